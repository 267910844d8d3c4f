"""Hold config.json's sizes against the checkpoint's headers, before memory is asked for."""

from pathlib import Path

from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.loader import tensor_shapes

_LAYERS = "model.layers."


def check_sizes(model: ModelConfig, model_dir: Path) -> None:
    """Raise a ValueError naming the field that asks for more than the checkpoint has.

    Else a wrong digit would be met as a lack of memory, or use up what there is. What is smaller,
    missing or of another name is found when the weights are loaded.
    """
    shapes = tensor_shapes(model_dir)
    for name, sizes in _sizes(model).items():
        for (field, asked), found in zip(sizes, shapes.get(name, ()), strict=False):
            if asked > found:
                raise ValueError(
                    f"{model_dir}/config.json: {field} = {asked}, but {name} has the shape "
                    f"{shapes[name]}; do config.json and the weights belong together?"
                )
    numbers = {name.split(".")[2] for name in shapes if name.startswith(_LAYERS)}
    num_layers = len([number for number in numbers if number.isdecimal()])
    if 0 < num_layers < model.num_layers:
        raise ValueError(
            f"{model_dir}/config.json: num_hidden_layers = {model.num_layers}, but the checkpoint "
            f"has {num_layers} layers. Incomplete download, or files of two models?"
        )


def _sizes(model: ModelConfig) -> dict[str, tuple[tuple[str, int], ...]]:
    """Tensor -> the fields that its dimensions follow from, in one layer of each kind."""
    hidden = ("hidden_size", model.hidden_size)
    vocab = ("vocab_size", model.vocab_size)
    query = ("num_attention_heads * head_dim", model.num_heads * model.head_dim)
    key = ("num_key_value_heads * head_dim", model.num_kv_heads * model.head_dim)
    sizes: dict[str, tuple[tuple[str, int], ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        f"{_LAYERS}0.self_attn.q_proj.weight": (query, hidden),
        f"{_LAYERS}0.self_attn.k_proj.weight": (key, hidden),
        f"{_LAYERS}0.mlp.gate_proj.weight": (
            ("intermediate_size", model.intermediate_size),
            hidden,
        ),
    }
    if model.moe is not None:
        expert = ("moe_intermediate_size", model.moe.intermediate_size)
        experts = ("num_experts", model.moe.num_experts)
        first = next(i for i in range(2**16 + 1) if i not in model.moe.dense_layers)
        sizes[f"{_LAYERS}{first}.mlp.gate.weight"] = (experts, hidden)
        sizes[f"{_LAYERS}{first}.mlp.experts.0.gate_proj.weight"] = (expert, hidden)
    return sizes
