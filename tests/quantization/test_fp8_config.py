"""Which quantization_config is understood; every other is refused by name."""

from __future__ import annotations

import copy
import json

import pytest
from fp8_checkpoints import COMPRESSED_TENSORS_CONFIG, QWEN_CONFIG

from nanovllm.models.model_config import ModelConfig
from nanovllm.models.quantization_config import read_quantization


def changed(config, path, value):
    """A copy with the field at a dotted path replaced, or left out where the value is `...`."""
    result = copy.deepcopy(config)
    *parents, last = path.split(".")
    place = result
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, None),
        (QWEN_CONFIG, "fp8_block"),
        (changed(QWEN_CONFIG, "modules_to_not_convert", ...), "fp8_block"),
        (changed(QWEN_CONFIG, "fmt", ...), "fp8_block"),  # as transformers writes it
        ({**QWEN_CONFIG, "scale_fmt": "float", "dequantize": False}, "fp8_block"),
        (COMPRESSED_TENSORS_CONFIG, "fp8_channel"),
        (changed(COMPRESSED_TENSORS_CONFIG, "kv_cache_scheme", ...), "fp8_channel"),
        ({**COMPRESSED_TENSORS_CONFIG, "sparsity_config": {}, "version": "0.9"}, "fp8_channel"),
        (changed(COMPRESSED_TENSORS_CONFIG, f"{GROUP}.weights.observer", "mse"), "fp8_channel"),
    ],
)
def test_two_layouts_are_understood(config, expected):
    assert read_quantization({"quantization_config": config}) == expected
    assert read_quantization({"compression_config": config}) == expected


def test_two_statements_that_differ_are_refused():
    """The second was not read."""
    both = {"quantization_config": QWEN_CONFIG, "compression_config": QWEN_CONFIG}
    assert read_quantization(both) == "fp8_block"
    both["compression_config"] = {**QWEN_CONFIG, "fmt": "e5m2"}
    with pytest.raises(ValueError, match="^quantization_config and compression_config differ"):
        read_quantization(both)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config must be an object, got 'fp8'"),
        ({}, "quant_method None is not supported; supported are fp8 with weight_block_size"),
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' is not supported"),
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method 'fbgemm_fp8'"),
        ({"quant_method": "fp8"}, "activation_scheme is None"),
        ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\]"),
        *(
            (changed(QWEN_CONFIG, path, value), message)
            for path, value, message in [
                ("activation_scheme", "static", "activation_scheme is 'static'"),
                ("weight_block_size", None, "weight_block_size is None"),
                ("weight_block_size", [64, 128], r"weight_block_size is \[64, 128\]"),
                ("fmt", "e5m2", "fmt is 'e5m2'"),
                ("scale_fmt", "ue8m0", "scale_fmt is 'ue8m0'"),
                ("modules_to_convert", ["model.embed_tokens"], "modules_to_convert is"),
                (
                    "modules_to_not_convert",
                    ["lm_head", "model.layers.3.mlp.down_proj"],
                    "leaves 'model.layers.3.mlp.down_proj' unquantised",
                ),
                ("modules_to_not_convert", ["model.layers.3"], "leaves 'model.layers.3'"),
                ("modules_to_not_convert", "lm_head", "must be a list of names, got 'lm_head'"),
                ("ignored_layers", ["model.layers.0.mlp"], "ignored_layers leaves"),
            ]
        ),
        *(
            (changed(COMPRESSED_TENSORS_CONFIG, path, value), message)
            for path, value, message in [
                ("format", "int-quantized", "format is 'int-quantized'"),
                ("format", "naive-quantized", "format is 'naive-quantized'"),
                ("format", "nvfp4-pack-quantized", "format is 'nvfp4-pack-quantized'"),
                ("ignore", [], r"ignore is \[\], so lm_head is quantised"),
                ("ignore", ["lm_head", "re:.*q_proj"], "ignore leaves 're:.\\*q_proj'"),
                ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is"),
                ("sparsity_config", {"format": "dense"}, "sparsity_config is"),
                ("config_groups", {}, "config_groups must hold one group"),
                ("config_groups", {"a": {}, "b": {}}, "config_groups must hold one group"),
                ("config_groups", {"a": 1}, "config_groups.a must be an object"),
                (f"{GROUP}.targets", ["re:.*mlp.*"], "targets is"),
                (f"{GROUP}.output_activations", {"num_bits": 8}, "output_activations is"),
                (f"{GROUP}.weights", None, "weights must be an object, got None"),
                (f"{GROUP}.input_activations", None, "input_activations must be an object"),
                (f"{GROUP}.weights.strategy", "tensor", "weights.strategy is 'tensor'"),
                (f"{GROUP}.weights.strategy", "block", "weights.strategy is 'block'"),
                (f"{GROUP}.weights.num_bits", 4, "weights.num_bits is 4"),
                (f"{GROUP}.weights.type", "int", "weights.type is 'int'"),
                (f"{GROUP}.weights.symmetric", False, "weights.symmetric is False"),
                (f"{GROUP}.weights.group_size", 128, "weights.group_size is 128"),
                (f"{GROUP}.weights.dynamic", 0, "weights.dynamic is 0"),
                (f"{GROUP}.input_activations.dynamic", False, "input_activations.dynamic is F"),
                (f"{GROUP}.input_activations.strategy", "tensor", "strategy is 'tensor'"),
            ]
        ),
    ],
)  # fmt: skip
def test_all_others_are_refused_by_name(config, message):
    with pytest.raises((TypeError, ValueError), match=message):
        read_quantization({"quantization_config": config})


def test_the_refusal_names_the_file_and_the_way_out(demo_model):
    config = json.loads((demo_model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(ValueError, match="^here.json: quantization_config.*Or use the checkpoint"):
        ModelConfig.from_dict(config, "here.json")
    config["quantization_config"] = QWEN_CONFIG
    assert ModelConfig.from_dict(config, "here.json").quantization == "fp8_block"
