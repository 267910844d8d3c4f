"""The work list of decode attention: rows cut into parts on the device, longest first.

A CUDA graph fixes the attention kernel's grid while lengths change under it. So once a step
`DecodePlan.cut` cuts each row into parts of nearly equal size and lists them; program i of the
attention kernel takes item i, and programs past the end of the list exit.
"""

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import tl, triton

ITEM_WIDTH = 8  # int32 fields kept per work item: one 32-byte sector, five are used
_NUM_CANDIDATES = 32  # part sizes compared: steps of 7 to 12 percent, or every number of tiles


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """How a decode kernel is compiled and how finely rows are cut."""

    tile: int  # tokens a loop turn reads
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3  # that reside together, by shared memory and registers
    overhead_tokens: int = 96  # what a program's start and end cost, in tokens it could have read


# Up to so many rows: a DecodeTuning; see tests/gpu/bench_attention.py.
_ANY = 1 << 30
_HALF = {4: (64, 4, 3, 2), 48: (32, 1, 4, 4), 96: (64, 4, 4, 2), _ANY: (64, 4, 3, 3)}
_FP8 = {4: (64, 4, 3, 2, 192), 48: (64, 2, 3, 4), 96: (128, 4, 3, 2, 192), _ANY: (64, 2, 3, 4)}


