"""Log-probabilities of given continuations: what multiple-choice evaluations ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanovllm.frontend.llm_engine import LLMEngine
from nanovllm.frontend.prompts import check_text, plain_list, prompt_list
from nanovllm.outputs import RequestOutput, Score
from nanovllm.run_requests import checked, run_requests
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.progress import Progress
from nanovllm.utils.tokenizer import encode_texts

_TOKENIZE_BATCH = 512
# The token that is drawn behind the continuation is thrown away: a request draws at least one.
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

TokenPair = tuple[list[int], list[int]]  # of a context and of its continuation


def score_continuations(
    engine: LLMEngine,
    contexts: Any,
    continuations: Any,
    *,
    use_tqdm: bool | Callable[..., Any] = True,
) -> list[Score]:
    """Look up the log-probability of each continuation after its context.

    Logits are computed from the context's last token on only, so whatever full blocks contexts
    share is computed once and taken from the prefix cache.
    """
    pairs = encode_pairs(
        engine.tokenizer, *_paired(contexts, continuations), max_tokens=engine.max_model_len
    )
    with Progress(use_tqdm, len(pairs)) as progress:
        prompts: list[Any] = [context + continuation for context, continuation in pairs]
        built = engine.builder.build(
            prompts, [_PARAMS] * len(prompts), on_progress=progress.show_tokenized
        )
        requests = checked(built, advice="Nothing was started.")
        for request, (context, _) in zip(requests, pairs, strict=True):
            request.seqs[0].prompt_logprobs_from = len(context)
        done = run_requests(engine, requests, progress)
    return [
        _score(done[request.request_id], len(context))
        for request, (context, _) in zip(requests, pairs, strict=True)
    ]


def encode_pairs(
    tokenizer: Any | None, contexts: list[Any], continuations: list[Any], *, max_tokens: int
) -> list[TokenPair]:
    """Ids of contexts and continuations, which are texts or ids already.

    Two texts are encoded as one and cut behind as many tokens as the context has alone, and spaces
    at the end of a context count as the continuation's: that is how lm-evaluation-harness does it.
    An empty text as context stands for the tokenizer's bos, or its eos where it has none. A
    ValueError names a text that has no ids, or cannot fit into `max_tokens`.
    """
    encode = _Encoder(tokenizer, max_tokens)
    contexts = [_readable("context", *item) for item in enumerate(contexts)]
    continuations = [_readable("continuation", *item) for item in enumerate(continuations)]
    pairs: list[TokenPair] = []
    for start in range(0, len(contexts), _TOKENIZE_BATCH):
        rows = range(start, min(len(contexts), start + _TOKENIZE_BATCH))
        moved = [_with_spaces_moved(contexts[i], continuations[i]) for i in rows]
        encode.prepare([context for context, _ in moved if isinstance(context, str)])
        encode.prepare([a + b for a, b in moved if isinstance(a, str) and isinstance(b, str)])
        pairs += [encode.pair(index, *pair) for index, pair in zip(rows, moved, strict=True)]
        encode.forget()
    return pairs


class _Encoder:
    """Owns the ids of texts of one batch; each text is encoded once."""

    def __init__(self, tokenizer: Any | None, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._known: dict[str, list[int] | ValueError] = {}

    def prepare(self, texts: list[str]) -> None:
        todo = [text for text in dict.fromkeys(texts) if text and text not in self._known]
        if todo:
            encoded = self._encoded(todo, add_special_tokens=True)
            self._known.update(zip(todo, encoded, strict=True))

    def forget(self) -> None:
        self._known.clear()

    def pair(self, index: int, context: Any, continuation: Any) -> TokenPair:
        first, second = context, continuation
        if isinstance(context, str) and context:
            first = _ids(f"context {index}", self._known[context])
        if isinstance(context, str) and context and isinstance(continuation, str):
            both = self._known[context + continuation]
            second = _ids(f"context {index} with its continuation", both)[len(first) :]
        elif isinstance(continuation, str):
            (encoded,) = self._encoded([continuation], add_special_tokens=False)
            second = _ids(f"continuation {index}", encoded)
        if context == "":
            prefix = self._prefix_id()
            first = [prefix]
            if isinstance(continuation, str) and second[:1] == first:
                second = second[1:]
        for name, ids in (("context", first), ("continuation", second)):
            if not isinstance(ids, list | tuple):
                raise TypeError(
                    f"{name} {index} must be a string or token ids, got {type(ids).__name__}."
                )
            if any(isinstance(item, str) for item in ids):
                raise TypeError(
                    f"{name} {index} must be a string or token ids, got a list with a string. "
                    "Texts stand in one flat list: a context for each continuation."
                )
            if not ids:
                advice = "Give it at least one"
                if name == "continuation" and isinstance(continuation, str) and continuation:
                    advice = (
                        "The tokenizer joins it with the context's end: pass both as token ids, or "
                        "move the border between them"
                    )
                raise ValueError(f"{name} {index} has no token of its own. {advice}.")
        return list(first), list(second)

    def _encoded(
        self, texts: list[str], *, add_special_tokens: bool
    ) -> list[list[int] | ValueError]:
        return encode_texts(
            self._live_tokenizer(),
            texts,
            max_tokens=self._max_tokens,
            add_special_tokens=add_special_tokens,
        )

    def _prefix_id(self) -> int:
        tokenizer = self._live_tokenizer()
        for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token_id is not None:
                return int(token_id)
        raise ValueError("An empty context needs a tokenizer with a bos or eos token.")

    def _live_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ValueError("The model has no tokenizer: pass token ids.")
        return self._tokenizer


def _ids(what: str, encoded: list[int] | ValueError) -> list[int]:
    if isinstance(encoded, ValueError):
        raise ValueError(f"{what} {encoded}. Nothing was started.") from encoded
    return encoded


def _paired(contexts: Any, continuations: Any) -> tuple[list[Any], list[Any]]:
    """One context for each continuation; a single one is shared by all."""
    firsts, is_shared = prompt_list(contexts, "contexts")
    seconds, _ = prompt_list(continuations, "continuations")
    if is_shared:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise ValueError(
            f"contexts has {len(firsts)} entries for {len(seconds)} continuations. "
            "Pass one context for all, or exactly one for each continuation."
        )
    return firsts, seconds


def _readable(name: str, index: int, value: Any) -> Any:
    """A text that can be encoded, or ids as a list; a ValueError names what is neither."""
    try:
        if isinstance(value, str):
            check_text(value)
        return plain_list(value)
    except ValueError as error:
        raise ValueError(f"{name} {index} {error}.") from error


def _with_spaces_moved(context: Any, continuation: Any) -> tuple[Any, Any]:
    if isinstance(context, str) and isinstance(continuation, str):
        bare = context.rstrip()
        return bare, context[len(bare) :] + continuation
    return context, continuation


def _score(output: RequestOutput, start: int) -> Score:
    token_ids = output.prompt_token_ids[start:]
    positions = output.prompt_logprobs[start:] if output.prompt_logprobs else []
    found = [
        position[token_id]
        for position, token_id in zip(positions, token_ids, strict=True)
        if position is not None
    ]
    logprobs = [item.logprob for item in found]
    is_greedy = all(item.rank == 1 for item in found)
    return Score(sum(logprobs), is_greedy, token_ids, logprobs)
