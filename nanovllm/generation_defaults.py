"""Sampling parameters from a model's generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.tokenizer import load_generation_config

logger = logging.getLogger(__name__)

# What transformers would follow and we cannot; with one of these values it asks for nothing.
_IGNORED = (
    "no_repeat_ngram_size",
    "num_beams",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "penalty_alpha",
    "guidance_scale",
    "min_new_tokens",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "exponential_decay_length_penalty",
)
_NOTHING: tuple[Any, ...] = (None, 0, 1, [], {})
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
        f"{name}={values[name]!r:.80}" for name in _IGNORED if values.get(name) not in _NOTHING
    ]
    if ignored:
        logger.warning("%s: %s is not followed", path, ", ".join(ignored))
    try:
        return SamplingParams(**named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