def default_tuning(head_dim: int, dtype: torch.dtype, num_seqs: int) -> DecodeTuning:
    """Return what is best on an H200 at head_dim 128, scaled to keep a tile's bytes.

    dtype: the KV cache's
    """
    table = _FP8 if dtype.itemsize == 1 else _HALF
    tile, warps, *others = next(tuning for limit, tuning in table.items() if num_seqs <= limit)
    tile = max(16, min(tile, tile * 256 // (head_dim * dtype.itemsize)))
    # One warp's registers hold what it adds up of 128 dims, not of 256.
    return DecodeTuning(tile, max(warps, head_dim // 128), *others)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """One step's work list. A value of its own, so that steps being warmed up do not meet in it."""

    plan: "DecodePlan"
    items: torch.Tensor  # [max_items, ITEM_WIDTH] int32: row, begin, end, parts of row, first item
    num_items: torch.Tensor  # [1] int32


class DecodePlan:
    """Owns the partial results and counters of decode attention, and cuts the work.

    All addresses are static, so one plan serves every CUDA graph and layer of an engine, as long as
    they run one after another on one stream.
    """

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, max_num_seqs: int,
        dtype: torch.dtype, device: torch.device, tuning: DecodeTuning | None = None,
    ) -> None:  # fmt: skip
        self._tuning = tuning
        self._shape = (head_dim, dtype)
        self._num_kv_heads = num_kv_heads
        self._num_sms = 4  # off CUDA: the interpreter, where fewer programs are better
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._max_num_seqs = max_num_seqs
        max_items = max(self.max_items(num_seqs) for num_seqs in range(1, max_num_seqs + 1))

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Parts of one row that have finished; the last one puts the zero back.
        self.num_done = buffer(max_num_seqs, num_kv_heads, dtype=torch.int32)
        group = num_heads // num_kv_heads
        self.partial_out = buffer(max_items, num_kv_heads, group, head_dim, dtype=torch.float32)
        self.partial_lse = buffer(max_items, num_kv_heads, group, dtype=torch.float32)

    def tuning(self, num_seqs: int) -> DecodeTuning:
        """How the kernel for so many rows is compiled."""
        return self._tuning or default_tuning(*self._shape, num_seqs)

    def wave(self, num_seqs: int) -> int:
        """How many items fill every SM once. Not rounded up: a few more take a second round."""
        return max(1, self._num_sms * self.tuning(num_seqs).programs_per_sm // self._num_kv_heads)

    def max_items(self, num_seqs: int) -> int:
        """Return the grid bound: how many items `num_seqs` rows are cut into at most."""
        # A wave more than rows fill by themselves, but only one for few rows: programs that find
        # no item end last and cost more time there than a finer cut saves.
        wave = self.wave(num_seqs)
        return wave if 2 * num_seqs <= wave else wave * (-(-num_seqs // wave) + 1)

    def cut(self, seq_lens: torch.Tensor) -> DecodeWork:
        """Cut the rows of this step into parts; device work of a fixed shape.

        seq_lens: [num_seqs] int32, may be strided; 0 gives one empty item, which writes zeros
        """
        num_seqs = len(seq_lens)
        assert num_seqs <= self._max_num_seqs, "buffers are sized by max_num_seqs"
        block_seqs = triton.next_power_of_2(max(16, self._max_num_seqs))
        tuning, max_items = self.tuning(num_seqs), self.max_items(num_seqs)
        items = seq_lens.new_empty((max_items, ITEM_WIDTH))
        num_items = seq_lens.new_empty(1)
        # Registers bound the [rows, all rows] comparison that ranks the rows of a program.
        block_rows = max(1, min(16, 4096 // block_seqs))
        _plan_kernel[(triton.cdiv(num_seqs, block_rows),)](
            seq_lens, items, num_items, num_seqs, seq_lens.stride(0),
            self.wave(num_seqs), max_items, tuning.overhead_tokens / tuning.tile,
            TILE=tuning.tile, ITEM_WIDTH=ITEM_WIDTH, BLOCK_SEQS=block_seqs,
            BLOCK_ROWS=block_rows, NUM_CANDIDATES=_NUM_CANDIDATES,
            BLOCK_CANDIDATES=max(1, min(_NUM_CANDIDATES, 4096 // block_seqs)),
        )  # fmt: skip
        return DecodeWork(self, items, num_items)


# Row counts change from graph to graph: specialising on them would only compile more often.
@triton.jit(do_not_specialize=["num_seqs", "wave", "max_items"])
def _plan_kernel(
    seq_lens, items, num_items, num_seqs, stride_seq_lens, wave, max_items,
    overhead,  # of a program, in tiles
    TILE: tl.constexpr, ITEM_WIDTH: tl.constexpr, BLOCK_SEQS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, NUM_CANDIDATES: tl.constexpr, BLOCK_CANDIDATES: tl.constexpr,
):  # fmt: skip
    others = tl.arange(0, BLOCK_SEQS)
    is_other = others < num_seqs
    other_lens = tl.load(seq_lens + others * stride_seq_lens, mask=is_other, other=0)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_seqs
    lens = tl.load(seq_lens + rows * stride_seq_lens, mask=is_row, other=0)

    # Every program chooses the part size again: cheaper than a second kernel.
    other_tiles = tl.cdiv(other_lens, TILE).to(tl.float32)
    max_tiles = _choose_max_tiles(
        other_tiles, num_seqs, wave, max_items, overhead, NUM_CANDIDATES, BLOCK_CANDIDATES
    )
    other_sizes, other_parts = _cut(other_lens, max_tiles, TILE)
    other_parts = tl.where(is_other, other_parts, 0)
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
def _choose_max_tiles(
    tiles,  # per row, float32
    num_seqs, wave, max_items, overhead,
    NUM_CANDIDATES: tl.constexpr, BLOCK_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the longest part in tiles that makes the attention kernel finish first."""
    num_tiles = tl.sum(tiles, axis=0)
    longest = tl.maximum(tl.max(tiles, axis=0), 1.0)
    shortest = tl.min(tl.where(tiles > 0, tiles, float("inf")), axis=0)
    num_real = tl.sum(tl.where(tiles > 0, 1.0, 0.0), axis=0)  # rows that are not padding
    max_parts = max_items - num_seqs + num_real
    smallest = tl.minimum(tl.maximum(num_tiles / max_parts, 1.0), longest)
    best_cost = float("inf")
    best_size = longest
    for first in range(0, NUM_CANDIDATES, BLOCK_CANDIDATES):
        steps = first + tl.arange(0, BLOCK_CANDIDATES)
        growth = tl.log2(longest / smallest) / (NUM_CANDIDATES - 1)
        sizes = tl.minimum(tl.ceil(smallest * tl.exp2(steps * growth)), longest)
        # The last candidate leaves all rows whole, so one always fits.
        sizes = tl.where(steps == NUM_CANDIDATES - 1, longest, sizes)
        # ceil(tiles / size) by one multiplication; the half keeps the rounding away from integers.
        parts = tl.floor((tiles[:, None] + (sizes - 0.5)[None, :]) * (1.0 / sizes)[None, :])
        num_parts = tl.sum(parts, axis=0)
        # Short parts come last and fill what long ones leave, so whole waves count only in as far
        # as the shortest are long: where all rows are equal.
        turns = num_parts / wave
        cost = num_tiles / wave + turns * overhead
        cost += (tl.ceil(turns) - turns) * (tl.minimum(shortest, sizes) + overhead)
        cost = tl.maximum(cost, sizes + overhead)
        cost = tl.where(num_parts > num_real, cost + overhead, cost)  # merging
        cost = tl.where(num_parts <= max_parts, cost, float("inf"))
        cost_here = tl.min(cost, axis=0)
        size_here = tl.max(tl.where(cost == cost_here, sizes, 0.0), axis=0)
        best_size = tl.where(cost_here < best_cost, size_here, best_size)
        best_cost = tl.minimum(cost_here, best_cost)
    return best_size.to(tl.int32)


@triton.jit
def _cut(lens, max_tiles, TILE: tl.constexpr):
    """Return per row the tiles of a part and the number of parts, at least one."""
    tiles = tl.cdiv(lens, TILE)
    # Equal parts, not full ones and a rest: a rest of one tile costs as much as four.
    sizes = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, max_tiles), 1)), 1)
    return tl.where(lens > 0, sizes, 0), tl.maximum(tl.cdiv(tiles, sizes), 1)
