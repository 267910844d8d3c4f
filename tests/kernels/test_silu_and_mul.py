"""The gated activation."""

import pytest
import torch

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.silu_and_mul import (
    silu_and_mul,
    silu_and_mul_reference,
    silu_and_mul_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def test_gate_comes_first():
    gate_up = torch.tensor([[0.0, 100.0, 3.0, 2.0]], device=DEVICE)
    assert silu_and_mul(gate_up).tolist() == [[0.0, 200.0]]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 64), (1, 3072), (5, 100), (2, 1)])
def test_triton_matches_the_reference(dtype, num_tokens, size):
    torch.manual_seed(0)
    gate_up = (torch.randn(num_tokens, 2 * size, device=DEVICE) * 4).to(dtype)
    # Two steps of rounding.
    rtol = {torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(dtype, 1e-5)
    torch.testing.assert_close(
        silu_and_mul_triton(gate_up), silu_and_mul_reference(gate_up), rtol=rtol, atol=1e-6
    )


@needs_triton
def test_triton_takes_strided_rows():
    gate_up = torch.randn(3, 400, device=DEVICE)[:, 8:208]
    torch.testing.assert_close(silu_and_mul_triton(gate_up), silu_and_mul_reference(gate_up))


@needs_triton
def test_large_inputs_stay_finite():
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 90.0] + [1.0] * 4], device=DEVICE)
    assert silu_and_mul_triton(gate_up).tolist() == [[0.0, 1e4, pytest.approx(0), 90.0]]
