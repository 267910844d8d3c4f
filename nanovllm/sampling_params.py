"""What one request asks for: how tokens are drawn, when to stop, what to return."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from nanovllm.utils.checks import check_bool, check_float, check_int, hint_unknown_keywords

MAX_N = 16384
# Below it a draw is the argmax, as in vLLM: soon the quotient would overflow.
GREEDY_TEMPERATURE = 1e-5
# Even divided by the smallest temperature that is not greedy it stays finite in float32.
_MAX_LOGIT_BIAS = 1e30
_MAX_TEMPERATURE = 1e30  # float32 holds it, and its reciprocal
# Divided by it too, and by the smallest temperature, the largest bias is finite in float32.
_MIN_REPETITION_PENALTY, _MAX_REPETITION_PENALTY = 1e-3, 1e3
_MIN_TOP_P = 1e-30  # what is smaller might be 0 in float32; only the likeliest token is left anyway

# What to do about names that users of vLLM and transformers bring along.
_ADVICE = {
    "max_new_tokens": "Did you mean 'max_tokens'?",
    "num_return_sequences": "Did you mean 'n'?",
    "best_of": "Ask for all of them with 'n' and choose by cumulative_logprob.",
    "do_sample": "temperature=0 is greedy, any other temperature samples.",
    "eos_token_id": "Did you mean 'stop_token_ids'?",
    "stop_strings": "Did you mean 'stop'?",
    "max_completion_tokens": "Did you mean 'max_tokens'?",
    **dict.fromkeys(
        ("use_beam_search", "early_stopping", "length_penalty"), "Beam search is not supported."
    ),
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "response_format"),
        "Structured output is not supported; see 'logits_processors'.",
    ),
    "output_kind": "Outputs are always whole: leave it out.",
}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class SamplingParams:
    """How one request is sampled, checked at construction and never changed; see `clone`.

    Names, defaults and meaning are vLLM's, but for max_tokens, 64. Logits are changed in vLLM's
    order: allowed_token_ids, bad_words, min_tokens, logit_bias, logits_processors, penalties,
    temperature, min_p, top_k, top_p. The fields below are the stored forms; `__init__` has what
    may be passed.
    """

    n: int  # answers per prompt
    presence_penalty: float  # subtracted once for a token the answer has
    frequency_penalty: float  # subtracted for each time the answer has it
    repetition_penalty: float  # divides the positive logits of tokens seen, prompt included
    temperature: float  # 0: greedy
    top_p: float  # 1: off
    top_k: int  # 0: off
    min_p: float  # 0: off
    seed: int | None  # None: derived from the engine's seed and the request's number
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    max_tokens: int | None  # None: to the context limit
    min_tokens: int  # no eos and no stop id before as many tokens
    logprobs: int | None  # per answer token the k likeliest and the sampled one; -1: all
    prompt_logprobs: int | None  # per prompt token likewise
    detokenize: bool  # False: the text stays empty
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    bad_words: tuple[str, ...]
    logit_bias: tuple[tuple[int, float], ...]  # (token id, added to its logit), by token id
    allowed_token_ids: tuple[int, ...] | None  # None: all
    logits_processors: tuple[Callable[..., Any], ...]  # called on one row in Python: slow

    @hint_unknown_keywords("SamplingParams has no option", _ADVICE)
    def __init__(
        self,
        n: int = 1,
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Iterable[str] | None = None,
        stop_token_ids: Iterable[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 64,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        bad_words: Iterable[str] | None = None,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None,
        allowed_token_ids: Iterable[int] | None = None,
        logits_processors: Iterable[Callable[..., Any]] | None = None,
    ) -> None:
        stored: dict[str, Any] = {
            "n": check_int("n", n, minimum=1, maximum=MAX_N, advice="It counts the answers."),
            "presence_penalty": check_float(
                "presence_penalty", presence_penalty, minimum=-2.0, maximum=2.0, advice="0 is off."
            ),
            "frequency_penalty": check_float(
                "frequency_penalty",
                frequency_penalty,
                minimum=-2.0,
                maximum=2.0,
                advice="0 is off.",
            ),
            "repetition_penalty": check_float(
                "repetition_penalty",
                repetition_penalty,
                minimum=_MIN_REPETITION_PENALTY,
                maximum=_MAX_REPETITION_PENALTY,
                advice="1 is off.",
            ),
            "temperature": check_float(
                "temperature",
                temperature,
                minimum=0.0,
                maximum=_MAX_TEMPERATURE,
                advice="0 is greedy.",
            ),
            "top_p": max(
                check_float("top_p", top_p, above=0.0, maximum=1.0, advice="1 is off."), _MIN_TOP_P
            ),
            "top_k": max(check_int("top_k", top_k, minimum=-1, advice="0 or -1 is off."), 0),
            "min_p": check_float("min_p", min_p, minimum=0.0, maximum=1.0, advice="0 is off."),
            "seed": _seed(seed),
            "stop": _strings("stop", [stop] if isinstance(stop, str) else stop),
            "stop_token_ids": _token_ids("stop_token_ids", stop_token_ids),
            "ignore_eos": check_bool("ignore_eos", ignore_eos),
            "max_tokens": _max_tokens(max_tokens),
            "min_tokens": check_int("min_tokens", min_tokens, minimum=0, advice="0 is off."),
            "logprobs": _num_logprobs("logprobs", logprobs),
            "prompt_logprobs": _num_logprobs("prompt_logprobs", prompt_logprobs),
            "detokenize": check_bool("detokenize", detokenize),
            "skip_special_tokens": check_bool("skip_special_tokens", skip_special_tokens),
            "spaces_between_special_tokens": check_bool(
                "spaces_between_special_tokens", spaces_between_special_tokens
            ),
            "include_stop_str_in_output": check_bool(
                "include_stop_str_in_output", include_stop_str_in_output
            ),
            "bad_words": _strings("bad_words", bad_words),
            "logit_bias": _logit_bias(logit_bias),
            "allowed_token_ids": _allowed_token_ids(allowed_token_ids),
            "logits_processors": _callables(logits_processors),
        }
        for name, value in stored.items():
            object.__setattr__(self, name, value)
        self._check_together()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    def clone(self, **changes: Any) -> "SamplingParams":
        """Return a copy, with `changes` to its fields if any, checked like a new one."""
        return replace(self, **changes)

    def __repr__(self) -> str:
        default = SamplingParams()
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return f"SamplingParams({', '.join(changed)})"

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}. "
                "Raise max_tokens, or pass max_tokens=None."
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop={list(self.stop)} needs text, but detokenize is False. "
                "Pass detokenize=True, or use stop_token_ids."
            )
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n must be 1 when temperature is 0, got {self.n}: greedy answers are all the same."
                " Pass n=1, or a temperature above 0."
            )


# What to do about arguments of vLLM's methods, and about what belongs elsewhere.
CALL_ADVICE = {
    **{
        item.name: f"Pass it in sampling_params, as SamplingParams({item.name}=...)."
        for item in fields(SamplingParams)
    },
    "params": "Did you mean 'sampling_params'?",
    "prompt_token_ids": "Pass the ids as prompts.",
    "lora_request": "Pass lora=DIR to LLM: one adapter, merged into the weights while they load.",
    "enable_thinking": "Pass chat_template_kwargs={'enable_thinking': ...} to chat.",
}


def _seed(value: Any) -> int | None:
    if value is None:
        return None
    advice = "None lets the engine choose."
    seed = check_int("seed", value, minimum=-(2**63), maximum=2**64 - 1, advice=advice)
    # -1 stands for "no seed", as in vLLM.
    return None if seed == -1 else seed


def _max_tokens(value: Any) -> int | None:
    if value is None:
        return None
    return check_int("max_tokens", value, minimum=1, advice="None means to the context limit.")


def _num_logprobs(name: str, value: Any) -> int | None:
    # True stands for 1, as in vLLM.
    if value is None or value is True:
        return 1 if value else None
    advice = "None is off, 0 gives the chosen token's only, k the k likeliest too, -1 all."
    return check_int(name, value, minimum=-1, advice=advice)


def _sequence(name: str, value: Any, of: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name} must be a list of {of}, got {value!r} of type {type(value).__name__}."
        )
    return list(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = [] if value is None else _sequence(name, value, "strings")
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"{name} must hold strings only, got {string!r} in {strings!r}.")
        if not string:
            raise ValueError(f"{name} must not hold an empty string, got {strings!r}. Take it out.")
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise ValueError(
                f"{name} must hold text, got {string!r}, which has one half of a surrogate pair: "
                "no text does. Decode its source with errors='replace'."
            )
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    token_ids = [] if value is None else _sequence(name, value, "token ids")
    checked = [
        check_int(f"{name}[{i}]", token_id, minimum=0, maximum=2**31 - 1)
        for i, token_id in enumerate(token_ids)
    ]
    return tuple(dict.fromkeys(checked))


def _allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    token_ids = _token_ids("allowed_token_ids", value)
    if not token_ids:
        raise ValueError(
            "allowed_token_ids must name at least one token, got an empty list. None allows all."
        )
    return token_ids


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = value.items()
    biases: dict[int, float] = {}
    for pair in _sequence("logit_bias", value, "(token id, bias) pairs, or a dict"):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"logit_bias must be a dict of token id to bias, got {pair!r} in its place."
            )
        token_id = check_int("a token id in logit_bias", pair[0], minimum=0, maximum=2**31 - 1)
        biases[token_id] = check_float(
            f"logit_bias[{token_id}]",
            pair[1],
            minimum=-_MAX_LOGIT_BIAS,
            maximum=_MAX_LOGIT_BIAS,
            advice="-100 all but bans a token, 100 all but forces it.",
        )
    return tuple(sorted(biases.items()))


def _callables(value: Any) -> tuple[Callable[..., Any], ...]:
    processors = [] if value is None else _sequence("logits_processors", value, "callables")
    for processor in processors:
        if not callable(processor):
            raise TypeError(
                f"logits_processors must hold callables only, got {processor!r} "
                f"of type {type(processor).__name__}."
            )
        _check_parameters(processor)
    return tuple(processors)


def _check_parameters(processor: Callable[..., Any]) -> None:
    """TypeError where the call in the middle of a batch would be one."""
    try:
        signature = inspect.signature(processor)
    except (ValueError, TypeError):  # built-in functions may have none
        return
    try:
        signature.bind(*range(3 if len(signature.parameters) == 3 else 2))
    except TypeError as error:
        raise TypeError(
            "logits_processors are called with (output ids, logits), or with (prompt ids, output "
            f"ids, logits) where they have three parameters, got {processor!r} with {signature}."
        ) from error
