"""Which class runs which architecture; model files are imported when first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.models.decoder import DecoderForCausalLM

_MODELS: dict[str, "tuple[str, str] | type[DecoderForCausalLM]"] = {
    "LlamaForCausalLM": ("nanovllm.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("nanovllm.models.mistral", "MistralForCausalLM"),
    "Phi3ForCausalLM": ("nanovllm.models.phi3", "Phi3ForCausalLM"),
    "Qwen2ForCausalLM": ("nanovllm.models.qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("nanovllm.models.qwen3", "Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("nanovllm.models.qwen3_moe", "Qwen3MoeForCausalLM"),
}

# Loaded by name, since models work without it: turns a model class into one with fp8 weights.
_QUANTIZATION = "nanovllm.quantization.model"


def supported_architectures() -> list[str]:
    """Return the names that `architectures` in config.json may have, sorted."""
    return sorted(_MODELS)


def get_model_class(
    architecture: str, quantization: str | None = None
) -> "type[DecoderForCausalLM]":
    """Import the model class of an architecture; a ValueError lists the supported ones.

    quantization: what `ModelConfig.quantization` says of the weights
    """
    if architecture not in _MODELS:
        raise ValueError(
            f"architecture {architecture!r} is not supported; "
            f"supported are {', '.join(supported_architectures())}."
        )
    entry = _MODELS[architecture]
    if isinstance(entry, tuple):
        module, class_name = entry
        model_class: type[DecoderForCausalLM] = getattr(import_module(module), class_name)
    else:
        model_class = entry
    if quantization is not None:
        model_class = import_module(_QUANTIZATION).quantized_class(model_class)
    return model_class


def register_model(architecture: str, model_class: "type[DecoderForCausalLM]") -> None:
    """Add a model class, or replace a built-in one, in this process.

    Ranks and data-parallel engines are processes that import the main script anew: call it at the
    script's top level, outside `if __name__ == "__main__"`, so that they know the class too.
    """
    _MODELS[architecture] = model_class
