"""fp8 checkpoints as others write them, made from a plain one without our own code, and loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import model_harness
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import load_model_config
from nanovllm.utils.loader import load_model

FP8 = torch.float8_e4m3fn
QWEN_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.norm"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_SCHEME = {
    "actorder": None,
    "block_structure": None,
    "group_size": None,
    "num_bits": 8,
    "observer_kwargs": {},
    "symmetric": True,
    "type": "float",
}
COMPRESSED_TENSORS_CONFIG = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                **_SCHEME, "dynamic": True, "observer": None, "strategy": "token"
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                **_SCHEME, "dynamic": False, "observer": "minmax", "strategy": "channel"
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.46,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
CONFIGS = {"block": QWEN_CONFIG, "channel": COMPRESSED_TENSORS_CONFIG}


def quantized_weights(
    directory: Path, kind: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of a `kind` checkpoint, and what they stand for, of a plain checkpoint.

    Scales are bfloat16 and not the best ones, as others' may be: their numbers must be believed.
    """
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        side = (128, 128) if kind == "block" else (1, columns)
        grid = (-(-rows // side[0]), -(-columns // side[1]))
        scale = torch.empty(grid)
        for i in range(grid[0]):
            for j in range(grid[1]):
                block = tensor[i * side[0] : (i + 1) * side[0], j * side[1] : (j + 1) * side[1]]
                scale[i, j] = block.abs().max() / 400
        scale = scale.bfloat16()
        wide = scale.float().repeat_interleave(side[0], 0).repeat_interleave(side[1], 1)
        wide = wide[:rows, :columns]
        stored[name] = (tensor / wide).to(FP8)
        stored[name + ("_scale_inv" if kind == "block" else "_scale")] = scale
        meant[name] = stored[name].float() * wide
    return stored, meant


def write_quantized(source: Path, target: Path, kind: str) -> Path:
    """Write `source`, a plain checkpoint in one file, in fp8."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = CONFIGS[kind]
    (target / "config.json").write_text(json.dumps(config))
    save_file(quantized_weights(source, kind)[0], target / "model.safetensors")
    return target


def load(directory: Path, **options: Any) -> DecoderForCausalLM:
    """Load a checkpoint as ours; a plain one is quantised on loading."""
    config = load_model_config(directory)
    if config.quantization is None:
        config = replace(config, quantization="fp8")
    model = model_harness.build(config, **options)
    load_model(model, directory)
    return model


def rounded(x: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """What fp8 makes of numbers [..., size] with a scale for each row, or each group in it."""
    x = x.float()
    parts = [x] if group_size is None else list(x.split(group_size, dim=-1))
    results = []
    for part in parts:
        scale = part.abs().amax(-1, keepdim=True) * (1 / 448)
        results.append((part * (1 / scale)).clamp(-448, 448).to(FP8).float() * scale)
    return torch.cat(results, dim=-1)


class RoundingOracle:
    """transformers on the weights that a checkpoint stands for, each linear input rounded to fp8.

    kind: "block", "channel", or "online" for a plain checkpoint whose weights are rounded too
    """

    def __init__(self, source: Path, kind: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, experts_implementation="eager"
        ).eval()
        if kind == "online":
            plain = load_file(source / "model.safetensors")
            meant = {
                name: rounded(tensor, None) if name.endswith("_proj.weight") else tensor
                for name, tensor in plain.items()
            }
        else:
            meant = quantized_weights(source, kind)[1]
        group_size = 128 if kind == "block" else None
        for name, module in self.model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(
                    lambda _, inputs: (rounded(inputs[0], group_size), *inputs[1:])
                )
            if name.endswith(".experts"):
                stack_experts(meant, name, module.num_experts)
                round_products(module, group_size)
        self.model.load_state_dict(meant, strict=not self.model.config.tie_word_embeddings)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] float32"""
        return self.model(torch.tensor([token_ids])).logits[0]


def stack_experts(weights: dict[str, torch.Tensor], path: str, num_experts: int) -> None:
    """Replace a layer's matrices by the two tensors that transformers 5 has of them in memory."""
    parts = {
        part: [weights.pop(f"{path}.{i}.{part}_proj.weight") for i in range(num_experts)]
        for part in ("gate", "up", "down")
    }
    pairs = zip(parts["gate"], parts["up"], strict=True)
    weights[f"{path}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    weights[f"{path}.down_proj"] = torch.stack(parts["down"])


def round_products(experts: torch.nn.Module, group_size: int | None) -> None:
    """Let all products in `experts`, which are no modules, round their input."""
    plain, forward = torch.nn.functional.linear, experts.forward

    def rounding(*args, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.nn.functional, "linear", lambda x, w: plain(rounded(x, group_size), w)
            )
            return forward(*args, **options)

    experts.forward = rounding
