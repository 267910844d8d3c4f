"""From a `SchedulerOutput` to device tensors: NumPy columns, and one pinned transfer a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
import torch

from nanovllm.engine.step import Column, PrefillWork
from nanovllm.utils.context import ForwardContext

_Array = TypeVar("_Array", np.ndarray, torch.Tensor)
_NUM_BUFFERS = 3  # one more than steps in flight, so that no copy is overtaken


def slot_mapping(
    block_tables: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """Return each token's slot in the flattened KV cache, [num_tokens] int32.

    block_tables: [num_rows, max_blocks] int32; rows, positions: [num_tokens]
    """
    # A cache of 2^31 slots would be hundreds of terabytes: int32 holds every slot.
    block_ids = block_tables[rows, positions // block_size]
    slots: np.ndarray = block_ids * block_size + positions % block_size
    return slots


@dataclass(frozen=True)  # no slots: a generic class keeps its type argument in an attribute
class PrefillColumns(Generic[_Array]):
    """What the device needs of a prefill step, on the host or uploaded. All int32."""

    token_ids: _Array  # [num_tokens]
    positions: _Array  # [num_tokens]
    slots: _Array  # [num_tokens]
    rows: _Array  # [num_chunks]
    seq_lens: _Array  # [num_chunks], up to the end of the chunk
    cu_seqlens_q: _Array  # [num_chunks + 1]
    cu_seqlens_k: _Array  # [num_chunks + 1]
    sampled_rows: _Array  # [num_sampled]
    sampled_tokens: _Array  # [num_sampled], place of the chunk's last token in the packed step
    # [num_prompt_logprobs] both: places of tokens whose next one's logprobs are wanted, and it
    prompt_places: _Array
    prompt_targets: _Array

    def arrays(self) -> list[_Array]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


def prefill_columns(
    work: PrefillWork, block_tables: np.ndarray, block_size: int
) -> PrefillColumns[np.ndarray]:
    """Lay a prefill step out, without a Python loop over its tokens.

    block_tables: [max_num_seqs, max_blocks] int32, the host's mirror
    """
    ends = np.cumsum(work.num_tokens)
    starts = ends - work.num_tokens
    # Position of a token: its place in the step, shifted by where its chunk starts and begins.
    shifts = np.repeat(work.first_positions - starts, work.num_tokens)
    positions = (np.arange(len(work.token_ids)) + shifts).astype(np.int32)
    token_rows = np.repeat(work.rows, work.num_tokens)
    seq_lens = work.first_positions + work.num_tokens
    is_sampled = work.is_sampled != 0
    zero = np.zeros(1, dtype=np.int32)
    return PrefillColumns(
        token_ids=work.token_ids,
        positions=positions,
        slots=slot_mapping(block_tables, token_rows, positions, block_size),
        rows=work.rows,
        seq_lens=seq_lens,
        cu_seqlens_q=np.concatenate([zero, ends]).astype(np.int32),
        cu_seqlens_k=np.concatenate([zero, np.cumsum(seq_lens)]).astype(np.int32),
        sampled_rows=work.rows[is_sampled],
        sampled_tokens=(ends - 1)[is_sampled].astype(np.int32),
        prompt_places=work.prompt_places,
        prompt_targets=work.prompt_targets,
    )


def blank_prefill(lengths: np.ndarray) -> PrefillColumns[np.ndarray]:
    """A prefill step of sequences of these lengths that stores nothing, for warm-up.

    lengths: [num_chunks] int32
    """
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    zeros, none = np.zeros(ends[-1], dtype=np.int32), np.zeros(0, dtype=np.int32)
    rows = np.arange(len(lengths), dtype=np.int32)
    return PrefillColumns[np.ndarray](
        token_ids=zeros,
        positions=zeros,
        slots=zeros - 1,
        rows=rows,
        seq_lens=lengths,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        sampled_rows=rows,
        sampled_tokens=ends[1:] - 1,
        prompt_places=none,
        prompt_targets=none,
    )


def prefill_context(
    columns: PrefillColumns[np.ndarray], on_device: PrefillColumns[torch.Tensor],
    rows: torch.Tensor, kv_cache: torch.Tensor, kv_scales: torch.Tensor | None,
) -> ForwardContext:  # fmt: skip
    """Say to the layers where a prefill step's tokens live; `attn_metadata` is not set.

    rows: [num_rows, row_width] int32, the device's
    """
    num_query = np.diff(columns.cu_seqlens_q)
    max_seqlen_k = int(columns.seq_lens.max())
    first, num_blocks = int(Column.BLOCK_TABLE), -(-max_seqlen_k // kv_cache.shape[3])
    return ForwardContext(
        kv_cache=kv_cache,
        is_decode=False,
        slot_mapping=on_device.slots.long(),
        block_tables=rows[on_device.rows, first : first + num_blocks],
        seq_lens=on_device.seq_lens,
        kv_scales=kv_scales,
        cu_seqlens_q=on_device.cu_seqlens_q,
        cu_seqlens_k=on_device.cu_seqlens_k,
        max_seqlen_q=int(num_query.max()),
        max_seqlen_k=max_seqlen_k,
        # A chunk that is not its sequence's first reads what an earlier step, or a row of this
        # one, wrote.
        has_cached_prefix=bool((columns.seq_lens > num_query).any()),
        host_seqlens=tuple(zip(num_query.tolist(), columns.seq_lens.tolist(), strict=True)),
    )


class RowMirror:
    """Owns a rank's copy, on the host, of its device rows as far as records tell: no drawn tokens.

    The scheduler's RowTable, whose changes the records are, is on rank 0 alone.
    """

    def __init__(self, max_num_seqs: int, width: int) -> None:
        self._rows = np.zeros((max_num_seqs, width), dtype=np.int32)

    @property
    def block_tables(self) -> np.ndarray:  # [max_num_seqs, max_blocks]
        return self._rows[:, Column.BLOCK_TABLE :]

    def features(self, rows: np.ndarray) -> np.ndarray:
        """SamplingFeature bits of some rows."""
        bits: np.ndarray = self._rows[rows, Column.FEATURES]
        return bits

    def apply(self, moves: np.ndarray, cells: np.ndarray) -> None:
        if len(moves):
            self._rows[moves[:, 1]] = self._rows[moves[:, 0]]
        if len(cells):
            self._rows.reshape(-1)[cells[:, 0]] = cells[:, 1]


class Uploader:
    """Owns pinned staging memory; copies int32 arrays to the device in one transfer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.int32)] * _NUM_BUFFERS
        # When each was last read. Where steps are waited for that is long ago; where one fault
        # follows another the device may lag behind by more steps than there are buffers.
        self._is_cuda = device.type == "cuda"
        self._copied: list[torch.cuda.Event] = []
        for _ in range(_NUM_BUFFERS if self._is_cuda else 0):
            self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # torch's
        self._turn = 0

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Return device tensors of the same shapes, valid until the second next call at least."""
        # Each starts on a border of 16 bytes: kernels are compiled anew for pointers that do not.
        sizes = [-(-array.size // 4) * 4 for array in arrays]
        starts = [0, *accumulate(sizes)]
        total = starts[-1]
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        staging = self._buffers[self._turn]
        if self._copied:
            self._copied[self._turn].synchronize()
        if staging.numel() < total:
            size = max(4096, 2 * total)
            staging = torch.empty(size, dtype=torch.int32, pin_memory=self._is_cuda)
            self._buffers[self._turn] = staging
        flat = staging.numpy()
        for array, start in zip(arrays, starts, strict=False):
            flat[start : start + array.size] = array.reshape(-1)
        # On a CPU the copy is what makes the tensors outlive the staging buffer.
        on_device = staging[:total].to(self._device, non_blocking=True, copy=True)
        if self._copied:
            self._copied[self._turn].record()
        spans = zip(arrays, starts, strict=False)
        return [on_device[at : at + a.size].view(a.shape) for a, at in spans]
