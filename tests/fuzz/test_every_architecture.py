"""Other models' files with anything in them, and what a config that loads means.

`fuzz.test_model_files` does it for Qwen3, whose fields all others have too.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.json_values import NUM_EXAMPLES, VALUES, mutated, short
from fuzz.test_model_files import (
    DTYPES,
    SIZES,
    fuzzed,
    header_of,
    load,
    paths_of,
    with_value,
    write_safetensors,
)
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Oracle
from quantization.fp8_checkpoints import write_quantized
from tiny_models import write_tiny, write_tiny_qwen3

from nanovllm import LLM, SamplingParams

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 10000.0, **LLAMA3}}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 100}),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "moe": ("Qwen3MoeForCausalLM", EXPERTS),
}
EXTRA = (
    *("quantization_config", "num_experts", "num_local_experts", "mlp_only_layers", "rope_scaling"),
    *("decoder_sparse_step", "sliding_window", "use_sliding_window", "layer_types", "mlp_bias"),
    *("original_max_position_embeddings", "partial_rotary_factor", "pretraining_tp", "head_dim"),
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One directory of each kind."""
    root = tmp_path_factory.mktemp("kinds")
    made = {name: write_tiny(root / name, kind, **more) for name, (kind, more) in KINDS.items()}
    made["qwen3"] = write_tiny_qwen3(root / "qwen3")
    wide = {"hidden_size": 128, "num_key_value_heads": 4, "intermediate_size": 128}
    plain = write_tiny_qwen3(root / "plain", **wide)
    for kind in ("block", "channel"):
        made[f"fp8 {kind}"] = root / f"fp8-{kind}"
        write_quantized(plain, made[f"fp8 {kind}"], kind)
    return made


@fuzzed(st.data())
def test_mutated_configs_and_headers_of_every_kind_load_or_are_named(originals, tmp_path, mutation):
    name = mutation.draw(st.sampled_from([*KINDS, "fp8 block", "fp8 channel"]))
    model = tmp_path / name
    if not model.exists():
        shutil.copytree(originals[name], model)
    path = model / mutation.draw(st.sampled_from(["config.json", "model.safetensors"]))
    if path.suffix == ".json":
        data = mutation.draw(mutated(json.loads((originals[name] / path.name).read_text()), EXTRA))
        path.write_text(json.dumps(data))
    else:
        header, body = header_of(originals[name] / path.name)
        tensor = mutation.draw(st.sampled_from([key for key in header if key != "__metadata__"]))
        place = mutation.draw(st.sampled_from(list(paths_of(header[tensor], (tensor,)))))
        values = st.one_of(VALUES, st.sampled_from(DTYPES), SIZES, st.lists(SIZES, max_size=4))
        data = (place, mutation.draw(values))
        write_safetensors(path, with_value(header, *data), body)
    load(model, (name, data))
    shutil.copy(originals[name] / path.name, path)


# ---- what is not refused means what it means elsewhere

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [
    None,
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    {**LLAMA3, "factor": 2.0, "original_max_position_embeddings": 16},
    YARN,
    {**YARN, "factor": 1.5, "beta_fast": 8, "beta_slow": 2},
    {**YARN, "attention_factor": 0.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0},
]
LEGAL: dict[str, list[Any]] = {
    "rope_theta": [10000.0, 1e6, 123.5],
    "rope_scaling": SCALINGS,
    "rope_parameters": [s and {"rope_theta": 10000.0, **s} for s in SCALINGS],
    "partial_rotary_factor": [1, 1.0, 0.5, None],
    "original_max_position_embeddings": [32, 64, 512, None],
    "max_position_embeddings": [30, 64, 512, 4096],
    "rms_norm_eps": [1e-6, 1e-5, 0.1, 1.0],
    "hidden_act": ["silu", "gelu", "relu", "gelu_pytorch_tanh"],
    "attention_bias": [True, False, None],
    "mlp_bias": [True, False],
    "tie_word_embeddings": [True, False, None],
    "head_dim": [None, 16, 32],
    "num_key_value_heads": [None, 1, 2, 4],
    "num_hidden_layers": [1, 2],
    "sliding_window": [None, 4, 100, 600],
    "use_sliding_window": [True, False, None],
    "max_window_layers": [0, 1, 28],
    "layer_types": [None, ["full_attention"] * 2, ["sliding_attention"] * 2],
    "pretraining_tp": [1, 2],
    "num_experts_per_tok": [1, 2, 6, 7],
    "norm_topk_prob": [True, False, None],
    "decoder_sparse_step": [1, 2, 0],
    "mlp_only_layers": [[], [0], [1], None],
    "attention_dropout": [0.0, 0.5],
    "use_cache": [True, False],
    "attention_multiplier": [0.3],
    "initializer_range": [0.5],
    "router_aux_loss_coef": [0.9],
    "output_router_logits": [True],
    "dtype": ["float32", "bfloat16", None],
    "torch_dtype": ["float32", "bfloat16", None],
}
PROMPT = [5, 6, 7, 500, 11, 4, *range(40, 62)]


@st.composite
def legal(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """`base` with one to three keys of other values that models have, or left out."""
    changed = dict(base)
    names = st.lists(st.sampled_from(sorted(LEGAL)), min_size=1, max_size=3, unique=True)
    for name in draw(names):
        if draw(st.integers(0, 7)) == 0:
            changed.pop(name, None)
        else:
            changed[name] = draw(st.sampled_from(LEGAL[name]))
    return changed


def ours(model: Path) -> list[float] | None:
    """The log-probability of each token of PROMPT but the first; None if the model is refused."""
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16}
    try:
        with LLM(model, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    except ValueError as error:
        assert str(model) in str(error) or "max_model_len" in str(error)
        return None
    pairs = zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)
    return [position[token_id].logprob for token_id, position in pairs]


@settings(
    max_examples=NUM_EXAMPLES // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mutation=st.data())
def test_a_config_that_loads_means_what_it_means_in_transformers(originals, tmp_path, mutation):
    """An option that is ignored gives text that is a little wrong, and nobody sees it."""
    name = mutation.draw(st.sampled_from([*KINDS, "qwen3"]))
    model = tmp_path / name
    if not model.exists():
        shutil.copytree(originals[name], model)
    base = json.loads((originals[name] / "config.json").read_text())
    if mutation.draw(st.booleans()):  # as transformers 4 writes it
        base["rope_theta"] = base.pop("rope_parameters")["rope_theta"]
    data = mutation.draw(legal(base))
    (model / "config.json").write_text(json.dumps(data))
    found = ours(model)
    if found is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exact = Oracle(model).logits(PROMPT)[:-1].log_softmax(-1)
        except (StrictDataclassError, TypeError):
            return  # it does not take null where we do, knowing what is meant
    right = exact.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(found), right, atol=2e-3, rtol=0, msg=lambda text: f"{short(data)}\n{text}"
    )
