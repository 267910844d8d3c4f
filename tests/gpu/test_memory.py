"""Device memory that is lent out really comes back."""

from __future__ import annotations

import gc

import pytest
import torch

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [f"{a}+{b}=" for a, b in [(12, 34), (40, 41), (8, 10)]]
SLACK = 96 * 2**20  # what torch's libraries keep for themselves
CACHE = 2 * 2**30
OPTIONS = {
    "kvcache_block_size": 64,
    # [2, 6 layers, blocks, 64, 2 heads, 64] in bf16: 2 GiB of KV cache
    "num_kvcache_blocks": CACHE // (2 * 6 * 64 * 2 * 64 * 2),
    "max_num_seqs": 64,
}


def used() -> int:
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def tokens(llm: LLM) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module", autouse=True)
def warmed_up(demo_model):
    """The first engine of a process loads libraries, whose memory stays."""
    with LLM(demo_model, **OPTIONS) as llm:
        tokens(llm)


def test_sleep_returns_memory_and_waking_gives_the_same_tokens(demo_model):
    before = used()
    with LLM(demo_model, **OPTIONS) as llm:
        expected = tokens(llm)
        assert used() - before > 0.95 * CACHE
        for level in (1, 2):
            llm.sleep(level)
            assert used() - before < SLACK, f"level {level}"
            llm.wake_up()
            assert tokens(llm) == expected
            assert used() - before > 0.95 * CACHE
        weights = llm._engine._executor._runner._model.parameters()
        num_bytes = sum(p.untyped_storage().nbytes() for p in weights)
        llm.sleep(1)
        allocated = torch.cuda.memory_allocated()
        llm.sleep(2)
        assert allocated - torch.cuda.memory_allocated() >= 0.9 * num_bytes > 0
        llm.wake_up()
        assert tokens(llm) == expected


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_new_weights_keep_captured_graphs_valid(demo_model, kv_cache_dtype):
    """In fp8 the scales change with the weights, at the address that the graphs know."""
    with LLM(demo_model, kv_cache_dtype=kv_cache_dtype, **OPTIONS) as llm:
        expected = tokens(llm)
        runner = llm._engine._executor._runner
        name = "model.embed_tokens.weight"
        table = dict(runner._model.named_parameters())[name].detach().clone()
        llm.load_weights([(name, torch.zeros_like(table))])
        assert tokens(llm) != expected
        llm.load_weights([(name, table)])
        assert tokens(llm) == expected


def test_closing_returns_memory_each_time(demo_model):
    before = used()
    for _ in range(3):
        llm = LLM(demo_model, **OPTIONS)
        tokens(llm)
        assert used() - before > 0.95 * CACHE
        llm.close()
        assert used() - before < SLACK


def test_a_score_on_the_device_equals_its_logprobs(demo_model):
    with LLM(demo_model, **OPTIONS) as llm:
        params = GREEDY.clone(logprobs=0)
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            completion = output.outputs[0]
            (score,) = llm.score(output.prompt_token_ids, [completion.token_ids], use_tqdm=False)
            assert score.logprob == pytest.approx(completion.cumulative_logprob, abs=0.2)
