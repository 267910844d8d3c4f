"""RMSNorm with and without the residual add."""

import pytest
import torch

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    # A step or two of rounding, as the sum's order differs; more for bfloat16 on a CPU, because
    # the interpreter cuts off where a GPU rounds.
    bf16 = 2**-6 if DEVICE == "cuda" else 2**-5
    return {"atol": 1e-6, "rtol": {torch.bfloat16: bf16, torch.float16: 2**-9}.get(dtype, 1e-5)}


def make(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, residual = torch.randn(2, num_tokens, hidden_size, device=DEVICE).to(dtype)
    return [x, residual, torch.randn(hidden_size, device=DEVICE).to(dtype)]


def test_reference_is_the_formula():
    x, _, weight = make(3, 40, torch.float32)
    expected = weight * x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_changes_no_input(dtype):
    x, residual, weight = make(3, 64, dtype)
    copies = [t.clone() for t in (x, residual, weight)]
    rms_norm_reference(x, weight, 1e-6)
    out, new_residual = add_rms_norm_reference(x, residual, weight, 1e-6)
    assert all(torch.equal(*pair) for pair in zip(copies, (x, residual, weight), strict=True))
    assert out.dtype == new_residual.dtype == dtype


def test_sum_is_rounded_before_the_norm():
    x = torch.full((1, 16), 1.0, dtype=torch.bfloat16, device=DEVICE)
    residual = torch.full_like(x, 2**-9)
    out, new_residual = add_rms_norm(x, residual, torch.ones_like(x[0]), 0.0)
    assert (new_residual == 1).all()
    assert (out == 1).all()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "hidden_size"), [(1, 1024), (3, 64), (2, 896), (2, 4096), (1, 5120), (1, 8192)]
)
def test_triton_matches_the_reference(dtype, num_tokens, hidden_size):
    x, residual, weight = make(num_tokens, hidden_size, dtype)
    expected = rms_norm_reference(x, weight, 1e-6)
    expected_out, expected_sum = add_rms_norm_reference(x, residual, weight, 1e-6)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-6), expected, **tolerances(dtype))
    out, new_residual = add_rms_norm_triton(x, residual, weight, 1e-6)
    torch.testing.assert_close(out, expected_out, **tolerances(dtype))
    torch.testing.assert_close(new_residual, expected_sum, **tolerances(dtype))


@needs_triton
def test_triton_takes_strided_rows():
    wide = torch.randn(3, 300, device=DEVICE)
    x, residual, weight = wide[:, :96], wide[:, 100:196], wide[0, 200:296]
    expected_out, expected_sum = add_rms_norm_reference(x, residual, weight, 1e-6)
    torch.testing.assert_close(
        rms_norm_triton(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6)
    )
    out, new_residual = add_rms_norm_triton(x, residual, weight, 1e-6)
    torch.testing.assert_close(out, expected_out)
    assert torch.equal(new_residual, expected_sum)


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's 4 GiB are touched in few places")
def test_triton_takes_shares_that_lie_more_than_int32_apart():
    """As those of eight experts and 150,000 tokens; offsets once wrapped to addresses of nobody."""
    far = 2**30 + 64
    x = torch.empty(2 * far + 128, dtype=torch.float16).as_strided((3, 2, 64), (far, 64, 1))
    for share in x:
        share.normal_()
    residual, weight = torch.randn(2, 64).half(), torch.ones(64).half()
    expected, expected_sum = add_rms_norm_reference(x, residual, weight, 1e-6)
    out, total = add_rms_norm_triton(x, residual, weight, 1e-6)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(total, expected_sum, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "norms",
    [
        (rms_norm, add_rms_norm),
        pytest.param((rms_norm_triton, add_rms_norm_triton), marks=needs_triton),
    ],
    ids=["public", "triton"],
)
def test_empty_batch(norms):
    x, residual, weight = make(0, 64, torch.bfloat16)
    assert norms[0](x, weight, 1e-6).shape == (0, 64)
    out, new_residual = norms[1](x, residual, weight, 1e-6)
    assert out.shape == new_residual.shape == (0, 64)
