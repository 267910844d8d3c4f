"""The gate and up projections of a decode step with the gated activation in them."""

from __future__ import annotations

import torch

from nanovllm.fused.product import (
    grid_of,
    halves,
    num_parts_of,
    product_share,
    put_share,
    scaled_linear_reference,
    shares_of,
    sum_shares,
)
from nanovllm.fused.tiles import Tiles, gate_up_tiles
from nanovllm.kernels._triton import pdl_options, tl, triton
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.kernels.split_gemm import product


def gate_up_silu_reference(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """As `gate_up_silu_triton`, out of the parts that it fuses."""
    return silu_and_mul_reference(scaled_linear_reference(x, weight, squares, eps))


def gate_up_silu_triton(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None = None, eps: float = 0.0,
    num_done: torch.Tensor | None = None, tiles: Tiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return `silu(x @ gate.T) * (x @ up.T)`, [num_rows, intermediate_size].

    x: [num_rows, in_features], rows may be strided
    weight: [2 * intermediate_size, in_features], gate first, contiguous
    squares, eps: the factor of each row that x is yet to be multiplied by; see `gemm_add_triton`;
        for split tiles only, which are those of few rows
    num_done: as there, for split tiles
    """
    num_rows, in_features = x.shape
    size = weight.shape[0] // 2
    tiles = tiles or gate_up_tiles(num_rows)
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows and weight must be contiguous"
    assert squares is None or tiles.is_split, "only shares are scaled"
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    grid = grid_of(x, size // tiles.width, tiles)
    num_cells = tiles.block_m * 2 * tiles.width
    shares = shares_of(x, grid, num_cells, num_done) if tiles.is_split else None
    _gate_up_silu_kernel[grid](
        x, weight, squares, eps, shares, num_done, out, num_rows, x.stride(0), SIZE=size,
        WIDTH=tiles.width, IN_FEATURES=in_features, NUM_PARTS=num_parts_of(squares),
        BLOCK_M=tiles.block_m, BLOCK_K=tiles.block_k, **tiles.options(), **pdl_options(x),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])  # or batches of 1 and of multiples of 16 compile anew
def _gate_up_silu_kernel(
    x, weight, squares, eps, shares, num_done, out, num_rows, x_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, IN_FEATURES: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    NUM_SPLITS: tl.constexpr = IN_FEATURES // BLOCK_K
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    start = tl.program_id(1) * WIDTH
    is_row = rows[:, None] < num_rows
    lanes = tl.arange(0, 2 * WIDTH)
    columns = start + tl.where(lanes < WIDTH, lanes, SIZE - WIDTH + lanes)
    if shares is None:
        sums = product(
            x, x_stride, weight, rows, columns, num_rows, IN_FEATURES, IN_FEATURES, BLOCK_K, PDL
        )
    else:
        sums = product_share(
            x, x_stride, squares, eps, weight, rows, columns, num_rows, IN_FEATURES, NUM_PARTS,
            BLOCK_K, PDL,
        )  # fmt: skip
        if not put_share(sums, shares, num_done, is_row, BLOCK_M, 2 * WIDTH, NUM_SPLITS):
            return
        sums = sum_shares(shares, is_row, BLOCK_M, 2 * WIDTH, NUM_SPLITS)
    gate, up = halves(sums, x, WIDTH, BLOCK_M)
    # Rounded between the two factors, as torch does.
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    target = out + rows[:, None] * SIZE + start + tl.arange(0, WIDTH)[None, :]
    tl.store(target, (activated * up).to(out.dtype.element_ty), mask=is_row)
