"""Attention with the flash-attn package for prefill, and our Triton kernel for decode."""

import logging

import torch
from flash_attn import flash_attn_varlen_func

from nanovllm.attention.backend import flash_attn_fits
from nanovllm.attention.triton import FreshPrefill, TritonBackend
from nanovllm.utils.context import ForwardContext

logger = logging.getLogger(__name__)

_FLASH_ATTN_PAGE = 256  # its paged kernels need pages of a multiple of this


class FlashAttnBackend(TritonBackend):
    """Prefill by flash-attn where it has the kernels; everything else as `TritonBackend`.

    Decode stays ours also where pages would fit: flash-attn's reaches half the bandwidth.
    """

    name = "flash_attn"

    def _choose_fresh_prefill(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FreshPrefill | None:
        if flash_attn_fits(dtype, head_dim):
            return flash_attn_prefill
        logger.warning(
            "flash-attn has no kernels for head_dim %d, %s; attention_backend='flash_attn' "
            "uses the Triton path",
            head_dim,
            dtype,
        )
        return super()._choose_fresh_prefill(num_heads, num_kv_heads, head_dim, dtype, device)

    def _prefill_cached(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        fits = self._prefill_fresh is flash_attn_prefill
        if not fits or k_cache.shape[1] % _FLASH_ATTN_PAGE:
            # Not gathered for flash-attn: that copies every cached token once per row and layer,
            # also those that rows share, and our kernel reads them in place at a like speed.
            return super()._prefill_cached(q, k_cache, v_cache, ctx)
        out: torch.Tensor = flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            ctx.cu_seqlens_q,
            ctx.cu_seqlens_k,
            ctx.max_seqlen_q,
            ctx.max_seqlen_k,
            softmax_scale=self._scale,
            causal=True,
            block_table=ctx.block_tables,
        )
        return out


def flash_attn_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext, scale: float
) -> torch.Tensor:
    """Attend within each chunk; all tensors as in `AttentionBackend.forward`."""
    lens = (ctx.cu_seqlens_q, ctx.cu_seqlens_q, ctx.max_seqlen_q, ctx.max_seqlen_q)
    out: torch.Tensor = flash_attn_varlen_func(q, k, v, *lens, softmax_scale=scale, causal=True)
    return out
