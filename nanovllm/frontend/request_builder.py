"""From prompts and parameters to requests: tokenised in batches and checked at the door."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from nanovllm.engine.sequence import Sequence
from nanovllm.frontend.output_processor import Request
from nanovllm.frontend.prompts import read_prompt
from nanovllm.kernels.noise import make_key
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import encode_texts

_TOKENIZE_BATCH = 512
_MAX_LISTS = 64  # of bad words, whose ids are remembered


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sequence may be, as the model and the KV cache allow."""

    max_model_len: int  # prompt and output together
    num_cache_tokens: int  # what the whole KV cache holds
    vocab_size: int
    allows_processors: bool = True  # Python functions do not reach the workers of other ranks


@dataclass(frozen=True, slots=True)
class BadPrompt:
    """A prompt that cannot run, and why."""

    index: int
    prompt: str | None
    reason: str


class RequestBuilder:
    """Owns the numbering of requests, from which ids and unset seeds derive."""

    def __init__(
        self,
        tokenizer: Any | None,
        limits: Limits,
        stop_token_ids: list[int],
        seed: int,
        *,
        is_taken: Callable[[str], bool],
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self._is_taken = is_taken  # by a pending request, to which the user gave that id
        self._numbers = count()
        self._seq_ids = count()
        # Requests come by the thousand with one list of bad words, which may be long.
        self._ids_of_bad_words: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def build(
        self,
        prompts: list[Any],
        params: list[SamplingParams],
        *,
        add_special_tokens: bool = True,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Request | BadPrompt]:
        """Tokenise and check all prompts; one result for each, in order. Changes nothing else."""
        results: list[Request | BadPrompt] = []
        for start in range(0, len(prompts), _TOKENIZE_BATCH):
            batch = prompts[start : start + _TOKENIZE_BATCH]
            texts, token_lists, reasons = self._tokenize(batch, add_special_tokens)
            for offset, (text, token_ids, reason) in enumerate(
                zip(texts, token_lists, reasons, strict=True)
            ):
                index = start + offset
                reason = reason or self._obstacle(token_ids, params[index])
                if reason is None:
                    results.append(self._request(text, token_ids, params[index]))
                else:
                    results.append(BadPrompt(index, text, reason))
            if on_progress is not None:
                on_progress(len(batch))
        return results

    def _tokenize(
        self, prompts: list[Any], add_special_tokens: bool
    ) -> tuple[list[str | None], list[list[int]], list[str | None]]:
        """Texts, ids and reasons of refusal, one of each for a prompt."""
        texts: list[str | None] = [None] * len(prompts)
        token_lists: list[list[int]] = [[] for _ in prompts]
        reasons: list[str | None] = [None] * len(prompts)
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, BadPrompt):
                reasons[place] = prompt.reason
                continue
            try:
                texts[place], token_lists[place] = read_prompt(prompt)
            except (TypeError, ValueError) as error:
                reasons[place] = str(error)
            except Exception as error:
                # A mapping or an array is the user's, and raises what it likes.
                reasons[place] = f"cannot be read ({type(error).__name__}: {error})".rstrip(".")
        todo = [
            place
            for place, text in enumerate(texts)
            if text is not None and not token_lists[place] and reasons[place] is None
        ]
        if todo and self.tokenizer is None:
            for place in todo:
                reasons[place] = "is text, but the model has no tokenizer; pass token ids"
        elif todo:
            encoded = encode_texts(
                self.tokenizer,
                [texts[place] or "" for place in todo],
                max_tokens=self.limits.max_model_len,
                add_special_tokens=add_special_tokens,
            )
            for place, ids in zip(todo, encoded, strict=True):
                if isinstance(ids, ValueError):
                    reasons[place] = str(ids)
                else:
                    token_lists[place] = ids
        return texts, token_lists, reasons

    def _obstacle(self, token_ids: list[int], params: SamplingParams) -> str | None:
        """Why a request can never run, or None."""
        limits, num_tokens = self.limits, len(token_ids)
        if num_tokens == 0:
            return "is empty: it has no token to continue from. Give it at least one token"
        if num_tokens + 1 > limits.max_model_len:
            return (
                f"has {num_tokens} tokens; with one to generate that exceeds max_model_len = "
                f"{limits.max_model_len}. Shorten it or raise max_model_len"
            )
        if num_tokens > limits.num_cache_tokens:
            return (
                f"has {num_tokens} tokens, more than the whole KV cache holds "
                f"({limits.num_cache_tokens}). Shorten it or give the cache more memory"
            )
        smallest, largest = min(token_ids), max(token_ids)
        if smallest < 0 or largest >= limits.vocab_size:
            bad = smallest if smallest < 0 else largest
            return f"has token id {bad}; ids must be in [0, {limits.vocab_size})"
        return self._params_obstacle(params)

    def _params_obstacle(self, params: SamplingParams) -> str | None:
        vocab_size = self.limits.vocab_size
        named = {
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": [token_id for token_id, _ in params.logit_bias],
        }
        for name, ids in named.items():
            bad = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
            if bad:
                return f"has {name} with id {bad[0]}; ids must be in [0, {vocab_size})"
        if self.tokenizer is None and (params.stop or params.bad_words):
            return "asks for stop strings or bad words, but the model has no tokenizer"
        try:
            bad_word_ids = self._bad_word_ids(params)
        except ValueError as error:
            return str(error)
        if (output := self._dead_end(params, bad_word_ids)) is not None:
            return (
                f"allows only tokens that are barred as well, after the output {list(output)}: "
                "all are bad words, or end a text, which min_tokens forbids at first. "
                "Allow another token, or lower min_tokens"
            )
        if params.logits_processors and not self.limits.allows_processors:
            return (
                "has logits_processors, which run in one process only. "
                "Leave them out or use an LLM with tensor_parallel_size=1"
            )
        return None

    def _dead_end(
        self, params: SamplingParams, bad_word_ids: tuple[tuple[int, ...], ...]
    ) -> tuple[int, ...] | None:
        """An output behind which no token may be drawn, or None where there is none."""
        allowed = params.allowed_token_ids or range(self.limits.vocab_size)
        ends = self._barred_until_min_len(params)
        barred_at_first = ends if params.min_tokens else set()
        if not barred_at_first.union(run[-1] for run in bad_word_ids).issuperset(allowed):
            return None  # nearly always, and the rest takes long for many bad words

        def barred_after(output: tuple[int, ...]) -> set[int]:
            barred = {run[-1] for run in bad_word_ids if _ends_with(output, run[:-1])}
            return barred | ends if len(output) < params.min_tokens else barred

        def may_come(output: tuple[int, ...]) -> bool:
            final = set(params.stop_token_ids) if params.ignore_eos else ends
            return set(output).issubset(allowed) and not any(
                token_id in final or token_id in barred_after(output[:place])
                for place, token_id in enumerate(output)
            )

        most = self.limits.max_model_len if params.max_tokens is None else params.max_tokens - 1
        for output in sorted({(), *(run[:-1] for run in bad_word_ids)}, key=len):
            if len(output) > most or not barred_after(output).issuperset(allowed):
                continue
            if may_come(output):
                return output
        return None

    def _request(self, text: str | None, token_ids: list[int], params: SamplingParams) -> Request:
        number = next(n for n in self._numbers if not self._is_taken(str(n)))
        seed = params.seed
        if seed is None:
            seed = derived_seed(self._seed, number)
        request_id = str(number)
        limit = self._max_num_tokens(len(token_ids), params)
        barred = self._barred_until_min_len(params)
        bad_word_ids = self._bad_word_ids(params)
        seqs = [
            Sequence(
                seq_id=next(self._seq_ids),
                request_id=request_id,
                token_ids=list(token_ids),
                params=params,
                max_num_tokens=limit,
                noise_key=make_key(seed, sample),
                sample_index=sample,
                is_watched=bool(params.stop) or params.logprobs is not None,
                barred_until_min_len=tuple(sorted(barred)),
                bad_word_ids=bad_word_ids,
            )
            for sample in range(params.n)
        ]
        return Request(request_id, text, token_ids, params, seqs)

    def _max_num_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        # The last token's KV is never needed: a full cache still allows one more.
        limit = min(self.limits.max_model_len, self.limits.num_cache_tokens + 1)
        if params.max_tokens is None:
            return limit
        return min(limit, num_prompt_tokens + params.max_tokens)

    def _barred_until_min_len(self, params: SamplingParams) -> set[int]:
        return {*params.stop_token_ids, *self._stop_token_ids}

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as encoded at the start of a text and, if that differs, inside one.

        ValueError: one has no ids, in words to follow the prompt's number.
        """
        if (known := self._ids_of_bad_words.get(params.bad_words)) is not None:
            return known
        runs: dict[tuple[int, ...], None] = {}
        for ids in encode_texts(
            self.tokenizer,
            [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())],
            max_tokens=self.limits.max_model_len,
            add_special_tokens=False,
        ):
            if isinstance(ids, ValueError):
                raise ValueError(f"has a bad word that {ids}") from ids
            if ids:
                runs[tuple(ids)] = None
        if len(self._ids_of_bad_words) >= _MAX_LISTS:
            self._ids_of_bad_words.clear()
        self._ids_of_bad_words[params.bad_words] = tuple(runs)
        return tuple(runs)


def _ends_with(output: tuple[int, ...], run: tuple[int, ...]) -> bool:
    return len(run) <= len(output) and output[len(output) - len(run) :] == run


def derived_seed(engine_seed: int, number: int) -> int:
    """The seed of the engine's request `number` where the request names none."""
    low, high = make_key(engine_seed, number)
    return (high << 32) | (low & 0xFFFFFFFF)


def params_list(
    params: SamplingParams | Iterable[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """One SamplingParams for each prompt."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        advice = " SamplingParams(**options) makes one of a dict." * isinstance(params, Mapping)
        raise TypeError(
            "sampling_params must be a SamplingParams or one for each prompt, "
            f"got {type(params).__name__}.{advice}"
        )
    items = list(params)
    for index, item in enumerate(items):
        if not isinstance(item, SamplingParams):
            raise TypeError(
                f"sampling_params[{index}] must be a SamplingParams, got {type(item).__name__}."
            )
    if len(items) != num_prompts:
        raise ValueError(
            f"sampling_params has {len(items)} entries for {num_prompts} prompts. "
            "Pass one SamplingParams for all, or exactly one for each prompt."
        )
    return items
