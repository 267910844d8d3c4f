"""Decode steps of a narrow model in five kernels a layer, which norms and adds are parts of.

The decoder loads this by name on CUDA; what does not fit runs as it does without.
"""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.fused.gate_up_silu import gate_up_silu_triton
from nanovllm.fused.gemm_add import gemm_add_triton
from nanovllm.fused.product import NUM_COUNTERS
from nanovllm.fused.qkv_rope_store import qkv_rope_store_triton
from nanovllm.fused.tiles import (
    MAX_HIDDEN_SIZE,
    MULTIPLE_OF_HIDDEN_SIZE,
    MULTIPLE_OF_WIDTH,
    ROWS,
)
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.layers.attention import SelfAttention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.models.decoder import DecoderLayer, DecoderModel, GatedMLP, run_layers
from nanovllm.utils.context import ForwardContext

_HEAD_DIM = 128


def install(model: DecoderModel) -> None:
    """Let decode steps of `model`, of one rank, use the fused kernels where these fit."""
    device = model.norm.weight.device
    # Others have too little shared memory for these tiles.
    if not HAS_TRITON or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return
    if all(fits(layer) for layer in model.layers):
        model.run = FusedLayers(device)


class FusedLayers:
    """Owns the counters by which a tile's programs know the last; steps must run one by one.

    Holds no reference to the model, which holds this.
    """

    def __init__(self, device: torch.device) -> None:
        self._num_done = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)

    def __call__(
        self, model: DecoderModel, input_ids: torch.Tensor, positions: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:  # fmt: skip
        """As `run_layers`, in fewer kernels for decode steps of as many rows as `tiles.ROWS`."""
        if not ctx.is_decode or len(input_ids) not in ROWS:
            return run_layers(model, input_ids, positions, ctx)
        layers: list[Any] = list(model.layers)
        residual = model.embed_tokens(input_ids)
        # From here on x is what a norm gives but for a factor of each row, which squares tell.
        x, squares = layers[0].input_layernorm(residual), None
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), model.norm]
        for layer, next_norm in zip(layers, next_norms, strict=True):
            attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
            x = self._attend(attention, x, squares, positions, model.cos_sin, ctx)
            x, squares = gemm_add_triton(
                x, attention.o_proj.weight, residual, norm.weight, self._num_done
            )
            x = gate_up_silu_triton(x, mlp.gate_up_proj.weight, squares, norm.eps, self._num_done)
            x, squares = gemm_add_triton(
                x, mlp.down_proj.weight, residual, next_norm.weight, self._num_done
            )
        normed: torch.Tensor = model.norm(residual)
        return normed

    def _attend(
        self, layer: SelfAttention, x: torch.Tensor, squares: torch.Tensor | None,
        positions: torch.Tensor, cos_sin: torch.Tensor, ctx: ForwardContext,
    ) -> torch.Tensor:  # fmt: skip
        q_weight = None if layer.q_norm is None else layer.q_norm.weight
        k_weight = None if layer.k_norm is None else layer.k_norm.weight
        caches = ctx.kv_cache[0, layer.layer_id], ctx.kv_cache[1, layer.layer_id]
        kv_scale = None if ctx.kv_scales is None else ctx.kv_scales[layer.layer_id]
        q = qkv_rope_store_triton(
            x, layer.qkv_proj.weight, q_weight, k_weight, layer.eps, cos_sin, positions,
            ctx.slot_mapping, *caches, layer.qkv_proj.num_heads, kv_scale=kv_scale,
            squares=squares, num_done=self._num_done,
        )  # fmt: skip
        # No k and v of this step beside the cache: decode reads what is in it.
        return layer.backend.forward(q, q[:, :0], q[:, :0], *caches, ctx, kv_scale).flatten(1)


def fits(layer: torch.nn.Module) -> bool:
    """Whether the kernels can do what this layer, of one rank, does."""
    if type(layer) is not DecoderLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not SelfAttention or type(mlp) is not GatedMLP:
        return False
    kinds = {
        layer.input_layernorm: RMSNorm,
        layer.post_attention_layernorm: RMSNorm,
        attention.qkv_proj: QKVParallelLinear,
        attention.o_proj: RowParallelLinear,
        mlp.gate_up_proj: MergedColumnParallelLinear,
        mlp.down_proj: RowParallelLinear,
    }
    # Not subclasses: those quantise.
    if any(type(module) is not kind for module, kind in kinds.items()):
        return False
    if any(getattr(module, "bias", None) is not None for module in kinds):
        return False
    hidden_size, size = mlp.down_proj.weight.shape
    width = attention.o_proj.weight.shape[1]
    return (
        all(module.weight.dtype is torch.bfloat16 for module in kinds)
        and attention.head_dim == _HEAD_DIM
        and hidden_size <= MAX_HIDDEN_SIZE
        and hidden_size % MULTIPLE_OF_HIDDEN_SIZE == 0
        and size % MULTIPLE_OF_WIDTH == width % MULTIPLE_OF_WIDTH == 0
    )
