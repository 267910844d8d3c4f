"""`LLM`: what users call. Prompts in, texts out, in the order they were given."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.output_processor import Request
from nanovllm.engine.request_builder import BadPrompt, params_list, prompt_list
from nanovllm.generation_defaults import default_sampling_params
from nanovllm.lazy import error_output, iterate
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.interrupt import InterruptFlag
from nanovllm.utils.progress import Progress

logger = logging.getLogger(__name__)

_DEFAULT_MAX_TOKENS = 64
_MAX_LISTED_ERRORS = 20


class LLM:
    """A language model ready to generate. Owns its engine; close it, or use it in a `with` block.

    `model` is a directory or a hub id; for the options see `nanovllm.config.Config`.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._engine = LLMEngine(Config.from_options(model, options))
        self._has_named_defaults = False

    # ---- whole batches

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Continue every prompt; return one finished RequestOutput for each, in order.

        Args:
            prompts: a string, a list of token ids, a dict with "prompt" or "prompt_token_ids", or an
                iterable of those
            sampling_params: one for all, or one for each prompt; None: what the model's
                generation_config says (`get_default_sampling_params`)
            use_tqdm: show progress; a callable is used in tqdm's place
            return_errors: a prompt that cannot run becomes an output with `error` set and no
                completions; otherwise a ValueError lists all such prompts before any work starts
        """
        items, _ = prompt_list(prompts)
        params = params_list(sampling_params or self._default_params(), len(items))
        return self._run(items, params, use_tqdm=use_tqdm, return_errors=return_errors)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[Any] | None = None,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, laid out by the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        texts = [
            self._chat_text(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        params = params_list(sampling_params or self._default_params(), len(texts))
        # The template has written the special tokens: no second BOS.
        return self._run(
            texts,
            params,
            use_tqdm=use_tqdm,
            return_errors=return_errors,
            add_special_tokens=False,
        )

    # ---- as results come

    def generate_iter(
        self,
        prompts: Iterable[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        window: int | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, its output) as requests finish.

        `prompts` may be lazy and endless; it is read in another thread, `window` prompts ahead of
        the results (default: 4 * max_num_seqs). A prompt that cannot run yields an output with
        `error` set. Closing the generator aborts what is open.
        """
        params = sampling_params or self._default_params()
        params_iter = repeat(params) if isinstance(params, SamplingParams) else iter(params)
        pairs = zip(prompts, params_iter, strict=False)
        return iterate(self._engine, pairs, window=window or 4 * self._engine.config.max_num_seqs)

    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one request piece by piece; the pieces make up its final text."""
        params = sampling_params or self._default_params()
        if params.n > 1:
            raise ValueError(f"stream takes one answer a prompt, got n={params.n}. Use generate_iter.")
        self.get_tokenizer()
        (request,) = _checked(self._engine.builder.build([prompt], [params]))
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[str]:
        engine, request_id = self._engine, request.request_id
        request.is_streamed = request.seqs[0].is_watched = True
        foreign: list[RequestOutput] = []
        num_given, is_finished = 0, False
        try:
            engine.add([request])
            while not is_finished:
                for output in engine.step():
                    if output.request_id != request_id:
                        foreign.append(output)
                        continue
                    is_finished = output.finished
                    if piece := output["text"][num_given:]:
                        num_given += len(piece)
                        yield piece
        finally:
            engine.abort([request_id])
            engine.keep_for_later(foreign)

    # ---- step by step

    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt for `step`; return its request id."""
        params = [sampling_params or self._default_params()]
        (request,) = _checked(self._engine.builder.build([prompt], params))
        if request_id is not None:
            request.request_id = request_id
            for seq in request.seqs:
                seq.request_id = request_id
        self._engine.add([request])
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Do one step of the engine; return the requests that it finished."""
        return self._engine.step()

    def is_finished(self) -> bool:
        """Whether every added request has been returned by `step`."""
        return not self._engine.has_unfinished()

    def abort(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests where they stand; return what they had, with finish_reason "abort"."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        return self._engine.abort(ids)

    # ---- facts and life

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._engine.max_model_len

    @property
    def metrics(self) -> Any:
        """Counters since the engine was built."""
        return self._engine.metrics

    def get_tokenizer(self) -> Any:
        """The model's tokenizer. ValueError where it has none."""
        if self._engine.tokenizer is None:
            raise ValueError(f"{self._engine.model_dir} has no tokenizer.")
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config asks for, as `generate` uses without parameters."""
        return default_sampling_params(self._engine.model_dir)

    # ---- for trainers: weights that change, memory that is lent

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Replace weights in place from (Hugging Face name, full tensor) pairs, all or some.

        The prefix cache is reset. Refused while requests are open.
        """
        self._engine.load_weights(weights)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Refused while requests are open."""
        self._engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give device memory back: level 1 the KV cache, level 2 the weights too."""
        self._engine.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again; after level 2 the weights are read from the checkpoint."""
        self._engine.wake_up()

    def close(self) -> None:
        """Free the device's memory and end the worker processes. A second call does nothing."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    # ---- inside

    def _default_params(self) -> SamplingParams:
        params = self.get_default_sampling_params()
        if not self._has_named_defaults:
            self._has_named_defaults = True
            logger.info("No sampling_params: using the model's defaults, %r", params)
        return params

    def _run(
        self,
        prompts: list[Any],
        params: list[SamplingParams],
        *,
        use_tqdm: bool | Callable[..., Any],
        return_errors: bool,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        engine = self._engine
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
                else _checked(built)
            )
            done = self._run_requests(requests, progress)
        _warn_if_cut(done.values(), params)
        return [
            done[item.request_id] if isinstance(item, Request) else error_output(item, item.index)
            for item in built
        ]

    def _run_requests(
        self, requests: list[Request], progress: Progress
    ) -> dict[str, RequestOutput]:
        """Step until all `requests` are done; whatever ends this early leaves nothing behind."""
        engine = self._engine
        ids = [request.request_id for request in requests]
        waiting_for = set(ids)
        done: dict[str, RequestOutput] = {}
        foreign: list[RequestOutput] = []
        interrupt = InterruptFlag()
        try:
            with interrupt:
                engine.add(requests)
                while waiting_for and not interrupt.count:
                    for output in engine.step():
                        if output.request_id not in waiting_for:
                            foreign.append(output)
                        elif output.finished:
                            waiting_for.discard(output.request_id)
                            done[output.request_id] = output
                            progress.show_finished(*_token_counts(output))
                    progress.show_state(*engine.load())
            if interrupt.count:
                raise KeyboardInterrupt
        except BaseException:
            # A second Ctrl-C may have struck anywhere: only a new engine is sure to be right.
            if interrupt.count > 1:
                engine.close()
            engine.abort(ids)
            raise
        finally:
            engine.keep_for_later(foreign)
        return done

    def _chat_text(self, conversation: Any, **options: Any) -> str:
        tokenizer = self.get_tokenizer()
        if options["chat_template"] is None and not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer of {self._engine.model_dir} has no chat template. "
                "Pass chat_template=..., or use generate."
            )
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))


