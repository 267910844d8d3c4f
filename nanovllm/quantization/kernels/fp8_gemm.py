"""Products of fp8 activations and fp8 weights."""

from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import pdl_options, pdl_wait, tl, triton, use_triton
from nanovllm.quantization.formats import BLOCK
from nanovllm.quantization.kernels.quantize import ROWS_OF_LIBRARY, QuantTensor

_NUM_SMS = 132  # an H200's
_MIN_PROGRAMS = 100  # fewer leave too many of them without work
_ALIGNMENT = 16  # what the library's kernels ask of both sides of a weight
# Measured by tests/gpu/bench_fp8_tiles.py. Where a library kernel fits too, ours takes 64 us for
# the products of a layer of Qwen3-8B at 48 rows and the library 105; at 256 rows 146 and 106.
_MAX_ROWS_OF_OURS = 96
_MAX_ROWS_OF_OURS_BY_BLOCKS = 64  # 256 rows of a layer of blocks: ours 172 us, the library's 114
_MAX_ROWS_OF_SHARES = 128
_LIBRARY_TILE = 128  # columns and rows of the result


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of our GEMM takes."""

    block_m: int  # rows of activations
    block_n: int  # rows of weights, a divisor of 128
    num_warps: int
    num_stages: int
    block_k: int = BLOCK  # where scales go by groups, it is their size
    num_splits: int = 1  # shares of K, each of other programs


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
    limit = _MAX_ROWS_OF_OURS if group_size is None else _MAX_ROWS_OF_OURS_BY_BLOCKS
    if x.data.shape[0] > limit and _has_library(weight, group_size, dtype):
        return _by_library(x, weight, bias, group_size, dtype)
    return fp8_linear_triton(x, weight, bias, group_size=group_size, dtype=dtype)


def fp8_linear_shares(
    x: QuantTensor, weight: QuantTensor, *, group_size: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """As `fp8_linear`, or shares [num_splits, num_rows, out_features] that sum up to it.

    For `rms_norm_quantized` and `add_rms_norm`, which take either. Shares where few rows meet a
    narrow weight: the tiles of the result alone would leave most of a GPU idle. Of our kernel they
    are float32, of the library's in `dtype`, and rounded once more.
    """
    if use_triton(x.data):
        num_rows, (out_features, in_features) = x.data.shape[0], weight.data.shape
        tile = share_tile_for(num_rows, out_features, in_features)
        if tile is not None:
            return fp8_linear_triton(x, weight, None, group_size=group_size, dtype=dtype, tile=tile)
        num_tiles = -(-num_rows // _LIBRARY_TILE) * -(-out_features // _LIBRARY_TILE)
        has_idle_half = num_rows > _MAX_ROWS_OF_SHARES and 2 * num_tiles <= _NUM_SMS
        # Not of blocks: the scales of half a weight do not lie as the library wants them.
        can_halve = group_size is None and in_features % (2 * _ALIGNMENT) == 0
        if has_idle_half and can_halve and _has_library(weight, group_size, dtype):
            return fp8_linear_halves(x, weight, dtype)
    return fp8_linear(x, weight, None, group_size=group_size, dtype=dtype)


def fp8_linear_halves(x: QuantTensor, weight: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return shares of two halves of K, [2, num_rows, out_features]: library calls side by side."""
    out_features = weight.data.shape[0]
    out = torch.empty((2, x.data.shape[0], out_features), dtype=dtype, device=x.data.device)
    scales = (x.scale, weight.scale.view(1, -1))
    main = torch.cuda.current_stream(x.data.device)
    side = _side_stream(main)
    side.wait_stream(main)
    halves = (x.data.chunk(2, dim=1), weight.data.chunk(2, dim=1))
    for stream, a, b, share in zip((main, side), *halves, out, strict=True):
        with torch.cuda.stream(stream):
            torch._scaled_mm(a, b.t(), *scales, out_dtype=dtype, out=share)
    main.wait_stream(side)
    return out


@cache
def _side_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each stream: what another thread launches must not get into a graph's capture."""
    return torch.cuda.Stream(main.device)


