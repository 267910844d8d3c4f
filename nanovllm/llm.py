"""`LLM`: what users call. Prompts in, texts out, in the order they were given."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from threading import Event
from typing import Any, NoReturn

from nanovllm.chat import chat_prompts
from nanovllm.config import Config
from nanovllm.frontend.llm_engine import LLMEngine
from nanovllm.frontend.prompts import prompt_list
from nanovllm.frontend.request_builder import params_list
from nanovllm.generation_defaults import default_sampling_params
from nanovllm.lazy import checked_window, iterate, paired, stream_text
from nanovllm.metrics import Metrics, StepSample, StepSampler
from nanovllm.outputs import RequestOutput, Score
from nanovllm.run_requests import checked, run_prompts, step_whole, without_interrupts
from nanovllm.sampling_params import CALL_ADVICE, SamplingParams
from nanovllm.scoring import score_continuations
from nanovllm.utils.checks import check_callable, check_int, hint_unknown_keywords

logger = logging.getLogger(__name__)


class LLM:
    """A language model ready to generate. Owns its engine; close it, or use it in a `with` block.

    `model` is a directory or a hub id; for the options see `nanovllm.config.Config`. One thread at
    a time may use it, and no logits processor: RuntimeError for who comes second.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._engine = LLMEngine(Config.from_options(model, options))
        self._defaults: SamplingParams | None = None  # read and said once

    # ---- whole batches

    @hint_unknown_keywords("generate has no option", CALL_ADVICE)
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
            prompts: a string, a list of token ids, a dict with "prompt" or "prompt_token_ids", or
                an iterable of those
            sampling_params: one for all, or one for each prompt; None: what the model's
                generation_config says (`get_default_sampling_params`)
            use_tqdm: show progress; a callable is used in tqdm's place
            return_errors: a prompt that cannot run becomes an output with `error` set and no
                completions; otherwise a ValueError lists all such prompts before any work starts
        """
        self._engine.check_ready()
        items, _ = prompt_list(prompts)
        params = params_list(self._params_or_default(sampling_params), len(items))
        return run_prompts(
            self._engine, items, params, use_tqdm=use_tqdm, return_errors=return_errors
        )

    @hint_unknown_keywords("chat has no option", CALL_ADVICE)
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
        """Answer one conversation or several, laid out by the model's chat template.

        Args:
            messages: a list of dicts with "role" and "content", or a list of such lists
            add_generation_prompt: end with what begins an answer
            continue_final_message: let the answer go on where the last message ends; needs
                add_generation_prompt=False
            chat_template: used in place of the tokenizer's
            chat_template_kwargs: passed on to the template, such as {"enable_thinking": False}
            tools: functions or JSON schemas that the template describes to the model
            return_errors: as in `generate`; a conversation is named as the prompt of its index
        """
        self._engine.check_ready()
        prompts = chat_prompts(
            self.get_tokenizer(),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )
        params = params_list(self._params_or_default(sampling_params), len(prompts))
        # The template has written the special tokens: no second BOS.
        return run_prompts(
            self._engine,
            prompts,
            params,
            use_tqdm=use_tqdm,
            return_errors=return_errors,
            add_special_tokens=False,
        )

    # ---- as results come

    @hint_unknown_keywords("generate_iter has no option", CALL_ADVICE)
    def generate_iter(
        self,
        prompts: Iterable[Any],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        window: int | None = None,
        drain: Event | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, its output) as requests finish.

        `prompts` may be lazy and endless; it is read in another thread, `window` prompts ahead of
        the results (default: 4 * max_num_seqs). A prompt that cannot run yields an output with
        `error` set. Closing the generator aborts what is open; setting `drain`, from any thread,
        lets what runs finish and drops the rest.
        """
        self._engine.check_ready()
        window = checked_window(window, drain, default=4 * self._engine.config.max_num_seqs)
        pairs = paired(prompts, self._params_or_default(sampling_params))
        return iterate(self._engine, pairs, window=window, drain=drain)

    @hint_unknown_keywords("stream has no option", CALL_ADVICE)
    def stream(self, prompt: Any, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one request piece by piece; the pieces make up its final text."""
        self._engine.check_ready()
        (params,) = params_list(self._params_or_default(sampling_params), 1)
        if params.n > 1:
            raise ValueError(
                f"stream takes one answer a prompt, got n={params.n}. Use generate_iter."
            )
        if not params.detokenize:
            raise ValueError("stream gives text, but detokenize is False. Use generate_iter.")
        self.get_tokenizer()
        (request,) = checked(self._engine.builder.build([prompt], [params]))
        return stream_text(self._engine, request)

    # ---- how likely a given text is

    @hint_unknown_keywords("score has no option", CALL_ADVICE)
    def score(
        self,
        contexts: Any,
        continuations: Any,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[Score]:
        """Return the log-probability of each continuation after its context, nothing generated.

        Args:
            contexts: texts or lists of token ids, one for each continuation; a single one is shared
            continuations: texts or lists of token ids
            use_tqdm: show progress; a callable is used in tqdm's place
        """
        self._engine.check_ready()
        return score_continuations(self._engine, contexts, continuations, use_tqdm=use_tqdm)

    # ---- step by step

    @hint_unknown_keywords("add_request has no option", CALL_ADVICE)
    def add_request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue one prompt for `step`; return its request id."""
        params = params_list(self._params_or_default(sampling_params), 1)
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}.")
        (request,) = checked(self._engine.builder.build([prompt], params))
        if request_id is not None:
            request.request_id = request_id
            for seq in request.seqs:
                seq.request_id = request_id
        self._engine.add([request])
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Do one step of the engine; return the requests that it finished."""
        return step_whole(self._engine)

    def is_finished(self) -> bool:
        """Whether every added request has been returned by `step`."""
        return not self._engine.has_unfinished()

    def abort(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """End requests where they stand; return what they had, with finish_reason "abort"."""
        is_many = isinstance(request_id, Iterable) and not isinstance(request_id, str)
        ids: list[Any] = list(request_id) if is_many else [request_id]
        for item in ids:
            if not isinstance(item, str):
                raise TypeError(f"request_id must be a string or several, got {item!r:.80}.")
        return self._engine.abort(ids)

    # ---- facts and life

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output together."""
        return self._engine.max_model_len

    @property
    def num_cache_tokens(self) -> int:
        """How many tokens the KV cache holds."""
        return self._engine.builder.limits.num_cache_tokens

    def load(self) -> tuple[int, int, float]:
        """Sequences running and waiting, and the share of the KV cache's blocks in use."""
        return self._engine.load()

    @property
    def metrics(self) -> Metrics:
        """Counters since the engine was built; they go on counting in the object that is given."""
        return self._engine.metrics

    def observe_steps(self, sink: Callable[[StepSample], None] | None) -> None:
        """Call `sink` with what each step did, from now on; None: no more."""
        check_callable("sink", sink)
        self._engine.on_step = None if sink is None else StepSampler(self.metrics, sink)

    def give_up_waiting(self, max_num_requests: int | None = None) -> list[str]:
        """Abort added requests that have not begun to run, last come first; return their ids."""
        if max_num_requests is not None:
            max_num_requests = check_int("max_num_requests", max_num_requests, minimum=0)
        return self._engine.give_up_waiting(max_num_requests)

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

        The prefix cache is reset. Refused while requests are open. The pairs are whole weights: an
        adapter (`lora`) is not added to them, and is gone from those they replace.
        """
        without_interrupts(lambda: self._engine.load_weights(weights))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Refused while requests are open."""
        self._engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give device memory back: level 1 the KV cache, level 2 the weights too."""
        without_interrupts(lambda: self._engine.sleep(level))

    def wake_up(self) -> None:
        """Take the memory again; after level 2 the checkpoint, and an adapter, are read again."""
        without_interrupts(self._engine.wake_up)

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

    def __reduce__(self) -> NoReturn:
        """Refuse copies, of which the first to go would close the engine of all."""
        raise TypeError("An LLM cannot be copied, pickled or sent to a process. Build one there.")

    # ---- inside

    def _params_or_default(self, sampling_params: Any) -> Any:
        # Not `sampling_params or ...`: an empty list is a mistake, not a wish for the default.
        return self._default_params() if sampling_params is None else sampling_params

    def _default_params(self) -> SamplingParams:
        if self._defaults is None:
            self._defaults = self.get_default_sampling_params()
            logger.info("No sampling_params: using the model's defaults, %r", self._defaults)
        return self._defaults
