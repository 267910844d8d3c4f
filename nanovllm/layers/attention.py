"""Self-attention over the paged KV cache."""

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.kernels.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanovllm.layers.placement import Placement
from nanovllm.utils.context import ForwardContext


class SelfAttention(nn.Module):
    """Projects, norms and rotates q and k, stores K and V in this layer's cache, then attends."""

    def __init__(
        self,
        layer_id: int,
        place: Placement,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        qk_norm: bool,
        qkv_bias: bool,
        o_bias: bool,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.head_dim = head_dim
        self.eps = rms_norm_eps
        self.backend = backend
        self.qkv_proj = QKVParallelLinear(
            hidden_size, num_heads, num_kv_heads, head_dim, place, bias=qkv_bias
        )
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, place, bias=o_bias)
        if qk_norm:
            self.q_norm: RMSNorm | None = RMSNorm(head_dim, self.eps, place)
            self.k_norm: RMSNorm | None = RMSNorm(head_dim, self.eps, place)
        else:
            self.q_norm = self.k_norm = None

    def forward(
        self,
        positions: torch.Tensor,  # [num_tokens]
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        cos_sin: torch.Tensor,  # [max_positions, head_dim] float32
        ctx: ForwardContext,
    ) -> torch.Tensor:  # [num_tokens, hidden_size], or shares of it: see RowParallelLinear.partials
        k_cache, v_cache = ctx.kv_cache[0, self.layer_id], ctx.kv_cache[1, self.layer_id]
        kv_scale = None if ctx.kv_scales is None else ctx.kv_scales[self.layer_id]
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        qkv: torch.Tensor = self.qkv_proj(hidden)
        qk_norm_rope_store(  # in place: q and k in qkv are normed and rotated after it
            qkv, q_weight, k_weight, self.eps, cos_sin, positions, ctx.slot_mapping,
            k_cache, v_cache, num_heads, num_kv_heads, self.head_dim, kv_scale,
        )  # fmt: skip
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, self.head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        out = self.backend.forward(q, k, v, k_cache, v_cache, ctx, kv_scale)
        projected: torch.Tensor = self.o_proj.partials(out.flatten(1))
        return projected
