"""Every dense architecture against transformers: logits of one prefill, tokens of the engine."""

import logging
import random

import pytest
import torch
from model_harness import load, on_ranks, prefill_logits
from oracle import Oracle
from safetensors.torch import load_file
from tiny_models import write_tiny

from nanovllm import SamplingParams
from nanovllm.models.model_config import load_model_config
from nanovllm.models.phi3 import _split

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = [
    ("Qwen2ForCausalLM", {}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"attention_bias": True, "num_key_value_heads": None}),
    ("LlamaForCausalLM", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    ("LlamaForCausalLM", {"head_dim": 32}),
    ("LlamaForCausalLM", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    ("MistralForCausalLM", {"sliding_window": None}),
    ("MistralForCausalLM", {"sliding_window": 100, "head_dim": 32}),
    ("Phi3ForCausalLM", {}),
    ("Phi3ForCausalLM", {"sliding_window": 100, "num_key_value_heads": None}),
]
CPU_OPTIONS = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16}


def some_ids(num_tokens):
    return torch.randint(517, (num_tokens,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("architecture", "overrides"), CASES, ids=str)
def test_logits_equal_transformers(tmp_path, architecture, overrides):
    write_tiny(tmp_path, architecture, **overrides)
    ids = some_ids(100)
    logits = prefill_logits(load(tmp_path), ids)
    expected = Oracle(tmp_path).logits(ids.tolist())
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("architecture", "overrides"), CASES, ids=str)
def test_greedy_tokens_equal_transformers(tmp_path, make_llm, optimistic, architecture, overrides):
    """Chunked prefill, decode and preemption in between; none goes beyond 100 positions."""
    write_tiny(tmp_path, architecture, **overrides)
    llm = make_llm(tmp_path, num_kvcache_blocks=12, max_num_batched_tokens=48, **CPU_OPTIONS)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 500) for _ in range(n)] for n in (1, 17, 40, 76)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    oracle = Oracle(tmp_path)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len(output["token_ids"]) == 24
        oracle.check_greedy(prompt, output["token_ids"])
    assert llm.metrics.num_preemptions > 0


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("Qwen2ForCausalLM", {"num_key_value_heads": 1}),
        ("LlamaForCausalLM", {"attention_bias": True}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("Phi3ForCausalLM", {}),
    ],
    ids=str,
)
def test_ranks_together_equal_one(tmp_path, architecture, overrides):
    write_tiny(tmp_path, architecture, **overrides)
    ids = some_ids(40)
    expected = prefill_logits(load(tmp_path), ids)
    for logits in on_ranks(2, lambda rank: prefill_logits(load(tmp_path, parallel=rank), ids)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_far_positions_use_llama3_scaling(tmp_path):
    """Ignored scaling is exact at position 0 and drifts with length, so look far out."""
    write_tiny(tmp_path, "LlamaForCausalLM", rope_parameters=LLAMA3)
    ids = some_ids(400)
    logits = prefill_logits(load(tmp_path), ids)[-20:]
    expected = Oracle(tmp_path).logits(ids.tolist())[-20:]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Phi3ForCausalLM"])
def test_a_model_runs_up_to_its_window_and_not_beyond(tmp_path, make_llm, caplog, architecture):
    """transformers hides old tokens past the window; here the context ends where that begins."""
    write_tiny(tmp_path, architecture, sliding_window=32)
    with caplog.at_level(logging.WARNING):
        llm = make_llm(tmp_path, num_kvcache_blocks=16, **CPU_OPTIONS)
    assert caplog.text.count("sliding_window = 32 bounds the context") == 1
    assert llm.max_model_len == 32
    prompt = some_ids(20).tolist()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert len(output["token_ids"]) == 12
    Oracle(tmp_path).check_greedy(prompt, output["token_ids"])
    with pytest.raises(ValueError, match="exceeds the 32 positions"):
        make_llm(tmp_path, max_model_len=33, **CPU_OPTIONS)


def test_fused_tensors_are_replaced_in_part_and_checked_before(tmp_path, make_llm):
    """Phi-3's checkpoint holds q, k and v in one tensor, and gate and up."""
    directory = write_tiny(tmp_path / "old", "Phi3ForCausalLM")
    new_directory = write_tiny(tmp_path / "new", "Phi3ForCausalLM", seed=1)
    llm = make_llm(directory, num_kvcache_blocks=16, **CPU_OPTIONS)
    new = load_file(new_directory / "model.safetensors")
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(ValueError, match=rf"{fused}: .*shape \(127, 64\) .* model's \(128, 64\)"):
        llm.load_weights([*new.items(), (fused, new[fused][1:])])
    for pair in new.items():
        llm.load_weights([pair])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    Oracle(new_directory).check_greedy([5, 6, 7], output["token_ids"])


def test_fused_scales_of_phi3_are_split_like_their_weights(tmp_path):
    config = load_model_config(write_tiny(tmp_path, "Phi3ForCausalLM"))
    kv_size, hidden = config.num_kv_heads * config.head_dim, config.hidden_size
    rows = config.num_heads * config.head_dim + 2 * kv_size
    scales = torch.arange(rows).float().unsqueeze(1)
    split = dict(_split([("a.qkv_proj.weight_scale", scales)], config))
    assert [*split] == [f"a.{part}_proj.weight_scale" for part in "qkv"]
    assert torch.equal(torch.cat([*split.values()]), scales)
    with pytest.raises(ValueError, match="a.gate_up_proj.weight_scale_inv: blocks of 128 rows"):
        list(_split([("a.gate_up_proj.weight_scale_inv", torch.ones(1, 1))], config))
    with pytest.raises(ValueError, match="a.qkv_proj.weight: "):
        list(_split([("a.qkv_proj.weight", torch.ones(rows, hidden + 1))], config))