def _checked(built: list[Request | BadPrompt]) -> list[Request]:
    """All requests, or a ValueError that lists every prompt that cannot run."""
    bad = [item for item in built if isinstance(item, BadPrompt)]
    if bad:
        lines = [f"prompt {item.index} {item.reason}." for item in bad[:_MAX_LISTED_ERRORS]]
        if len(bad) > len(lines):
            lines.append(f"... and {len(bad) - len(lines)} more.")
        lines.append("Nothing was started. return_errors=True runs the others.")
        raise ValueError("\n".join(lines))
    return [item for item in built if isinstance(item, Request)]


def _token_counts(output: RequestOutput) -> tuple[int, int]:
    return len(output.prompt_token_ids), sum(len(o.token_ids) for o in output.outputs)


def _warn_if_cut(outputs: Iterable[RequestOutput], params: list[SamplingParams]) -> None:
    if not any(item.max_tokens == _DEFAULT_MAX_TOKENS for item in params):
        return
    num_cut = sum(
        completion.finish_reason == "length" and len(completion.token_ids) == _DEFAULT_MAX_TOKENS
        for output in outputs
        for completion in output.outputs
    )
    if num_cut:
        logger.warning(
            "%d answer(s) were cut at max_tokens=%d, the default. Pass SamplingParams(max_tokens=...) "
            "for longer ones, None for no limit but the context's.",
            num_cut,
            _DEFAULT_MAX_TOKENS,
        )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep Python's garbage collector still: one pass over a large heap stalls the GPU for 0.1 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
