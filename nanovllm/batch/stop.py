"""Ctrl-C and SIGTERM during a job: the first lets what runs finish, the second ends at once."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class DrainOnSignal:
    """Owns both signals' handlers while its block runs; outside the main thread it does nothing."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> DrainOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        self.event.set()
        with suppress(OSError, AttributeError):  # a terminal that is gone; None where it is closed
            sys.stderr.write(
                "\nFinishing what runs; the rest stays for the next run. "
                "Ctrl-C again stops at once.\n"
            )
            sys.stderr.flush()
