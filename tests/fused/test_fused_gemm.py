"""The fused decode projections against what they fuse."""

import pytest
import torch

from nanovllm.fused.gate_up_silu import gate_up_silu_reference, gate_up_silu_triton
from nanovllm.fused.gemm_add import gemm_add_reference, gemm_add_triton
from nanovllm.fused.product import NUM_COUNTERS
from nanovllm.fused.qkv_rope_store import qkv_rope_store_reference, qkv_rope_store_triton
from nanovllm.fused.tiles import FEW, Tiles, gate_up_tiles, qkv_tiles
from nanovllm.kernels._triton import HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
PRECISION = 2**-6
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
def test_triton_knows_what_tiles_pass_to_a_launch():
    """The interpreter ignores options, so that a wrong name would show on a GPU only."""
    options = pytest.importorskip("triton.backends.nvidia.compiler").CUDAOptions(**FEW.options())
    expected = (FEW.num_warps, FEW.num_stages, FEW.max_registers)
    assert (options.num_warps, options.num_stages, options.maxnreg) == expected


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
    actual = gate_up_silu_triton(x, weight, tiles=tiles)
    expected = gate_up_silu_reference(x, weight)
    assert actual.shape == (num_rows, 64)
    torch.testing.assert_close(actual, expected, rtol=PRECISION, atol=PRECISION)


def gemm_add_inputs(num_rows, in_features=1024):
    out_features = 128
    return {
        "x": random(num_rows, 2 * in_features, seed=2).to(DTYPE)[:, :in_features],
        "weight": (random(out_features, in_features, seed=3) / in_features**0.5).to(DTYPE),
        "residual": random(num_rows, out_features, seed=4).to(DTYPE),
        "norm_weight": (1 + random(out_features, seed=5) / 4).to(DTYPE),
        "num_done": torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=DEVICE),
    }


@needs_triton
@pytest.mark.parametrize(
    ("num_rows", "in_features", "tiles"),
    [
        (1, 1024, FEW),
        (16, 1536, FEW),
        (3, 512, FEW),  # nothing to add up
        (33, 512, Tiles(16, 256, 4, 1, 32, is_split=True)),  # counters of several row tiles
    ],
    ids=str,
)
def test_gemm_add_is_what_it_fuses(num_rows, in_features, tiles):
    inputs = gemm_add_inputs(num_rows, in_features)
    num_done = inputs.pop("num_done")
    expected, expected_squares, expected_sum = gemm_add_reference(**inputs)
    scaled, squares = gemm_add_triton(**inputs, num_done=num_done, tiles=tiles)
    assert squares.shape == (num_rows, 128 // tiles.width)
    close = {"rtol": PRECISION, "atol": PRECISION}
    torch.testing.assert_close(inputs["residual"], expected_sum, **close)
    torch.testing.assert_close(scaled, expected, **close)
    torch.testing.assert_close(squares.sum(1, keepdim=True), expected_squares, **close)
    assert not num_done.any(), "the next kernel counts from zero"


@needs_triton
def test_gemm_add_gives_the_same_bits_again():
    """Whichever program is last."""
    results = []
    for _ in range(2 if DEVICE == "cpu" else 50):
        inputs = gemm_add_inputs(16)
        results.append((*gemm_add_triton(**inputs), inputs["residual"]))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@needs_triton
@pytest.mark.parametrize(
    ("num_rows", "num_parts", "block_k"), [(1, 1, 256), (16, 16, 128), (20, 8, 64)], ids=str
)
def test_projections_finish_a_norm_that_was_begun(num_rows, num_parts, block_k):
    """Rows that are scaled at the end of a projection are as if they had come normed."""
    tiles = Tiles(16, block_k, 8, 1, is_split=True)
    inputs = qkv_inputs(num_rows, 2, 1)
    x = inputs["x"] * 8
    squares = torch.rand(num_rows, num_parts, device=DEVICE) * 1e4
    other_caches = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    expected = qkv_rope_store_reference(**inputs | other_caches | {"x": x, "squares": squares})
    num_done = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
    options = {"tiles": tiles, "num_done": num_done}
    q = qkv_rope_store_triton(**inputs | {"x": x}, squares=squares, **options)
    torch.testing.assert_close(q, expected, rtol=0, atol=4 * PRECISION)
    for name, cache in other_caches.items():
        torch.testing.assert_close(inputs[name], cache, rtol=0, atol=4 * PRECISION)
    weight = (random(2 * 64, 256, seed=3) / 8).to(DTYPE)
    actual = gate_up_silu_triton(x, weight, squares, 1e-6, **options)
    expected = gate_up_silu_reference(x, weight, squares, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=PRECISION, atol=PRECISION)
    assert not num_done.any(), "the next kernel counts from zero"
    assert not torch.allclose(expected, gate_up_silu_reference(x, weight), rtol=0.5)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_first_projection_takes_rows_that_are_normed(dtype):
    """Split as for few rows, and in one piece in float16 too."""
    inputs = qkv_inputs(4, 2, 1)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dtype is DTYPE:
            inputs[name] = value.to(dtype)
    other_caches = {name: inputs[name].clone() for name in ("k_cache", "v_cache")}
    expected = qkv_rope_store_reference(**inputs | other_caches)
    is_split = dtype is torch.bfloat16
    num_done = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=DEVICE) if is_split else None
    tiles = Tiles(16, 128, 4, 1, is_split=is_split)
    q = qkv_rope_store_triton(**inputs, tiles=tiles, num_done=num_done)
    torch.testing.assert_close(q, expected, rtol=0, atol=4 * PRECISION)
    torch.testing.assert_close(inputs["k_cache"], other_caches["k_cache"], rtol=0, atol=0.07)


def test_few_rows_have_split_tiles_and_no_others():
    for pick, most in ((qkv_tiles, 512), (gate_up_tiles, 256)):
        split = [num_rows for num_rows in range(1, most + 1) if pick(num_rows).is_split]
        assert split == list(range(1, 17))
