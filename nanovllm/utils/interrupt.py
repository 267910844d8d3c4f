"""Ctrl-C during a batch: the first is noted and obeyed between steps, the second at once."""

from __future__ import annotations

import signal
import threading
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
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
