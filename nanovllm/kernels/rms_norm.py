"""RMSNorm, alone and fused with the residual add before it."""

import torch

from nanovllm.kernels._triton import tl, triton, use_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x` scaled to unit root mean square, times `weight`.

    Computed in float32, rounded to x.dtype before the product with the weight, as Hugging Face.

    x: [num_tokens, hidden_size], rows may be strided; weight: [hidden_size]
    """
    if use_triton(x):
        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`, the sum rounded to x.dtype first.

    On CUDA the sum overwrites `residual`; use only what is returned.

    x, residual: [num_tokens, hidden_size], rows may be strided; weight: [hidden_size]
    """
    if use_triton(x):
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain torch form of `rms_norm`; any leading dimensions."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `add_rms_norm`; changes no input."""
    residual = x + residual
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Triton form of `rms_norm`: one program a row, the row in registers."""
    return _launch(x, None, weight, eps)


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton form of `add_rms_norm`; the sum overwrites `residual`."""
    return _launch(x, residual, weight, eps), residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    num_tokens, hidden_size = x.shape
    assert x.stride(1) == 1, "rows must be contiguous"
    assert residual is None or residual.stride(1) == 1, "rows must be contiguous"
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(hidden_size)
    _rms_norm_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        HIDDEN_SIZE=hidden_size,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        # 8 elements (16 bytes) a thread up to 8 warps, more per thread above.
        num_warps=min(max(block // 256, 1), 8 if block <= 4096 else 16),
    )
    return out


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN_SIZE
    # The weight is loaded first so that its latency hides behind the reduction.
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual + row * residual_stride + columns
        values += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(pointers, rounded, mask=mask)
        values = rounded.to(tl.float32)
    variance = tl.sum(values * values, axis=0) / HIDDEN_SIZE
    normed = (values * tl.rsqrt(variance + eps)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(
        out + row * HIDDEN_SIZE + columns, (normed * scale).to(out.dtype.element_ty), mask=mask
    )
