"""Qwen3-MoE against transformers, and what its config.json and weights may be."""

import json
import random

import pytest
import torch
from model_harness import build, load, on_ranks, prefill_logits
from oracle import Oracle
from safetensors.torch import load_file
from tiny_models import write_tiny

from nanovllm import SamplingParams
from nanovllm.models.model_config import load_model_config
from nanovllm.models.moe_config import MoeConfig
from nanovllm.moe.layer import one_by_one

FIELDS = {
    "head_dim": 32,
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
CASES = [
    {},
    {"norm_topk_prob": False},
    {"mlp_only_layers": [1]},
    {"decoder_sparse_step": 2, "num_experts": 16, "num_experts_per_tok": 8},
    {"num_experts_per_tok": 1, "norm_topk_prob": False, "attention_bias": True},
]
CPU_OPTIONS = {"device": "cpu", "dtype": "float32", "kvcache_block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def write(directory, *, seed=0, **overrides):
    return write_tiny(directory, "Qwen3MoeForCausalLM", seed=seed, **{**FIELDS, **overrides})


def some_ids(num_tokens):
    return torch.randint(517, (num_tokens,), generator=torch.Generator().manual_seed(1))


def check(llm, oracle, num_prompts=4):
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 500) for _ in range(n)] for n in (1, 17, 40, 76)][:num_prompts]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        assert len(output["token_ids"]) == 16
        oracle.check_greedy(prompt, output["token_ids"])


@pytest.mark.parametrize("overrides", CASES, ids=str)
def test_logits_and_tokens_equal_transformers(tmp_path, make_llm, optimistic, overrides):
    """Chunked prefill, decode and preemption in between."""
    write(tmp_path, **overrides)
    oracle, ids = Oracle(tmp_path), some_ids(100)
    logits = prefill_logits(load(tmp_path), ids)
    torch.testing.assert_close(logits, oracle.logits(ids.tolist()), rtol=1e-4, atol=1e-4)
    llm = make_llm(tmp_path, num_kvcache_blocks=11, max_num_batched_tokens=48, **CPU_OPTIONS)
    check(llm, oracle)
    assert llm.metrics.num_preemptions > 0


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_together_equal_one(tmp_path, tp_size):
    """Experts are split by their inner size, 6 each on four ranks; the router is whole."""
    write(tmp_path, mlp_only_layers=[1])
    ids = some_ids(40)
    expected = prefill_logits(load(tmp_path), ids)
    ranks = on_ranks(tp_size, lambda rank: prefill_logits(load(tmp_path, parallel=rank), ids))
    for logits in ranks:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_an_uneven_split_names_both_numbers(tmp_path, make_llm):
    write(tmp_path, moe_intermediate_size=25)
    match = "moe_intermediate_size = 25 .* tensor_parallel_size = 2"
    with pytest.raises(ValueError, match=match):  # before any process starts
        make_llm(tmp_path, tensor_parallel_size=2, **CPU_OPTIONS)
    with pytest.raises(ValueError, match=match):
        on_ranks(2, lambda rank: build(load_model_config(tmp_path), parallel=rank))


def test_weights_are_replaced_freed_and_read_again_on_two_ranks(tmp_path, make_llm):
    old = write(tmp_path / "old")
    new = write(tmp_path / "new", seed=1)
    weights = load_file(new / "model.safetensors")
    llm = make_llm(old, num_kvcache_blocks=32, tensor_parallel_size=2, **CPU_OPTIONS)
    check(llm, Oracle(old), 2)
    match = rf"{EXPERT}: .*shape \(23, 64\) does not fit the model's \(24, 64\)"
    with pytest.raises(ValueError, match=match):
        llm.load_weights([(EXPERT, weights[EXPERT][1:])])
    with pytest.raises(ValueError, match="1 unexpected: .*experts.6.up_proj.weight"):
        llm.load_weights([(EXPERT.replace("3.up", "6.up"), weights[EXPERT])])
    for pair in weights.items():  # one after another, each a part
        llm.load_weights([pair])
    check(llm, Oracle(new), 2)
    llm.sleep(level=2)
    llm.wake_up()
    check(llm, Oracle(old), 2)


