"""Phi-3 and Phi-4, dense, whose rotary embedding is not LongRoPE."""

from collections.abc import Iterable, Iterator

import torch

from nanovllm.models.decoder import AttentionOptions, DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.loader import check_shape


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3: no biases, and a checkpoint that fuses as we do. Its window bounds the context."""

    def attention_options(self, config: ModelConfig) -> AttentionOptions:
        return AttentionOptions(qk_norm=False, qkv_bias=False, o_bias=False)

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool = False
    ) -> None:
        super().load_weights(_split(weights, self.config), partial=partial)

    def check_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        super().check_weights(list(_split(weights, self.config)))


def _split(
    weights: Iterable[tuple[str, torch.Tensor]], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Take fused tensors apart, since each part is sharded by itself."""
    kv_size = config.num_kv_heads * config.head_dim
    q_size = config.num_heads * config.head_dim
    parts = {
        "qkv_proj": {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
    }
    for name, tensor in weights:
        prefix, _, fused = name.removesuffix(".weight").rpartition(".")
        sizes = parts.get(fused)
        if sizes is None:
            yield name, tensor
            continue
        try:
            check_shape(tensor, (sum(sizes.values()), config.hidden_size))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        for part, rows in zip(sizes, tensor.split_with_sizes(list(sizes.values())), strict=True):
            yield f"{prefix}.{part}.weight", rows
