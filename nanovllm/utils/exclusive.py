"""One thread at a time, and nothing inside a step: who comes second is told so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MAX_END_S = 0.5  # for a thread that was told to end
_MAX_WAIT_S = 10.0  # for a step; most that take longer hang, as with a dead rank


class Exclusive:
    """Owns the lock of one engine. Refuses rather than waits, so that a mistake is seen."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = threading.current_thread()  # or who was it last
        self._in_step = False

    @contextmanager
    def use(self, *, is_step: bool = False, waits: bool = False) -> Iterator[None]:
        """Hold the engine; RuntimeError where another thread or a step of this one does.

        waits: for another thread's use to end, as what cleans up must; never inside a step
        """
        # Asked, not remembered: an exception may strike between the lines that would remember it.
        is_nested = self._lock._is_owned()  # type: ignore[attr-defined]  # Condition calls it too
        if not self._lock.acquire(blocking=waits):
            raise RuntimeError(
                f"The engine is in use by thread {self._holder.name!r}: thread "
                f"{threading.current_thread().name!r} may not use it at the same time. Build one "
                "LLM for each thread, or take a lock of your own around all its calls. An iterable "
                "given to generate_iter is read in a thread."
            )
        try:
            if self._in_step and is_nested:
                raise RuntimeError(
                    "The engine is in the middle of a step, from which it was called again, as by "
                    "a logits processor. Use another LLM there, or call it between steps."
                )
            self._holder = threading.current_thread()
            self._in_step = is_step
            try:
                yield
            finally:
                self._in_step = False
        finally:
            self._lock.release()

    @contextmanager
    def after_others(self) -> Iterator[None]:
        """Give another thread 10 s to end its step first; at once where it is this one's."""
        # A daemon thread that the end of the interpreter struck never lets go.
        timeout = 0.0 if sys.is_finalizing() else _MAX_WAIT_S
        is_held = False
        try:
            is_held = self._lock.acquire(timeout=timeout)
        finally:  # after a Ctrl-C in the wait, too, which is raised behind the block
            try:
                yield
            finally:
                if is_held:
                    self._lock.release()

    def wait_for_holder(self) -> None:
        """Give the thread that had the engine last, if it is another, half a second to end."""
        if self._holder is not threading.current_thread():
            with suppress(AssertionError, RuntimeError):  # a thread that Python did not start
                self._holder.join(_MAX_END_S)
