"""The product that all fused decode GEMMs are made of, with weights fetched early.

Some stand behind a norm, of which a factor for each row may be left to them: then x comes with
`squares`, which tell it; see `gemm_add_triton`.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import prefetch_l2, tl, triton


def scaled_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return `x @ weight.T`, rows scaled as `gemm_add` left it to be done, rounded once."""
    if squares is None:
        return F.linear(x, weight)
    scale = torch.rsqrt(squares.sum(dim=1, keepdim=True) / x.shape[1] + eps)
    return (F.linear(x.float(), weight.float()) * scale).to(x.dtype)


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
def pair_product(
    x, x_stride, squares, eps, weight, rows, first, second, num_rows,
    WIDTH: tl.constexpr, IN_FEATURES: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return `x @ weight[first : first + WIDTH].T` and the same from `second`, rounded as stored.

    Each is [BLOCK_M, WIDTH] float32: tiles of the same columns side by side, as the halves of a
    head that rotate into each other need them, and gate and up.
    """
    lanes = tl.arange(0, 2 * WIDTH)
    columns = tl.where(lanes < WIDTH, first + lanes, second - WIDTH + lanes)
    sums = product(
        x, x_stride, squares, eps, weight, rows, columns, 0, num_rows, IN_FEATURES, IN_FEATURES,
        NUM_PARTS, BLOCK_PARTS, BLOCK_M, 2 * WIDTH, BLOCK_K, PREFETCH, PDL,
    )  # fmt: skip
    sums = sums.to(x.dtype.element_ty).to(tl.float32)
    return tl.split(tl.permute(tl.reshape(sums, [BLOCK_M, 2, WIDTH]), [0, 2, 1]))
