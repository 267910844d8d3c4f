"""Phi-3 and Phi-4, dense, whose rotary embedding is not LongRoPE."""

from collections.abc import Iterable, Iterator

import torch

from nanovllm.models.decoder import AttentionOptions, DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.checks import errors_named
from nanovllm.utils.loader import check_shape

_BLOCK = 128  # of Qwen's and DeepSeek's fp8 scales


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3: no biases, and a checkpoint that fuses as we do. Its window bounds the context."""

    def attention_options(self, config: ModelConfig) -> AttentionOptions:
        return AttentionOptions(qk_norm=False, qkv_bias=False, o_bias=False)

    def split_fused(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        return _split(weights, self.config)


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
    # Rows and columns of a weight that one number of it stands for: scales of fp8 are fused too.
    grains = {
        "weight": (1, 1),
        "weight_scale": (1, config.hidden_size),
        "weight_scale_inv": (_BLOCK, _BLOCK),
    }
    for name, tensor in weights:
        stem, _, kind = name.rpartition(".")
        prefix, _, fused = stem.rpartition(".")
        if fused not in parts or kind not in grains:
            yield name, tensor
            continue
        rows, columns = grains[kind]
        sizes = parts[fused]
        if any(size % rows for size in sizes.values()):
            raise ValueError(
                f"{name}: blocks of {rows} rows do not divide the parts of {fused}, {sizes}."
            )
        counts = [size // rows for size in sizes.values()]
        with errors_named(name):
            check_shape(tensor, (sum(counts), -(-config.hidden_size // columns)))
        for part, piece in zip(sizes, tensor.split_with_sizes(counts), strict=True):
            yield f"{prefix}.{part}.{kind}", piece
