"""Ctrl-C during a batch: the first is noted and obeyed between steps, the second at once.

Processes that we start never hear of it: the parent decides.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any


class InterruptFlag:
    """Owns the SIGINT handler while its block runs; outside the main thread it does nothing.

    An interrupt between two lines of the scheduler would leave its books half written.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None

    def __enter__(self) -> InterruptFlag:
        # A program that has its own idea of Ctrl-C keeps it.
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if threading.current_thread() is threading.main_thread() and is_default:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._previous is not None:
            previous, self._previous = self._previous, None
            signal.signal(signal.SIGINT, previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


# A terminal or a batch system signals all processes of a job at once.
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A process started here is born deaf to Ctrl-C and SIGTERM, even while it imports."""
    resource_tracker.ensure_running()  # first, since starting it takes the block off again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Ignore, in a process that we started, what its parent hears too and decides on."""
    for unheard in _PARENTS_SIGNALS:
        signal.signal(unheard, signal.SIG_IGN)
