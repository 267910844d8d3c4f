"""Child processes that obey one parent: how they start, what they reply, how they end."""

from __future__ import annotations

import atexit
import multiprocessing
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from nanovllm.utils.interrupt import signals_held_back
from nanovllm.utils.owner import Owner
from nanovllm.utils.processes import end_processes
from nanovllm.utils.remote_error import RemoteError

PATIENCE_S = 5.0  # for the end of a process that has closed its connections
_POLL_S = 0.2


class ChildGroup:
    """Owns the processes, this end of their pipes, and a directory that only this user can read.

    Children are numbered from 1, as ranks are. A child replies None, or a RemoteError.
    """

    def __init__(self, what: str, owner: Owner) -> None:
        self._what = what
        self.directory = Path(tempfile.mkdtemp(prefix="nanovllm-"))
        self.processes: list[BaseProcess] = []
        self.commands: list[Connection] = []
        self._replies: list[Connection] = []
        self._finalizer = weakref.finalize(
            self, end_processes, owner, self.processes, self.commands, str(self.directory)
        )
        # Registered last, so called first: multiprocessing would wait for the children for ever.
        atexit.register(self._finalizer)

    def start(self, target: Callable[..., None], *args: Any, name: str) -> None:
        """Start one more child with `target(number, commands, replies, *args)`."""
        context = multiprocessing.get_context("spawn")
        number = len(self.processes) + 1
        commands, child_commands = context.Pipe()
        replies, child_replies = context.Pipe(duplex=False)
        process = context.Process(
            target=target,
            args=(number, child_commands, child_replies, *args),
            name=f"{name}{number}",
            daemon=True,
        )
        with signals_held_back():
            process.start()
        child_commands.close()
        child_replies.close()
        self.processes.append(process)
        self.commands.append(commands)
        self._replies.append(replies)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def collect(self) -> None:
        """Wait until each child has replied to the last command; then raise the first one's error.

        One that has ended replies no more, and that is an error too.
        """
        errors = []
        for number in range(1, len(self.processes) + 1):
            try:
                self._read_reply(number)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def check_alive(self, patience_s: float = 0.0) -> None:
        """Raise with a child's own error if one has failed or ended."""
        for number, process in enumerate(self.processes, 1):
            replies = self._replies[number - 1]
            process.join(patience_s)
            if process.is_alive():
                continue
            try:
                while replies.poll():
                    self._raise_if_error(number, replies.recv())
            except EOFError:
                pass
            raise RuntimeError(
                f"{self._what} {number} ended with exit code {process.exitcode} "
                "(negative: killed by that signal). The engine must be closed. If it ended at "
                "start-up, is the script's code under `if __name__ == '__main__':`?"
            )

    def kill(self) -> None:
        """End all at once: each may wait for another that will not come."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End all, gently first. A second call does nothing."""
        self._finalizer()
        atexit.unregister(self._finalizer)

    def _read_reply(self, number: int) -> None:
        replies = self._replies[number - 1]
        while not replies.poll(_POLL_S):
            self.check_alive()
        try:
            reply = replies.recv()
        except EOFError:
            self.check_alive(patience_s=PATIENCE_S)
            raise
        self._raise_if_error(number, reply)

    def _raise_if_error(self, number: int, reply: RemoteError | None) -> None:
        if reply is not None:
            raise reply.rebuilt(f"{self._what} {number}")
