"""fp8 checkpoints as others write them, made here from a plain one without our own code."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

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
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        if kind == "online":
            plain = load_file(source / "model.safetensors")
            meant = {
                name: rounded(tensor, None) if name.endswith("_proj.weight") else tensor
                for name, tensor in plain.items()
            }
        else:
            meant = quantized_weights(source, kind)[1]
        self.model.load_state_dict(meant, strict=not self.model.config.tie_word_embeddings)
        group_size = 128 if kind == "block" else None
        for name, module in self.model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(
                    lambda _, inputs: (rounded(inputs[0], group_size), *inputs[1:])
                )

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[num_tokens, vocab_size] float32"""
        return self.model(torch.tensor([token_ids])).logits[0]
