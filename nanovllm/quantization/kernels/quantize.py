"""Rows of numbers as fp8 and scales, and what travels from a norm to a linear layer."""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import pdl_options, pdl_wait, tl, triton, use_triton
from nanovllm.quantization.formats import BLOCK, FP8

FP8_MAX = 448.0
ROWS_OF_LIBRARY = 4  # it takes multiples of, with scales of groups
_MIN_ABSMAX = 1e-12  # so that the scale of zeros is no zero
_INVERSE_FP8_MAX_DEVICE = tl.constexpr(1 / FP8_MAX)
_MIN_ABSMAX_DEVICE = tl.constexpr(_MIN_ABSMAX)


class QuantTensor(NamedTuple):
    """Numbers as `data * scale`, a scale for each row or each group of 128 in a row."""

    data: torch.Tensor  # [num_rows, size] float8_e4m3fn
    # [num_rows, num_groups] float32, strided as `empty_quantized` says; of a weight of blocks
    # [blocks, blocks]
    scale: torch.Tensor


def quantize(x: torch.Tensor, group_size: int | None, *, is_gathered: bool = False) -> QuantTensor:
    """Round to e4m3 with a scale that takes the largest of a row, or of each group, to 448.

    x: [num_rows, size], rows may be strided; group_size: 128, or None for whole rows;
    is_gathered: rows will be read in any order, so that the scales of one should lie together
    """
    if use_triton(x):
        return quantize_triton(x, group_size, is_gathered=is_gathered)
    return quantize_reference(x, group_size)


def quantize_reference(x: torch.Tensor, group_size: int | None) -> QuantTensor:
    """Plain torch form of `quantize`."""
    num_rows, size = x.shape
    group = group_size or size
    num_groups = -(-size // group)
    wide = F.pad(x.float(), (0, num_groups * group - size)).view(num_rows, num_groups, group)
    scale = wide.abs().amax(dim=-1).clamp_min(_MIN_ABSMAX) * (1 / FP8_MAX)
    # Times the inverse, not divided: as the kernels, to the last bit. Rounding may exceed 448.
    scaled = (wide * (1 / scale).unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return QuantTensor(scaled.view(num_rows, num_groups * group)[:, :size].to(FP8), scale)


def quantize_triton(
    x: torch.Tensor, group_size: int | None, *, is_gathered: bool = False
) -> QuantTensor:
    """Triton form of `quantize`: a program takes a row, or a few groups of it."""
    assert x.stride(1) == 1, "rows must be contiguous"
    num_rows, size = x.shape
    out = empty_quantized(num_rows, size, group_size, x.device, is_gathered=is_gathered)
    block, group = tile(size, group_size)
    if num_rows:
        _quantize_kernel[(num_rows, triton.cdiv(size, block))](
            x, out.data, out.scale, x.stride(0), *out.scale.stride(),
            SIZE=size, BLOCK=block, GROUP=group, num_warps=num_warps(block), **pdl_options(x),
        )  # fmt: skip
    return out


def quantize_blocks(weight: torch.Tensor) -> QuantTensor:
    """Round a weight to e4m3 with a scale for each 128 x 128 block; the last ones may be smaller.

    In plain torch, since it runs where weights are replaced and nowhere else.
    """
    rows, columns = weight.shape
    padding = (0, -columns % BLOCK, 0, -rows % BLOCK)
    wide = F.pad(weight.float(), padding)
    blocks = wide.view(wide.shape[0] // BLOCK, BLOCK, wide.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(_MIN_ABSMAX) * (1 / FP8_MAX)
    scaled = (blocks * (1 / scale)[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return QuantTensor(scaled.view_as(wide)[:rows, :columns].to(FP8), scale)


def empty_quantized(
    num_rows: int, size: int, group_size: int | None, device: torch.device, *,
    is_gathered: bool = False,
) -> QuantTensor:  # fmt: skip
    """Return unwritten memory for `num_rows` rows.

    The scales of a group lie together, and behind both tensors is memory up to a multiple of 4
    rows, as the library wants it (see `fp8_gemm`); where rows are gathered, those of one row do.
    """
    if group_size is None:
        scale = torch.empty((num_rows, 1), dtype=torch.float32, device=device)
        return QuantTensor(torch.empty((num_rows, size), dtype=FP8, device=device), scale)
    num_groups = -(-size // group_size)
    num_padded = -(-num_rows // ROWS_OF_LIBRARY) * ROWS_OF_LIBRARY
    shape = (num_padded, num_groups) if is_gathered else (num_groups, num_padded)
    scale = torch.empty(shape, dtype=torch.float32, device=device)
    data = torch.empty((num_padded, size), dtype=FP8, device=device)
    return QuantTensor(data[:num_rows], (scale if is_gathered else scale.t())[:num_rows])


def tile(size: int, group_size: int | None) -> tuple[int, int]:
    """Return how many numbers a program takes, and in groups of how many: powers of two."""
    block: int = triton.next_power_of_2(size)
    if group_size is None:
        return block, block
    return min(max(block, group_size), 8 * group_size), group_size


def num_warps(block: int) -> int:
    """8 numbers (16 bytes) a thread up to 16 warps, more per thread above."""
    return min(max(block // 256, 1), 16)


@triton.jit
def scaled_to_fp8(values):
    """[groups, group] float32 -> the same within e4m3's range, and [groups] scales."""
    absmax = tl.maximum(tl.max(tl.abs(values), axis=1), _MIN_ABSMAX_DEVICE)
    scale = absmax * _INVERSE_FP8_MAX_DEVICE
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return values * inverse[:, None], scale


@triton.jit
def store_quantized(
    values, data, scale, scale_stride, group_stride, row, first, SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Quantise [groups, group] numbers of a row, of which `first` is the first column."""
    scaled, scales = scaled_to_fp8(values)
    groups = tl.arange(0, values.shape[0])
    columns = first + groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # The cast saturates, so what rounding took above 448 is 448.
    tl.store(data + row * SIZE + columns, scaled.to(tl.float8e4nv), mask=columns < SIZE)
    groups += first // GROUP
    num_groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    target = scale + row * scale_stride + groups * group_stride
    tl.store(target, scales, mask=groups < num_groups)


@triton.jit(do_not_specialize=["scale_stride", "group_stride"])
def _quantize_kernel(
    x, data, scale, x_stride, scale_stride, group_stride, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    columns += first
    values = tl.load(x + row * x_stride + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    store_quantized(values, data, scale, scale_stride, group_stride, row, first, SIZE, GROUP)
