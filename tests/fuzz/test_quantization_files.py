"""quantization_config with anything in it: the checkpoint loads, or an error names the file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fuzz.json_values import VALUES, mutated
from fuzz.test_model_files import fuzzed, load
from hypothesis import strategies as st
from quantization.fp8_checkpoints import CONFIGS, write_quantized
from tiny_models import write_tiny_qwen3

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
}
EXTRA = (
    *("fmt", "ignored_layers", "modules_to_convert", "scale_fmt", "ignore", "format"),
    *("config_groups", "activation_scheme", "weight_block_size", "kv_cache_scheme", "bits"),
)
NAMES = st.sampled_from(["lm_head", "model.layers.0.mlp.gate_proj", "re:.*", "re:(", "norm", ""])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("fp8")
    source = write_tiny_qwen3(root / "plain", **SIZES)
    return {kind: write_quantized(source, root / kind, kind) for kind in CONFIGS}


@st.composite
def stated(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A format, and what its config.json says of it, under one key or under two."""
    kind = draw(st.sampled_from(sorted(CONFIGS)))
    changed = draw(mutated(CONFIGS[kind], EXTRA))
    if draw(st.booleans()):
        name = draw(st.sampled_from(["ignore", "modules_to_not_convert", "ignored_layers"]))
        changed[name] = draw(st.lists(NAMES | VALUES, max_size=3))
    keys = draw(st.sampled_from([("quantization_config",), ("compression_config",), (0, 1)]))
    if len(keys) == 2:
        return kind, {"quantization_config": CONFIGS[kind], "compression_config": changed}
    return kind, {keys[0]: changed}


@fuzzed(stated())
def test_mutated_quantisation_loads_or_is_named(checkpoints, mutation):
    kind, fields = mutation
    path = checkpoints[kind] / "config.json"
    before = path.read_text()
    config = json.loads(before)
    del config["quantization_config"]
    path.write_text(json.dumps(config | fields))
    try:
        load(checkpoints[kind], fields)
    finally:
        path.write_text(before)
