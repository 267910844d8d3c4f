"""Attention with the flash-attn package for prefill, and our Triton kernel for decode."""

import torch
from flash_attn import flash_attn_varlen_func

from nanovllm.attention.backend import flash_attn_fits
from nanovllm.attention.triton import TritonBackend
from nanovllm.utils.context import ForwardContext

_PAGE = 256  # flash-attn's paged kernels need pages of a multiple of this


class FlashAttnBackend(TritonBackend):
    """Prefill by flash-attn where it has the kernels; everything else as `TritonBackend`.

    Decode stays ours also where pages would fit: flash-attn's reaches half the bandwidth.
    """

    name = "flash_attn"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor,
        v_cache: torch.Tensor, ctx: ForwardContext, kv_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        is_paged = ctx.has_cached_prefix
        # Small pages are not gathered for flash-attn: that copies every cached token once per row
        # and layer, also those that rows share. Our kernel reads them in place at a like speed.
        is_ours = ctx.is_decode or (is_paged and k_cache.shape[1] % _PAGE != 0)
        if is_ours or not flash_attn_fits(q.dtype, q.shape[2]):
            return super().forward(q, k, v, k_cache, v_cache, ctx, kv_scale)
        out: torch.Tensor = flash_attn_varlen_func(
            q,
            k_cache if is_paged else k,
            v_cache if is_paged else v,
            ctx.cu_seqlens_q,
            ctx.cu_seqlens_k,
            ctx.max_seqlen_q,
            ctx.max_seqlen_k,
            softmax_scale=self._scale,
            causal=True,
            block_table=ctx.block_tables if is_paged else None,
        )
        return out
