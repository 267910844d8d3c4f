"""Results as they come: requests from an iterable that may be endless, and one request's text."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from threading import Event
from typing import Any

from nanovllm.frontend.llm_engine import LLMEngine
from nanovllm.frontend.output_processor import Request
from nanovllm.frontend.request_builder import BadPrompt
from nanovllm.outputs import RequestOutput
from nanovllm.run_requests import error_output, step_whole
from nanovllm.sampling_params import SamplingParams

_MAX_CHUNK = 128  # prompts tokenised at once, in a thread while the device works
_MAX_READ_S = 0.05  # what a slow iterable has given by then is not held back for a full chunk


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What was read at once."""

    built: list[Request | BadPrompt]
    is_last: bool
    error: Exception | None = None  # raised by the iterable behind these prompts


def paired(
    prompts: Iterable[Any], params: SamplingParams | Iterable[SamplingParams]
) -> Iterator[tuple[Any, SamplingParams]]:
    """Give each prompt its parameters; more parameters than prompts are fine, fewer an error."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be an iterable of prompts, got {type(prompts).__name__}.")
    if isinstance(params, SamplingParams):
        return zip(prompts, repeat(params), strict=False)
    if not isinstance(params, Iterable):
        raise TypeError(
            "sampling_params must be a SamplingParams or an iterable with one for each prompt, "
            f"got {type(params).__name__}."
        )
    return _paired(prompts, iter(params))


def _paired(
    prompts: Iterable[Any], params: Iterator[SamplingParams]
) -> Iterator[tuple[Any, SamplingParams]]:
    for index, prompt in enumerate(prompts):
        one = next(params, None)
        if one is None:
            raise ValueError(
                f"sampling_params has {index} entries, but there is a prompt {index}. "
                "Pass one SamplingParams for all, or one for each prompt."
            )
        if not isinstance(one, SamplingParams):
            raise TypeError(
                f"sampling_params[{index}] must be a SamplingParams, got {type(one).__name__}."
            )
        yield prompt, one


def iterate(
    engine: LLMEngine,
    pairs: Iterator[tuple[Any, SamplingParams]],
    *,
    window: int,
    drain: Event | None = None,
) -> Iterator[tuple[int, RequestOutput]]:
    """Yield (index, finished output) in the order of finishing.

    Prompts are pulled from `pairs` as results are taken, so that at most `window` of them, and a
    chunk being tokenised, are held. A prompt that cannot run yields an output with `error`. What
    `pairs` raises is raised once all that was read before is finished. Requests still open when the
    generator is closed are aborted. Once `drain` is set nothing more is read, what has not begun to
    run is dropped, and what runs is finished.
    """
    open_indexes: dict[str, int] = {}
    num_read = 0
    error: Exception | None = None
    chunk_size = max(1, min(_MAX_CHUNK, window // 4))
    with ThreadPoolExecutor(1, thread_name_prefix="nanovllm-tokenize") as pool:
        ahead: Future[_Chunk] | None = pool.submit(_read_chunk, engine, pairs, chunk_size)
        try:
            while ahead is not None or open_indexes:
                if drain is not None and drain.is_set():
                    ahead = None
                    for request_id in engine.give_up_waiting():
                        open_indexes.pop(request_id, None)
                while ahead is not None and len(open_indexes) + chunk_size <= max(
                    window, chunk_size
                ):
                    if open_indexes and not ahead.done():
                        break
                    chunk = ahead.result()
                    error = chunk.error
                    ahead = (
                        None
                        if chunk.is_last
                        else pool.submit(_read_chunk, engine, pairs, chunk_size)
                    )
                    engine.add([item for item in chunk.built if isinstance(item, Request)])
                    # Known before anything is yielded: the generator may be closed there.
                    first, num_read = num_read, num_read + len(chunk.built)
                    for index, item in enumerate(chunk.built, first):
                        if isinstance(item, Request):
                            open_indexes[item.request_id] = index
                    for index, item in enumerate(chunk.built, first):
                        if isinstance(item, BadPrompt):
                            yield index, error_output(item, index)
                for output in _step(engine, open_indexes) if open_indexes else ():
                    if output.finished:
                        yield open_indexes.pop(output.request_id), output
            if error is not None:
                raise error
        finally:
            engine.abort(list(open_indexes))


def _read_chunk(
    engine: LLMEngine, pairs: Iterator[tuple[Any, SamplingParams]], chunk_size: int
) -> _Chunk:
    prompts: list[Any] = []
    params: list[SamplingParams] = []
    is_last, error = False, None
    deadline = time.monotonic() + _MAX_READ_S
    while len(prompts) < chunk_size and (not prompts or time.monotonic() < deadline):
        try:
            prompt, one = next(pairs)
        except StopIteration:
            is_last = True
            break
        except Exception as raised:  # the user's code: kept until what it gave before is done
            is_last, error = True, raised
            break
        prompts.append(prompt)
        params.append(one)
    return _Chunk(engine.builder.build(prompts, params), is_last, error)


def stream_text(engine: LLMEngine, request: Request) -> Iterator[str]:
    """Run one request of one answer and yield its text as it grows. Closed early, it is aborted."""
    request_id = request.request_id
    request.is_streamed = request.seqs[0].is_watched = True
    num_given, is_finished = 0, False
    try:
        engine.add([request])
        while not is_finished:
            for output in _step(engine, (request_id,)):
                is_finished = output.finished
                if piece := output["text"][num_given:]:
                    num_given += len(piece)
                    yield piece
    finally:
        engine.abort([request_id])


def _step(engine: LLMEngine, request_ids: Container[str]) -> list[RequestOutput]:
    """One step; outputs of `request_ids` are returned, others kept for who asked for them."""
    if not engine.has_unfinished():
        raise RuntimeError(
            "Requests of this generator are gone: step() or abort() was called between its results."
        )
    outputs = step_whole(engine)
    mine = [output for output in outputs if output.request_id in request_ids]
    # At once, not in the end: another generator may be waiting for them.
    engine.keep_for_later([output for output in outputs if output.request_id not in request_ids])
    return mine
