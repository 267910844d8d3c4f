"""RMSNorm, alone and fused with the residual add before it."""

import torch

from nanovllm.kernels._triton import pdl_options, pdl_wait, tl, triton, use_triton


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
    """Return `(rms_norm(x + residual), x + residual)`, the sum rounded to residual.dtype first.

    On CUDA the sum overwrites `residual`; use only what is returned.

    Args:
        x: [num_tokens, hidden_size], rows may be strided, or shares of it,
            [num_splits, num_tokens, hidden_size], to be added up in float32 and rounded: what
            `split_gemm` returns, or one of each expert
        residual: [num_tokens, hidden_size], rows may be strided
        weight: [hidden_size]
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
    if x.dim() == 3:
        x = x.sum(dim=0).to(residual.dtype)
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
    num_tokens, hidden_size = x.shape[-2:]
    num_splits = x.shape[0] if x.dim() == 3 else 1
    total = x if residual is None else residual
    assert x.stride(-1) == 1 and total.stride(1) == 1, "rows must be contiguous"
    out = torch.empty((num_tokens, hidden_size), dtype=total.dtype, device=x.device)
    block = triton.next_power_of_2(hidden_size)
    if num_tokens:
        _rms_norm_kernel[(num_tokens,)](
            x, residual, weight, out, x.stride(0), x.stride(-2), total.stride(0), eps,
            HIDDEN_SIZE=hidden_size, BLOCK=block, NUM_SPLITS=num_splits,
            # 8 elements (16 bytes) a thread up to 8 warps, more per thread above.
            num_warps=min(max(block // 256, 1), 8 if block <= 4096 else 16), **pdl_options(x),
        )  # fmt: skip
    return out


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, split_stride, x_stride, residual_stride, eps,
    HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    normed = normed_row(
        x, residual, weight, row, columns, split_stride, x_stride, residual_stride, eps,
        HIDDEN_SIZE, NUM_SPLITS, PDL,
    )  # fmt: skip
    tl.store(out + row * HIDDEN_SIZE + columns, normed, mask=columns < HIDDEN_SIZE)


@triton.jit
def normed_row(
    x, residual, weight, row, columns, split_stride, x_stride, residual_stride, eps,
    HIDDEN_SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return a row of x normed, 0 from HIDDEN_SIZE on; a residual is added first, in place.

    columns: [groups, group], the row's in the shape that they come back in
    """
    mask = columns < HIDDEN_SIZE
    dtype: tl.constexpr = (x if residual is None else residual).dtype.element_ty
    # The weight is loaded first so that its latency hides behind the kernel before.
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    source = x + row * x_stride + columns
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if NUM_SPLITS > 1:
        for split in tl.static_range(1, NUM_SPLITS):
            # In 64 bits: eight experts' shares of 150,000 tokens of 2,048 go beyond 2^31.
            values += tl.load(source + split * split_stride.to(tl.int64), mask=mask, other=0.0)
        values = values.to(dtype).to(tl.float32)
    if residual is not None:
        pointers = residual + row * residual_stride + columns
        values += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        tl.store(pointers, rounded, mask=mask)
        values = rounded.to(tl.float32)
    variance = tl.sum(tl.sum(values * values, axis=1), axis=0) / HIDDEN_SIZE
    normed = (values * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)
    return (normed * scale).to(dtype)