def test_stacked_experts_of_transformers_in_memory_are_taken(tmp_path):
    write(tmp_path, mlp_only_layers=[0])
    oracle, ids = Oracle(tmp_path), some_ids(20)
    stacked = oracle.model.state_dict()
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 48, 64)
    model = build(load_model_config(tmp_path))
    model.check_weights(list(stacked.items()))
    model.load_weights(stacked.items())
    expected = oracle.logits(ids.tolist())
    torch.testing.assert_close(prefill_logits(model, ids), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"experts.down_proj must be .* got \(6, 24\)"):
        model.check_weights([("model.layers.1.mlp.experts.down_proj", torch.zeros(6, 24))])


def test_every_expert_must_come_exactly_once(tmp_path):
    write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    model = build(load_model_config(tmp_path))
    model.load_weights(weights.items())
    down = EXPERT.replace("up_proj", "down_proj")
    with pytest.raises(ValueError, match=f"1 missing: {EXPERT}; 1 duplicate: {down}"):
        model.load_weights(
            [(n, w) for n, w in weights.items() if n != EXPERT] + [(down, weights[down])]
        )


def test_dummy_weights_run(tmp_path):
    write(tmp_path)
    model = build(load_model_config(tmp_path))
    model.init_dummy_weights(0)
    assert prefill_logits(model, some_ids(5)).isfinite().all()


def edit(directory, without=(), **changes):
    path = directory / "config.json"
    config = {key: v for key, v in json.loads(path.read_text()).items() if key not in without}
    path.write_text(json.dumps(config | changes))
    return load_model_config(directory)


def test_fields_are_read_as_published_and_as_transformers_writes_them(tmp_path):
    write(tmp_path)
    both = ("num_experts", "num_local_experts")
    expected = MoeConfig(6, 2, 24, norm_topk_prob=True, dense_layers=())
    assert edit(tmp_path, both, num_experts=6).moe == expected
    assert edit(tmp_path, both, num_local_experts=6).moe == expected
    assert edit(tmp_path, num_experts=6, decoder_sparse_step=2).moe.dense_layers == (0, 2)
    config = edit(tmp_path, decoder_sparse_step=None, mlp_only_layers=[2, 0], norm_topk_prob=None)
    assert config.moe.dense_layers == (0, 2) and not config.moe.norm_topk_prob


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_local_experts": 0}, "num_local_experts must be from 1 to 4096, got 0"),
        ({"num_experts": 7}, "num_experts = 7 and num_local_experts = 6 differ; remove one"),
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok must be from 1 to 6, got 7"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": "24"}, "moe_intermediate_size must be an int, got '24'"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be True or False, got 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, got 0"),
        ({"mlp_only_layers": 1}, "mlp_only_layers must be a list of layer numbers, got 1"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers must be from 0 to 2, got 3"),
    ],
    ids=str,
)
def test_bad_fields_are_named(tmp_path, changes, match):
    write(tmp_path)
    with pytest.raises(ValueError, match=match):
        edit(tmp_path, **changes)


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_stack_of_another_number_of_experts_is_refused(count):
    stack = torch.zeros(count, 8, 4)
    with pytest.raises(ValueError, match=r"must be \[4 experts, rows, columns\].*got"):
        list(one_by_one([("model.layers.0.mlp.experts.down_proj", stack)], 4))


@pytest.mark.parametrize("shape", [(4, 7, 8), (4, 8)])
def test_a_stack_that_has_no_gate_for_each_up_is_refused(shape):
    with pytest.raises(ValueError, match=r"as many rows of gate as of up; got \(4,"):
        list(one_by_one([("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(shape))], 4))
