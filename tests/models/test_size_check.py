"""Sizes in config.json that the checkpoint's headers deny, refused before memory is asked for."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from nanovllm.frontend.start_up import check_ranks
from nanovllm.models.model_config import load_model_config
from nanovllm.models.size_check import check_sizes

MOE = {
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [2],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny(root / name, name, **fields)
        for name, fields in {"Phi3ForCausalLM": {}, "Qwen3MoeForCausalLM": MOE}.items()
    }


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        (
            "Phi3ForCausalLM",
            {"intermediate_size": 97},
            r"2 \* intermediate_size = 194, but .*gate_u",
        ),
        ("Phi3ForCausalLM", {"num_heads": 8}, "= 128, but model.layers.0.self_attn.o_proj"),
        ("Phi3ForCausalLM", {"num_kv_heads": 4}, r"2 \* num_key_value_heads\) \* head_dim = 192"),
        ("Phi3ForCausalLM", {"hidden_size": 65}, "hidden_size = 65, but"),
        (
            "Qwen3MoeForCausalLM",
            {"intermediate_size": 97},
            "= 97, but model.layers.2.mlp.gate_proj",
        ),
    ],
    ids=str,
)
def test_fused_tensors_and_dense_layers_behind_sparse_ones_are_compared(
    models, architecture, changes, words
):
    model = load_model_config(models[architecture])
    check_sizes(model, models[architecture])
    with pytest.raises(ValueError, match=words):
        check_sizes(replace(model, **changes), models[architecture])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 7}, "num_experts = 7, but model.layers.0.mlp"),
        ({"intermediate_size": 25}, "moe_intermediate_size = (25|50), but model.layers.0.mlp.exp"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_compared_one_by_one_or_stacked(models, tmp_path, changes, words, stacked):
    directory = models["Qwen3MoeForCausalLM"]
    model = load_model_config(directory)
    if stacked:
        prefix = "model.layers.0.mlp.experts"
        tensors = load_file(directory / "model.safetensors")
        tensors = {name: tensor for name, tensor in tensors.items() if "experts" not in name}
        tensors[f"{prefix}.gate_up_proj"] = torch.zeros(6, 48, 64)
        tensors[f"{prefix}.down_proj"] = torch.zeros(6, 64, 24)
        save_file(tensors, tmp_path / "model.safetensors")
        directory = tmp_path
    check_sizes(model, directory)
    assert model.moe is not None
    with pytest.raises(ValueError, match=words):
        check_sizes(replace(model, moe=replace(model.moe, **changes)), directory)


def test_many_dense_layers_are_compared_soon(models):
    """A layer was looked for in a tuple of all layers: minutes for 2**16 of them."""
    directory = models["Qwen3MoeForCausalLM"]
    model = load_model_config(directory)
    moe = replace(model.moe, dense_layers=tuple(range(2**16)))
    with pytest.raises(ValueError, match="num_hidden_layers = 65536, but the checkpoint has 4"):
        check_sizes(replace(model, num_layers=2**16, moe=moe), directory)


def test_ranks_need_not_divide_what_no_layer_has(models):
    """Every Qwen3-MoE states intermediate_size; most have no dense layer that uses it."""
    cpu = torch.device("cpu")
    model = replace(load_model_config(models["Qwen3MoeForCausalLM"]), intermediate_size=97)
    with pytest.raises(ValueError, match="intermediate_size = 97 cannot be split over"):
        check_ranks(model, 2, cpu)
    sparse = replace(model.moe, dense_layers=())
    check_ranks(replace(model, moe=sparse), 2, cpu)
    with pytest.raises(ValueError, match="moe_intermediate_size = 23 cannot be split over"):
        check_ranks(replace(model, moe=replace(sparse, intermediate_size=23)), 2, cpu)
