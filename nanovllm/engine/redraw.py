"""Draw again for rows that ask for more than temperature, and look at log-probabilities.

Runs on the device right behind the captured step, without waiting for it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from nanovllm.engine.sampling_state import RedrawPlan, RowSlice, SamplingState
from nanovllm.engine.step import Column, ProcessorCall, SamplingFeature
from nanovllm.kernels.keep_top import keep_top
from nanovllm.kernels.penalties import apply_penalties
from nanovllm.kernels.sample import sample
from nanovllm.layers.filters import (
    add_bias,
    allow_only,
    apply_temperature,
    bar,
    ends_with,
    run_processors,
)
from nanovllm.layers.logprobs import TokenLogprobs, token_logprobs

# One float32 copy of the logits of a slice of rows; filters and logprobs hold four at most.
SLICE_BYTES = 64 * 2**20
MAX_COPIES = 4


class LogitsModel(Protocol):
    """What is needed of a model."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def gather_logits(self, local_logits: torch.Tensor) -> torch.Tensor: ...


def slice_rows(vocab_size: int) -> int:
    """How many rows of logits are looked at together."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


def redraw(
    plan: RedrawPlan,
    state: SamplingState,
    model: LogitsModel,
    local_logits: torch.Tensor,  # [num_sampled, shard_size], this rank's columns
    rows: torch.Tensor,  # [max_num_seqs + 1, width] int32, LAST_TOKEN written in place
    token_ids: torch.Tensor,  # [num_sampled] int32, written in place
    *,
    max_logprobs: int,
    is_processed: bool,
    processor_calls: tuple[ProcessorCall, ...] = (),
) -> list[TokenLogprobs]:
    """Draw for the plan's slices; return the logprobs of its logprob slices, on their way home.

    Rows that are not in the plan keep their tokens. All ranks compute the same.
    """
    calls = {call.place: call for call in processor_calls}
    parts = []
    for part in plan.slices:
        header = rows[part.rows, : int(Column.BLOCK_TABLE)]
        floats = header.view(torch.float32)
        raw = model.gather_logits(local_logits[part.index])
        # A copy always: the raw logits are still needed for logprobs, and in the next prefill.
        logits = raw.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        _apply_rules(logits, part, header, state, calls)
        temperatures = floats[:, Column.TEMPERATURE]
        if part.features & (SamplingFeature.TOP_K_P | SamplingFeature.MIN_P):
            keep_top(
                logits,
                temperatures,
                floats[:, Column.MIN_P],
                header[:, Column.TOP_K],
                floats[:, Column.TOP_P],
            )
        # The logits are not divided yet: `sample` does that as it does in the captured step, so a
        # row draws the same token here and there if no filter changes its logits.
        positions = header[:, Column.SEQ_LEN] - 1
        key_lo, key_hi = header[:, Column.KEY_LO], header[:, Column.KEY_HI]
        _, drawn = sample(logits, temperatures, key_lo, key_hi, positions)
        token_ids[part.index] = drawn
        rows[part.rows, int(Column.LAST_TOKEN)] = drawn
        state.count(part.rows, drawn, part.features)
        if is_processed and part.features & SamplingFeature.LOGPROBS:
            scaled = apply_temperature(logits, temperatures)
            parts.append(token_logprobs(scaled, drawn, max_logprobs).to_host())
    if not is_processed:
        for part in plan.logprob_slices:
            raw = model.gather_logits(local_logits[part.index])
            parts.append(token_logprobs(raw, token_ids[part.index], max_logprobs).to_host())
    return parts


def prompt_logprobs(
    model: LogitsModel,
    hidden: torch.Tensor,  # [num_tokens, hidden_size]
    places: torch.Tensor,  # [num_positions] int32, of the tokens before the targets
    targets: torch.Tensor,  # [num_positions] int32
    num_top: int,
    max_rows: int,
) -> list[TokenLogprobs]:
    """Look at given next tokens, slice after slice: the logits are never all there."""
    parts = []
    for start in range(0, len(places), max_rows):
        end = start + max_rows
        local = model.compute_logits(hidden[places[start:end].long()])
        logits = model.gather_logits(local)
        parts.append(token_logprobs(logits, targets[start:end], num_top).to_host())
    return parts


def _apply_rules(
    logits: torch.Tensor,
    part: RowSlice,
    header: torch.Tensor,
    state: SamplingState,
    calls: dict[int, ProcessorCall],
) -> None:
    """Everything before temperature, in the order that SamplingParams documents."""
    if part.allowed_rows.numel():
        allow_only(logits, part.allowed_rows, part.allowed[0], part.allowed[1])
    if part.bad_words.shape[1]:
        place, last_token = part.bad_words[0], part.bad_words[1]
        history = state.history[part.rows[place]]
        bar(logits, place, last_token, ends_with(history, part.bad_words[2:].t()))
    if part.barred.shape[1]:
        is_short = header[:, Column.SEQ_LEN] - 1 < header[:, Column.MIN_LEN]
        bar(logits, part.barred[0], part.barred[1], is_short[part.barred[0]])
    if part.biases.shape[1]:
        values = part.biases[2].int().view(torch.float32)
        add_bias(logits, part.biases[0], part.biases[1], values)
    for row, place in enumerate(part.places.tolist() if calls else ()):
        if call := calls.get(place):
            run_processors(
                logits[row], call.processors, call.prompt_token_ids, call.output_token_ids
            )
    if part.features & SamplingFeature.PENALTIES:
        floats = header.view(torch.float32)
        apply_penalties(
            logits,
            state.counts,
            part.rows,
            floats[:, Column.REPETITION_PENALTY],
            floats[:, Column.FREQUENCY_PENALTY],
            floats[:, Column.PRESENCE_PENALTY],
        )
