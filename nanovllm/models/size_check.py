"""Hold config.json's sizes against the checkpoint's headers, before memory is asked for."""

from pathlib import Path

from nanovllm.models.model_config import ModelConfig
from nanovllm.models.moe_config import MoeConfig
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
    inner = ("intermediate_size", model.intermediate_size)
    num_q, num_kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    query = ("num_attention_heads * head_dim", num_q)
    key = ("num_key_value_heads * head_dim", num_kv)
    all_heads = ("(num_attention_heads + 2 * num_key_value_heads) * head_dim", num_q + 2 * num_kv)
    attention, experts = f"{_LAYERS}0.self_attn", {}
    dense = 0
    if model.moe is not None:
        is_dense = set(model.moe.dense_layers)
        dense = min(is_dense, default=0)
        sparse = next(i for i in range(len(is_dense) + 1) if i not in is_dense)
        experts = _expert_sizes(f"{_LAYERS}{sparse}.mlp", model.moe, hidden)
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        f"{attention}.q_proj.weight": (query, hidden),
        f"{attention}.k_proj.weight": (key, hidden),
        f"{attention}.o_proj.weight": (hidden, query),
        f"{attention}.qkv_proj.weight": (all_heads, hidden),  # Phi-3's
        f"{_LAYERS}{dense}.mlp.gate_proj.weight": (inner, hidden),
        f"{_LAYERS}{dense}.mlp.gate_up_proj.weight": (_doubled(inner), hidden),
        f"{_LAYERS}{dense}.mlp.down_proj.weight": (hidden, inner),
        **experts,
    }


def _expert_sizes(
    mlp: str, moe: MoeConfig, hidden: tuple[str, int]
) -> dict[str, tuple[tuple[str, int], ...]]:
    inner = ("moe_intermediate_size", moe.intermediate_size)
    count = ("num_experts", moe.num_experts)
    return {
        f"{mlp}.gate.weight": (count, hidden),
        f"{mlp}.experts.0.gate_proj.weight": (inner, hidden),
        f"{mlp}.experts.gate_up_proj": (count, _doubled(inner), hidden),  # stacked
    }


def _doubled(field: tuple[str, int]) -> tuple[str, int]:
    return f"2 * {field[0]}", 2 * field[1]
