"""The fused decode projections against what they fuse."""

import pytest
import torch
from model_harness import build
from tiny_models import write_tiny_qwen3

from nanovllm.fused import fused_activate, fused_project
from nanovllm.fused.gate_up_silu import gate_up_silu_reference, gate_up_silu_triton
from nanovllm.fused.qkv_rope_store import qkv_rope_store_reference, qkv_rope_store_triton
from nanovllm.fused.tiles import Tiles
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.layers.attention import project
from nanovllm.models.decoder import activate
from nanovllm.models.model_config import load_model_config
from nanovllm.utils.context import ForwardContext

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's dot product takes bfloat16 for integers.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
PRECISION = 2**-6 if DEVICE == "cuda" else 2**-9
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


def qkv_inputs(num_rows, num_heads, num_kv_heads, has_norm=True, index_dtype=torch.int64):
    in_features, head_dim = 256, 128
    width = (num_heads + 2 * num_kv_heads) * head_dim
    angles = random(50, head_dim // 2, seed=1) * 3
    generator = torch.Generator().manual_seed(num_rows)
    slots = torch.randperm(5 * 16, generator=generator)[:num_rows].to(DEVICE)
    slots[1::3] = -1  # padding
    caches = torch.full((2, 5, 16, num_kv_heads, head_dim), -7.0, dtype=DTYPE, device=DEVICE)
    return {
        # Rows are strided, as slices of a larger buffer are.
        "x": random(num_rows, 2 * in_features, seed=2).to(DTYPE)[:, :in_features],
        "weight": (random(width, in_features, seed=3) / in_features**0.5).to(DTYPE),
        "q_weight": (1 + random(head_dim, seed=4) / 4).to(DTYPE) if has_norm else None,
        "k_weight": (1 + random(head_dim, seed=5) / 4).to(DTYPE) if has_norm else None,
        "eps": 1e-6,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
        "positions": torch.randint(50, (num_rows,), generator=generator).to(DEVICE, index_dtype),
        "slots": slots,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "num_heads": num_heads,
    }


@needs_triton
@pytest.mark.parametrize(
    ("num_rows", "heads", "has_norm", "tiles"),
    [
        (1, (2, 1), True, Tiles(16, 128, 4, 3)),
        (17, (4, 2), True, Tiles(16, 64, 4, 3)),
        (17, (2, 2), False, Tiles(32, 64, 4, 3)),
        (67, (3, 1), True, None),
    ],
    ids=str,
)
def test_qkv_is_what_it_fuses(num_rows, heads, has_norm, tiles):
    inputs = qkv_inputs(num_rows, *heads, has_norm)
    expected_caches = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    expected = qkv_rope_store_reference(
        **inputs | dict(zip(("k_cache", "v_cache"), expected_caches, strict=True))
    )
    q = qkv_rope_store_triton(**inputs, tiles=tiles)
    assert q.shape == (num_rows, heads[0], 128)
    # A rounding of the product moves by one place what comes after it.
    atol = 4 * PRECISION
    torch.testing.assert_close(q, expected, rtol=0, atol=atol)
    for cache, other in zip((inputs["k_cache"], inputs["v_cache"]), expected_caches, strict=True):
        torch.testing.assert_close(cache, other, rtol=0, atol=atol)
        assert torch.equal(cache == -7, other == -7)


@needs_triton
@pytest.mark.parametrize(("num_rows", "heads"), [(1, (2, 1)), (17, (4, 2))], ids=str)
def test_qkv_stores_fp8_as_its_parts_do(num_rows, heads):
    inputs = qkv_inputs(num_rows, *heads)
    for name in ("k_cache", "v_cache"):
        inputs[name] = inputs[name].to(torch.float8_e4m3fn)
    exponents = -torch.linspace(5, 8, 2 * heads[1], device=DEVICE).round()
    inputs["kv_scale"] = exponents.exp2().view(2, -1)
    expected_caches = inputs["k_cache"].clone(), inputs["v_cache"].clone()
    expected = qkv_rope_store_reference(
        **inputs | dict(zip(("k_cache", "v_cache"), expected_caches, strict=True))
    )
    q = qkv_rope_store_triton(**inputs, tiles=Tiles(16, 64, 4, 3))
    torch.testing.assert_close(q, expected, rtol=0, atol=4 * PRECISION)
    for cache, other in zip((inputs["k_cache"], inputs["v_cache"]), expected_caches, strict=True):
        # A product that rounds otherwise may move to the neighbour in fp8.
        step = 4 * PRECISION / float(inputs["kv_scale"].min())
        torch.testing.assert_close(cache.float(), other.float(), rtol=2**-3, atol=step)
        assert (cache.float() == other.float()).float().mean() > 0.98
        is_unused = (other.float() == -7).all(dim=-1)
        assert is_unused.any() and (cache.float()[is_unused] == -7).all()


@needs_triton
def test_qkv_takes_int32_and_strided_indices():
    inputs = qkv_inputs(5, 2, 1, index_dtype=torch.int32)
    matrix = torch.zeros(5, 3, dtype=torch.int64, device=DEVICE)
    matrix[:, 1] = inputs["slots"]
    expected = qkv_rope_store_reference(**inputs)
    k_cache = inputs["k_cache"].clone()
    q = qkv_rope_store_triton(**inputs | {"slots": matrix[:, 1]}, tiles=Tiles(16, 128, 4, 3))
    torch.testing.assert_close(q, expected, rtol=0, atol=2**-4)
    torch.testing.assert_close(inputs["k_cache"], k_cache, rtol=0, atol=2**-4)


@needs_triton
@pytest.mark.parametrize(
    ("num_rows", "tiles"),
    [
        (1, Tiles(16, 128, 4, 3, 16)),
        (17, Tiles(16, 64, 4, 3, 32)),
        (33, Tiles(32, 128, 4, 3, 16)),
        (67, None),
    ],
    ids=str,
)
def test_gate_up_is_what_it_fuses(num_rows, tiles):
    x = random(num_rows, 512, seed=2).to(DTYPE)[:, :256]
    weight = (random(2 * 64, 256, seed=3) / 8).to(DTYPE)
    actual = gate_up_silu_triton(x, weight, tiles)
    expected = gate_up_silu_reference(x, weight)
    assert actual.shape == (num_rows, 64)
    torch.testing.assert_close(actual, expected, rtol=PRECISION, atol=PRECISION)


def make_layer(tmp_path, head_dim):
    """A layer of a model on the CPU, whose kernels run in the interpreter."""
    config = {"hidden_size": 256, "head_dim": head_dim, "intermediate_size": 128}
    model = build(load_model_config(write_tiny_qwen3(tmp_path, **config)), dtype=torch.float16)
    model.init_dummy_weights(0)
    return model.model.layers[1], model.model.cos_sin


def decode_context(num_rows, head_dim, is_decode=True):
    lens = torch.full((num_rows,), 5, dtype=torch.int32)
    return ForwardContext(
        kv_cache=torch.zeros(2, 2, 4, 16, 2, head_dim, dtype=torch.float16),
        is_decode=is_decode,
        slot_mapping=torch.arange(num_rows) * 3,
        block_tables=torch.zeros(num_rows, 1, dtype=torch.int32),
        seq_lens=lens,
    )


on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for tensors on the CPU")


@needs_triton
@on_cpu
@pytest.mark.parametrize(
    ("head_dim", "is_decode", "is_fused"),
    [(128, True, True), (128, False, False), (64, True, False)],
)
def test_a_layer_projects_the_same_where_the_fused_kernel_fits(
    tmp_path, head_dim, is_decode, is_fused
):
    layer, cos_sin = make_layer(tmp_path, head_dim)
    hidden = random(20, 256).half()
    positions = torch.arange(20) % 10
    contexts = [decode_context(20, head_dim, is_decode) for _ in range(2)]
    expected, k, _ = project(layer.self_attn, hidden, positions, cos_sin, contexts[0], None)
    q, new_k, new_v = fused_project(layer.self_attn, hidden, positions, cos_sin, contexts[1], None)
    torch.testing.assert_close(q, expected, rtol=0, atol=4 * PRECISION)
    caches = [context.kv_cache for context in contexts]
    torch.testing.assert_close(caches[1], caches[0], rtol=0, atol=4 * PRECISION)
    assert new_k.numel() == new_v.numel() == (0 if is_fused else k.numel())


@needs_triton
@on_cpu
def test_a_layer_activates_the_same_in_the_fused_kernel(tmp_path):
    layer, _ = make_layer(tmp_path, 64)
    x = random(600, 256).half()
    expected = activate(layer.mlp, x)
    torch.testing.assert_close(
        fused_activate(layer.mlp, x[:40]), expected[:40], rtol=PRECISION, atol=PRECISION
    )
    assert torch.equal(fused_activate(layer.mlp, x), expected), "too many rows are not fused"