def _by_library(
    x: QuantTensor,
    weight: QuantTensor,
    bias: torch.Tensor | None,
    group_size: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if group_size is None:
        # Not use_fast_accum, a tenth faster at 4,096 rows and 3 % at 256: the tensor core then adds
        # up all of K and cuts each sum off at 14 bits, where now it hands blocks of K to float32.
        # In a simulation sums of 4,096 err 1.3 times as far as rounding to bfloat16 alone, of
        # 12,288 1.9 times; numbers whose mean is not 0 fare worse.
        scales = (x.scale, weight.scale.view(1, -1))
        return torch._scaled_mm(x.data, weight.data.t(), *scales, bias=bias, out_dtype=dtype)
    (num_rows, in_features), (_, num_padded) = x.data.shape, x.scale.stride()
    assert num_padded % ROWS_OF_LIBRARY == 0, "memory is from empty_quantized"
    data = x.data.as_strided((num_padded, in_features), (in_features, 1))
    x_scale = x.scale.as_strided((num_padded, x.scale.shape[1]), (1, num_padded))
    scales = (x_scale, weight.scale.t())
    out = torch._scaled_mm(data, weight.data.t(), *scales, bias=bias, out_dtype=dtype)
    return out[:num_rows]


def _has_library(weight: QuantTensor, group_size: int | None, dtype: torch.dtype) -> bool:
    if dtype is not torch.bfloat16 or any(size % _ALIGNMENT for size in weight.data.shape):
        return False
    # Of blocks it reads scales of K by fours, and what is behind a row's end if there are fewer.
    has_all_scales = weight.data.shape[1] % (4 * BLOCK) == 0
    return group_size is None or (has_all_scales and _has_library_of_blocks(weight.data.device))


@cache
def _has_library_of_blocks(device: torch.device) -> bool:
    """torch calls it since 2.9, CUDA has it since 12.9, and for compute capability 9.0 alone."""
    versions = ((torch.__version__, (2, 9)), (torch.version.cuda or "0.0", (12, 9)))
    is_new = all(tuple(map(int, v.split(".")[:2])) >= least for v, least in versions)
    return is_new and torch.cuda.get_device_capability(device) == (9, 0)


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
    tile: Tile | None = None,
) -> torch.Tensor:
    """Triton form of `fp8_linear`: a program a tile of the result, cut as `tile_for` says.

    With a tile of several splits, float32 shares [num_splits, num_rows, out_features].
    """
    num_rows, in_features = x.data.shape
    out_features = weight.data.shape[0]
    assert x.data.is_contiguous() and weight.data.is_contiguous(), "K must be contiguous"
    assert weight.scale.is_contiguous(), "scales of a weight must be contiguous"
    tile = tile or tile_for(num_rows, out_features)
    assert group_size is None or tile.block_k == BLOCK, "a scale a block of K"
    shape, splits = (num_rows, out_features), tile.num_splits
    out = (
        torch.empty(shape, dtype=dtype, device=x.data.device)
        if splits == 1
        else torch.empty((splits, *shape), dtype=torch.float32, device=x.data.device)
    )
    if num_rows == 0:
        return out
    num_tiles = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(out_features, tile.block_n)
    _fp8_gemm_kernel[(num_tiles, splits)](
        x.data, x.scale, weight.data, weight.scale, weight.scale if bias is None else bias, out,
        num_rows, *x.scale.stride(), OUT_FEATURES=out_features, IN_FEATURES=in_features,
        HAS_BIAS=bias is not None, HAS_GROUPS=group_size is not None, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, NUM_SPLITS=splits, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **pdl_options(out),
    )  # fmt: skip
    return out


