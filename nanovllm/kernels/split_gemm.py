"""The narrow projections of decode batches (attention output, MLP down), K split over programs.

With few output features a library GEMM leaves most of a GPU idle. Here each program sums a share of
K, and the norm that follows anyway adds the float32 shares up in a fixed order.
"""

import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import pdl_options, prefetch_l2, tl, triton, use_triton

_MAX_ROWS = 256
_MAX_OUT_FEATURES = 1024  # wider ones fill an H200 by themselves
_BLOCK_M, _BLOCK_N, _BLOCK_K = 64, 64, 128
_MULTIPLE_OF_IN_FEATURES = 4 * _BLOCK_K


def _num_splits(num_rows: int) -> int:
    """Into how many shares K is cut: with more row tiles fewer fill an H200.

    Measured at [1024, 2048] and [1024, 3072] by tests/gpu/bench_fused_gemm.py.
    """
    return 4 if num_rows <= 128 else 2


def split_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x @ weight.T`, or float32 [num_splits, num_rows, out_features] that sum up to it.

    For `add_rms_norm`, which takes either.

    x: [num_rows, in_features], rows may be strided; weight: [out_features, in_features]
    """
    out_features, in_features = weight.shape
    fits = out_features <= _MAX_OUT_FEATURES and out_features % 64 == 0
    fits = fits and in_features % _MULTIPLE_OF_IN_FEATURES == 0 and 0 < x.shape[0] <= _MAX_ROWS
    if fits and use_triton(x) and x.dtype != torch.float32:
        return split_gemm_triton(x, weight)
    return split_gemm_reference(x, weight)


def split_gemm_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `split_gemm`: the whole sum."""
    return F.linear(x, weight)


def split_gemm_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Triton form of `split_gemm`: always shares, [num_splits, num_rows, out_features] float32."""
    num_rows = x.shape[0]
    out_features, in_features = weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows and weight must be contiguous"
    splits = _num_splits(num_rows)
    out = torch.empty((splits, num_rows, out_features), dtype=torch.float32, device=x.device)
    # Row tiles first: those that read the same weights run together.
    grid = (triton.cdiv(num_rows, _BLOCK_M), out_features // _BLOCK_N, splits)
    _split_gemm_kernel[grid](
        x, weight, out, num_rows, x.stride(0), OUT_FEATURES=out_features,
        IN_FEATURES=in_features, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K,
        NUM_SPLITS=splits, num_warps=4, num_stages=4, **pdl_options(x),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])  # or batches of 1 and of multiples of 16 compile anew
def _split_gemm_kernel(
    x, weight, out, num_rows, x_stride,
    OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = IN_FEATURES // NUM_SPLITS
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    x += split * SHARE
    weight += split * SHARE
    sums = product(x, x_stride, weight, rows, columns, num_rows, IN_FEATURES, SHARE, BLOCK_K, PDL)
    out_pointers = out + (split * num_rows + rows)[:, None] * OUT_FEATURES + columns[None, :]
    tl.store(out_pointers, sums, mask=rows[:, None] < num_rows)


@triton.jit
def product(
    x, x_stride, weight, rows, columns, num_rows, WEIGHT_STRIDE: tl.constexpr,
    NUM_FEATURES: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return `x[rows] @ weight[columns].T` over NUM_FEATURES, float32; rows from num_rows on are 0.

    Waits for the kernel before; weights, which no kernel writes, come into L2 before that.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        # Programs of one weight block share the work: they are neighbours in the grid.
        lines = weight + columns[:, None] * WEIGHT_STRIDE
        lines += tl.arange(0, BLOCK_K // 64)[None, :] * 64
        step = tl.num_programs(0) * BLOCK_K
        for offset in range(tl.program_id(0) * BLOCK_K, NUM_FEATURES, step):
            prefetch_l2(lines + offset)
        # Not inside the loop, whose pipelining would move loads above it.
        tl.extra.cuda.gdc_wait()
    features = tl.arange(0, BLOCK_K)
    # Masked, not clamped to the last row: hundreds of programs that read one line wait for it.
    is_row = rows[:, None] < num_rows
    x_pointers = x + rows[:, None] * x_stride + features[None, :]
    weight_pointers = weight + columns[None, :] * WEIGHT_STRIDE + features[:, None]
    sums = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for _ in range(0, NUM_FEATURES, BLOCK_K):
        sums = tl.dot(tl.load(x_pointers, mask=is_row, other=0.0), tl.load(weight_pointers), sums)
        x_pointers += BLOCK_K
        weight_pointers += BLOCK_K
    return sums
