"""What config.json may say, and how wrong ones are refused."""

import json
import logging

import pytest
import torch
import transformers

from nanovllm.layers.rotary_embedding import RopeScaling
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.model_config import ModelConfig, load_model_config
from nanovllm.models.registry import (
    _MODELS,
    get_model_class,
    register_model,
    supported_architectures,
)

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 517,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 64,
}


def parse(*without, **changes):
    fields = {key: value for key, value in BASE.items() if key not in without}
    return ModelConfig.from_dict(fields | changes, "here/config.json")


def test_fields_are_read():
    config = parse(eos_token_id=[2, 5, 2], dtype="bfloat16", attention_bias=True)
    assert config == ModelConfig(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=96,
        vocab_size=517,
        rms_norm_eps=1e-6,
        attention_bias=True,
        hidden_act="silu",
        tie_word_embeddings=True,
        max_position_embeddings=512,
        sliding_window=None,
        rope_theta=10000.0,
        rope_scaling=None,
        dtype=torch.bfloat16,
        eos_token_ids=(2, 5),
    )
    hash(config)


@pytest.mark.parametrize("without_head_dim", [{}, {"head_dim": None}], ids=["absent", "null"])
def test_head_dim_is_derived_only_when_not_given(without_head_dim):
    assert parse("head_dim", **without_head_dim).head_dim == 16
    assert parse().head_dim == 32


def test_kv_heads_default_to_heads():
    assert parse("num_key_value_heads").num_kv_heads == 4
    assert parse(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, None),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
    ],
    ids=str,
)
def test_dtype_is_read_under_both_names(changes, dtype):
    assert parse(**changes).dtype is dtype


@pytest.mark.parametrize(
    ("value", "ids"), [(None, ()), (0, (0,)), (7, (7,)), ([7, 8], (7, 8)), ([], ())], ids=str
)
def test_eos_is_an_id_a_list_or_nothing(value, ids):
    assert parse(eos_token_id=value).eos_token_ids == ids


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1000000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {}},
        {"rope_theta": None, "rope_scaling": {"rope_theta": 1e6}},
    ],
    ids=str,
)
def test_rope_theta_is_read_from_either_place(changes):
    """Transformers 5 moved the base into rope_parameters: a default base gives wrong text."""
    config = parse("rope_theta", **changes)
    assert config.rope_theta == 1e6
    assert config.rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling("linear", 2.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000}},
            RopeScaling("linear", 2.0),
        ),
        ({"rope_scaling": LLAMA3}, RopeScaling("llama3", 8.0, 64, 1.0, 4.0)),
        ({"rope_scaling": YARN}, RopeScaling("yarn", 4.0, 128)),
        ({"rope_scaling": YARN | {"type": "yarn"}}, RopeScaling("yarn", 4.0, 128)),
        ({"rope_scaling": YARN | {"factor": None}}, RopeScaling("yarn", 4.0, 128)),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, RopeScaling("yarn", 4.0, 128)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            RopeScaling("yarn", 4.0, 512),
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 256},
            RopeScaling("yarn", 4.0, 256),
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": 16, "truncate": False, "mscale": 1}},
            RopeScaling("yarn", 4.0, 128, beta_fast=16.0, truncate=False, mscale=1.0),
        ),
    ],
    ids=str,
)
def test_rope_scaling_is_read(changes, scaling):
    config = parse(**changes)
    assert config.rope_scaling == scaling
    hash(config)


def test_yarn_extends_the_context():
    assert parse().max_context_len == 512
    assert parse(rope_scaling=YARN).max_context_len == 512
    assert parse(rope_scaling=YARN | {"factor": 8.0}).max_context_len == 1024
    assert parse(rope_scaling=LLAMA3).max_context_len == 512


def parse_other(architecture, *without, **changes):
    return parse("architectures", *without, **({"architectures": [architecture]} | changes))


def test_mistrals_window_bounds_the_context_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        config = parse_other("MistralForCausalLM", sliding_window=128)
    assert config.max_context_len == 128
    assert "sliding_window = 128 bounds the context" in caplog.text


def test_longrope_is_refused():
    longrope = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    with pytest.raises(ValueError, match="rope_type 'longrope', which is not supported"):
        parse_other("Phi3ForCausalLM", rope_scaling=longrope)
    # So transformers reads the name that the first checkpoints had; as YaRN it gave wrong text.
    with pytest.raises(ValueError, match="rope_type 'yarn' is not supported for Phi-3"):
        parse_other("Phi3ForCausalLM", rope_scaling={**longrope, "type": "yarn", "factor": 2.0})


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_a_window_as_long_as_the_context_changes_nothing(caplog, window):
    assert parse_other("MistralForCausalLM", sliding_window=window).max_context_len == 512
    assert not caplog.records


