"""Results as they come: requests from an iterable that may be endless, and one request's text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import repeat
from threading import Event
from typing import Any

from nanovllm.frontend.llm_engine import LLMEngine
from nanovllm.frontend.output_processor import Request
from nanovllm.frontend.prompts import check_no_table
from nanovllm.frontend.request_builder import BadPrompt
from nanovllm.outputs import RequestOutput
from nanovllm.read_ahead import ReadAhead
from nanovllm.run_requests import error_output, step_whole
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int

_MAX_CHUNK = 128  # prompts tokenised at once, in a thread while the device works
_POLL_S = 0.1  # how soon a drain is seen while the iterable blocks


def paired(
    prompts: Iterable[Any], params: SamplingParams | Iterable[SamplingParams]
) -> Iterator[tuple[Any, SamplingParams]]:
    """Give each prompt its parameters; more parameters than prompts are fine, fewer an error."""
    # A dict is an iterable of its keys, and a single prompt elsewhere.
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be an iterable of prompts, got {type(prompts).__name__}.")
    check_no_table("prompts", prompts)
    if isinstance(params, SamplingParams):
        return zip(prompts, repeat(params), strict=False)
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        advice = " SamplingParams(**options) makes one of a dict." * isinstance(params, Mapping)
        raise TypeError(
            "sampling_params must be a SamplingParams or an iterable with one for each prompt, "
            f"got {type(params).__name__}.{advice}"
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


def checked_window(window: Any, drain: Any, *, default: int) -> int:
    """Check what `generate_iter` is given beside its prompts; return the window."""
    if drain is not None and not callable(getattr(drain, "is_set", None)):
        raise TypeError(f"drain must be a threading.Event or None, got {drain!r:.80}.")
    return default if window is None else check_int("window", window, minimum=1)


def iterate(
    engine: LLMEngine,
    pairs: Iterator[tuple[Any, SamplingParams]],
    *,
    window: int,
    drain: Event | None = None,
) -> Iterator[tuple[int, RequestOutput]]:
    """Yield (index, finished output) in the order of finishing.

    Prompts are pulled from `pairs` as results are taken, so that at most `window` of them, and a
    chunk being tokenised, are held. While `pairs` blocks, what it gave before runs, and closing the
    generator does not wait for it. A prompt that cannot run yields an output with `error`. What
    `pairs` raises is raised once all that was read before is finished. Requests still open when the
    generator is closed are aborted. Once `drain` is set nothing more is read, what has not begun to
    run is dropped, and what runs is finished.
    """
    open_indexes: dict[str, int] = {}
    num_read = 0
    error: BaseException | None = None
    chunk_size = max(1, min(_MAX_CHUNK, window // 4))
    ahead = ReadAhead(engine.builder, pairs, chunk_size)
    is_reading = True
    try:
        while is_reading or open_indexes:
            if drain is not None and drain.is_set():
                is_reading = False
                for request_id in engine.give_up_waiting():
                    open_indexes.pop(request_id, None)
            while is_reading and len(open_indexes) + chunk_size <= max(window, chunk_size):
                chunk = ahead.take(0 if open_indexes else _POLL_S)
                if chunk is None:
                    break
                is_reading, error = not chunk.is_last, chunk.error
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
        ahead.close()
        engine.abort(list(open_indexes))


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


def _step(engine: LLMEngine, request_ids: Collection[str]) -> list[RequestOutput]:
    """One step; outputs of `request_ids` are returned, others kept for who asked for them."""
    engine.check_any_open(request_ids)
    outputs = step_whole(engine)
    mine = [output for output in outputs if output.request_id in request_ids]
    # At once, not in the end: another generator may be waiting for them.
    engine.keep_for_later([output for output in outputs if output.request_id not in request_ids])
    return mine
