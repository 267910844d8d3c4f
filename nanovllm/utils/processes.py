"""Child processes: notice the end of one at once, end them all, and end with the parent."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

_STOP_TIMEOUT_S = 10.0
_JOIN_TIMEOUT_S = 5.0


class ProcessWatch:
    """Owns a thread that calls `on_end` when the first of `processes` ends, unless stopped before.

    `on_end` runs in that thread: the main one may be held up by what the process left undone.
    """

    def __init__(self, processes: Sequence[BaseProcess], on_end: Callable[[], None]) -> None:
        self._has_fired = threading.Event()
        stopped, self._stop = Pipe(duplex=False)
        sentinels = [process.sentinel for process in processes]

        # Not a method: the thread must not keep alive whoever owns the watch.
        def run(has_fired: threading.Event) -> None:
            if stopped not in wait([*sentinels, stopped]):
                has_fired.set()  # first: who sees the effect of `on_end` must see the cause too
                on_end()
            stopped.close()

        self._thread = threading.Thread(
            target=run, args=(self._has_fired,), name="nanovllm-watch", daemon=True
        )
        self._thread.start()

    @property
    def has_fired(self) -> bool:
        return self._has_fired.is_set()

    def stop(self) -> None:
        """Watch no longer. A second call does nothing."""
        self._stop.close()  # the thread sees the end of the file
        self._thread.join(_JOIN_TIMEOUT_S)


def end_processes(processes: list[BaseProcess], commands: list[Connection], directory: str) -> None:
    """Close what they read commands from, wait a little, kill who is left; remove `directory`."""
    for connection in commands:
        connection.close()  # a worker that waits for a command sees the end of file
    for process in processes:
        process.join(_STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    processes.clear()
    shutil.rmtree(directory, ignore_errors=True)


def exit_with_parent(store_path: str) -> None:
    """In a thread of a child: end it when its parent is gone, and remove the store's directory."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    # A parent that was killed could not do it.
    shutil.rmtree(Path(store_path).parent, ignore_errors=True)
    # Not sys.exit: the main thread may wait in a collective that will never end.
    os._exit(1)
