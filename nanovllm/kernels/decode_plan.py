"""The work list of decode attention: rows cut into parts on the device, longest first.

A CUDA graph fixes the attention kernel's grid while lengths change under it. So once a step
`DecodePlan.update` cuts each row into parts of nearly equal size and lists them; program i of the
attention kernel takes item i, and programs past the end of the list exit.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import tl, triton

ITEM_WIDTH = 8  # int32 fields kept per work item: one 32-byte sector, five are used


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How a decode kernel is compiled and how finely rows are cut."""

    tile: int  # tokens a loop turn reads
    num_warps: int = 4
    num_stages: int = 3
    min_part: int = 128  # tokens; smaller parts cost more in start-up and merging than they balance
    num_waves: int = 4  # programs per SM slot to aim at when rows alone are too few
    programs_per_sm: int = 3  # what shared memory lets reside together


def default_tuning(head_dim: int, dtype: torch.dtype) -> DecodeTuning:
    """Return the tile that is good on an H200 at head_dim 128, scaled to keep its bytes."""
    bytes_per_token = head_dim * dtype.itemsize
    # 64 tokens of 128 bf16 values: K and V of two stages in flight take 64 KiB, and three programs
    # fit an SM.
    tile = max(16, min(64, 16384 // bytes_per_token))
    return DecodeTuning(tile=tile, num_stages=4 if bytes_per_token <= 128 else 3)


class DecodePlan:
    """Owns the work list, partial results and counters of decode attention.

    All addresses are static, so one plan serves every CUDA graph and layer of an engine, as long as
    they run one after another on one stream.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
        tuning: DecodeTuning | None = None,
    ) -> None:
        self.tuning = default_tuning(head_dim, dtype) if tuning is None else tuning
        num_sms = 4  # off CUDA: the interpreter, where fewer programs are better
        if device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        # How many items fill every SM once.
        self._wave = -(-num_sms * self.tuning.programs_per_sm // num_kv_heads)
        self._max_num_seqs = max_num_seqs
        max_items = self.max_items(max_num_seqs)

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.items = buffer(max_items, ITEM_WIDTH, dtype=torch.int32)
        self.num_items = buffer(1, dtype=torch.int32)
        # Parts of one row that have finished; the last one puts the zero back.
        self.num_done = buffer(max_num_seqs, num_kv_heads, dtype=torch.int32)
        group = num_heads // num_kv_heads
        self.partial_out = buffer(max_items, num_kv_heads, group, head_dim, dtype=torch.float32)
        self.partial_lse = buffer(max_items, num_kv_heads, group, dtype=torch.float32)

    def max_items(self, num_seqs: int) -> int:
        """Return the grid bound: how many items `num_seqs` rows can be cut into."""
        return num_seqs + self._num_cuts(num_seqs)

    def update(self, seq_lens: torch.Tensor) -> None:
        """Cut the rows of this step; device work of a fixed shape, in place.

        seq_lens: [num_seqs] int32, may be strided; 0 gives one empty item, which writes zeros
        """
        num_seqs = len(seq_lens)
        assert num_seqs <= self._max_num_seqs, "buffers are sized by max_num_seqs"
        block_seqs = triton.next_power_of_2(max(16, self._max_num_seqs))
        # Registers bound the [rows, all rows] comparison that ranks the rows of a program.
        block_rows = max(1, min(16, 8192 // block_seqs))
        _plan_kernel[(triton.cdiv(num_seqs, block_rows),)](
            seq_lens,
            self.items,
            self.num_items,
            num_seqs,
            seq_lens.stride(0),
            self._num_cuts(num_seqs),
            max(1, self.tuning.min_part // self.tuning.tile),
            TILE=self.tuning.tile,
            ITEM_WIDTH=ITEM_WIDTH,
            BLOCK_SEQS=block_seqs,
            BLOCK_ROWS=block_rows,
        )

    def _num_cuts(self, num_seqs: int) -> int:
        # Rows fill some waves by themselves. One more is always granted: with parts no longer than
        # an SM slot's fair share and the longest first, a single very long row cannot be the tail.
        return max(self._wave, self.tuning.num_waves * self._wave - num_seqs)


# Row counts change from graph to graph: specialising on them would only compile more often.
@triton.jit(do_not_specialize=["num_seqs", "num_cuts", "min_tiles"])
def _plan_kernel(
    seq_lens,
    items,
    num_items,
    num_seqs,
    stride_seq_lens,
    num_cuts,
    min_tiles,
    TILE: tl.constexpr,
    ITEM_WIDTH: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    others = tl.arange(0, BLOCK_SEQS)
    is_other = others < num_seqs
    other_lens = tl.load(seq_lens + others * stride_seq_lens, mask=is_other, other=0)
    # sum(ceil(tiles / max_tiles)) <= num_seqs + num_cuts, which is the grid's bound.
    num_tiles = tl.sum(tl.cdiv(other_lens, TILE), axis=0)
    max_tiles = tl.maximum(tl.cdiv(num_tiles, num_cuts), min_tiles)
    other_sizes, other_parts = _cut(other_lens, max_tiles, TILE)
    other_parts = tl.where(is_other, other_parts, 0)

    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_seqs
    lens = tl.load(seq_lens + rows * stride_seq_lens, mask=is_row, other=0)
    sizes, parts = _cut(lens, max_tiles, TILE)
    parts = tl.where(is_row, parts, 0)
    # Rank by counting: every program ranks its own rows against all, no sort, no second pass.
    is_longer = other_sizes[None, :] > sizes[:, None]
    is_earlier = (other_sizes[None, :] == sizes[:, None]) & (others[None, :] < rows[:, None])
    first_items = tl.sum(tl.where(is_longer | is_earlier, other_parts[None, :], 0), axis=1)
    if tl.program_id(0) == 0:
        tl.store(num_items, tl.sum(other_parts, axis=0))

    for part in range(0, tl.max(parts, axis=0)):
        item = items + (first_items + part).to(tl.int64) * ITEM_WIDTH
        mask = part < parts
        begin = part * sizes * TILE
        tl.store(item, rows, mask=mask)
        tl.store(item + 1, begin, mask=mask)
        tl.store(item + 2, tl.minimum(begin + sizes * TILE, lens), mask=mask)
        tl.store(item + 3, parts, mask=mask)
        tl.store(item + 4, first_items, mask=mask)


@triton.jit
def _cut(lens, max_tiles, TILE: tl.constexpr):
    """Return per row the tiles of a part and the number of parts, at least one."""
    tiles = tl.cdiv(lens, TILE)
    # Equal parts, not full ones and a rest: a rest of one tile costs as much as four.
    sizes = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, max_tiles), 1)), 1)
    return tl.where(lens > 0, sizes, 0), tl.maximum(tl.cdiv(tiles, sizes), 1)
