"""QK-norm, rotary embedding and the KV cache write, fused: all that stands between two GEMMs."""

import torch

from nanovllm.kernels._triton import pdl_options, pdl_wait, tl, triton, use_triton
from nanovllm.kernels.rms_norm import rms_norm_reference
from nanovllm.kernels.store_kv import store_kv


def qk_norm_rope_store(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
    cos_sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
    kv_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Norm (if there are weights) and rotate q and k in place, then store k and v.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], in place
        q_weight, k_weight: [head_dim] or None, both or neither
        cos_sin: [max_positions, head_dim] float32, the first half cosines, the second sines
        positions: [num_tokens] int64 or int32
        slots: [num_tokens] int64, -1 is not stored
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, in place
        kv_scale: [2, num_kv_heads] float32, as `store_kv` has it, for an fp8 cache
    """
    # The kernel's tiles are powers of two. Other head sizes rotate and store in torch.
    has_tile = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    kernel = qk_norm_rope_store_triton if use_triton(qkv) and has_tile else None
    (kernel or qk_norm_rope_store_reference)(
        qkv, q_weight, k_weight, eps, cos_sin, positions, slots, k_cache, v_cache, num_heads,
        num_kv_heads, head_dim, kv_scale,
    )  # fmt: skip


def qk_norm_rope_store_reference(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
    cos_sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
    kv_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Plain torch form of `qk_norm_rope_store`."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.tensor_split(heads, [num_heads, num_heads + num_kv_heads], dim=1)
    # [num_tokens, 1, head_dim / 2] each
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = x if weight is None else rms_norm_reference(x, weight, eps)
        first, second = normed.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    store_kv(k, v, k_cache, v_cache, slots, kv_scale)


def qk_norm_rope_store_triton(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
    cos_sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
    kv_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Triton form of `qk_norm_rope_store`: a program takes a group of one token's heads."""
    num_tokens = qkv.shape[0]
    assert qkv.stride(1) == 1, "rows must be contiguous"
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "a cache view is contiguous"
    assert (q_weight is None) == (k_weight is None), "norm both or neither"
    if num_tokens == 0:
        return
    # Groups of at most 1024 elements, 16 a thread: 16 bytes of each half. None mixes q, k and v.
    group = min(triton.next_power_of_2(num_kv_heads), max(1024 // head_dim, 1))
    q_groups, kv_groups = triton.cdiv(num_heads, group), triton.cdiv(num_kv_heads, group)
    _qk_norm_rope_store_kernel[(num_tokens, q_groups + 2 * kv_groups)](
        qkv, q_weight, k_weight, eps, cos_sin, positions, slots, k_cache, v_cache, kv_scale,
        qkv.stride(0), positions.stride(0), slots.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, GROUP=group,
        Q_GROUPS=q_groups, KV_GROUPS=kv_groups,
        num_warps=min(max(group * head_dim // 512, 1), 8), **pdl_options(qkv),
    )  # fmt: skip


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv, q_weight, k_weight, eps, cos_sin, positions, slots, k_cache, v_cache, kv_scale,
    qkv_stride, positions_stride, slots_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr, Q_GROUPS: tl.constexpr, KV_GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, HALF)[None, :]
    row = qkv + token * qkv_stride
    cache_row = tl.load(slots + token * slots_stride).to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)

    if group >= Q_GROUPS + KV_GROUPS:
        heads = (group - Q_GROUPS - KV_GROUPS) * GROUP + tl.arange(0, GROUP)[:, None]
        whole = tl.arange(0, HEAD_DIM)[None, :]
        mask = heads < NUM_KV_HEADS
        source = row + (NUM_HEADS + NUM_KV_HEADS + heads) * HEAD_DIM + whole
        value = tl.load(source, mask=mask, other=0.0)
        if kv_scale is not None:
            scale = tl.load(kv_scale + NUM_KV_HEADS + heads, mask=mask, other=1.0)
            value = to_e4m3_range(value, scale)
        if cache_row >= 0:
            target = v_cache + cache_row + heads * HEAD_DIM + whole
            tl.store(target, value.to(v_cache.dtype.element_ty), mask=mask)
        return

    is_key = group >= Q_GROUPS
    heads = (group - tl.where(is_key, Q_GROUPS, 0)) * GROUP + tl.arange(0, GROUP)[:, None]
    mask = heads < tl.where(is_key, NUM_KV_HEADS, NUM_HEADS)
    # The halves are two tiles, so that rotating moves nothing between threads.
    pointers = row + (heads + tl.where(is_key, NUM_HEADS, 0)) * HEAD_DIM + columns
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    table = cos_sin + tl.load(positions + token * positions_stride).to(tl.int64) * HEAD_DIM
    cos = tl.load(table + columns)
    sin = tl.load(table + HALF + columns)

    if q_weight is not None:
        # Not a choice of pointer: that would lose its alignment, and with it the wide loads.
        if is_key:
            weight_first = tl.load(k_weight + columns)
            weight_second = tl.load(k_weight + HALF + columns)
        else:
            weight_first = tl.load(q_weight + columns)
            weight_second = tl.load(q_weight + HALF + columns)
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        # Rounded where Hugging Face rounds: after the norm and after its weight.
        first = _round(_round(first * scale, qkv) * weight_first.to(tl.float32), qkv)
        second = _round(_round(second * scale, qkv) * weight_second.to(tl.float32), qkv)

    new_first = (first * cos - second * sin).to(qkv.dtype.element_ty)
    new_second = (second * cos + first * sin).to(qkv.dtype.element_ty)
    tl.store(pointers, new_first, mask=mask)
    tl.store(pointers + HALF, new_second, mask=mask)
    if kv_scale is not None:
        scale = tl.load(kv_scale + heads, mask=heads < NUM_KV_HEADS, other=1.0)
        new_first = to_e4m3_range(new_first, scale)
        new_second = to_e4m3_range(new_second, scale)
    if is_key & (cache_row >= 0):
        target = k_cache + cache_row + heads * HEAD_DIM + columns
        tl.store(target, new_first.to(k_cache.dtype.element_ty), mask=mask)
        tl.store(target + HALF, new_second.to(k_cache.dtype.element_ty), mask=mask)


@triton.jit
def _round(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def to_e4m3_range(x, scale):
    """Divide by the scale; what is beyond the range of e4m3 saturates."""
    return tl.clamp(x.to(tl.float32) / scale, -448.0, 448.0)
