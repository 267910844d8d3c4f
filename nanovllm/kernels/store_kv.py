"""Write new keys and values into the paged KV cache."""

import torch

from nanovllm.kernels._triton import tl, triton, use_triton


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slots: torch.Tensor, kv_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write new keys and values into the paged cache, in place; slot -1 is skipped.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], rows may be strided
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous
        slots: [num_tokens] int64, `block_id * block_size + offset`
        kv_scale: [2, num_kv_heads] float32, by which K and V are divided for an fp8 cache; what is
            then beyond its range saturates
    """
    implementation = store_kv_triton if use_triton(key) else store_kv_reference
    implementation(key, value, k_cache, v_cache, slots, kv_scale)


def store_kv_reference(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slots: torch.Tensor, kv_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Plain torch form of `store_kv`; on CUDA it waits for the device to count the slots."""
    rows = (slots >= 0).nonzero().squeeze(1)
    slots = slots[rows].long()
    for index, (new, cache) in enumerate(((key, k_cache), (value, v_cache))):
        new = new[rows]
        if kv_scale is not None:
            new = (new.float() / kv_scale[index, :, None]).clamp(-448, 448)  # fp8's range
        # Indexing, as torch has no index_copy_ of fp8.
        cache.view(-1, *new.shape[1:])[slots] = new.to(cache.dtype)


def store_kv_triton(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slots: torch.Tensor, kv_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Triton form of `store_kv`: one program a token."""
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    assert k_cache.is_contiguous(), "a cache view is contiguous"
    assert v_cache.is_contiguous(), "a cache view is contiguous"
    if num_tokens == 0:
        return
    width = num_kv_heads * head_dim
    _store_kv_kernel[(num_tokens,)](
        key, value, k_cache, v_cache, slots, kv_scale,
        key.stride(0), value.stride(0), slots.stride(0), WIDTH=width, HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= 1024 else 8,
    )  # fmt: skip


@triton.jit
def _store_kv_kernel(
    key, value, k_cache, v_cache, slots, kv_scale, key_stride, value_stride, slots_stride,
    WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    # Before the slot is known: the loads do not wait for it.
    k = tl.load(key + token * key_stride + columns, mask=mask)
    v = tl.load(value + token * value_stride + columns, mask=mask)
    slot = tl.load(slots + token * slots_stride).to(tl.int64)
    if kv_scale is not None:
        scales = kv_scale + columns // HEAD_DIM
        k = to_e4m3_range(k, tl.load(scales, mask=mask, other=1.0))
        v = to_e4m3_range(v, tl.load(scales + WIDTH // HEAD_DIM, mask=mask, other=1.0))
    if slot >= 0:
        tl.store(k_cache + slot * WIDTH + columns, k.to(k_cache.dtype.element_ty), mask=mask)
        tl.store(v_cache + slot * WIDTH + columns, v.to(v_cache.dtype.element_ty), mask=mask)


@triton.jit
def to_e4m3_range(x, scale):
    return tl.clamp(x.to(tl.float32) / scale, -448.0, 448.0)
