"""The narrow decode GEMM: its shares add up to the product, and the norm behind it sums them."""

import pytest
import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.rms_norm import add_rms_norm_reference, add_rms_norm_triton
from nanovllm.kernels.split_gemm import split_gemm, split_gemm_reference, split_gemm_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a CPU the finer one: a tolerance lets less through.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def make(num_rows, out_features=128, in_features=512):
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 2 * in_features, generator=generator)[:, :in_features]
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    return x.to(DEVICE, DTYPE), weight.to(DEVICE, DTYPE)


@needs_triton
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 129])
def test_shares_sum_up_to_the_product(num_rows):
    x, weight = make(num_rows)
    shares = split_gemm_triton(x, weight)
    assert shares.dtype == torch.float32
    assert shares.shape == (4 if num_rows <= 128 else 2, num_rows, 128)
    torch.testing.assert_close(shares.sum(0), x.float() @ weight.float().T, rtol=1e-3, atol=1e-3)


@needs_triton
@pytest.mark.parametrize("num_rows", [1, 40])
def test_the_norm_sums_shares_as_it_takes_a_whole_product(num_rows):
    x, weight = make(num_rows)
    residual = torch.randn(num_rows, 128, device=DEVICE).to(DTYPE)
    scale = torch.rand(128, device=DEVICE).to(DTYPE) + 0.5
    shares = split_gemm_triton(x, weight)
    expected = add_rms_norm_reference(split_gemm_reference(x, weight), residual, scale, 1e-6)
    by_reference = add_rms_norm_reference(shares, residual, scale, 1e-6)
    by_triton = add_rms_norm_triton(shares, residual.clone(), scale, 1e-6)
    for index in range(2):
        torch.testing.assert_close(by_reference[index], expected[index], rtol=2**-6, atol=2**-6)
        torch.testing.assert_close(by_triton[index], by_reference[index], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features"), [(4, 96, 512), (4, 128, 500), (300, 128, 512)]
)
def test_shapes_that_do_not_fit_go_to_the_library(num_rows, out_features, in_features):
    x, weight = make(num_rows, out_features, in_features)
    assert torch.equal(split_gemm(x, weight), F.linear(x, weight))
