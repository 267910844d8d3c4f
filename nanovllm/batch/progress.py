"""How far a job is: a bar where a person looks on, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import IO

LINE_INTERVAL_S = 30.0
_BAR_INTERVAL_S = 0.5
_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a job is."""

    num_done: int  # lines answered, earlier runs included
    num_done_now: int  # by this run
    num_failed: int
    num_output_tokens: int
    total: int | None  # lines in all; None: not known
    fraction: float | None  # of the input that was read, where `total` is not known


class BatchProgress:
    """Owns the thread that shows how far a job is, until it is closed."""

    def __init__(
        self,
        standing: Callable[[], Standing],
        stream: IO[str] | None = None,
        *,
        is_shown: bool = True,
    ) -> None:
        self._standing = standing
        self._stream = stream or sys.stderr
        is_shown = is_shown and self._stream is not None  # where standard error is closed
        self._is_bar = is_shown and self._stream.isatty()
        self._started = time.monotonic()
        self._last = (self._started, 0)
        self._rate = 0.0
        self._ended = Event()
        self._thread = Thread(target=self._run, name="nanovllm-progress", daemon=True)
        if is_shown:
            self._thread.start()

    def close(self) -> None:
        """Show the last state and stop. A second call does nothing."""
        if not self._ended.is_set():
            self._ended.set()
            if self._thread.is_alive():
                self._thread.join()
                self._show(last=True)

    def _run(self) -> None:
        while not self._ended.wait(_BAR_INTERVAL_S if self._is_bar else LINE_INTERVAL_S):
            self._show()

    def _show(self, *, last: bool = False) -> None:
        text = self._text(self._standing())
        with suppress(OSError):  # nobody looks any more, which is no reason to end a job
            if self._is_bar:
                self._stream.write(f"\r\x1b[2K{text}" + ("\n" if last else ""))
            else:
                self._stream.write(text + "\n")
            self._stream.flush()

    def _text(self, now: Standing) -> str:
        moment = time.monotonic()
        elapsed = moment - self._last[0]
        if elapsed > 0.2:
            rate = (now.num_output_tokens - self._last[1]) / elapsed
            # Smoothed, since steps finish requests in bunches.
            self._rate = (
                rate if self._rate == 0 or not self._is_bar else 0.8 * self._rate + 0.2 * rate
            )
            self._last = (moment, now.num_output_tokens)
        return format_standing(
            now, tokens_per_s=self._rate, elapsed_s=moment - self._started, with_bar=self._is_bar
        )


def format_standing(now: Standing, *, tokens_per_s: float, elapsed_s: float, with_bar: bool) -> str:
    """One line: done of total, tokens/s, time left, failures."""
    share = now.num_done / now.total if now.total else now.fraction
    parts = [f"{now.num_done:,} of {now.total:,}" if now.total else f"{now.num_done:,} done"]
    if share is not None:
        parts.append(f"{min(share, 1.0):.0%}")
    parts.append(f"{tokens_per_s:,.0f} tokens/s")
    parts.append(f"{_clock(elapsed_s)} gone")
    left = _time_left(now, elapsed_s)
    if left is not None:
        parts.append(f"{_clock(left)} left")
    parts.append(f"{now.num_failed:,} failed")
    line = " | ".join(parts)
    if with_bar and share is not None:
        full = round(min(share, 1.0) * _BAR_WIDTH)
        return f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {line}"
    return line


def _time_left(now: Standing, elapsed_s: float) -> float | None:
    if not now.num_done_now:
        return None
    if now.total:
        return elapsed_s / now.num_done_now * max(now.total - now.num_done, 0)
    if now.fraction:
        return elapsed_s / now.fraction * (1 - min(now.fraction, 1.0))
    return None


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
