"""Qwen3, dense."""

from nanovllm.models.decoder import AttentionOptions, DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3: RMSNorm on every query and key head."""

    def attention_options(self, config: ModelConfig) -> AttentionOptions:
        bias = config.attention_bias
        return AttentionOptions(qk_norm=True, qkv_bias=bias, o_bias=bias)
