"""The progress bar of a batch: prompts done, tokens per second in and out, what runs and waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from tqdm import tqdm

logger = logging.getLogger(__name__)

_REFRESH_S = 0.5


class Progress:
    """Owns one bar over `total` prompts; shows nothing where `use_tqdm` is False.

    A callable in tqdm's place is called as `use_tqdm(total=..., desc=..., ...)`. What it makes
    needs `update`; `set_postfix` and `close` are used where there are any. What the bar
    raises once all prompts are done is logged only: the results are not lost. One that cannot write
    (an OSError: a terminal or a pipe that is gone) is not shown any more.
    """

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int) -> None:
        make: Any = use_tqdm
        if isinstance(make, np.bool_):
            make = bool(make)
        if make is True:
            make = tqdm
        self._bar: Any = None
        if make is not False and not callable(make):
            raise TypeError(
                f"use_tqdm must be True, False or a callable in tqdm's place, got {make!r:.80}."
            )
        if make is not False:
            with self._or_no_bar():
                self._bar = make(
                    total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True
                )
            if self._bar is not None and not callable(getattr(self._bar, "update", None)):
                raise TypeError(
                    f"use_tqdm gave a {type(self._bar).__name__}, which has no method 'update'. "
                    "Give it update(n), which is called once for each prompt done."
                )
        self._num_left = total
        self._started = time.perf_counter()
        self._num_tokenized = self._num_tokens_in = self._num_tokens_out = 0
        self._next_refresh = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        close = getattr(self._bar, "close", None)
        try:
            with _only_logged():
                self._show_rates()
        finally:
            if callable(close):
                with _only_logged():
                    close()

    def show_tokenized(self, num_prompts: int) -> None:
        """Say that so many more prompts were tokenised, before any is finished."""
        self._num_tokenized += num_prompts
        self._postfix(tokenized=self._num_tokenized)

    def show_finished(self, num_tokens_in: int, num_tokens_out: int) -> None:
        """Count one prompt as done."""
        self._num_tokens_in += num_tokens_in
        self._num_tokens_out += num_tokens_out
        self._num_left -= 1
        if self._bar is None:
            return
        with self._or_no_bar(), nullcontext() if self._num_left > 0 else _only_logged():
            self._bar.update(1)

    def show_state(self, num_running: int, num_waiting: int, kv_use: float) -> None:
        """Refresh the figures beside the bar, twice a second at most."""
        now = time.perf_counter()
        if self._bar is None or now < self._next_refresh or not self._num_left:
            return
        self._next_refresh = now + _REFRESH_S
        self._show_rates(run=num_running, wait=num_waiting, kv=f"{kv_use:.0%}")

    def _show_rates(self, **state: Any) -> None:
        elapsed = time.perf_counter() - self._started
        self._postfix(
            in_tok_s=round(self._num_tokens_in / elapsed),
            out_tok_s=round(self._num_tokens_out / elapsed),
            **state,
        )

    def _postfix(self, **figures: Any) -> None:
        if self._bar is not None and hasattr(self._bar, "set_postfix"):
            with self._or_no_bar():
                self._bar.set_postfix(figures)

    @contextmanager
    def _or_no_bar(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._bar = None
            logger.warning("The progress bar cannot be written (%s) and is left out", error)


@contextmanager
def _only_logged() -> Iterator[None]:
    """Let no fault of a bar, which may be anybody's, cost results that are there already."""
    try:
        yield
    except Exception:
        logger.warning("The progress bar failed at its end", exc_info=True)
