"""A sequence's sampling parameters as fields of its row, features of its steps, and rules."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ALL_LOGPROBS, Column, Rule, SamplingFeature
from nanovllm.sampling_params import SamplingParams


def param_cells(seq: Sequence) -> dict[int, int]:
    """Column -> int32 value of the fields that never change while `seq` runs."""
    params = seq.params
    is_sampled = not params.is_greedy  # the likeliest token passes every filter
    floats = {
        Column.TEMPERATURE: params.temperature,
        Column.TOP_P: params.top_p if is_sampled else 1.0,
        Column.MIN_P: params.min_p if is_sampled else 0.0,
        Column.PRESENCE_PENALTY: params.presence_penalty,
        Column.FREQUENCY_PENALTY: params.frequency_penalty,
        Column.REPETITION_PENALTY: params.repetition_penalty,
    }
    cells = {int(column): float_bits(value) for column, value in floats.items()}
    # No vocabulary is as large as what int32 holds.
    cells[Column.TOP_K] = min(params.top_k, 2**31 - 1) if is_sampled else 0
    cells[Column.KEY_LO], cells[Column.KEY_HI] = seq.noise_key
    cells[Column.MIN_LEN] = min(seq.num_prompt_tokens + params.min_tokens, 2**31 - 1)
    cells[Column.FEATURES] = row_features(params)
    return cells


def float_bits(value: float) -> int:
    """The bits of a float32, read as a signed 32-bit integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def num_logprobs(asked: int | None) -> int:
    """A request's number of logprobs as steps count it: -1 is none, ALL_LOGPROBS all."""
    if asked is None:
        return -1
    return ALL_LOGPROBS if asked < 0 else min(asked, ALL_LOGPROBS)


def row_features(params: SamplingParams) -> int:
    """SamplingFeature bits: what this row needs beyond temperature."""
    is_sampled = not params.is_greedy
    has_penalties = (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )
    has_rules = (
        params.min_tokens or params.logit_bias or params.allowed_token_ids or params.bad_words
    )
    asked = (
        (SamplingFeature.TOP_K_P, is_sampled and (params.top_k > 0 or params.top_p < 1)),
        (SamplingFeature.MIN_P, is_sampled and params.min_p > 0),
        (SamplingFeature.PENALTIES, has_penalties),
        (SamplingFeature.TOKEN_RULES, has_rules),
        (SamplingFeature.LOGPROBS, params.logprobs is not None),
        (SamplingFeature.PYTHON_PROCESSORS, params.logits_processors),
        (SamplingFeature.PROMPT_LOGPROBS, params.prompt_logprobs is not None),
    )
    bits = SamplingFeature.NONE
    for feature, is_asked in asked:
        if is_asked:
            bits |= feature
    return int(bits)


def row_rules(seq: Sequence) -> list[np.ndarray]:
    """The variable-length data of a joining row, as runs of (row, rule, count, values)."""
    features, params, runs = row_features(seq.params), seq.params, []

    def add(rule: Rule, values: Iterable[int]) -> None:
        data = list(values)
        runs.append(np.array([seq.row, rule, len(data), *data], dtype=np.int64))

    # First, and always: it tells the device side that the row begins anew.
    if features & (SamplingFeature.PENALTIES | SamplingFeature.TOKEN_RULES):
        add(Rule.OUTPUT, seq.token_ids[seq.num_prompt_tokens :])
    if features & SamplingFeature.PENALTIES:
        add(Rule.PROMPT, seq.token_ids[: seq.num_prompt_tokens])
    if params.min_tokens:
        add(Rule.BARRED_UNTIL_MIN_LEN, seq.barred_until_min_len)
    if params.logit_bias:
        pairs = dict(params.logit_bias).items()
        add(Rule.BIAS, (value for pair in pairs for value in (pair[0], float_bits(pair[1]))))
    if params.allowed_token_ids:
        add(Rule.ALLOWED, params.allowed_token_ids)
    for run in seq.bad_word_ids:
        add(Rule.BAD_WORD, run)
    return runs
