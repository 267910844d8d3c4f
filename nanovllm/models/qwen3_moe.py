"""Qwen3 with mixtures of experts."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nanovllm.layers.placement import Placement
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.moe.layer import SparseMLP, one_by_one


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3-MoE: Qwen3 in which most or all layers have experts in place of the dense MLP."""

    def make_mlp(self, config: ModelConfig, place: Placement, layer_id: int) -> nn.Module:
        moe = config.moe
        assert moe is not None, "the reading of config.json asks for it"
        if layer_id in moe.dense_layers:
            return super().make_mlp(config, place, layer_id)
        return SparseMLP(
            moe.num_experts,
            config.hidden_size,
            moe.intermediate_size,
            place,
            top_k=moe.num_experts_per_tok,
            is_normalized=moe.norm_topk_prob,
        )

    def split_fused(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.config.moe is not None, "the reading of config.json asks for it"
        return one_by_one(weights, self.config.moe.num_experts)
