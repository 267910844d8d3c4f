"""Decode's QKV and gate-up projections, each one kernel with what follows it.

The decoder loads this by name on CUDA; what does not fit runs as it does without.
"""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.fused.gate_up_silu import gate_up_silu_triton
from nanovllm.fused.qkv_rope_store import qkv_rope_store_triton
from nanovllm.fused.tiles import (
    GATE_UP_ROWS,
    MAX_IN_FEATURES,
    MULTIPLE_OF_IN_FEATURES,
    MULTIPLE_OF_SIZE,
    QKV_ROWS,
)
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.layers.attention import SelfAttention, project
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from nanovllm.models.decoder import GatedMLP, activate
from nanovllm.utils.context import ForwardContext

_HEAD_DIM = 128


def install(model: nn.Module, device: torch.device) -> None:
    """Let the layers of `model` use the fused kernels where these fit."""
    # Others have too little shared memory for these tiles.
    if not HAS_TRITON or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return
    for module in model.modules():
        if type(module) is SelfAttention:
            module.project = fused_project
        elif type(module) is GatedMLP:
            module.activate = fused_activate


def fused_project(
    layer: SelfAttention, hidden: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor,
    ctx: ForwardContext, kv_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As `project`; in decode steps one kernel, and k and v empty: they are in the cache."""
    linear = layer.qkv_proj
    # Asked at each call (once a captured graph), since linear layers may be replaced by fp8 ones.
    fits = ctx.is_decode and type(linear) is QKVParallelLinear and _fits(linear, hidden, QKV_ROWS)
    if not (fits and layer.head_dim == _HEAD_DIM):
        return project(layer, hidden, positions, cos_sin, ctx, kv_scale)
    q_weight = None if layer.q_norm is None else layer.q_norm.weight
    k_weight = None if layer.k_norm is None else layer.k_norm.weight
    caches = ctx.kv_cache[0, layer.layer_id], ctx.kv_cache[1, layer.layer_id]
    q = qkv_rope_store_triton(
        hidden, linear.weight, q_weight, k_weight, layer.eps, cos_sin, positions,
        ctx.slot_mapping, *caches, linear.num_heads, kv_scale=kv_scale,
    )  # fmt: skip
    return q, q[:, :0], q[:, :0]


def fused_activate(layer: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    """As `activate`, in one kernel where there are few tokens."""
    linear = layer.gate_up_proj
    fits = type(linear) is MergedColumnParallelLinear and _fits(linear, x, GATE_UP_ROWS)
    if not (fits and linear.weight.shape[0] % (2 * MULTIPLE_OF_SIZE) == 0):
        return activate(layer, x)
    return gate_up_silu_triton(x, linear.weight)


def _fits(linear: MergedColumnParallelLinear, x: torch.Tensor, rows: range) -> bool:
    is_half = linear.weight.dtype in (torch.bfloat16, torch.float16) and linear.bias is None
    in_features = x.shape[1]
    is_narrow = in_features % MULTIPLE_OF_IN_FEATURES == 0 and in_features <= MAX_IN_FEATURES
    return is_half and is_narrow and len(x) in rows
