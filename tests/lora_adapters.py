"""LoRA directories as PEFT writes them, made by hand, and checkpoints that are merged by hand."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def write_adapter(
    directory: Path,
    model_dir: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    ranks: dict[str, int] | None = None,
    **changes: Any,
) -> Path:
    """Write a random adapter for the targeted weights; `changes` are fields of its config.

    ranks: parts of module names whose rank is not `r`, by what `rank_pattern` should say
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": 4,
        "lora_alpha": 6,
        "target_modules": list(ALL),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    } | changes
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model_dir / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in config["target_modules"]:
            continue
        r = next((r for part, r in (ranks or {}).items() if part in module), config["r"])
        for part, shape in {"A": (r, weight.shape[1]), "B": (weight.shape[0], r)}.items():
            noise = torch.randn(shape, generator=generator) * 0.5 / math.sqrt(r)
            tensors[f"{PREFIX}{module}.lora_{part}.weight"] = noise.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config))
    save_file(tensors, directory / WEIGHTS)
    return directory


def merge_by_hand(
    directory: Path, model_dir: Path, adapter: Path, scales: dict[str, float]
) -> Path:
    """Write the merged checkpoint; `scales` maps a part of a weight's name to its scale."""
    shutil.copytree(model_dir, directory)
    weights = load_file(model_dir / "model.safetensors")
    halves = load_file(adapter / WEIGHTS)
    for name in weights:
        a_name = PREFIX + re.sub(r"weight$", "lora_A.weight", name)
        if a_name in halves:
            a, b = halves[a_name].double(), halves[a_name.replace("lora_A", "lora_B")].double()
            scale = next(scale for part, scale in scales.items() if part in name)
            weights[name] = (weights[name].double() + scale * (b @ a)).float()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
