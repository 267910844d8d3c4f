"""RMSNorm whose result is quantised at once, alone and with the residual add before it."""

import torch

from nanovllm.kernels._triton import pdl_options, tl, triton, use_triton
from nanovllm.kernels.rms_norm import add_rms_norm_reference, normed_row, rms_norm_reference
from nanovllm.quantization.formats import BLOCK
from nanovllm.quantization.kernels.quantize import (
    QuantTensor,
    empty_quantized,
    num_warps,
    quantize_reference,
    store_quantized,
)


def rms_norm_quantized(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    group_size: int | None,
) -> tuple[QuantTensor, torch.Tensor]:  # fmt: skip
    """Return `quantize(rms_norm(x + residual))` and the sum, x itself where there is no residual.

    On CUDA the sum overwrites `residual`; use only what is returned. Roundings are those of the
    two functions one after the other.

    Args:
        x: [num_tokens, hidden_size], rows may be strided, or with a residual shares of it,
            [num_splits, num_tokens, hidden_size], as `fp8_linear_shares` gives them
        residual: [num_tokens, hidden_size], rows may be strided
        weight: [hidden_size]
    """
    function = rms_norm_quantized_triton if use_triton(x) else rms_norm_quantized_reference
    return function(x, residual, weight, eps, group_size)


def rms_norm_quantized_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    group_size: int | None,
) -> tuple[QuantTensor, torch.Tensor]:  # fmt: skip
    """Plain torch form of `rms_norm_quantized`; changes no input."""
    if residual is None:
        return quantize_reference(rms_norm_reference(x, weight, eps), group_size), x
    normed, residual = add_rms_norm_reference(x, residual, weight, eps)
    return quantize_reference(normed, group_size), residual


def rms_norm_quantized_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    group_size: int | None,
) -> tuple[QuantTensor, torch.Tensor]:  # fmt: skip
    """Triton form of `rms_norm_quantized`: one program a row, the row in registers."""
    num_tokens, hidden_size = x.shape[-2:]
    num_splits = x.shape[0] if x.dim() == 3 else 1
    total = x if residual is None else residual
    assert x.stride(-1) == 1 and total.stride(1) == 1, "rows must be contiguous"
    out = empty_quantized(num_tokens, hidden_size, group_size, x.device)
    block = max(triton.next_power_of_2(hidden_size), BLOCK)
    if num_tokens:
        _rms_norm_quantized_kernel[(num_tokens,)](
            x, residual, weight, out.data, out.scale, x.stride(0), x.stride(-2), total.stride(0),
            *out.scale.stride(), eps, HIDDEN_SIZE=hidden_size, BLOCK=block,
            GROUP=group_size or block, NUM_SPLITS=num_splits, num_warps=num_warps(block),
            **pdl_options(x),
        )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["scale_stride", "group_stride"])
def _rms_norm_quantized_kernel(
    x, residual, weight, data, scale, split_stride, x_stride, residual_stride, scale_stride,
    group_stride, eps, HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Rounded where the norm without quantisation rounds.
    normed = normed_row(
        x, residual, weight, row, columns, split_stride, x_stride, residual_stride, eps,
        HIDDEN_SIZE, NUM_SPLITS, PDL,
    )  # fmt: skip
    normed = normed.to(tl.float32)
    store_quantized(normed, data, scale, scale_stride, group_stride, row, 0, HIDDEN_SIZE, GROUP)
