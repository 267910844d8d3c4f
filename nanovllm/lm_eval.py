"""nanovllm as a model of lm-evaluation-harness.

The harness has no entry points for models of others, so its command line is started from here:

    python -m nanovllm.lm_eval --model nanovllm --model_args pretrained=DIR --tasks TASKS

In Python, import this module before `lm_eval.simple_evaluate(model="nanovllm", ...)`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int

try:
    # The harness registers its own models only while there are none yet.
    import lm_eval.models  # noqa: F401
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import (
        get_rolling_token_windows,
        make_disjoint_window,
        simple_parse_args_string,
    )
except ImportError as error:
    raise ImportError(
        f"nanovllm.lm_eval needs {error.name}. Run `pip install -e '.[lm-eval]'`, "
        "or use LLM.score without the harness."
    ) from error

logger = logging.getLogger(__name__)

# The harness passes these to any model; they are for models that batch by themselves.
_NOT_OURS = ("batch_size", "max_batch_size")
_LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")

_Encoded = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, and their ids


@register_model("nanovllm")
class NanoVLLM(TemplateLM):
    """Owns an engine. `pretrained` is a directory or hub id; `**options` are those of `LLM`.

    All requests of a task are handed to the engine at once: there is no batch size to choose.
    max_length: tokens that a prediction may look back on, by default what the engine's limit allows
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        limits = {"max_length": max_length, "max_gen_toks": max_gen_toks}
        for name, value in limits.items():
            if value is not None:
                check_int(name, value, minimum=1)
        for name in _NOT_OURS:
            options.pop(name, None)
        if options.get("device") == "cuda:0":  # the harness's default, on any machine
            del options["device"]
        self._llm = LLM(pretrained, **options)
        self.tokenizer = self._llm.get_tokenizer()
        limit = self._llm.max_model_len
        self._max_len_to_generate = min(max_length or limit, limit)
        # As the harness counts: tokens fed, of which the last predicts one more. The engine draws
        # another one behind it, which scoring throws away.
        self.max_length = min(max_length or limit, limit - 2)
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._pretrained = str(pretrained)
        self._chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._chat_template_args["enable_thinking"] = enable_thinking

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> NanoVLLM:
        """Called by the harness; its own defaults, such as device="cuda:0", yield to model_args."""
        defaults = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**{**defaults, **arg_dict})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> NanoVLLM:
        """Called by the harness with "name=value,name=value"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # ---- tokens

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that is scored from its first token on."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache knows the tokenizer by."""
        return self._pretrained.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text; a BOS is not written twice."""
        if add_special_tokens is None:
            has_bos = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = False if has_bos else self._add_bos_token
        extra = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **extra)
        return ids

    # ---- chat

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template, or its one of that name; None: none is asked for."""
        if chat_template is False or chat_template is None:
            return None
        name = chat_template if isinstance(chat_template, str) else None
        template: str = self.tokenizer.get_chat_template(name)
        return template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the model's template lays it out."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._chat_template_args,
        )
        return text

    # ---- requests

    def _loglikelihood_tokens(
        self, requests: list[_Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        contexts, continuations = [], []
        num_cut = 0
        for _, context, continuation in requests:
            # Cut from the left, as the harness's other models do; one token of context must stay.
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                raise ValueError(
                    f"A continuation of {len(continuation)} tokens leaves no context within "
                    f"max_length = {self.max_length}. Raise max_model_len."
                )
            num_cut += len(context) > room
            contexts.append(context[-room:])
            continuations.append(continuation)
        if num_cut:
            logger.warning(
                "%d context(s) were cut from the left to max_length = %d", num_cut, self.max_length
            )
        scores = self._llm.score(contexts, continuations, use_tqdm=not disable_tqdm)
        results = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _, _), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows as long as fit, each token scored once."""
        windows: list[_Encoded] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (logprob, _) in zip(owners, scored, strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer each context up to its stop strings, which are not part of the answer."""
        prompts, params = [], []
        num_cut = 0
        for request in requests:
            context, options = request.args
            one = self._params(options)
            assert one.max_tokens is not None
            room = self._max_len_to_generate - one.max_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks = {one.max_tokens} leaves no context within max_length = "
                    f"{self._max_len_to_generate}. Lower it."
                )
            ids = self.tok_encode(context)
            num_cut += len(ids) > room
            prompts.append(ids[-room:])
            params.append(one)
        if num_cut:
            logger.warning("%d prompt(s) were cut from the left to leave room", num_cut)
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        """What a task's generation_kwargs ask for; greedy unless they say otherwise."""
        given = defaultdict(lambda: None, options)
        until = given["until"] or []
        limits = [given[name] for name in _LIMIT_NAMES if given[name] is not None]
        temperature = float(given["temperature"] or 0.0)
        if given["do_sample"] is False:
            temperature = 0.0
        elif given["do_sample"] and given["temperature"] is None:
            temperature = 1.0
        return SamplingParams(
            temperature=temperature,
            max_tokens=int(limits[0]) if limits else self._max_gen_toks,
            stop=[stop for stop in ([until] if isinstance(until, str) else until) if stop],
            **{name: given[name] for name in _SAMPLING if given[name] is not None},
        )


if __name__ == "__main__":
    cli_evaluate()
