"""Run requests until all are done, in one call: progress, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.frontend.llm_engine import LLMEngine
from nanovllm.frontend.output_processor import Request
from nanovllm.frontend.request_builder import BadPrompt
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_bool
from nanovllm.utils.interrupt import InterruptFlag
from nanovllm.utils.progress import Progress

logger = logging.getLogger(__name__)

NOTHING_STARTED = "Nothing was started. return_errors=True runs the others."
_DEFAULT_MAX_TOKENS = 64
_MAX_LISTED_ERRORS = 20


def run_prompts(
    engine: LLMEngine,
    prompts: list[Any],
    params: list[SamplingParams],
    *,
    use_tqdm: bool | Callable[..., Any],
    return_errors: bool,
    add_special_tokens: bool = True,
) -> list[RequestOutput]:
    """Tokenise and check all prompts, run them, and return their outputs in order."""
    check_bool("return_errors", return_errors)
    with Progress(use_tqdm, len(prompts)) as progress, _quiet_collector():
        built = engine.builder.build(
            prompts,
            params,
            add_special_tokens=add_special_tokens,
            on_progress=progress.show_tokenized,
        )
        requests = (
            [item for item in built if isinstance(item, Request)]
            if return_errors
            else checked(built, advice=NOTHING_STARTED)
        )
        done = run_requests(engine, requests, progress)
    warn_if_cut(done.values(), params)
    return [
        done[item.request_id] if isinstance(item, Request) else error_output(item, item.index)
        for item in built
    ]


def run_requests(
    engine: LLMEngine, requests: list[Request], progress: Progress
) -> dict[str, RequestOutput]:
    """Step until all `requests` are done; whatever ends this early leaves nothing behind."""
    with engine.claim():
        return _run_claimed(engine, requests, progress)


def _run_claimed(
    engine: LLMEngine, requests: list[Request], progress: Progress
) -> dict[str, RequestOutput]:
    ids = [request.request_id for request in requests]
    waiting_for = set(ids)
    done: dict[str, RequestOutput] = {}
    foreign: list[RequestOutput] = []
    interrupt = InterruptFlag()
    with interrupt:
        try:
            engine.add(requests)
            while waiting_for and not interrupt.count:
                engine.check_any_open(waiting_for)
                for output in engine.step():
                    if output.request_id not in waiting_for:
                        foreign.append(output)
                    elif output.finished:
                        waiting_for.discard(output.request_id)
                        done[output.request_id] = output
                        progress.show_finished(
                            len(output.prompt_token_ids), output.num_output_tokens
                        )
                progress.show_state(*engine.load())
        except BaseException:
            # A second Ctrl-C wants an end at once, also of what is on its way on the device.
            if interrupt.count > 1:
                engine.close()
            raise
        finally:
            # Inside the block: a Ctrl-C must not cut this short either.
            if waiting_for:
                engine.abort(ids)
            engine.keep_for_later(foreign)
    if interrupt.count:
        raise KeyboardInterrupt
    return done


def step_whole(engine: LLMEngine) -> list[RequestOutput]:
    """One step, never cut short: the first Ctrl-C raises after it, a second closes the engine."""
    interrupt = InterruptFlag()
    with interrupt:
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            engine.close()
            raise
        if interrupt.count:
            engine.keep_for_later(outputs)
    if interrupt.count:
        raise KeyboardInterrupt
    return outputs


def without_interrupts(work: Callable[[], None]) -> None:
    """Do what must not be left half done; a Ctrl-C raises after it, a second one at once."""
    interrupt = InterruptFlag()
    with interrupt:
        work()
    if interrupt.count:
        raise KeyboardInterrupt


def checked(built: list[Request | BadPrompt], *, advice: str = "") -> list[Request]:
    """All requests, or a ValueError that lists every prompt that cannot run."""
    bad = [item for item in built if isinstance(item, BadPrompt)]
    if bad:
        lines = [f"prompt {item.index} {item.reason}." for item in bad[:_MAX_LISTED_ERRORS]]
        if len(bad) > len(lines):
            lines.append(f"... and {len(bad) - len(lines)} more.")
        raise ValueError("\n".join([*lines, advice] if advice else lines))
    return [item for item in built if isinstance(item, Request)]


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


def warn_if_cut(outputs: Iterable[RequestOutput], params: list[SamplingParams]) -> None:
    """Log once how many answers the default of `max_tokens` has cut."""
    if not any(item.max_tokens == _DEFAULT_MAX_TOKENS for item in params):
        return
    num_cut = sum(
        completion.finish_reason == "length" and len(completion.token_ids) == _DEFAULT_MAX_TOKENS
        for output in outputs
        for completion in output.outputs
    )
    if num_cut:
        logger.warning(
            "%d answer(s) were cut at max_tokens=%d, the default. Pass "
            "SamplingParams(max_tokens=...) for longer ones, None for no limit but the context's.",
            num_cut,
            _DEFAULT_MAX_TOKENS,
        )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep Python's garbage collector still: one pass over a large heap stalls the GPU."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
