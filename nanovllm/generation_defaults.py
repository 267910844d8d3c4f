"""Sampling parameters from a model's generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import errors_named
from nanovllm.utils.tokenizer import load_generation_config

logger = logging.getLogger(__name__)

# What transformers would follow and we cannot, and the value that asks for nothing.
_IGNORED: dict[str, Any] = {
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "min_new_tokens": 0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "exponential_decay_length_penalty": None,
}
_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling_params(model_dir: Path) -> SamplingParams:
    """The model's own defaults; greedy where it says do_sample=false beside a temperature.

    A warning names what of them is not followed. ValueError names the file and the field of a bad
    value.
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
    ignored = [
        f"{name}={values[name]!r:.80}"
        for name, nothing in _IGNORED.items()
        if values.get(name) not in (None, nothing)
    ]
    if ignored:
        logger.warning("%s: %s is not followed", path, ", ".join(ignored))
    with errors_named(path):
        return SamplingParams(**named)
