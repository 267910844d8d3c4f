"""The QKV projection of a decode step with QK-norm, rotary embedding and KV cache write in it."""

from __future__ import annotations

import torch

from nanovllm.fused.product import (
    grid_of,
    halves,
    num_parts_of,
    product_share,
    put_share,
    scaled_linear_reference,
    shares_of,
    sum_shares,
)
from nanovllm.fused.tiles import Tiles, qkv_tiles
from nanovllm.kernels._triton import pdl_options, tl, triton
from nanovllm.kernels.qk_norm_rope_store import qk_norm_rope_store_reference, to_e4m3_range
from nanovllm.kernels.split_gemm import product


def qkv_rope_store_reference(
    x: torch.Tensor, weight: torch.Tensor, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor, positions: torch.Tensor,
    slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, num_heads: int,
    kv_scale: torch.Tensor | None = None, squares: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `qkv_rope_store_triton`, out of the parts that it fuses."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    qkv = scaled_linear_reference(x, weight, squares, eps)
    qk_norm_rope_store_reference(
        qkv, q_weight, k_weight, eps, cos_sin, positions, slots, k_cache, v_cache, num_heads,
        num_kv_heads, head_dim, kv_scale,
    )  # fmt: skip
    return qkv[:, : num_heads * head_dim].reshape(-1, num_heads, head_dim)


def qkv_rope_store_triton(
    x: torch.Tensor, weight: torch.Tensor, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, eps: float, cos_sin: torch.Tensor, positions: torch.Tensor,
    slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, num_heads: int,
    tiles: Tiles | None = None, kv_scale: torch.Tensor | None = None,
    squares: torch.Tensor | None = None, num_done: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Project x, norm (if there are weights) and rotate q and k, store k and v; return q.

    Args:
        x: [num_rows, in_features], rows may be strided
        weight: [(num_heads + 2 * num_kv_heads) * head_dim, in_features], contiguous
        q_weight, k_weight: [head_dim] or None, both or neither
        cos_sin: [max_positions, head_dim] float32, the first half cosines, the second sines
        positions: [num_rows] int64 or int32
        slots: [num_rows] int64, -1 is not stored
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, in place
        kv_scale: [2, num_kv_heads] float32 for a cache in fp8, as `store_kv` has it
        squares: with eps the factor of each row that x is yet to be multiplied by; see
            `gemm_add_triton`; for split tiles only, which are those of few rows
        num_done: as there, for split tiles

    Returns q, [num_rows, num_heads, head_dim].
    """
    num_rows, in_features = x.shape
    num_kv_heads, head_dim = k_cache.shape[2:]
    tiles = tiles or qkv_tiles(num_rows)
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows and weight must be contiguous"
    assert k_cache.is_contiguous() and v_cache.is_contiguous(), "a cache view is contiguous"
    assert (q_weight is None) == (k_weight is None), "norm both or neither"
    assert squares is None or tiles.is_split, "only shares are scaled"
    q = torch.empty((num_rows, num_heads, head_dim), dtype=x.dtype, device=x.device)
    grid = grid_of(x, num_heads + 2 * num_kv_heads, tiles)
    shares = shares_of(x, grid, tiles.block_m * head_dim, num_done) if tiles.is_split else None
    _qkv_rope_store_kernel[grid](
        x, squares, weight, q_weight, k_weight, eps, cos_sin, positions, slots, q, k_cache, v_cache,
        kv_scale, shares, num_done, num_rows, x.stride(0), positions.stride(0), slots.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
        IN_FEATURES=in_features, NUM_PARTS=num_parts_of(squares), BLOCK_M=tiles.block_m,
        BLOCK_K=tiles.block_k, **tiles.options(), **pdl_options(x),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize=["num_rows"])  # or batches of 1 and of multiples of 16 compile anew
def _qkv_rope_store_kernel(
    x, squares, weight, q_weight, k_weight, eps, cos_sin, positions, slots, q, k_cache, v_cache,
    kv_scale, shares, num_done, num_rows, x_stride, positions_stride, slots_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    IN_FEATURES: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    NUM_SPLITS: tl.constexpr = IN_FEATURES // BLOCK_K
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    is_row = rows < num_rows
    features_of_head = head * 2 * HALF + tl.arange(0, 2 * HALF)
    if shares is None:
        sums = product(
            x, x_stride, weight, rows, features_of_head, num_rows, IN_FEATURES, IN_FEATURES,
            BLOCK_K, PDL,
        )  # fmt: skip
    else:
        sums = product_share(
            x, x_stride, squares, eps, weight, rows, features_of_head, num_rows, IN_FEATURES,
            NUM_PARTS, BLOCK_K, PDL,
        )  # fmt: skip
        if not put_share(sums, shares, num_done, is_row[:, None], BLOCK_M, 2 * HALF, NUM_SPLITS):
            return
        sums = sum_shares(shares, is_row[:, None], BLOCK_M, 2 * HALF, NUM_SPLITS)
    first, second = halves(sums, x, HALF, BLOCK_M)
    slot = tl.load(slots + rows * slots_stride, mask=is_row, other=-1).to(tl.int64)
    columns = tl.arange(0, HALF)[None, :]
    is_stored = (slot >= 0)[:, None]

    if head >= NUM_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_HEADS - NUM_KV_HEADS
        if kv_scale is not None:  # rounded first to what the projection alone gives
            scale = tl.load(kv_scale + NUM_KV_HEADS + kv_head)
            first = to_e4m3_range(_round(first, x), scale)
            second = to_e4m3_range(_round(second, x), scale)
        target = v_cache + (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + columns
        tl.store(target, first.to(v_cache.dtype.element_ty), mask=is_stored)
        tl.store(target + HALF, second.to(v_cache.dtype.element_ty), mask=is_stored)
        return

    is_key = head >= NUM_HEADS
    if q_weight is not None:
        norm_weight = k_weight if is_key else q_weight
        total = tl.sum(first * first + second * second, axis=1)[:, None]
        scale = tl.rsqrt(total / (2 * HALF) + eps)
        # Rounded where Hugging Face rounds: after the norm and after its weight.
        weight_first = tl.load(norm_weight + columns).to(tl.float32)
        weight_second = tl.load(norm_weight + HALF + columns).to(tl.float32)
        first = _round(_round(first * scale, x) * weight_first, x)
        second = _round(_round(second * scale, x) * weight_second, x)
    position = tl.load(positions + rows * positions_stride, mask=is_row, other=0)
    table = cos_sin + position.to(tl.int64)[:, None] * (2 * HALF) + columns
    cos = tl.load(table)
    sin = tl.load(table + HALF)
    new_first = (first * cos - second * sin).to(x.dtype.element_ty)
    new_second = (second * cos + first * sin).to(x.dtype.element_ty)
    if is_key:
        kv_head = head - NUM_HEADS
        target = k_cache + (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + columns
        if kv_scale is None:
            tl.store(target, new_first.to(k_cache.dtype.element_ty), mask=is_stored)
            tl.store(target + HALF, new_second.to(k_cache.dtype.element_ty), mask=is_stored)
        else:
            k_scale = tl.load(kv_scale + kv_head)
            k_first = to_e4m3_range(new_first, k_scale)
            k_second = to_e4m3_range(new_second, k_scale)
            tl.store(target, k_first.to(k_cache.dtype.element_ty), mask=is_stored)
            tl.store(target + HALF, k_second.to(k_cache.dtype.element_ty), mask=is_stored)
    else:
        q_target = q + (rows * NUM_HEADS + head)[:, None] * (2 * HALF) + columns
        tl.store(q_target, new_first, mask=is_row[:, None])
        tl.store(q_target + HALF, new_second, mask=is_row[:, None])


@triton.jit
def _round(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)
