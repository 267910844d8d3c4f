"""Checkpoints of each dtype, in one file or many, as a model of each dtype: a direct cast."""

from __future__ import annotations

import pytest
import torch
from model_harness import load
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_qwen3

from nanovllm.utils.loader import INDEX_NAME

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ATTENTION, MLP = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
# Ours -> the checkpoint's, one above another.
FUSED = {
    ATTENTION + "qkv_proj": [ATTENTION + f"{part}_proj" for part in "qkv"],
    MLP + "gate_up_proj": [MLP + "gate_proj", MLP + "up_proj"],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(dtype, in shards) -> directory; the same random weights, rounded to the dtype."""
    root = tmp_path_factory.mktemp("formats")
    return {
        (dtype, sharded): write_tiny_qwen3(
            root / f"{dtype}-{sharded}", dtype=dtype, max_shard_size="100KB" if sharded else "5GB"
        )
        for dtype in DTYPES
        for sharded in (False, True)
    }


def tensors_of(directory):
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def check_direct_cast(model, tensors, dtype):
    """Every parameter is the checkpoint's tensor, cast once; all tensors are used."""
    left = set(tensors)
    fused = {
        f"{ours.format(layer)}.weight": [f"{name.format(layer)}.weight" for name in names]
        for ours, names in FUSED.items()
        for layer in range(2)
    }
    for name, parameter in model.named_parameters():
        names = fused.get(name, [name])
        left -= set(names)
        expected = torch.cat([tensors[part] for part in names]).to(dtype)
        assert parameter.dtype == dtype
        assert torch.equal(parameter, expected), name
    assert not left


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_a_direct_cast_of_the_checkpoints(checkpoints, stored, dtype, sharded):
    directory = checkpoints[stored, sharded]
    assert (directory / INDEX_NAME).exists() == sharded
    tensors = tensors_of(directory)
    assert {tensor.dtype for tensor in tensors.values()} == {stored}
    check_direct_cast(load(directory, dtype=dtype), tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checkpoint_may_mix_dtypes(tmp_path, dtype):
    """Norms in float32 beside halves are common."""
    write_tiny_qwen3(tmp_path)
    tensors = {
        name: tensor.to(DTYPES[i % 3]).contiguous()
        for i, (name, tensor) in enumerate(tensors_of(tmp_path).items())
    }
    save_file(tensors, tmp_path / "model.safetensors")
    check_direct_cast(load(tmp_path, dtype=dtype), tensors, dtype)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_auto_is_the_checkpoints_dtype(checkpoints, make_llm, stored):
    llm = make_llm(checkpoints[stored, True], device="cpu", num_kvcache_blocks=8)
    model = llm._engine._executor._runner._model
    check_direct_cast(model, tensors_of(checkpoints[stored, True]), stored)


def with_value(directory, value, dtype=torch.float32):
    tensors = tensors_of(directory)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("value", [1e5, -65520.0])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_values_beyond_float16_are_refused_with_what_to_do(tmp_path, stored, value):
    """As infinities they load without a word, and every logit is NaN."""
    write_tiny_qwen3(tmp_path)
    tensors = with_value(tmp_path, value, stored)
    reached = r"reach \d+, beyond float16's 65504; pass dtype='bfloat16'"
    with pytest.raises(ValueError, match=rf"layers.1.mlp.up_proj.weight: its values {reached}"):
        load(tmp_path, dtype=torch.float16)
    for dtype in (torch.float32, torch.bfloat16):
        check_direct_cast(load(tmp_path, dtype=dtype), tensors, dtype)


@pytest.mark.parametrize("value", [65504.0, -65519.0, 1e-9])
def test_values_that_float16_can_round_to_are_loaded(tmp_path, value):
    write_tiny_qwen3(tmp_path)
    tensors = with_value(tmp_path, value)
    check_direct_cast(load(tmp_path, dtype=torch.float16), tensors, torch.float16)


def test_a_trainers_weights_beyond_float16_change_nothing(tmp_path, make_llm):
    directory = write_tiny_qwen3(tmp_path)
    llm = make_llm(directory, device="cpu", dtype="float16", num_kvcache_blocks=8)
    tensors = tensors_of(directory)
    new = {name: tensor + 1 for name, tensor in tensors.items()}
    new["model.norm.weight"][0] = 7e4
    with pytest.raises(ValueError, match="model.norm.weight: its values reach 70000, beyond"):
        llm.load_weights(new.items())
    check_direct_cast(llm._engine._executor._runner._model, tensors, torch.float16)
