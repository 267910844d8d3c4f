"""What transformers assumes for keys that a config.json leaves out, by architecture."""

from typing import Any

# Only where a default differs from ours for all. Qwen3 and its sparse form are not here: their
# checkpoints state all.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
    },
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "eos_token_id": 2,
    },
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 32000,
    },
    "Qwen2ForCausalLM": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
}


def with_defaults(architecture: str, d: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with absent keys filled in; a null stays null, as it has its own meaning."""
    defaults = dict(_DEFAULTS.get(architecture, {}))
    for place in ("rope_parameters", "rope_scaling"):
        if isinstance(d.get(place), dict) and d[place].get("rope_theta") is not None:
            defaults.pop("rope_theta", None)  # or it would contradict the one that is stated
    return defaults | d