def tile_for(num_rows: int, out_features: int) -> Tile:
    """Return how to cut a batch; it follows from shapes."""
    block_m = _block_m(num_rows)
    block_n = 64 if block_m == 16 else 128
    num_row_tiles = -(-num_rows // block_m)
    # Narrow tiles read the activations more often, but few programs do not fill the device.
    while block_n > 32 and num_row_tiles * -(-out_features // block_n) < _MIN_PROGRAMS:
        block_n //= 2
    return _tile(block_m, block_n)


def share_tile_for(num_rows: int, out_features: int, in_features: int) -> Tile | None:
    """Return how to cut K too, or None where that does not pay."""
    if not 0 < num_rows <= _MAX_ROWS_OF_SHARES:
        return None
    block_m, block_n = _block_m(num_rows), 64
    splits = 4 // -(-num_rows // block_m)  # with two row tiles half as many
    num_tiles = -(-out_features // block_n)
    is_short = in_features < 4 * splits * BLOCK  # too few blocks to hide the first one's way here
    if num_tiles >= _MIN_PROGRAMS or is_short:
        return None
    if num_tiles * 4 < _MIN_PROGRAMS:
        block_n = 32
    return _tile(block_m, block_n, splits)


def _block_m(num_rows: int) -> int:
    return 16 if num_rows <= 16 else 64


def _tile(block_m: int, block_n: int, num_splits: int = 1) -> Tile:
    # In 96 KiB of shared memory, which Ada has too.
    num_stages = min(5 if block_m == 16 else 8, 96 * 1024 // (BLOCK * (block_m + block_n)))
    return Tile(block_m, block_n, 4, num_stages, num_splits=num_splits)


# Or batches of 1 and of multiples of 16 would compile anew.
@triton.jit(do_not_specialize=["num_rows", "scale_stride", "group_stride"])
def _fp8_gemm_kernel(
    x, x_scale, weight, weight_scale, bias, out, num_rows, scale_stride, group_stride,
    OUT_FEATURES: tl.constexpr, IN_FEATURES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
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
    # Past the end: rows are masked, as hundreds of programs that read one line wait for it; of
    # columns, seldom there, the last one is repeated. Neither is stored.
    is_row = (rows < num_rows)[:, None]
    safe_rows = tl.minimum(rows, num_rows - 1)
    safe_columns = tl.minimum(columns, OUT_FEATURES - 1)
    first_group = 0
    end_group = NUM_GROUPS
    if NUM_SPLITS > 1:
        SHARE: tl.constexpr = (NUM_GROUPS + NUM_SPLITS - 1) // NUM_SPLITS
        first_group = tl.program_id(1) * SHARE
        end_group = tl.minimum(first_group + SHARE, NUM_GROUPS)
        out += tl.program_id(1).to(tl.int64) * num_rows * OUT_FEATURES
    features = first_group * BLOCK_K + tl.arange(0, BLOCK_K)
    x_pointers = x + rows[:, None] * IN_FEATURES + features[None, :]
    weight_pointers = weight + safe_columns[None, :] * IN_FEATURES + features[:, None]
    # A tile lies within one row of blocks, as BLOCK_N divides 128.
    block_scales = weight_scale + column_tile * BLOCK_N // BLOCK_K * NUM_GROUPS
    pdl_wait(PDL)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if HAS_GROUPS:
        x_scales = x_scale + safe_rows * scale_stride
        readable = tl.minimum(first_group, NUM_GROUPS - 1)  # a last share may be empty
        row_scales = tl.load(x_scales + readable * group_stride)
        block_scale = tl.load(block_scales + readable)
    for group in range(first_group, end_group):
        if IN_FEATURES % BLOCK_K == 0:
            activations = tl.load(x_pointers, mask=is_row, other=0.0)
            weights = tl.load(weight_pointers)
        else:
            is_inside = group * BLOCK_K + tl.arange(0, BLOCK_K) < IN_FEATURES
            activations = tl.load(x_pointers, mask=is_row & is_inside[None, :], other=0.0)
            weights = tl.load(weight_pointers, mask=is_inside[:, None], other=0.0)
        if HAS_GROUPS:
            # Those of the next block, so that nothing waits for them behind the product.
            following = tl.minimum(group + 1, NUM_GROUPS - 1)
            next_row_scales = tl.load(x_scales + following * group_stride)
            next_block_scale = tl.load(block_scales + following)
        # Added up outside of the tensor core, which keeps 14 bits of a sum of fp8 products.
        product = tl.dot(activations, weights)
        if HAS_GROUPS:
            product *= row_scales[:, None] * block_scale
            row_scales, block_scale = next_row_scales, next_block_scale
        sums += product
        x_pointers += BLOCK_K
        weight_pointers += BLOCK_K
    if not HAS_GROUPS:
        sums *= tl.load(x_scale + safe_rows * scale_stride)[:, None]
        sums *= tl.load(weight_scale + safe_columns)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + safe_columns).to(tl.float32)[None, :]
    mask = is_row & (columns[None, :] < OUT_FEATURES)
    pointers = out + rows[:, None] * OUT_FEATURES + columns[None, :]
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=mask)
