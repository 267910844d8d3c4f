"""Sampling parameters from a model's generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import load_generation_config

_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling_params(model_dir: Path) -> SamplingParams:
    """The model's own defaults; greedy where it says do_sample=false beside a temperature.

    ValueError names the file and the field of a bad value.
    """
    path = model_dir / "generation_config.json"
    values = load_generation_config(path)
    named: dict[str, Any] = {
        name: values[name] for name in _SAME_NAME if values.get(name) is not None
    }
    if values.get("max_new_tokens") is not None:
        named["max_tokens"] = values["max_new_tokens"]
    if values.get("do_sample") is False:
        named["temperature"] = 0.0
    try:
        return SamplingParams(**named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
