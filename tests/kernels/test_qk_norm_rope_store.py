"""QK-norm, rotary embedding and KV write in one."""

import pytest
import torch

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.qk_norm_rope_store import (
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
    qk_norm_rope_store_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def make_inputs(num_tokens, heads, dtype=torch.float32, has_norm=True, index_dtype=torch.int64):
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE)
    weights = 1 + torch.randn(2, head_dim, device=DEVICE) / 4
    angles = torch.rand(50, head_dim // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    # Neither in order nor dense; the second token is padding.
    slots = torch.tensor([17, -1, 2, 9, 8][:num_tokens], device=DEVICE, dtype=index_dtype)
    positions = torch.tensor([49, 0, 3, 21, 20][:num_tokens], device=DEVICE, dtype=index_dtype)
    shape = (5, 4, num_kv_heads, head_dim)
    return {
        "qkv": qkv.to(dtype),
        "q_weight": weights[0].to(dtype) if has_norm else None,
        "k_weight": weights[1].to(dtype) if has_norm else None,
        "eps": EPS,
        "cos_sin": cos_sin,
        "positions": positions,
        "slots": slots,
        "k_cache": torch.full(shape, -7.0, dtype=dtype, device=DEVICE),
        "v_cache": torch.full(shape, -7.0, dtype=dtype, device=DEVICE),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def outputs(function, inputs):
    """Run on copies; return qkv and both caches."""
    copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    assert function(**copies) is None
    return copies["qkv"], copies["k_cache"], copies["v_cache"]


@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize("has_norm", [True, False])
def test_public_function_is_the_formula_for_any_head_dim(head_dim, has_norm):
    inputs = make_inputs(3, (4, 2, head_dim), has_norm=has_norm)
    qkv, k_cache, v_cache = outputs(qk_norm_rope_store, inputs)
    heads = inputs["qkv"].view(3, 8, head_dim).clone()
    for token, position in enumerate([49, 0, 3]):
        cos, sin = inputs["cos_sin"][position].chunk(2)
        for head in range(6):
            x = heads[token, head]
            if has_norm:
                weight = inputs["q_weight" if head < 4 else "k_weight"]
                x = x / (x.square().mean() + EPS).sqrt() * weight
            a, b = x.chunk(2)
            heads[token, head] = torch.cat((a * cos - b * sin, b * cos + a * sin))
    torch.testing.assert_close(qkv.view(3, 8, head_dim), heads)
    for cache, stored in ((k_cache, qkv.view(3, 8, head_dim)[:, 4:6]), (v_cache, heads[:, 6:])):
        expected = torch.full_like(cache, -7.0)
        expected[4, 1], expected[0, 2] = stored[0], stored[2]
        assert torch.equal(cache, expected)


@needs_triton
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "heads",
    [(4, 2, 16), (2, 1, 32), (16, 8, 128), (14, 2, 64), (6, 3, 64), (5, 5, 16), (4, 1, 256)],
    ids=str,
)
def test_triton_matches_the_reference(heads, dtype, has_norm):
    inputs = make_inputs(3, heads, dtype, has_norm)
    actual = outputs(qk_norm_rope_store_triton, inputs)
    expected = outputs(qk_norm_rope_store_reference, inputs)
    # A sum in another order can move a value by one rounding before the rotation; the interpreter
    # also cuts bfloat16 off where a GPU rounds.
    bf16 = 2**-4 if DEVICE == "cuda" else 2**-3
    atol = {torch.bfloat16: bf16, torch.float16: 2**-7}.get(dtype, 1e-5)
    for a, b in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
    assert torch.equal(actual[2], expected[2])
    num_values = heads[1] * heads[2]
    assert torch.equal(actual[0][:, -num_values:], inputs["qkv"][:, -num_values:])


@needs_triton
@pytest.mark.parametrize("heads", [(4, 2, 16), (16, 8, 128), (6, 3, 64), (4, 1, 256)], ids=str)
def test_triton_stores_fp8_as_the_reference_does(heads):
    inputs = make_inputs(3, heads)
    for name in ("k_cache", "v_cache"):
        inputs[name] = inputs[name].to(torch.float8_e4m3fn)
    # Another scale a head; the last ones make values saturate.
    exponents = -torch.linspace(5, 9, 2 * heads[1], device=DEVICE).round()
    inputs["kv_scale"] = exponents.exp2().view(2, -1)
    actual = outputs(qk_norm_rope_store_triton, inputs)
    expected = outputs(qk_norm_rope_store_reference, inputs)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-5)
    # A key that differs in its last bit may round to the neighbour.
    torch.testing.assert_close(actual[1].float(), expected[1].float(), rtol=2**-3, atol=2**-9)
    assert (actual[1].float() != expected[1].float()).sum() <= 2
    assert torch.equal(actual[2].float(), expected[2].float())
    assert (actual[2].float().abs() == 448).any() and (actual[2].float() == -7).any()


@needs_triton
def test_triton_takes_int32_and_strided_indices():
    inputs = make_inputs(5, (4, 2, 32), index_dtype=torch.int32)
    expected = outputs(qk_norm_rope_store_reference, inputs)
    matrix = torch.zeros(5, 3, dtype=torch.int32, device=DEVICE)
    matrix[:, 0], matrix[:, 2] = inputs["positions"], inputs["slots"]
    qkv, k_cache, v_cache = (inputs[name] for name in ("qkv", "k_cache", "v_cache"))
    qk_norm_rope_store_triton(**inputs | {"positions": matrix[:, 0], "slots": matrix[:, 2]})
    for a, b in zip((qkv, k_cache, v_cache), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "function",
    [qk_norm_rope_store, pytest.param(qk_norm_rope_store_triton, marks=needs_triton)],
)
def test_empty_batch_stores_nothing(function):
    _, k_cache, v_cache = outputs(function, make_inputs(0, (4, 2, 16)))
    assert (k_cache == -7).all()
    assert (v_cache == -7).all()
