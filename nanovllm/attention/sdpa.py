"""Attention with torch alone: the CPU path, and the reference of the others."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.kernels.store_kv import as_words
from nanovllm.utils.context import ForwardContext

# Decode gathers keys and values of a slice of rows; this bounds the slice's temporary memory.
_MAX_GATHERED_TOKENS = 1 << 17


class SdpaBackend:
    """Any device, dtype and head_dim; needs no extra package."""

    name = "sdpa"
    is_capturable = False

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, max_num_seqs: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self._scale = head_dim**-0.5

    def prepare(self, ctx: ForwardContext) -> Any:
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor,
        v_cache: torch.Tensor, ctx: ForwardContext, kv_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if ctx.is_decode:
            return decode_attention(
                q, k_cache, v_cache, ctx.block_tables, ctx.seq_lens, self._scale, kv_scale
            )
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        begin = 0
        for seq, (num_queries, seq_len) in enumerate(ctx.host_seqlens):
            end = begin + num_queries
            # In fp8 never the fresh ones: answers must not depend on how prompts are cut.
            if ctx.has_cached_prefix or kv_scale is not None:
                pages = (ctx.block_tables[seq], seq_len, kv_scale, q.dtype)
                keys, values = gather_pages(k_cache, v_cache, *pages)
            else:
                keys, values = k[begin:end], v[begin:end]
            out[begin:end] = causal_attention(q[begin:end], keys, values, self._scale)
            begin = end
        return out


def gather_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_len: int,
    kv_scale: torch.Tensor | None, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return one sequence's keys and values, [seq_len, num_kv_heads, head_dim] each, in `dtype`.

    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], block_table: [max_blocks]
    int32, kv_scale: [2, num_kv_heads] float32 for a cache in fp8
    """
    blocks = block_table[: -(-seq_len // k_cache.shape[1])].long()
    keys, values = (as_words(c)[blocks].flatten(0, 1)[:seq_len] for c in (k_cache, v_cache))
    keys, values = keys.view(k_cache.dtype), values.view(v_cache.dtype)
    return dequantised(keys, 0, kv_scale, dtype), dequantised(values, 1, kv_scale, dtype)


def dequantised(
    x: torch.Tensor, index: int, kv_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return keys (index 0) or values (1) out of a cache as values to compute with, x's shape.

    x: [..., num_kv_heads, head_dim], kv_scale: [2, num_kv_heads] float32 if the cache is fp8
    """
    # Scales are powers of two, so nothing is rounded.
    return x.to(dtype) if kv_scale is None else x.to(dtype) * kv_scale[index, :, None].to(dtype)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend within one sequence; the queries are its last tokens. Returns q's shape.

    q: [num_queries, num_heads, head_dim], k, v: [seq_len, num_kv_heads, head_dim]
    """
    num_queries, seq_len = q.shape[0], k.shape[0]
    # Repeated heads instead of enable_gqa: with a mask, the latter falls back to the path that
    # materialises all scores.
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mask = None
    if num_queries not in (1, seq_len):
        # Not SDPA's is_causal: that aligns to the top left, but the new tokens are the last ones.
        positions = torch.arange(seq_len, device=q.device)
        mask = positions <= positions[seq_len - num_queries :, None]
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=num_queries == seq_len and num_queries > 1,
        scale=scale,
    )
    return out[0].transpose(0, 1)


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend from one query per row to the row's cached tokens, [num_seqs, num_heads, head_dim].

    q: [num_seqs, num_heads, head_dim], k_cache, v_cache: [num_blocks, block_size, num_kv_heads,
    head_dim], block_tables: [num_seqs, max_blocks] int32, seq_lens: [num_seqs] int32, 0 = padding,
    kv_scale: [2, num_kv_heads] float32 for a cache in fp8
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    max_len = int(seq_lens.max()) if len(seq_lens) else 0
    if max_len == 0:
        return out
    num_rows = max(1, _MAX_GATHERED_TOKENS // max_len)
    for begin in range(0, len(q), num_rows):
        rows = slice(begin, begin + num_rows)
        out[rows] = _decode_slice(
            q[rows], k_cache, v_cache, block_tables[rows], seq_lens[rows].long(), scale, kv_scale
        )
    return out


def _decode_slice(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, kv_scale: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_seqs, num_heads = q.shape[:2]
    positions = torch.arange(max(1, int(seq_lens.max())), device=q.device).expand(num_seqs, -1)
    is_valid = positions < seq_lens[:, None]
    # Past a row's end read its first token: unwritten memory may hold NaN, and 0 * NaN is NaN.
    positions = positions.where(is_valid, 0)
    block_ids = block_tables.gather(1, positions // block_size).long()
    # A padding row's table holds anything, even -1; block 0 exists and its output is dropped.
    is_padding = (seq_lens == 0)[:, None]
    slots = (block_ids * block_size + positions % block_size).masked_fill(is_padding, 0)
    # index_select on flat rows: twice to four times as fast on a CPU as indexing with a matrix.
    shape = (*slots.shape, num_kv_heads, head_dim)
    keys, values = (
        as_words(cache).flatten(0, 1).flatten(1).index_select(0, slots.flatten())
        for cache in (k_cache, v_cache)
    )
    keys, values = keys.view(k_cache.dtype).view(shape), values.view(v_cache.dtype).view(shape)
    out = scaled_dot_product_attention(
        # The heads that share a kv head become its queries, so nothing is repeated.
        q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim),
        dequantised(keys, 0, kv_scale, q.dtype).transpose(1, 2),
        dequantised(values, 1, kv_scale, q.dtype).transpose(1, 2),
        attn_mask=(is_valid | is_padding)[:, None, None, :],
        scale=scale,
    )
    return out.reshape(q.shape).masked_fill(is_padding[:, :, None], 0)
