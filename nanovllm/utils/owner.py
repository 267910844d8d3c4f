"""Whose an engine is: a fork has copies of it, but none of what it works with."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import weakref
from collections.abc import Callable


class Owner:
    """Remembers the process that made an object."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """RuntimeError in any other process, which has none of the threads, pipes and devices."""
        if not self.is_here:
            raise RuntimeError(
                f"This {self._what} was made in process {self._pid}; process {os.getpid()}, forked "
                f"from it, cannot use it. Make a {self._what} here, in a process that was started "
                "with multiprocessing.get_context('spawn')."
            )


class AtExit:
    """Calls an object's method, if it still lives, when the interpreter of its process ends.

    Later, when the object is freed, would be too late for what needs threads: the interpreter lets
    none start, and ends those that come back to it.
    """

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._owner = Owner("")
        atexit.register(self._run)

    def cancel(self) -> None:
        """Do nothing at the end. A second call does nothing."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        method = self._method()
        if method is not None and self._owner.is_here:
            method()


def never_free(thing: object) -> None:
    """Keep something in a fork for ever: process groups that are freed wait for their threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def check_may_start_processes(what: str) -> None:
    """RuntimeError where this process is one that would start itself again, or may start none."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        raise RuntimeError(
            f"{what} starts processes that import your script. "
            "Put the script's code under `if __name__ == '__main__':`."
        )
    if process.daemon:
        raise RuntimeError(
            f"{what} starts processes, which a daemonic process, such as those of "
            "multiprocessing.Pool, may not. Use concurrent.futures.ProcessPoolExecutor, or "
            "multiprocessing.Process with daemon=False."
        )
