"""The gated activation of the MLP."""

import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import pdl_options, pdl_wait, tl, triton, use_triton


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`, [num_tokens, intermediate_size].

    gate_up: [num_tokens, 2 * intermediate_size], gate first; rows may be strided
    """
    return silu_and_mul_triton(gate_up) if use_triton(gate_up) else silu_and_mul_reference(gate_up)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_and_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Triton form of `silu_and_mul`: a program takes a piece of one row."""
    num_tokens, width = gate_up.shape
    assert gate_up.stride(1) == 1, "rows must be contiguous"
    size = width // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens == 0:
        return out
    # 16 bytes a thread; smaller pieces at small batches so that more SMs take part.
    block = min(1024 if num_tokens * size > 2**20 else 512, triton.next_power_of_2(size))
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=block,
        num_warps=max(block // 256, 1), **pdl_options(gate_up),
    )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul_kernel(
    gate_up, out, gate_up_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    pointers = gate_up + row * gate_up_stride + columns
    gate = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + SIZE, mask=mask, other=0.0).to(tl.float32)
    # Rounded between the two factors, as torch does.
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + columns, (activated * up).to(out.dtype.element_ty), mask=mask)
