"""Llama 2 and 3, and what has their layout: SmolLM2, TinyLlama."""

from nanovllm.models.decoder import AttentionOptions, DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama: `attention_bias` is for all four projections."""

    def attention_options(self, config: ModelConfig) -> AttentionOptions:
        bias = config.attention_bias
        return AttentionOptions(qk_norm=False, qkv_bias=bias, o_bias=bias)
