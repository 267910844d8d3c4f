"""The split-K GEMM for decode batches."""

import pytest
import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.small_gemm import (
    SmallGemmConfig,
    find_config,
    make_workspace,
    small_gemm,
    small_gemm_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's dot product takes bfloat16 for integers.
DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float16]
SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def make(num_rows, out_features, in_features, dtype):
    torch.manual_seed(0)
    x = torch.randn(num_rows, in_features, device=DEVICE)
    weight = torch.randn(out_features, in_features, device=DEVICE) / in_features**0.5
    return x.to(dtype), weight.to(dtype)


@needs_triton
@pytest.mark.parametrize("split_k", [1, 2, 4])
@pytest.mark.parametrize(("num_rows", "block_m"), [(1, 16), (16, 16), (20, 16), (33, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_matches_the_library(dtype, num_rows, block_m, split_k):
    x, weight = make(num_rows, 128, 256, dtype)
    workspace = make_workspace(DEVICE)
    config = SmallGemmConfig(block_m, 64, 32, split_k, 4, 3)
    # Twice: the counters must be back at 0, and the same bits come out.
    first, second = (small_gemm_triton(x, weight, workspace, config) for _ in range(2))
    torch.testing.assert_close(first, F.linear(x, weight), rtol=2**-6, atol=2**-6)
    assert torch.equal(first, second)
    assert not workspace.counters.any()


@needs_triton
def test_triton_takes_strided_rows_and_empty_batches():
    x, weight = make(4, 64, 128, torch.float16)
    config, workspace = SmallGemmConfig(16, 32, 32, 2, 4, 3), make_workspace(DEVICE)
    wide = torch.cat((x, x), dim=1)
    expected = small_gemm_triton(x, weight, workspace, config)
    assert torch.equal(small_gemm_triton(wide[:, :128], weight, workspace, config), expected)
    assert small_gemm_triton(x[:0], weight, workspace, config).shape == (0, 64)


@pytest.mark.parametrize(("num_rows", "dtype"), [(0, torch.bfloat16), (3, torch.float32)])
def test_other_shapes_and_dtypes_go_to_the_library(num_rows, dtype):
    x, weight = make(num_rows, 24, 40, dtype)
    assert torch.equal(small_gemm(x, weight, make_workspace(DEVICE)), F.linear(x, weight))


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_configs_fit_their_shapes_and_the_workspace(out_features, in_features):
    workspace = make_workspace("cpu")
    for num_rows in (1, 16, 17, 64, 65, 128):
        config = find_config(num_rows, out_features, in_features)
        if config is None:
            continue
        assert out_features % config.block_n == 0
        assert in_features % (config.split_k * config.block_k) == 0
        num_row_tiles = -(-num_rows // config.block_m)
        assert num_row_tiles * out_features // config.block_n <= workspace.counters.numel()
        rows = num_row_tiles * config.block_m
        assert config.split_k * rows * out_features <= workspace.partials.numel()


def test_no_config_above_128_rows_and_for_unknown_shapes():
    assert find_config(129, 4096, 1024) is None
    assert find_config(0, 4096, 1024) is None
    assert find_config(1, 1000, 1024) is None
