"""All that crosses the border between the host side (scheduler) and the device side (runner).

The running batch lives on the device as one int32 matrix, a packed row per running sequence. A
`SchedulerOutput` says how the rows change and what is computed on them. Replaying every record from
the first rebuilds the rows from nothing, which is how tensor-parallel workers stay in step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np


class Column(IntEnum):
    """Header fields of a device row; the block table follows at `Column.BLOCK_TABLE`."""

    LAST_TOKEN = 0  # input of the next decode step
    SEQ_LEN = 1  # tokens of the sequence, LAST_TOKEN included
    TEMPERATURE = 2  # float32 bits, as all down to REPETITION_PENALTY
    TOP_P = 3
    MIN_P = 4
    PRESENCE_PENALTY = 5
    FREQUENCY_PENALTY = 6
    REPETITION_PENALTY = 7
    TOP_K = 8  # 0 is off
    KEY_LO = 9  # the two halves of the noise key
    KEY_HI = 10
    MIN_LEN = 11  # stop tokens are barred while the sequence is shorter
    FEATURES = 12  # SamplingFeature bits of the row
    BLOCK_TABLE = 16


class SamplingFeature(IntFlag):
    """What some sampled row of a step asks for beyond temperature; 0 stays in the decode graph."""

    NONE = 0
    TOP_K_P = 1
    MIN_P = 2
    PENALTIES = 4
    TOKEN_RULES = 8  # min_tokens, bias, allowed ids, bad words
    LOGPROBS = 16
    PYTHON_PROCESSORS = 32
    PROMPT_LOGPROBS = 64


class Rule(IntEnum):
    """Variable-length data of a row whose sampling needs more than its header says."""

    PROMPT = 0  # prompt token ids, for penalties
    OUTPUT = 1  # generated token ids so far, for penalties and bad words; always the first rule
    BARRED_UNTIL_MIN_LEN = 2  # stop token ids
    BIAS = 3  # (token id, float32 bits) pairs
    ALLOWED = 4  # token ids
    BAD_WORD = 5  # the token ids of one banned run


# Of a record as bytes: its numbers, in the order of the fields, and how many arrays follow.
_HEADER = struct.Struct("<qiiii")
ALL_LOGPROBS = 2**31 - 1  # a number of logprobs; cut to the vocabulary where that is known


def row_width(max_num_blocks: int) -> int:
    """Columns of a device row whose block table holds `max_num_blocks` entries."""
    return int(Column.BLOCK_TABLE) + max_num_blocks


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Tokens of known value to compute in one step, packed. Values are copies."""

    rows: np.ndarray  # [num_chunks] int32, the device row of each chunk
    token_ids: np.ndarray  # [num_tokens] int32, all chunks one after another
    num_tokens: np.ndarray  # [num_chunks] int32, sums to len(token_ids)
    first_positions: np.ndarray  # [num_chunks] int32, 0-based; more than 0 reads cached K and V
    is_sampled: np.ndarray  # [num_chunks] int32, 1 where the chunk ends its sequence
    # [num_prompt_logprobs] int32 both: places among `token_ids` of tokens of which the next one's
    # logprobs are wanted, and that next token
    prompt_places: np.ndarray
    prompt_targets: np.ndarray
    max_prompt_logprobs: np.ndarray  # [1] int32, largest k asked for by a chunk


@dataclass(frozen=True, slots=True)
class ProcessorCall:
    """Python functions to run on the logits of one sampled row."""

    place: int  # among the step's sampled rows
    processors: tuple[Callable[..., Any], ...]
    prompt_token_ids: list[int]
    output_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: first `moves`, then `cells`, then the work. Frozen; arrays are copies."""

    step_id: int
    num_decode_rows: int  # rows [0, n) decode one token each; 0 in a prefill step
    features: int  # SamplingFeature bits of the sampled rows
    max_logprobs: int  # largest k asked for by a sampled row; -1: none, ALL_LOGPROBS: all
    moves: np.ndarray  # [num_moves, 2] int32, (from, to) rows, disjoint; packs the holes
    cells: np.ndarray  # [num_cells, 2] int32, (row * width + column, value)
    rules: np.ndarray  # [n] int32, runs of (row, Rule, count, count values) for rows that joined
    prefill: PrefillWork | None
    processor_calls: tuple[ProcessorCall, ...] = ()  # stay in this process: not in `to_bytes`

    @property
    def needs_redrawer(self) -> bool:
        """Whether a row of it asks for more than a draw at its temperature."""
        asks_of_prompts = self.prefill is not None and len(self.prefill.prompt_places) > 0
        return bool(self.features) or len(self.rules) > 0 or asks_of_prompts

    def to_bytes(self) -> bytes:
        """A fixed binary layout (no pickle): header, array lengths, arrays of int32."""
        arrays = [self.moves, self.cells, self.rules]
        if self.prefill is not None:
            arrays += [getattr(self.prefill, field.name) for field in fields(PrefillWork)]
        header = (self.step_id, self.num_decode_rows, self.features, self.max_logprobs)
        lengths = [array.size for array in arrays]
        parts = [_HEADER.pack(*header, len(arrays))]
        parts.append(struct.pack(f"<{len(arrays)}i", *lengths))
        parts += [np.ascontiguousarray(array, dtype=np.int32).tobytes() for array in arrays]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> SchedulerOutput:
        """Rebuild what `to_bytes` wrote; the arrays are views of `data`."""
        step_id, num_decode_rows, features, max_logprobs, num_arrays = _HEADER.unpack_from(data)
        lengths = struct.unpack_from(f"<{num_arrays}i", data, _HEADER.size)
        offset = _HEADER.size + 4 * num_arrays
        arrays = []
        for length in lengths:
            arrays.append(np.frombuffer(data, dtype=np.int32, count=length, offset=offset))
            offset += 4 * length
        moves, cells = (array.reshape(-1, 2) for array in arrays[:2])
        prefill = PrefillWork(*arrays[3:]) if num_arrays > 3 else None
        head_fields = (step_id, num_decode_rows, features, max_logprobs)
        return cls(*head_fields, moves, cells, arrays[2], prefill)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities of some positions: the token there first, then the k likeliest."""

    token_ids: np.ndarray  # [num_positions, 1 + k] int32
    logprobs: np.ndarray  # [num_positions, 1 + k] float32
    ranks: np.ndarray  # [num_positions] int32, rank of the first column, 1 is likeliest


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step drew, in the order of its sampled rows."""

    token_ids: np.ndarray  # [num_sampled] int32
    logprobs: LogprobColumns | None = None  # one position a sampled row
    prompt_logprobs: LogprobColumns | None = None  # all wanted positions, chunk after chunk
