"""The product that all fused decode GEMMs are made of, with weights fetched early.

Some stand behind a norm, of which a factor for each row may be left to them: then x comes with
`squares`, which tell it; see `gemm_add_triton`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanovllm.fused.tiles import AddTiles, Tiles
from nanovllm.kernels._triton import prefetch_l2, tl, triton

NUM_COUNTERS = 4096  # for the tiles of one product, of which there are no more than half as many


def scaled_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return `x @ weight.T`, rows scaled as `gemm_add` left it to be done, rounded once."""
    if squares is None:
        return F.linear(x, weight)
    scale = torch.rsqrt(squares.sum(dim=1, keepdim=True) / x.shape[1] + eps)
    return (F.linear(x.float(), weight.float()) * scale).to(x.dtype)


def num_splits_of(in_features: int, tiles: Tiles | AddTiles) -> int:
    """Return how many programs sum a tile of a product, a share of the features each."""
    share = tiles.share or in_features
    is_whole = in_features % share == 0 and share % tiles.block_k == 0
    assert is_whole, "the model fits the tiles, or is not fused"
    return in_features // share


def shares_of(
    x: torch.Tensor, num_tiles: int, num_splits: int, num_cells: int, num_done: torch.Tensor | None
) -> torch.Tensor | None:
    """Return room for the shares of each tile of a product, if there are several.

    num_cells: of a tile; num_done: [NUM_COUNTERS] int32, zeros
    """
    if num_splits == 1:
        return None
    assert num_done is not None and num_done.numel() >= num_tiles, "a counter for each tile"
    return torch.empty(num_tiles * num_splits * num_cells, dtype=torch.float32, device=x.device)


def parts_options(squares: torch.Tensor | None) -> dict[str, int]:
    """Launch options that say into how many parts `squares`, [num_rows, num_parts], are cut."""
    num_parts = 1 if squares is None else squares.shape[1]
    assert squares is None or squares.is_contiguous(), "the kernel that writes them sees to it"
    return {"NUM_PARTS": num_parts, "BLOCK_PARTS": triton.next_power_of_2(num_parts)}


@triton.jit
def product(
    x, x_stride, squares, eps, weight, rows, columns, split, num_rows,
    IN_FEATURES: tl.constexpr, SHARE: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return what features [split * SHARE, +SHARE) add to `x @ weight[columns].T`.

    [BLOCK_M, BLOCK_N] float32. Waits for the kernel before; weights, which no kernel writes, are
    fetched before that: into L2, or all of them at once where BLOCK_K is SHARE. With `squares` rows
    are scaled to unit root mean square of what they are the squares of.
    """
    features = split * SHARE + tl.arange(0, BLOCK_K)
    # Masked, not clamped to the last row: hundreds of programs that read one line wait for it.
    is_row = rows[:, None] < num_rows
    x_pointers = x + rows[:, None] * x_stride + features[None, :]
    weight_pointers = weight + columns[None, :] * IN_FEATURES + features[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if BLOCK_K == SHARE:
        weights = tl.load(weight_pointers)
    if PDL:
        if PREFETCH and BLOCK_K < SHARE:
            # Programs of one weight block share the work: they are neighbours in the grid.
            lines = weight + columns[:, None] * IN_FEATURES + split * SHARE
            lines += tl.arange(0, BLOCK_K // 64)[None, :] * 64
            step = tl.num_programs(0) * BLOCK_K
            for offset in range(tl.program_id(0) * BLOCK_K, SHARE, step):
                prefetch_l2(lines + offset)
        # Not inside the loop, whose pipelining would move loads above it.
        tl.extra.cuda.gdc_wait()
    if squares is not None:  # before the loop, which hides their latency
        parts = tl.arange(0, BLOCK_PARTS)[None, :]
        cells = squares + rows[:, None] * NUM_PARTS + parts
        total = tl.sum(tl.load(cells, mask=is_row & (parts < NUM_PARTS), other=0.0), axis=1)
        scale = tl.rsqrt(total / IN_FEATURES + eps)
    if BLOCK_K == SHARE:
        sums = tl.dot(tl.load(x_pointers, mask=is_row, other=0.0), weights)
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for _ in range(0, SHARE, BLOCK_K):
            x_tile = tl.load(x_pointers, mask=is_row, other=0.0)
            sums = tl.dot(x_tile, tl.load(weight_pointers), sums)
            x_pointers += BLOCK_K
            weight_pointers += BLOCK_K
    if squares is not None:
        sums *= scale[:, None]
    return sums


@triton.jit
def put_share(
    sums, shares, num_done, tile, split, is_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Write what this program's features add to its tile; whether it is the tile's last program."""
    cells = _cells(tile, BLOCK_M, BLOCK_N, NUM_SPLITS)
    tl.store(shares + cells + split * (BLOCK_M * BLOCK_N), sums, mask=is_row)
    # Every thread's stores come before the barrier, the barrier before one thread's release; the
    # last program's acquire then sees them all.
    tl.debug_barrier()
    is_last = tl.atomic_add(num_done + tile, 1, sem="acq_rel", scope="gpu") == NUM_SPLITS - 1
    if is_last:
        tl.store(num_done + tile, 0)
    return is_last


@triton.jit
def sum_shares(
    shares, tile, is_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr
):
    """Return the sum of a tile's shares, [BLOCK_M, BLOCK_N]; for its last program."""
    cells = _cells(tile, BLOCK_M, BLOCK_N, NUM_SPLITS)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # All of them, its own too, so that the order does not depend on who is last; not through L1:
    # other SMs wrote these.
    for split in tl.static_range(NUM_SPLITS):
        pointers = shares + cells + split * (BLOCK_M * BLOCK_N)
        sums += tl.load(pointers, mask=is_row, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _cells(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Return where the first share of a tile lies; the others follow it."""
    cells = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return tile * (NUM_SPLITS * BLOCK_M * BLOCK_N) + cells


@triton.jit
def halves(sums, like, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the left and the right half of [BLOCK_M, 2 * WIDTH], rounded to the dtype of `like`.

    Side by side in the same columns, as the halves of a head that rotate into each other need them,
    and gate and up.
    """
    sums = sums.to(like.dtype.element_ty).to(tl.float32)
    return tl.split(tl.permute(tl.reshape(sums, [BLOCK_M, 2, WIDTH]), [0, 2, 1]))
