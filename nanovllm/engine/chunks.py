"""Pieces of sequences to be computed in one step, and what the device side gets of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nanovllm.engine.row_params import num_logprobs
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import PrefillWork, ProcessorCall


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a sequence, to be computed in the step being put together."""

    seq: Sequence
    start: int
    end: int

    @property
    def prompt_positions(self) -> range:
        """Positions of its tokens of which the next one's logprobs are wanted."""
        seq = self.seq
        if not seq.wants_prompt_logprobs:
            return range(0)
        first = max(self.start, seq.prompt_logprobs_from - 1)
        return range(first, min(self.end, seq.num_prompt_tokens - 1))


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Where in a step's output the logprobs of some prompt tokens of a sequence are."""

    seq: Sequence
    start: int  # places in the output
    end: int
    first_position: int  # of the prompt token at `start`


def pack(chunks: list[Chunk]) -> PrefillWork:
    token_ids = [np.array(c.seq.token_ids[c.start : c.end], dtype=np.int32) for c in chunks]
    places: list[int] = []
    targets: list[int] = []
    num_asked, step_start = -1, 0
    for c in chunks:
        if wanted := c.prompt_positions:
            shift = step_start - c.start
            places += range(wanted.start + shift, wanted.stop + shift)
            targets += c.seq.token_ids[wanted.start + 1 : wanted.stop + 1]
            num_asked = max(num_asked, num_logprobs(c.seq.params.prompt_logprobs))
        step_start += c.end - c.start
    return PrefillWork(
        rows=np.array([c.seq.row for c in chunks], dtype=np.int32),
        token_ids=np.concatenate(token_ids),
        num_tokens=np.array([c.end - c.start for c in chunks], dtype=np.int32),
        first_positions=np.array([c.start for c in chunks], dtype=np.int32),
        is_sampled=np.array([c.end == len(c.seq.token_ids) for c in chunks], dtype=np.int32),
        prompt_places=np.array(places, dtype=np.int32),
        prompt_targets=np.array(targets, dtype=np.int32),
        max_prompt_logprobs=np.array([num_asked], dtype=np.int32),
    )


def prompt_spans(chunks: list[Chunk]) -> list[PromptSpan]:
    spans, start = [], 0
    for chunk in chunks:
        if wanted := chunk.prompt_positions:
            end = start + len(wanted)
            spans.append(PromptSpan(chunk.seq, start, end, wanted.start + 1))
            start = end
    return spans


def processor_calls(sampled: list[Sequence]) -> tuple[ProcessorCall, ...]:
    # The engine does not run ahead of rows with processors: all their tokens are known here.
    return tuple(
        ProcessorCall(
            place,
            seq.params.logits_processors,
            seq.token_ids[: seq.num_prompt_tokens],
            seq.token_ids[seq.num_prompt_tokens :],
        )
        for place, seq in enumerate(sampled)
        if seq.params.logits_processors
    )
