"""Draw again for rows that ask for more than temperature, and look at log-probabilities.

Runs on the device right behind the captured step, without waiting for it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from nanovllm.engine.kv_cache import SAMPLING_WORKSPACE_BYTES
from nanovllm.engine.step import Column, ProcessorCall, SamplingFeature, SchedulerOutput
from nanovllm.engine.step_handle import StepLogprobs, TokenLogprobs
from nanovllm.kernels.sample import sample
from nanovllm.sampling.filters import (
    add_bias,
    allow_only,
    apply_temperature,
    bar,
    ends_with,
    run_processors,
)
from nanovllm.sampling.keep_top import keep_top
from nanovllm.sampling.logprobs import token_logprobs
from nanovllm.sampling.penalties import apply_penalties
from nanovllm.sampling.state import RedrawPlan, RowSlice, SamplingState

# One float32 copy of the logits of a slice of rows; filters and logprobs hold four at most.
SLICE_BYTES = SAMPLING_WORKSPACE_BYTES // 4


class LogitsModel(Protocol):
    """What is needed of a model."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def gather_logits(self, local_logits: torch.Tensor) -> torch.Tensor: ...


def slice_rows(vocab_size: int) -> int:
    """How many rows of logits are looked at together."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


class Redrawer:
    """Owns what sampling remembers of rows; draws again behind a step, the same on all ranks."""

    def __init__(
        self,
        model: LogitsModel,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        *,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self._model = model
        self._max_rows = slice_rows(vocab_size)
        self._is_processed = logprobs_mode == "processed_logprobs"
        self._state = SamplingState(max_num_seqs, vocab_size, device, max_slice_rows=self._max_rows)

    def begin_step(
        self, output: SchedulerOutput, sampled_rows: np.ndarray, features: np.ndarray
    ) -> RedrawPlan | None:
        """Follow a record's moves and rules; None if nothing is left to do behind the step.

        sampled_rows: [num_sampled] int32; features: [num_sampled] SamplingFeature bits of each
        """
        return self._state.begin_step(
            output, sampled_rows, features, is_processed=self._is_processed
        )

    def redraw(
        self,
        plan: RedrawPlan,
        output: SchedulerOutput,
        local_logits: torch.Tensor,  # [num_sampled, shard_size], this rank's columns
        rows: torch.Tensor,  # [max_num_seqs + 1, width] int32, LAST_TOKEN written in place
        token_ids: torch.Tensor,  # [num_sampled] int32, written in place
    ) -> StepLogprobs:
        """Draw for the plan's rows, others keep their tokens; return logprobs on their way home."""
        calls = {call.place: call for call in output.processor_calls}
        model, state = self._model, self._state
        sampled = []
        for part in plan.slices:
            header = rows[part.rows, : int(Column.BLOCK_TABLE)]
            floats = header.view(torch.float32)
            raw = model.gather_logits(local_logits[part.index])
            # Always a copy: logprobs want the raw logits.
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
            # The logits are not divided yet: `sample` does that as it does in the captured step,
            # so a row draws the same token here and there if no filter changes its logits.
            positions = header[:, Column.SEQ_LEN] - 1
            keys = header[:, Column.KEY_LO], header[:, Column.KEY_HI]
            _, drawn = sample(logits, temperatures, *keys, positions)
            token_ids[part.index] = drawn
            rows[part.rows, int(Column.LAST_TOKEN)] = drawn
            state.count(part.rows, drawn, part.features)
            if self._is_processed and part.features & SamplingFeature.LOGPROBS:
                scaled = apply_temperature(logits, temperatures)
                sampled.append(token_logprobs(scaled, drawn, output.max_logprobs).to_host())
        if not self._is_processed:
            for part in plan.logprob_slices:
                raw = model.gather_logits(local_logits[part.index])
                chosen = token_ids[part.index]
                sampled.append(token_logprobs(raw, chosen, output.max_logprobs).to_host())
        return StepLogprobs(sampled, [part.places for part in plan.logprob_slices])

    def prompt_logprobs(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        places: torch.Tensor,  # [num_positions] int32, of the tokens before the targets
        targets: torch.Tensor,  # [num_positions] int32
        num_top: int,
    ) -> list[TokenLogprobs]:
        """Look at given next tokens, slice after slice: the logits are never all there."""
        parts = []
        for start in range(0, len(places), self._max_rows):
            end = start + self._max_rows
            local = self._model.compute_logits(hidden[places[start:end].long()])
            logits = self._model.gather_logits(local)
            parts.append(token_logprobs(logits, targets[start:end], num_top).to_host())
        return parts

    def forget(self) -> None:
        """Free the device memory of rows; those that join later bring what they need."""
        self._state.forget()


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