@pytest.mark.parametrize("window", [1, 0, -1, True, False, 64.0, "64", [64], {}], ids=repr)
@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Phi3ForCausalLM"])
def test_a_window_that_holds_no_answer_is_refused(architecture, window):
    """With 1 the engine started, and refused every prompt."""
    with pytest.raises(ValueError, match="here/config.json: sliding_window must be .*null is no"):
        parse_other(architecture, sliding_window=window)
    assert parse_other(architecture, sliding_window=2).max_context_len == 2


def test_a_window_bounds_what_yarn_extends():
    changes = {"sliding_window": 600, "rope_scaling": YARN | {"factor": 8.0}}
    assert parse_other("MistralForCausalLM", **changes).max_context_len == 600
    assert parse(use_sliding_window=True, **changes).max_context_len == 600


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "LlamaForCausalLM"])
def test_a_window_counts_only_where_its_switch_is_on(architecture):
    off = parse_other(architecture, use_sliding_window=False, sliding_window=128)
    assert off == parse_other(architecture)
    with pytest.raises(ValueError, match="use_sliding_window is true with sliding_window = 128"):
        parse_other(architecture, use_sliding_window=True, sliding_window=128, max_window_layers=1)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM"],
)
def test_absent_keys_mean_what_they_mean_in_transformers(architecture):
    ours = parse_other(
        architecture,
        *("head_dim", "rms_norm_eps", "max_position_embeddings", "rope_theta"),
        *("tie_word_embeddings", "num_key_value_heads"),
        num_attention_heads=32,
        hidden_size=4096,
    )
    theirs = getattr(transformers, architecture).config_class()
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == 128
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else (eos,))


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_a_stated_theta_beats_the_default_wherever_it_stands(place):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert parse_other("LlamaForCausalLM", "rope_theta", **{place: rope}).rope_theta == 5e5


def test_unused_rope_keys_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        parse(rope_scaling={"type": "linear", "factor": 2, "beta_fast": 3})
    assert "beta_fast" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures must be a list"),
        ({"architectures": []}, "architectures"),
        ({"architectures": [3]}, "architectures must be a list"),
        ({"model_type": 3}, "model_type"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an int, got '64'"),
        ({"hidden_size": 64.0}, "hidden_size must be an int"),
        ({"hidden_size": True}, "hidden_size must be an int"),
        ({"hidden_size": 0}, "hidden_size must be from 1"),
        ({"hidden_size": 10**30}, "hidden_size must be from 1"),
        ({"vocab_size": -1}, "vocab_size must be from 1"),
        ({"vocab_size": 2**40}, "vocab_size must be from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"intermediate_size": []}, "intermediate_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 .* num_key_value_heads = 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 33}, "head_dim must be even.*33"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": None, "hidden_size": 66}, "head_dim is missing.*66"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"max_position_embeddings": 1}, "max_position_embeddings must be from 2 to"),
        ({"attention_bias": "no"}, "attention_bias"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, True]}, "eos_token_id"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of .*'bfloat16'.*float8_e4m3fn"),
        ({"torch_dtype": 16}, "torch_dtype"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "dtype 'float16' and torch_dtype"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*'fp8'"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window = 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"mlp_bias": True}, "mlp_bias = true is not supported"),
        ({"mlp_bias": 1}, "mlp_bias"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported"),
        ({"pretraining_tp": "2"}, "pretraining_tp"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_theta": "1e6"}, "rope_theta"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_theta = 10000 and rope_parameters.rope_theta = 1e\\+06 differ",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'full_attention'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling must have one rope_type"),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "one rope_type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.* not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "one rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, "differ"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "beta_fast"),
        ({"rope_scaling": YARN | {"mscale": "1"}}, "mscale"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "high_freq_factor = 1"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": None}}, "high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_wrong_field_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"here/config.json: .*{message}"):
        parse(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 128},
        {"sliding_window": 128, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None},
        {"mlp_bias": False, "pretraining_tp": 1},
        {"layer_types": ["full_attention", "full_attention"]},
        {"partial_rotary_factor": 1.0},
        {"quantization_config": None},
    ],
    ids=str,
)
def test_settings_without_effect_are_accepted(changes):
    assert parse(**changes) == parse()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must hold a JSON object, got list"),
        (b"{}", "architectures is missing"),
    ],
    ids=["absent", "empty", "cut", "binary", "deep", "list", "bare"],
)
def test_broken_config_file_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json.*{message}"):
        load_model_config(tmp_path)


def test_config_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert load_model_config(tmp_path) == parse()


def test_models_can_be_registered():
    class MyForCausalLM(DecoderForCausalLM):
        pass

    register_model("MyForCausalLM", MyForCausalLM)
    try:
        assert "MyForCausalLM" in supported_architectures()
        assert get_model_class("MyForCausalLM") is MyForCausalLM
        assert parse(architectures=["MyForCausalLM"]).architecture == "MyForCausalLM"
    finally:
        del _MODELS["MyForCausalLM"]


def test_unknown_architecture_lists_the_supported():
    with pytest.raises(ValueError, match="'Nope' is not supported; .*Qwen3ForCausalLM"):
        get_model_class("Nope")
