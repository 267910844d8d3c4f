"""Mistral, dense."""

from nanovllm.models.decoder import AttentionOptions, DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: no biases, whatever config.json says. Its window bounds `max_context_len`."""

    def attention_options(self, config: ModelConfig) -> AttentionOptions:
        return AttentionOptions(qk_norm=False, qkv_bias=False, o_bias=False)
