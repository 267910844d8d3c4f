"""A narrow projection of few rows with the residual add behind it and half of the norm.

As in `kernels/split_gemm.py` K is split over programs; here the last program of a tile sums the
shares, so that no kernel stands between this projection and the next one. A norm's factor of a row
needs the whole row, which no program sees: each writes the sum of squares of its columns, and the
next projection, linear in its rows, multiplies by the factor at its end.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanovllm.fused.product import grid_of, product_share, put_share, shares_of, sum_shares
from nanovllm.fused.tiles import FEW, Tiles
from nanovllm.kernels._triton import pdl_options, tl, triton


def gemm_add_reference(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain torch form of `gemm_add_triton`, and the sum: (scaled, squares in one part, sum)."""
    total = F.linear(x, weight) + residual
    return total * norm_weight, total.float().square().sum(dim=1, keepdim=True), total


def gemm_add_triton(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor,
    num_done: torch.Tensor, tiles: Tiles = FEW,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Add `x @ weight.T` to `residual`, in place, and prepare the norm of the sum.

    Args:
        x: [num_rows, in_features], rows may be strided
        weight: [out_features, in_features], contiguous
        residual: [num_rows, out_features], contiguous, in place; rounded as `add_rms_norm` does
        norm_weight: [out_features]
        num_done: [NUM_COUNTERS] int32, zeros, and zeros again when the kernel ends
        tiles: split ones

    Returns:
        the new residual times norm_weight, [num_rows, out_features]; not for float16, whose range
            is too small for what a norm has not made small yet
        its sums of squares without the weight, [num_rows, num_parts] float32, a part some columns
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    grid = grid_of(x, out_features // tiles.width, tiles)
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows and weight must be contiguous"
    assert residual.is_contiguous(), "a program writes its tile of it"
    assert grid[1] * tiles.width == out_features, "the model fits the tiles, or is not fused"
    shares = shares_of(x, grid, tiles.block_m * tiles.width, num_done)
    scaled = torch.empty_like(residual)
    squares = torch.empty((num_rows, grid[1]), dtype=torch.float32, device=x.device)
    _gemm_add_kernel[grid](
        x, weight, residual, norm_weight, shares, num_done, scaled, squares, num_rows, x.stride(0),
        OUT_FEATURES=out_features, IN_FEATURES=in_features, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.width, BLOCK_K=tiles.block_k, **tiles.options(), **pdl_options(x),
    )  # fmt: skip
    return scaled, squares


@triton.jit(do_not_specialize=["num_rows"])  # or batches of 1 and of multiples of 16 compile anew
def _gemm_add_kernel(
    x, weight, residual, norm_weight, shares, num_done, scaled, squares, num_rows, x_stride,
    OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    NUM_SPLITS: tl.constexpr = IN_FEATURES // BLOCK_K
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows[:, None] < num_rows
    sums = product_share(
        x, x_stride, None, 0.0, weight, rows, columns, num_rows, IN_FEATURES, 1, BLOCK_K, PDL
    )
    if not put_share(sums, shares, num_done, is_row, BLOCK_M, BLOCK_N, NUM_SPLITS):
        return
    sums = sum_shares(shares, is_row, BLOCK_M, BLOCK_N, NUM_SPLITS)
    targets = rows[:, None] * OUT_FEATURES + columns[None, :]
    dtype: tl.constexpr = residual.dtype.element_ty
    before = tl.load(residual + targets, mask=is_row, other=0.0).to(tl.float32)
    total = (sums.to(dtype).to(tl.float32) + before).to(dtype)
    tl.store(residual + targets, total, mask=is_row)
    wide = total.to(tl.float32)
    scale = tl.load(norm_weight + columns).to(tl.float32)
    tl.store(scaled + targets, (wide * scale[None, :]).to(dtype), mask=is_row)
    part_of_row = squares + rows * tl.num_programs(1) + tl.program_id(1)
    tl.store(part_of_row, tl.sum(wide * wide, axis=1), mask=rows < num_rows)
