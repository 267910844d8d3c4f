"""What `LLM(...)` may be asked for: each option checked, and refused with what to do."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from nanovllm.config import Config


def test_defaults_are_those_of_the_readme():
    config = Config("model")
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (16384, 512)
    assert (config.gpu_memory_utilization, config.tensor_parallel_size) == (0.9, 1)
    assert (config.kvcache_block_size, config.num_kvcache_blocks) == (64, None)
    assert (config.device, config.dtype, config.attention_backend) == ("auto", "auto", "auto")
    assert (config.enable_prefix_caching, config.enable_overlap) == (True, None)


def test_options_are_passed_through():
    config = Config.from_options("model", {"max_num_seqs": 8, "enforce_eager": True})
    assert config == Config("model", max_num_seqs=8, enforce_eager=True)


def test_nobody_writes_to_a_config():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config("model").max_num_seqs = 1


def test_a_config_crosses_to_a_worker_process_unchanged():
    config = Config("model", num_kvcache_blocks=7)
    assert pickle.loads(pickle.dumps(config)) == config


def test_unknown_option_names_the_nearest_one():
    with pytest.raises(TypeError, match=r"no option 'max_num_seq'\. Did you mean 'max_num_seqs'"):
        Config.from_options("model", {"max_num_seq": 8})


def test_misspelt_model_length_is_not_swallowed():
    with pytest.raises(TypeError, match="no option 'max_model_length'. Did you mean 'max_model_l"):
        Config.from_options("model", {"max_model_length": 8192})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("block_size", "Did you mean 'kvcache_block_size'"),
        ("num_gpu_blocks_override", "Did you mean 'num_kvcache_blocks'"),
        ("swap_space", "leave it out"),
        ("enable_lora", "Pass lora=DIR"),
        ("enable_chunked_prefill", "leave it out"),
        ("data_parallel_size", "nanovllm.data_parallel.DataParallelLLM"),
        ("pipeline_parallel_size", "within layers only"),
        ("disable_custom_all_reduce", "Did you mean enable_custom_all_reduce=False"),
        ("enable_sleep_mode", "leave it out"),
        ("kv_cache_memory_bytes", "See 'num_kvcache_blocks'"),
        ("generation_config", "Pass SamplingParams"),
        ("skip_tokenizer_init", "prompts be ids: leave it out"),
        ("tokenizer_mode", "leave it out"),
        ("hf_overrides", "Leave it out. Options: "),
    ],
)
def test_options_of_vllm_are_met_with_what_to_do(name, hint):
    with pytest.raises(TypeError, match=hint):
        Config.from_options("model", {name: 1})


def test_unknown_option_lists_all_options():
    with pytest.raises(TypeError, match=r"Options: tokenizer, .*, logprobs_mode, .*\.") as caught:
        Config.from_options("model", {"zzz": 1})
    assert "Did you mean" not in str(caught.value)
    assert " model," not in str(caught.value)


def test_model_given_twice_is_refused():
    with pytest.raises(TypeError, match="'model' twice"):
        Config.from_options("model", {"model": "other"})


def test_paths_become_strings():
    config = Config.from_options(Path("some/model"), {"tokenizer": Path("some/tokenizer")})
    assert (config.model, config.tokenizer) == ("some/model", "some/tokenizer")


@pytest.mark.parametrize("model", ["", "  "])
def test_empty_model_is_refused(model):
    with pytest.raises(ValueError, match="model must be a directory or a hub id"):
        Config(model)


@pytest.mark.parametrize("model", [None, 3, b"model", ["model"]])
def test_model_of_a_wrong_type_is_refused(model):
    with pytest.raises(TypeError, match="model must be"):
        Config(model)


@pytest.mark.parametrize(
    "name",
    [
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
        "tensor_parallel_size",
        "kvcache_block_size",
        "num_kvcache_blocks",
    ],
)
def test_counts_take_numpy_integers_and_nothing_else(name):
    assert type(getattr(Config("model", **{name: np.int64(64)}), name)) is int
    for value in (True, np.True_, torch.tensor(True), 64.0, "64", [64], float("nan")):
        with pytest.raises(TypeError, match=f"{name} must be an int"):
            Config("model", **{name: value})
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
            Config("model", **{name: value})


@pytest.mark.parametrize("name", ["max_num_seqs", "seed", "dtype", "device", "enforce_eager"])
def test_none_is_refused_where_it_has_no_meaning(name):
    with pytest.raises(TypeError, match=f"{name} must be"):
        Config("model", **{name: None})


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2**15 + 1},
        {"max_num_seqs": 10**30},
        {"max_num_batched_tokens": 2**31},
        {"cpu_kvcache_space_gib": 1e300},
    ],
    ids=str,
)
def test_sizes_that_no_machine_has_are_refused(options):
    """They were asked of the machine, or an OverflowError called a lack of memory."""
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .*got {value}".replace("+", r"\+")):
        Config("model", **options)


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.01, float("nan"), float("inf"), 10**400])
def test_memory_fraction_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be .* in \(0, 1\], got"):
        Config("model", gpu_memory_utilization=value)


@pytest.mark.parametrize("value", ["0.9", True, None, 1j])
def test_memory_fraction_of_a_wrong_type_is_refused(value):
    with pytest.raises(TypeError, match="gpu_memory_utilization must be a number"):
        Config("model", gpu_memory_utilization=value)


def test_numbers_are_stored_as_plain_floats():
    config = Config("model", gpu_memory_utilization=1, cpu_kvcache_space_gib=np.float32(0.5))
    assert (config.gpu_memory_utilization, config.cpu_kvcache_space_gib) == (1.0, 0.5)
    assert type(config.gpu_memory_utilization) is type(config.cpu_kvcache_space_gib) is float


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_cpu_cache_space_must_be_positive(value):
    with pytest.raises(ValueError, match="cpu_kvcache_space_gib must be a finite number in"):
        Config("model", cpu_kvcache_space_gib=value)


@pytest.mark.parametrize("value", [16, 48, 256, 1024])
def test_block_sizes_are_multiples_of_16(value):
    assert Config("model", kvcache_block_size=value).kvcache_block_size == value


def test_other_block_sizes_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"multiple of 16, got 100\. The nearest below is 96"):
        Config("model", kvcache_block_size=100)
    with pytest.raises(ValueError, match="kvcache_block_size must be from 16 to 1024, got 2048"):
        Config("model", kvcache_block_size=2048)


@pytest.mark.parametrize(
    "name",
    ["enforce_eager", "enable_prefix_caching", "enable_overlap", "enable_request_reordering"],
)
def test_switches_take_only_booleans(name):
    for value in (0, 1, "no"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
            Config("model", **{name: value})


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("auto", "auto"),
        ("bfloat16", "bfloat16"),
        ("half", "float16"),
        ("float", "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.half, "float16"),
    ],
)
def test_dtypes_are_stored_by_name(given, stored):
    assert Config("model", dtype=given).dtype == stored


@pytest.mark.parametrize("dtype", ["int8", "bf16", "", torch.int8, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be one of 'auto', 'float32'"):
        Config("model", dtype=dtype)


@pytest.mark.parametrize("dtype", [16, float, np.float32])
def test_dtypes_of_a_wrong_type_are_refused(dtype):
    with pytest.raises(TypeError, match="dtype must be one of"):
        Config("model", dtype=dtype)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", torch.device("cuda:1")])
def test_devices_are_stored_by_name(device):
    assert Config("model", device=device).device == str(device)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "", "cpu\n"])
def test_other_devices_are_refused(device):
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got"):
        Config("model", device=device)


def test_device_of_a_wrong_type_is_refused():
    with pytest.raises(TypeError, match="device must be .*, got 0 of type int"):
        Config("model", device=0)


def test_one_named_gpu_cannot_hold_several_ranks():
    with pytest.raises(ValueError, match="names one GPU, but tensor_parallel_size is 2"):
        Config("model", device="cuda:1", tensor_parallel_size=2)


def test_code_from_a_checkpoint_is_refused():
    with pytest.raises(ValueError, match="code from a checkpoint is never run"):
        Config("model", trust_remote_code=True)


def test_modes_are_refused_with_their_list():
    with pytest.raises(ValueError, match="load_format must be one of 'auto', 'dummy', got 'gguf'"):
        Config("model", load_format="gguf")
    with pytest.raises(ValueError, match="logprobs_mode must be one of 'raw_logprobs', 'processe"):
        Config("model", logprobs_mode="raw_logits")
    with pytest.raises(TypeError, match="attention_backend must be the name of a backend"):
        Config("model", attention_backend=None)


def test_seed_is_any_integer_of_64_bits():
    assert Config("model", seed=-5).seed == -5
    with pytest.raises(ValueError, match="seed must be from"):
        Config("model", seed=2**64)
