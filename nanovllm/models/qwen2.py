"""Qwen2 and Qwen2.5, dense."""

from nanovllm.models.decoder import AttentionOptions, DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2: q, k and v have a bias, whatever config.json says; the output projection has none."""

    def attention_options(self, config: ModelConfig) -> AttentionOptions:
        return AttentionOptions(qk_norm=False, qkv_bias=True, o_bias=False)
