"""Sort (token, expert) pairs by expert and cut each expert's share into tiles, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import pdl_options, pdl_wait, tl, triton, use_triton

# Up to so many pairs: how many a program looks at together, and warps.
_CHUNKS = {128: (128, 4), 8192: (1024, 4)}
_LARGEST_CHUNK = (4096, 8)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rows a grouped GEMM multiplies with which expert's weights.

    Pair p is the choice `p % top_k` of token `p // top_k`. There are as many tiles as the worst
    case needs, so that their number follows from shapes alone; those left over are empty.
    """

    order: torch.Tensor  # [num_pairs] int32, pairs by expert, each expert's in ascending order
    tiles: torch.Tensor  # [3, num_tiles] int32: expert, first place in `order`, end of the tile
    block_m: int  # places in a tile, at most


def max_num_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return how many tiles the pairs fill at most, however they fall on the experts."""
    num_active = min(num_pairs, num_experts)
    return num_active + (num_pairs - num_active) // block_m


def make_plan(expert_ids: torch.Tensor, num_experts: int, block_m: int) -> Plan:
    """Sort the pairs of `expert_ids`, [num_tokens, top_k] int32, all in [0, num_experts)."""
    implementation = make_plan_triton if use_triton(expert_ids) else make_plan_reference
    return implementation(expert_ids, num_experts, block_m)


def make_plan_reference(expert_ids: torch.Tensor, num_experts: int, block_m: int) -> Plan:
    """Plain torch form of `make_plan`; waits for the device."""
    flat = expert_ids.flatten()
    tiles: list[tuple[int, int, int]] = []
    first = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        end = first + count
        tiles += [(expert, i, min(i + block_m, end)) for i in range(first, end, block_m)]
        first = end
    num_empty = max_num_tiles(flat.numel(), num_experts, block_m) - len(tiles)
    tiles += [(0, 0, 0)] * num_empty
    columns = torch.tensor(tiles, dtype=torch.int32, device=flat.device).T.contiguous()
    return Plan(flat.argsort(stable=True).int(), columns, block_m)


def make_plan_triton(expert_ids: torch.Tensor, num_experts: int, block_m: int) -> Plan:
    """Triton form of `make_plan`: one kernel, a program an expert."""
    assert expert_ids.is_contiguous()
    num_pairs, device = expert_ids.numel(), expert_ids.device
    num_tiles = max_num_tiles(num_pairs, num_experts, block_m)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=device)
    fitting = (chunk for limit, chunk in _CHUNKS.items() if num_pairs <= limit)
    chunk, num_warps = next(fitting, _LARGEST_CHUNK)
    _plan_kernel[(num_experts,)](
        expert_ids, order, tiles, num_pairs, num_tiles, NUM_EXPERTS=num_experts,
        # One more than there are experts: what is past the end falls into it.
        BINS=max(triton.next_power_of_2(num_experts + 1), 32), BLOCK_M=block_m, CHUNK=chunk,
        num_warps=num_warps, **pdl_options(expert_ids),
    )  # fmt: skip
    return Plan(order, tiles, block_m)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _plan_kernel(
    expert_ids, order, tiles, num_pairs, num_tiles, NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lanes = tl.arange(0, CHUNK)
    # Every program counts all pairs, which are few: no second kernel, and no atomics, whose order
    # would change the sorting from run to run.
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pairs = start + lanes
        ids = tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        counts += tl.histogram(ids, BINS)
    counts = tl.where(bins < NUM_EXPERTS, counts, 0)
    tile_counts = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, counts, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(bins < expert, tile_counts, 0), axis=0)
    end_tile = first_tile + (count + BLOCK_M - 1) // BLOCK_M
    for start in range(first_tile, end_tile, BINS):
        tile = start + bins
        mask = tile < end_tile
        place = first + (tile - first_tile) * BLOCK_M
        tl.store(tiles + tile, tl.zeros([BINS], tl.int32) + expert, mask=mask)
        tl.store(tiles + num_tiles + tile, place, mask=mask)
        end = tl.minimum(place + BLOCK_M, first + count)
        tl.store(tiles + 2 * num_tiles + tile, end, mask=mask)
    if expert == NUM_EXPERTS - 1:
        nothing = tl.zeros([BINS], tl.int32)
        for start in range(end_tile, num_tiles, BINS):
            tile = start + bins
            for field in tl.static_range(3):
                tl.store(tiles + field * num_tiles + tile, nothing, mask=tile < num_tiles)
    for start in range(0, num_pairs, CHUNK):
        pairs = start + lanes
        ids = tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        is_mine = (ids == expert).to(tl.int32)
        place = first + tl.cumsum(is_mine, axis=0) - 1
        tl.store(order + place, pairs, mask=is_mine != 0)
        first += tl.sum(is_mine, axis=0)
