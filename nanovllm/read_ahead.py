"""Prompts read and tokenised ahead of the engine, by threads that nobody has to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Semaphore, Thread
from typing import Any

from nanovllm.frontend.output_processor import Request
from nanovllm.frontend.request_builder import BadPrompt, RequestBuilder
from nanovllm.sampling_params import SamplingParams

_MAX_READ_S = 0.05  # what an iterable has given by then is not held back for a full chunk
_MAX_GAP_S = 0.005  # nor is it when nothing more comes for so long
_JOIN_S = 0.2

_Pair = tuple[Any, SamplingParams]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What was read at once."""

    built: list[Request | BadPrompt]
    is_last: bool
    error: BaseException | None = None  # raised by the iterable behind these prompts


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class ReadAhead:
    """Owns a thread that reads an iterable and one that tokenises what it gave.

    At most `chunk_size` prompts are read and not taken. An iterable that blocks keeps nothing back
    that it gave before, and blocks neither `take` for longer than asked nor `close`.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        pairs: Iterator[_Pair],
        chunk_size: int,
        *,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._chunk_size = chunk_size
        self._items: SimpleQueue[_Pair | _End] = SimpleQueue()
        self._chunks: SimpleQueue[Chunk] = SimpleQueue()
        self._credits = Semaphore(chunk_size)
        self._stopped = Event()
        # A thread that is left in the iterable must hold neither the engine nor this object.
        self._reader = Thread(
            target=_read,
            args=(pairs, self._items, self._credits, self._stopped),
            name="nanovllm-read",
            daemon=True,
        )
        self._tokenizer = Thread(
            target=self._tokenize, args=(builder, on_ready), name="nanovllm-tokenize", daemon=True
        )
        self._reader.start()
        self._tokenizer.start()

    def take(self, timeout_s: float) -> Chunk | None:
        """The next chunk; None if there is none by then."""
        try:
            chunk = self._chunks.get(timeout=timeout_s) if timeout_s else self._chunks.get_nowait()
        except Empty:
            return None
        if chunk.built:
            self._credits.release(len(chunk.built))
        return chunk

    def close(self) -> None:
        """Read no more. A read that blocks is left behind, in a thread that ends after it."""
        self._stopped.set()
        self._credits.release()
        self._items.put(_End(None))
        self._tokenizer.join()
        self._reader.join(_JOIN_S)

    def _tokenize(self, builder: RequestBuilder, on_ready: Callable[[], None] | None) -> None:
        is_last = False
        while not is_last and not self._stopped.is_set():
            pairs, end = self._next_items()
            is_last = end is not None
            error = end.error if end is not None else None
            if self._stopped.is_set():
                return
            try:
                built = build_each(builder, pairs)
            except BaseException as raised:
                built, is_last, error = [], True, raised
            self._chunks.put(Chunk(built, is_last, error))
            if on_ready is not None:
                on_ready()

    def _next_items(self) -> tuple[list[_Pair], _End | None]:
        """Wait for something, then gather what else comes soon."""
        pairs: list[_Pair] = []
        item = self._items.get()
        deadline = time.monotonic() + _MAX_READ_S
        while not isinstance(item, _End):
            pairs.append(item)
            if len(pairs) >= self._chunk_size or time.monotonic() >= deadline:
                return pairs, None
            try:
                item = self._items.get(timeout=_MAX_GAP_S)
            except Empty:
                return pairs, None
        return pairs, item


class AllAtOnce:
    """Requests that are there, in the place of a ReadAhead."""

    def __init__(self, built: list[Request | BadPrompt]) -> None:
        self._chunk: Chunk | None = Chunk(built, is_last=True)

    def take(self, timeout_s: float) -> Chunk | None:
        """All of them, once."""
        chunk, self._chunk = self._chunk, None
        return chunk

    def close(self) -> None:
        """Do nothing."""


def build_each(builder: RequestBuilder, pairs: list[_Pair]) -> list[Request | BadPrompt]:
    """Build all together; if that fails, one by one, so that a prompt fails only by itself."""
    try:
        return builder.build([prompt for prompt, _ in pairs], [params for _, params in pairs])
    except Exception:  # any prompt of them may be why
        built: list[Request | BadPrompt] = []
        for prompt, params in pairs:
            try:
                built += builder.build([prompt], [params])
            except Exception as error:
                reason = f"cannot be taken in ({type(error).__name__}: {error})"
                built.append(BadPrompt(0, prompt if isinstance(prompt, str) else None, reason))
        return built


def _read(
    pairs: Iterator[_Pair], items: SimpleQueue[_Pair | _End], credits: Semaphore, stopped: Event
) -> None:
    while True:
        credits.acquire()
        if stopped.is_set():
            return
        try:
            items.put(next(pairs))
        except StopIteration:
            items.put(_End(None))
            return
        except BaseException as raised:  # the user's code: kept until what it gave is done
            items.put(_End(raised))
            return
