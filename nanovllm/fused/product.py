"""Products of few rows in the fused decode GEMMs: K is split over programs, the last of which sums.

More rows take `product` of `kernels/split_gemm.py`. These stand behind a norm of which a factor for
each row is left to them: then x comes with `squares`, which tell it; see `gemm_add_triton`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanovllm.fused.tiles import Tiles
from nanovllm.kernels._triton import tl, triton

NUM_COUNTERS = 4096  # for the tiles of one split product, of which narrow models have some dozens


def scaled_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return `x @ weight.T`, rows scaled as `gemm_add` left it to be done, rounded once."""
    if squares is None:
        return F.linear(x, weight)
    scale = torch.rsqrt(squares.sum(dim=1, keepdim=True) / x.shape[1] + eps)
    return (F.linear(x.float(), weight.float()) * scale).to(x.dtype)


def grid_of(x: torch.Tensor, num_column_tiles: int, tiles: Tiles) -> tuple[int, int, int]:
    """Return the numbers of row tiles, of column tiles and of programs to each tile.

    Row tiles first: those that read the same weights run together.
    """
    num_rows, in_features = x.shape
    assert in_features % tiles.block_k == 0, "the model fits the tiles, or is not fused"
    num_splits = in_features // tiles.block_k if tiles.is_split else 1
    return triton.cdiv(num_rows, tiles.block_m), num_column_tiles, num_splits


def shares_of(
    x: torch.Tensor, grid: tuple[int, int, int], num_cells: int, num_done: torch.Tensor | None
) -> torch.Tensor:
    """Return room for the shares of each tile of a split product.

    num_cells: of a tile; num_done: [NUM_COUNTERS] int32, zeros
    """
    num_tiles = grid[0] * grid[1]
    assert num_done is not None and num_done.numel() >= num_tiles, "a counter for each tile"
    return torch.empty(num_tiles * grid[2] * num_cells, dtype=torch.float32, device=x.device)


def num_parts_of(squares: torch.Tensor | None) -> int:
    """Return into how many parts `squares`, [num_rows, num_parts], are cut, a power of two."""
    assert squares is None or squares.is_contiguous(), "the kernel that writes them sees to it"
    return 1 if squares is None else squares.shape[1]


@triton.jit
def product_share(
    x, x_stride, squares, eps, weight, rows, columns, num_rows,
    IN_FEATURES: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return what the BLOCK_K features of this program add to `x[rows] @ weight[columns].T`.

    Waits for the kernel before, with the weights loaded. With `squares` rows are scaled to unit
    root mean square of what they are the squares of.
    """
    features = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_row = rows[:, None] < num_rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weights = tl.load(weight + columns[None, :] * IN_FEATURES + features[:, None])
    if PDL:
        tl.extra.cuda.gdc_wait()
    if squares is not None:  # before the product, which hides their latency
        parts = squares + rows[:, None] * NUM_PARTS + tl.arange(0, NUM_PARTS)[None, :]
        total = tl.sum(tl.load(parts, mask=is_row, other=0.0), axis=1)
        scale = tl.rsqrt(total / IN_FEATURES + eps)
    x_pointers = x + rows[:, None] * x_stride + features[None, :]
    sums = tl.dot(tl.load(x_pointers, mask=is_row, other=0.0), weights)
    if squares is not None:
        sums *= scale[:, None]
    return sums


@triton.jit
def put_share(
    sums, shares, num_done, is_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Write what this program's features add to its tile; whether it is the tile's last program."""
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    cells = _cells(tl.program_id(2), BLOCK_M, BLOCK_N, NUM_SPLITS)
    tl.store(shares + cells, sums, mask=is_row)
    # Every thread's stores come before the barrier, the barrier before one thread's release; the
    # last program's acquire then sees them all.
    tl.debug_barrier()
    is_last = tl.atomic_add(num_done + tile, 1, sem="acq_rel", scope="gpu") == NUM_SPLITS - 1
    if is_last:
        tl.store(num_done + tile, 0)
    return is_last


@triton.jit
def sum_shares(
    shares, is_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr
):
    """Return the sum of a tile's shares, [BLOCK_M, BLOCK_N]; for its last program."""
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # All of them, its own too, so that the order does not depend on who is last; not through L1:
    # other SMs wrote these.
    for split in tl.static_range(NUM_SPLITS):
        cells = _cells(split, BLOCK_M, BLOCK_N, NUM_SPLITS)
        sums += tl.load(shares + cells, mask=is_row, other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _cells(split, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Return where a share of this program's tile lies."""
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    cells = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return (tile * NUM_SPLITS + split) * (BLOCK_M * BLOCK_N) + cells


@triton.jit
def halves(sums, like, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the left and the right half of [BLOCK_M, 2 * WIDTH], rounded to the dtype of `like`.

    Side by side in the same columns, as the halves of a head that rotate into each other need them,
    and gate and up.
    """
    sums = sums.to(like.dtype.element_ty).to(tl.float32)
    return tl.split(tl.permute(tl.reshape(sums, [BLOCK_M, 2, WIDTH]), [0, 2, 1]))
