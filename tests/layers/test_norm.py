"""RMSNorm as a module."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.placement import Placement
from nanovllm.utils.parallel import ParallelContext


def norm_pair(dtype):
    ours = RMSNorm(24, 1e-6, Placement(ParallelContext.single(), torch.device("cpu"), dtype))
    theirs = Qwen3RMSNorm(24, eps=1e-6).to(dtype)
    weight = torch.randn(24, generator=torch.Generator().manual_seed(0))
    ours.load_weight("weight", weight)
    theirs.weight.data.copy_(weight)
    return ours, theirs


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_equals_transformers_and_leaves_its_input(dtype):
    """x.float() of a float32 tensor is the same tensor: scaling it in place broke the residual."""
    ours, theirs = norm_pair(dtype)
    x = (3 * random(5, 24, seed=1)).to(dtype)
    before = x.clone()
    torch.testing.assert_close(ours(x), theirs(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_residual_is_added_before_the_norm(dtype):
    ours, theirs = norm_pair(dtype)
    x, residual = random(5, 24, seed=1).to(dtype), random(5, 24, seed=2).to(dtype)
    total = x + residual
    out, new_residual = ours(x, residual.clone())
    assert torch.equal(new_residual, total)
    torch.testing.assert_close(out, theirs(total))
