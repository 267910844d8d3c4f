"""Requests from an iterable that may be endless: read a window ahead, give results as they finish."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.output_processor import Request
from nanovllm.engine.request_builder import BadPrompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

_CHUNK = 128  # prompts tokenised at once, in a thread while the device works


def iterate(
    engine: LLMEngine, pairs: Iterator[tuple[Any, SamplingParams]], *, window: int
) -> Iterator[tuple[int, RequestOutput]]:
    """Yield (index, finished output) in the order of finishing.

    Prompts are pulled from `pairs` as results are taken, so that at most `window` of them, and a
    chunk being tokenised, are held. A prompt that cannot run yields an output with `error`. Requests
    still open when the generator is closed are aborted.
    """
    open_indexes: dict[str, int] = {}
    foreign: list[RequestOutput] = []
    num_read = 0

    def read_chunk() -> list[Request | BadPrompt]:
        chunk = list(islice(pairs, _CHUNK))
        return engine.builder.build([item for item, _ in chunk], [params for _, params in chunk])

    with ThreadPoolExecutor(1, thread_name_prefix="nanovllm-tokenize") as pool:
        ahead: Future[list[Request | BadPrompt]] | None = pool.submit(read_chunk)
        try:
            while ahead is not None or open_indexes:
                must_wait = not open_indexes
                while ahead is not None and len(open_indexes) < window:
                    if not must_wait and not ahead.done():
                        break
                    built = ahead.result()
                    ahead = pool.submit(read_chunk) if built else None
                    requests = [item for item in built if isinstance(item, Request)]
                    engine.add(requests)
                    for index, item in enumerate(built, num_read):
                        if isinstance(item, Request):
                            open_indexes[item.request_id] = index
                        else:
                            yield index, error_output(item, index)
                    num_read += len(built)
                    must_wait = not open_indexes
                for output in engine.step() if open_indexes else ():
                    index_or_none = open_indexes.get(output.request_id)
                    if index_or_none is None:
                        foreign.append(output)
                    elif output.finished:
                        del open_indexes[output.request_id]
                        yield index_or_none, output
        finally:
            engine.abort(list(open_indexes))
            engine.keep_for_later(foreign)


def error_output(item: BadPrompt, index: int) -> RequestOutput:
    """The output of a prompt that cannot run."""
    return RequestOutput(
        request_id=f"error-{index}",
        prompt=item.prompt,
        prompt_token_ids=[],
        outputs=[],
        finished=True,
        error=f"prompt {index} {item.reason}.",
    )
