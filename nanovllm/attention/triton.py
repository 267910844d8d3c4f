"""Attention with our Triton kernels, and torch's own FlashAttention for fresh prompts."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.paged_attention import paged_attention_triton
from nanovllm.kernels.paged_prefill import paged_prefill_triton
from nanovllm.utils.context import ForwardContext

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older than torch 2.10
    varlen_attn = None

logger = logging.getLogger(__name__)

# (q, k, v, ctx, scale) -> out, for chunks that attend to nothing but themselves
FreshPrefill = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, ForwardContext, float], torch.Tensor
]


class TritonBackend:
    """Owns the decode plan; head_dim a power of two, CUDA or the interpreter."""

    name = "triton"
    is_capturable = True

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float | None = None,
    ) -> None:
        self._scale = head_dim**-0.5 if scale is None else scale
        self._plan = DecodePlan(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_num_seqs=max_num_seqs,
            dtype=dtype,
            device=device,
        )
        self._prefill_fresh = self._choose_fresh_prefill(
            num_heads, num_kv_heads, head_dim, dtype, device
        )

    def prepare(self, ctx: ForwardContext) -> DecodePlan | None:
        if not ctx.is_decode:
            return None
        self._plan.update(ctx.seq_lens)
        return self._plan

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:
        if ctx.is_decode:
            return paged_attention_triton(
                q, k_cache, v_cache, ctx.block_tables, ctx.seq_lens, self._scale, ctx.attn_metadata
            )
        if not ctx.has_cached_prefix and self._prefill_fresh is not None:
            return self._prefill_fresh(q, k, v, ctx, self._scale)
        return self._prefill_cached(q, k_cache, v_cache, ctx)

    def _prefill_cached(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        assert ctx.cu_seqlens_q is not None, "prefill steps carry it"
        return paged_prefill_triton(
            q,
            k_cache,
            v_cache,
            ctx.block_tables,
            ctx.seq_lens,
            ctx.cu_seqlens_q,
            ctx.max_seqlen_q,
            self._scale,
        )

    def _choose_fresh_prefill(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FreshPrefill | None:
        """Return what takes chunks with nothing cached, or None for our own paged kernel."""
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return None
        return varlen_prefill(num_heads // num_kv_heads)


def varlen_prefill(group: int) -> FreshPrefill | None:
    """Return a prefill by the FlashAttention inside torch, or None where this torch has none.

    Its interface changes from release to release, so the installed one is looked at, once.
    """
    if varlen_attn is None:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    # What asks for a causal mask: a window without a right side, or a plain switch before that.
    if "window_size" in parameters:
        causal: dict[str, Any] = {"window_size": (-1, 0)}
    elif "is_causal" in parameters:
        causal = {"is_causal": True}
    else:
        logger.info("torch.nn.attention.varlen has no causal mask here; using the paged kernel")
        return None
    has_scale, has_gqa = "scale" in parameters, "enable_gqa" in parameters

    def prefill(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext, scale: float
    ) -> torch.Tensor:
        options = dict(causal)
        if has_scale:
            options["scale"] = scale
        elif scale != q.shape[-1] ** -0.5:
            q = q * (scale * q.shape[-1] ** 0.5)
        if group > 1 and has_gqa:
            options["enable_gqa"] = True
        elif group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        lens = (ctx.cu_seqlens_q, ctx.cu_seqlens_q, ctx.max_seqlen_q, ctx.max_seqlen_q)
        out: torch.Tensor = varlen_attn(q, k, v, *lens, **options)
        return out

    return prefill
