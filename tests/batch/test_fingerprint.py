"""Which options make a job another one, and which may change when it is gone on with."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields

import pytest
from tiny_models import write_tokenizer

from nanovllm.batch.fingerprint import job_fingerprint
from nanovllm.config import Config

# Another value than the default for each option: of those that change answers, and of the others.
ANSWERS = {
    "max_model_len": 64,
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "quantization": "fp8",
    "seed": 1,
    "load_format": "dummy",
    "logprobs_mode": "processed_logprobs",
}
SPEED = {
    "max_num_batched_tokens": 100,
    "max_num_seqs": 3,
    "gpu_memory_utilization": 0.5,
    "tensor_parallel_size": 2,
    "enforce_eager": True,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 7,
    "enable_prefix_caching": False,
    "enable_overlap": True,
    "device": "cpu",
    "attention_backend": "sdpa",
    "cpu_kvcache_space_gib": 1.0,
    "enable_request_reordering": False,
    "enable_custom_all_reduce": False,
}
BY_CONTENT = {"model", "tokenizer", "lora"}
NO_CHOICE = {"trust_remote_code"}


def fingerprint(model, sampling=(), shard=(0, 1), source="-", **options):
    return job_fingerprint(
        Config(str(model), **options), dict(sampling), source=source, shard=shard
    )


def test_each_option_is_one_or_the_other():
    """A new one must be thought of, or jobs go on with other answers in the middle."""
    named = [*ANSWERS, *SPEED, *BY_CONTENT, *NO_CHOICE]
    assert sorted(named) == sorted(field.name for field in fields(Config))


@pytest.mark.parametrize("name", ANSWERS)
def test_what_changes_answers_makes_another_job(tiny_model, name):
    ours, other = fingerprint(tiny_model), fingerprint(tiny_model, **{name: ANSWERS[name]})
    assert {key for key in ours if ours[key] != other[key]} == {"engine"}
    assert ours["engine"].pop(name) != other["engine"].pop(name)
    assert ours == other


def test_what_changes_speed_alone_does_not(tiny_model):
    assert fingerprint(tiny_model, **SPEED) == fingerprint(tiny_model)


def test_sampling_shard_and_tokenizer_belong_to_a_job(tiny_model, tmp_path):
    ours = fingerprint(tiny_model)
    assert fingerprint(tiny_model, {"temperature": 0.5}) != ours
    assert fingerprint(tiny_model, shard=(1, 2)) != ours
    write_tokenizer(tmp_path / "tokenizer")
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "copy")
    with_own = fingerprint(tiny_model, tokenizer=tmp_path / "tokenizer")
    assert with_own != ours
    assert fingerprint(tiny_model, tokenizer=tmp_path / "copy") == with_own
    config = tmp_path / "copy" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": 5}))
    assert fingerprint(tiny_model, tokenizer=tmp_path / "copy") != with_own


def test_a_model_is_its_files_small_ones_to_the_byte(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    assert fingerprint(tmp_path / "model") == fingerprint(tiny_model), "wherever it is"
    (tmp_path / "model" / "README.md").write_text("not read")
    assert fingerprint(tmp_path / "model") == fingerprint(tiny_model)
    path = tmp_path / "model" / "tokenizer.json"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # of the same size
    path.write_bytes(data)
    assert fingerprint(tmp_path / "model") != fingerprint(tiny_model)
