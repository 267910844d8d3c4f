"""Child processes: notice the end of one at once, end them all, and end with the parent."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from nanovllm.utils.owner import Owner

_STOP_TIMEOUT_S = 10.0
_JOIN_TIMEOUT_S = 5.0
_POLL_S = 0.5
_T = TypeVar("_T")


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


def end_processes(
    owner: Owner, processes: list[BaseProcess], commands: list[Connection], directory: str
) -> None:
    """Close what they read commands from, wait a little, kill who is left; remove `directory`."""
    if not owner.is_here:
        return  # a fork ends, and they are not its processes
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


def in_thread(work: Callable[[], _T], *, while_waiting: Callable[[], None]) -> _T:
    """Do `work` in a thread; where `while_waiting` raises meanwhile, the thread is left behind.

    For what waits for another process and cannot be ended.
    """
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="nanovllm-wait", daemon=True).start()
    while not done.done():
        while_waiting()
        futures.wait([done], timeout=_POLL_S)
    return done.result()


def end_with_parent(directory: str | Path | None = None) -> None:
    """In a child: end it, from a thread, when its parent is gone, and remove `directory`."""
    threading.Thread(target=_watch_parent, args=(directory,), daemon=True).start()


def remove_if_orphaned(directory: str | Path) -> None:
    """In a child that failed: remove `directory` if its parent is gone, which may be why.

    The thread of `end_with_parent` may not come to it any more.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join(_POLL_S)
        if parent.is_alive() and os.getppid() == parent.pid:
            return
    shutil.rmtree(directory, ignore_errors=True)


def _watch_parent(directory: str | Path | None) -> None:
    parent = multiprocessing.parent_process()
    # Not by its pipe alone: a fork of the parent may live on and hold it open.
    while parent is not None and os.getppid() == parent.pid and parent.is_alive():
        parent.join(_POLL_S)
    # A parent that was killed could not do it.
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    # Not sys.exit: the main thread may wait in a collective that will never end.
    os._exit(1)
