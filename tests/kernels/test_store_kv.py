"""Writing keys and values into the paged cache."""

import pytest
import torch

from nanovllm.kernels.store_kv import store_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def caches(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (5, 4, num_kv_heads, head_dim)
    return [torch.full(shape, -7.0, dtype=dtype, device=DEVICE) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 64), (3, 80), (2, 96), (8, 128)])
def test_tokens_land_in_their_slots_and_nowhere_else(dtype, num_kv_heads, head_dim):
    # Views of a packed qkv row, as the layer hands them over.
    qkv = torch.randn(4, 3, num_kv_heads, head_dim, device=DEVICE).to(dtype)
    _, key, value = qkv.unbind(1)
    slots = torch.tensor([19, -1, 0, 6], device=DEVICE)
    k_cache, v_cache = caches(num_kv_heads, head_dim, dtype)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    for token, (block, offset) in ((0, (4, 3)), (2, (0, 0)), (3, (1, 2))):
        expected_k[block, offset] = key[token]
        expected_v[block, offset] = value[token]
    store_kv(key, value, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_padding_and_empty_batches_store_nothing(num_tokens):
    key = torch.randn(num_tokens, 2, 64, device=DEVICE)
    slots = torch.full((num_tokens,), -1, device=DEVICE)
    k_cache, v_cache = caches(2, 64, torch.float32)
    store_kv(key, key, k_cache, v_cache, slots)
    assert (k_cache == -7).all()
    assert (v_cache == -7).all()


def test_a_cache_of_another_dtype_gets_rounded_values():
    key = torch.randn(1, 2, 64, device=DEVICE)
    k_cache, v_cache = caches(2, 64, torch.float16)
    store_kv(key, key, k_cache, v_cache, torch.tensor([2], device=DEVICE))
    assert torch.equal(k_cache[0, 2], key[0].half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 64), (3, 80), (8, 128)])
def test_fp8_is_divided_by_its_head_s_scale_and_saturates(dtype, num_kv_heads, head_dim):
    torch.manual_seed(0)
    key, value = torch.randn(2, 3, num_kv_heads, head_dim, device=DEVICE).to(dtype)
    kv_scale = 2.0 ** -torch.arange(1, 2 * num_kv_heads + 1, device=DEVICE).view(2, -1)
    key[0, 0, :6] = torch.tensor([1e4, -1e4, 1e30, 448.0 / 2, 2.0**-10, 2.0**-20])
    slots = torch.tensor([3, -1, 17], device=DEVICE)
    k_cache, v_cache = caches(num_kv_heads, head_dim, torch.float8_e4m3fn)
    store_kv(key, value, k_cache, v_cache, slots, kv_scale)
    for new, cache, scale in ((key, k_cache, kv_scale[0]), (value, v_cache, kv_scale[1])):
        expected = torch.full(cache.shape, -7.0, device=DEVICE)
        for token, (block, offset) in ((0, (0, 3)), (2, (4, 1))):
            scaled = (new[token].float() / scale[:, None]).clamp(-448, 448)
            expected[block, offset] = scaled.to(torch.float8_e4m3fn).float()
        assert torch.equal(cache.float(), expected)
    # The first head's scale is 1/2: two that saturate, and a half of the smallest step.
    stored = k_cache[0, 3, 0, :6].float().tolist()
    assert stored == [448.0, -448.0, 448.0, 448.0, 2.0**-9, 0.0]
