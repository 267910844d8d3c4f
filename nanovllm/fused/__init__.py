"""Decode steps of a narrow model in fewer kernels: five a layer for few rows, else seven.

The five are QKV with all up to attention, attention, the output projection with the add, gate-up
with the activation, and the down projection with the add; norms are parts of them. With more rows
the adds and norms are kernels of their own. The decoder loads this by name on CUDA; what does not
fit runs as it does without.
"""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.fused.gate_up_silu import gate_up_silu_triton
from nanovllm.fused.gemm_add import gemm_add_triton
from nanovllm.fused.product import NUM_COUNTERS
from nanovllm.fused.qkv_rope_store import qkv_rope_store_triton
from nanovllm.fused.tiles import (
    FEW_ROWS,
    MAX_GATE_UP_ROWS,
    MAX_HIDDEN_SIZE,
    MAX_QKV_ROWS,
    MULTIPLE_OF_FEATURES,
)
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.silu_and_mul import silu_and_mul
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


def install(model: DecoderModel, tp_size: int) -> None:
    """Let decode steps of `model`, or of a rank's shard of it, use the fused kernels."""
    weight = model.norm.weight
    # Others have too little shared memory for these tiles.
    if not HAS_TRITON or torch.cuda.get_device_capability(weight.device)[0] not in (9, 10):
        return
    if all(fits(layer) for layer in model.layers):
        # A row that waits for its norm may leave float16's range, and ranks sum before the norm.
        has_five = weight.dtype is torch.bfloat16 and tp_size == 1
        model.run = FusedLayers(weight.device, has_five=has_five)


class FusedLayers:
    """Owns the counters by which a tile's programs know the last; steps must run one by one.

    Holds no reference to the model, which holds this.
    """

    def __init__(self, device: torch.device, *, has_five: bool) -> None:
        self._rows = range(1 if has_five else FEW_ROWS + 1, MAX_QKV_ROWS + 1)
        self._num_done = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)

    def __call__(
        self, model: DecoderModel, input_ids: torch.Tensor, positions: torch.Tensor,
        ctx: ForwardContext,
    ) -> torch.Tensor:  # fmt: skip
        """As `run_layers`, in fewer kernels for decode steps of as many rows as pays."""
        if not ctx.is_decode or len(input_ids) not in self._rows:
            return run_layers(model, input_ids, positions, ctx)
        layers: list[Any] = list(model.layers)
        residual = model.embed_tokens(input_ids)
        x, squares = layers[0].input_layernorm(residual), None
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), model.norm]
        for layer, next_norm in zip(layers, next_norms, strict=True):
            attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
            x = self._attend(attention, x, squares, positions, model.cos_sin, ctx)
            x, squares, residual = self._add_norm(x, attention.o_proj, residual, norm)
            x = self._activate(mlp, x, squares, norm.eps)
            x, squares, residual = self._add_norm(x, mlp.down_proj, residual, next_norm)
        normed: torch.Tensor = x if squares is None else model.norm(residual)
        return normed

    def _add_norm(
        self, x: torch.Tensor, linear: RowParallelLinear, residual: torch.Tensor, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return x after projection, add and norm, and the new residual.

        With squares between them x lacks the norm's factor of each row, which they tell.
        """
        if len(x) > FEW_ROWS:
            x, residual = norm(linear.partials(x), residual)
            return x, None, residual
        x, squares = gemm_add_triton(x, linear.weight, residual, norm.weight, self._num_done)
        return x, squares, residual

    def _activate(
        self, layer: GatedMLP, x: torch.Tensor, squares: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        linear = layer.gate_up_proj
        if len(x) > MAX_GATE_UP_ROWS:
            return silu_and_mul(linear(x))
        return gate_up_silu_triton(x, linear.weight, squares, eps, self._num_done)

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
    """Whether the kernels can do what this layer does."""
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
    features = (hidden_size, size, attention.o_proj.weight.shape[1])
    return (
        mlp.down_proj.weight.dtype in (torch.bfloat16, torch.float16)
        and attention.head_dim == _HEAD_DIM
        and hidden_size <= MAX_HIDDEN_SIZE
        and all(count % MULTIPLE_OF_FEATURES == 0 for count in features)
    )
