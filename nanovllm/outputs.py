"""What a request gives back. Attribute names are vLLM's; `output["text"]` is nano-vllm's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_KEYS = ("text", "token_ids")
_MAX_REPR_CHARS = 80
_MAX_REPR_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest token of the vocabulary
    decoded_token: str | None = None  # None: the request asked for no text


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a given continuation is after its context."""

    logprob: float  # of the whole continuation, the sum of `token_logprobs`
    is_greedy: bool  # each of its tokens is the likeliest one
    token_ids: list[int]  # the continuation's
    token_logprobs: list[float]


@dataclass(frozen=True, slots=True, repr=False)
class CompletionOutput:
    """One of the n answers to a request."""

    index: int  # which of the n
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort"; None: still running
    stop_reason: int | str | None = None  # the stop id or string that was met; None for eos
    cumulative_logprob: float | None = None  # of token_ids; None: no logprobs asked for
    logprobs: list[dict[int, Logprob]] | None = None  # one dict a token of token_ids

    def finished(self) -> bool:
        """Say whether this answer is complete."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        parts = [
            f"index={self.index}",
            f"text={_short_text(self.text)}",
            f"token_ids={_short_ids(self.token_ids)}",
            f"finish_reason={self.finish_reason!r}",
            f"stop_reason={self.stop_reason!r}",
        ]
        if self.cumulative_logprob is not None:
            parts.append(f"cumulative_logprob={self.cumulative_logprob:.4f}")
        return f"CompletionOutput({', '.join(parts)})"


@dataclass(frozen=True, slots=True, repr=False)
class RequestOutput:
    """One request with its answers.

    `output["text"]` and `output["token_ids"]` are the first answer's. A request that was refused
    or failed on its own has `error` set and may have no answers.
    """

    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # one a prompt token, first None
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.outputs)

    def keys(self) -> tuple[str, ...]:
        """Return the keys of `output[key]`, so that `dict(output)` is what nano-vllm gives."""
        return _KEYS

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __getitem__(self, key: str) -> Any:
        if key not in _KEYS:
            raise KeyError(
                f"RequestOutput has no key {key!r}. Keys: {', '.join(_KEYS)}; "
                "the rest are attributes, such as output.outputs[0].finish_reason."
            )
        if not self.outputs:
            raise ValueError(
                f"Request {self.request_id} has no {key}: {self.error or 'it gave no answer'}. "
                "Look at output.error first."
            )
        return self.outputs[0].text if key == "text" else self.outputs[0].token_ids

    def __repr__(self) -> str:
        parts = [
            f"request_id={self.request_id!r}",
            f"prompt={_short_text(self.prompt)}",
            f"prompt_token_ids={_short_ids(self.prompt_token_ids)}",
            f"outputs={self.outputs!r}",
            f"finished={self.finished}",
            f"num_cached_tokens={self.num_cached_tokens}",
        ]
        if self.error is not None:
            parts.append(f"error={self.error!r}")
        return f"RequestOutput({', '.join(parts)})"


def _short_text(text: str | None) -> str:
    if text is None or len(text) <= _MAX_REPR_CHARS:
        return repr(text)
    return f"{text[:_MAX_REPR_CHARS]!r}... ({len(text)} characters)"


def _short_ids(token_ids: list[int]) -> str:
    if len(token_ids) <= _MAX_REPR_TOKENS:
        return repr(token_ids)
    return f"[{', '.join(map(str, token_ids[:_MAX_REPR_TOKENS]))}, ...] ({len(token_ids)} tokens)"
