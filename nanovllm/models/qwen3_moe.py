"""Qwen3 with mixtures of experts."""

from collections.abc import Iterable

import torch
from torch import nn

from nanovllm.models.decoder import Placement
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
            top_k=moe.num_experts_per_tok,
            is_normalized=moe.norm_topk_prob,
            parallel=place.parallel,
            device=place.device,
            dtype=place.dtype,
        )

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool = False
    ) -> None:
        super().load_weights(one_by_one(weights, self._num_experts), partial=partial)

    def check_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        super().check_weights(list(one_by_one(weights, self._num_experts)))

    @property
    def _num_experts(self) -> int:
        assert self.config.moe is not None, "the reading of config.json asks for it"
        return self.config.moe.num_experts
