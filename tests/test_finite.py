"""Weights that are no numbers: named before or while they load, whatever way they come."""

from __future__ import annotations

import math

import pytest
import torch
from lora_adapters import PREFIX, WEIGHTS, write_adapter
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from nanovllm import LLM, SamplingParams
from nanovllm.utils.finite import check_finite, extremes

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
OPTIONS = {"device": "cpu", "num_kvcache_blocks": 16}


def write_with(directory, tensors, name, values):
    """Write a checkpoint in which the last of a tensor's values are these."""
    tensor = tensors[name].to(values.dtype)
    tensor.view(-1)[-len(values) :] = values
    save_file({**tensors, name: tensor}, directory / "model.safetensors")


@pytest.fixture
def model(tmp_path):
    return write_tiny(tmp_path / "model", "Qwen3ForCausalLM")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extremes_are_exact_and_nan_if_any_is(dtype):
    x = torch.tensor([[3.0, -2.0], [0.5, 7.0]], dtype=dtype)
    assert extremes(x).tolist() == [-2, 7]
    x[1, 0] = math.nan
    assert extremes(x.T[:1]).isnan().all()
    assert extremes(x[:1]).tolist() == [-2, 3]
    largest = torch.finfo(dtype).max
    assert extremes(torch.tensor([largest, largest], dtype=dtype)).isfinite().all()
    assert extremes(x[:0]).tolist() == [0, 0]


def test_every_bit_pattern_of_float8_is_known():
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits.view(torch.float8_e4m3fn)
    for value in values.split(1):
        assert bool(extremes(value).isnan().all()) == math.isnan(float(value))
    with pytest.raises(ValueError, match="^x: 2 of its 256 values are NaN or infinite"):
        check_finite([("x", values)], torch.float32)


@pytest.mark.parametrize(
    ("values", "dtype", "words"),
    [
        ([math.nan], torch.float32, "1 of its {} values are NaN or infinite. Is the file damaged"),
        ([math.inf, 1, -math.inf], torch.float32, "2 of its {} values are NaN or infinite"),
        ([1e39], torch.float32, "reach 1e.39, beyond float32's 3.40282e.38; no dtype holds"),
        ([3.4e38], torch.bfloat16, "beyond bfloat16's 3.38953e.38; pass dtype='float32'"),
        ([1e5], torch.float16, "beyond float16's 65504; pass dtype='bfloat16' or 'float32'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", [NORM, UP, "model.embed_tokens.weight"])
def test_a_checkpoint_is_refused_by_tensor_and_count(model, values, dtype, words, name):
    tensors = load_file(model / "model.safetensors")
    values = torch.tensor(values, dtype=torch.float64 if max(values) > 1e38 else torch.float32)
    write_with(model, tensors, name, values)
    words = words.format(tensors[name].numel())
    with pytest.raises(
        ValueError, match=f"cannot load the checkpoint in {model}: {name}: .*{words}"
    ):
        LLM(model, dtype=dtype, **OPTIONS)


def test_a_rank_whose_part_is_whole_does_not_wait_for_the_other(model):
    """The second rank alone has the rows that are broken."""
    tensors = load_file(model / "model.safetensors")
    write_with(model, tensors, UP, torch.tensor([math.nan]))
    with pytest.raises(Exception, match=f"{UP}: 1 of its"):
        LLM(model, tensor_parallel_size=2, **OPTIONS)


def test_stacked_experts_are_looked_at(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    model = write_tiny(tmp_path / "moe", "Qwen3MoeForCausalLM", **sizes)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    write_with(model, tensors, name, torch.tensor([math.inf]))
    with pytest.raises(ValueError, match=f"{name}: 1 of its"):
        LLM(model, **OPTIONS)


def test_new_weights_that_are_no_numbers_change_nothing(model):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(model, dtype="float32", **OPTIONS) as llm:
        before = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"]
        new = {name: tensor + 1 for name, tensor in load_file(model / "model.safetensors").items()}
        for value, words in ((math.nan, "1 of its 64 values are NaN"), (1e300, "beyond float32's")):
            new[NORM] = torch.ones(64, dtype=torch.float64)
            new[NORM][7] = value
            with pytest.raises(ValueError, match=f"{NORM}: .*{words}"):
                llm.load_weights(new.items())
        assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]["token_ids"] == before


@pytest.mark.parametrize("part", ["A", "B"])
def test_an_adapter_is_refused_before_the_model_loads(model, tmp_path, part):
    adapter = write_adapter(tmp_path / "adapter", model)
    tensors = load_file(adapter / WEIGHTS)
    module = UP.removesuffix(".weight")
    tensors[f"{PREFIX}{module}.lora_{part}.weight"][1, 1] = math.nan
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(ValueError, match=f"{adapter}/{WEIGHTS}: {module}.lora_{part}: 1 of its"):
        LLM(model, lora=adapter, **OPTIONS)


def test_a_sum_that_overflows_is_named(model, tmp_path):
    """Base and adapter are finite, what they add up to is not."""
    adapter = write_adapter(tmp_path / "adapter", model)
    tensors = load_file(adapter / WEIGHTS)
    module = UP.removesuffix(".weight")
    for part in "AB":
        tensors[f"{PREFIX}{module}.lora_{part}.weight"].fill_(1e30)
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(ValueError, match=f"{UP}: .*infinite"):
        LLM(model, lora=adapter, **OPTIONS)
