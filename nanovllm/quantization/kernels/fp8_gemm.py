"""Products of fp8 activations and fp8 weights."""

import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import pdl_options, tl, triton, use_triton
from nanovllm.quantization.formats import BLOCK
from nanovllm.quantization.kernels.quantize import QuantTensor

_MIN_PROGRAMS = 100  # fewer leave too many of an H200's 132 SMs without work
_ALIGNMENT = 16  # what the library's kernels ask of both sides of a weight


def fp8_linear(
    x: QuantTensor,
    weight: QuantTensor,
    bias: torch.Tensor | None,
    *,
    group_size: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `x @ weight.T + bias` in `dtype`, [num_rows, out_features], summed in float32.

    Args:
        x: data [num_rows, in_features], scale [num_rows, 1], or a scale a group of 128
        weight: data [out_features, in_features], scale [out_features, 1], or a scale a block of
            128 x 128; both sides are rounded up
        bias: [out_features]
    """
    if not use_triton(x.data):
        return fp8_linear_reference(x, weight, bias, group_size=group_size, dtype=dtype)
    is_aligned = not any(size % _ALIGNMENT for size in weight.data.shape)
    if group_size is None and dtype is torch.bfloat16 and is_aligned:
        return torch._scaled_mm(
            x.data,
            weight.data.t(),
            scale_a=x.scale,
            scale_b=weight.scale.view(1, -1),
            bias=bias,
            out_dtype=dtype,
        )
    return fp8_linear_triton(x, weight, bias, group_size=group_size, dtype=dtype)


def fp8_linear_reference(
    x: QuantTensor,
    weight: QuantTensor,
    bias: torch.Tensor | None,
    *,
    group_size: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Plain torch form of `fp8_linear`: both sides as float32."""
    wide_bias = None if bias is None else bias.float()
    return F.linear(dequantize(x, group_size), dequantize_weight(weight, group_size), wide_bias).to(
        dtype
    )


def dequantize(x: QuantTensor, group_size: int | None) -> torch.Tensor:
    """Return activations as float32."""
    scale = x.scale
    if group_size is not None:
        scale = scale.repeat_interleave(group_size, dim=1)[:, : x.data.shape[1]]
    return x.data.float() * scale


def dequantize_weight(weight: QuantTensor, group_size: int | None) -> torch.Tensor:
    """Return a weight as float32."""
    scale = weight.scale
    if group_size is not None:
        scale = scale.repeat_interleave(group_size, dim=0)[: weight.data.shape[0]]
    return dequantize(QuantTensor(weight.data, scale), group_size)


def fp8_linear_triton(
    x: QuantTensor,
    weight: QuantTensor,
    bias: torch.Tensor | None,
    *,
    group_size: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Triton form of `fp8_linear`: a program a tile of the result."""
    num_rows, in_features = x.data.shape
    out_features = weight.data.shape[0]
    assert x.data.is_contiguous() and weight.data.is_contiguous(), "K must be contiguous"
    assert x.scale.is_contiguous() and weight.scale.is_contiguous(), "scales must be contiguous"
    out = torch.empty((num_rows, out_features), dtype=dtype, device=x.data.device)
    if num_rows == 0:
        return out
    block_m, block_n = tiles(num_rows, out_features)
    num_tiles = triton.cdiv(num_rows, block_m) * triton.cdiv(out_features, block_n)
    _fp8_gemm_kernel[(num_tiles,)](
        x.data, x.scale, weight.data, weight.scale, weight.scale if bias is None else bias, out,
        num_rows, OUT_FEATURES=out_features, IN_FEATURES=in_features, HAS_BIAS=bias is not None,
        HAS_GROUPS=group_size is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK,
        num_warps=8 if block_m == 128 else 4,
        # In 96 KiB of shared memory, which Ada has too.
        num_stages=min(5, 96 * 1024 // (BLOCK * (block_m + block_n))), **pdl_options(out),
    )  # fmt: skip
    return out


def tiles(num_rows: int, out_features: int) -> tuple[int, int]:
    """Return a program's rows and columns; K goes in blocks of 128, as scales do."""
    block_m = 16 if num_rows <= 16 else 64 if num_rows <= 64 else 128
    block_n = 128 if block_m == 128 else 64
    num_row_tiles = -(-num_rows // block_m)
    # Narrow tiles read the activations more often, but few programs do not fill the device.
    while block_n > 32 and num_row_tiles * -(-out_features // block_n) < _MIN_PROGRAMS:
        block_n //= 2
    return block_m, block_n


@triton.jit(do_not_specialize=["num_rows"])  # or batches of 1 and of multiples of 16 compile anew
def _fp8_gemm_kernel(
    x, x_scale, weight, weight_scale, bias, out, num_rows, OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    NUM_GROUPS: tl.constexpr = (IN_FEATURES + BLOCK_K - 1) // BLOCK_K
    # Up to 16 row tiles share the columns' weights, then come the next columns: what programs that
    # run together read stays in the L2 cache.
    num_column_tiles: tl.constexpr = (OUT_FEATURES + BLOCK_N - 1) // BLOCK_N
    first_row_tile = tl.program_id(0) // (16 * num_column_tiles) * 16
    num_row_tiles = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first_row_tile, 16)
    place = tl.program_id(0) % (16 * num_column_tiles)
    row_tile, column_tile = first_row_tile + place % num_row_tiles, place // num_row_tiles
    rows = row_tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the end the last one is repeated: cheaper than a mask, and never stored.
    safe_rows = tl.minimum(rows, num_rows - 1)
    safe_columns = tl.minimum(columns, OUT_FEATURES - 1)
    features = tl.arange(0, BLOCK_K)
    x_pointers = x + safe_rows[:, None] * IN_FEATURES + features[None, :]
    weight_pointers = weight + safe_columns[None, :] * IN_FEATURES + features[:, None]
    # A tile lies within one row of blocks, as BLOCK_N divides 128.
    block_scales = weight_scale + column_tile * BLOCK_N // BLOCK_K * NUM_GROUPS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(0, NUM_GROUPS):
        if IN_FEATURES % BLOCK_K == 0:
            activations = tl.load(x_pointers)
            weights = tl.load(weight_pointers)
        else:
            is_inside = group * BLOCK_K + features < IN_FEATURES
            activations = tl.load(x_pointers, mask=is_inside[None, :], other=0.0)
            weights = tl.load(weight_pointers, mask=is_inside[:, None], other=0.0)
        # Added up outside of the tensor core, which keeps 14 bits of a sum of fp8 products.
        product = tl.dot(activations, weights)
        if HAS_GROUPS:
            scales = tl.load(x_scale + safe_rows * NUM_GROUPS + group)
            product *= scales[:, None] * tl.load(block_scales + group)
        sums += product
        x_pointers += BLOCK_K
        weight_pointers += BLOCK_K
    if not HAS_GROUPS:
        sums *= tl.load(x_scale + safe_rows)[:, None]
        sums *= tl.load(weight_scale + safe_columns)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    mask = (rows[:, None] < num_rows) & (columns[None, :] < OUT_FEATURES)
    pointers = out + rows[:, None] * OUT_FEATURES + columns[None, :]
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=mask)
