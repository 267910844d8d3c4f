"""Read the sliding window from config.json: no backend has one, so it bounds the context."""

import logging
from typing import Any

from nanovllm.utils.checks import check_bool, check_int

logger = logging.getLogger(__name__)

# Here a window counts only if use_sliding_window is true; elsewhere wherever it is stated.
_HAS_WINDOW_SWITCH = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


def read_sliding_window(
    d: dict[str, Any], architecture: str, max_position_embeddings: int
) -> int | None:
    """Return how many positions a token may look back at, or None for all; warn if it bounds."""
    layer_types = d.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise TypeError(f"layer_types must be a list, got {layer_types!r}.")
        for kind in layer_types:
            if kind != "full_attention":
                raise ValueError(
                    f"layer_types has {kind!r}; only 'full_attention' is supported, "
                    "no sliding window or other kind of layer."
                )
    has_switch = architecture in _HAS_WINDOW_SWITCH
    if d.get("sliding_window") is None or (has_switch and not _is_on(d)):
        return None
    window = check_int(
        "sliding_window",
        d["sliding_window"],
        minimum=2,
        advice="It is how many positions a token sees, and bounds prompt and answer together here; "
        "null is no window.",
    )
    if window >= max_position_embeddings:
        return window
    if has_switch:
        raise ValueError(
            f"use_sliding_window is true with sliding_window = {window}, which is below "
            f"max_position_embeddings = {max_position_embeddings}: not supported."
        )
    logger.warning(
        "Attention is not windowed here: sliding_window = %d bounds the context, instead of "
        "max_position_embeddings = %d",
        window,
        max_position_embeddings,
    )
    return window


def _is_on(d: dict[str, Any]) -> bool:
    value = d.get("use_sliding_window")
    return value is not None and check_bool("use_sliding_window", value)
