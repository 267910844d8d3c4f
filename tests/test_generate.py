"""Greedy tokens equal the oracle's under every engine setting."""

from __future__ import annotations

import random

import pytest

from nanovllm import SamplingParams

NUM_TOKENS = 24


def make_prompts(num_prompts: int = 9) -> list[list[int]]:
    """Prompts of 1 to 70 tokens; some begin alike, one comes twice."""
    rng = random.Random(7)
    common = [rng.randrange(3, 500) for _ in range(40)]
    prompts = [
        [rng.randrange(3, 500) for _ in range(rng.randint(1, 70))] for _ in range(num_prompts)
    ]
    prompts += [common + [rng.randrange(3, 500) for _ in range(n)] for n in (1, 8, 9, 25)]
    return [*prompts, prompts[0], common[:32], common[:33]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"num_kvcache_blocks": 7},
        {"num_kvcache_blocks": 12, "max_num_batched_tokens": 33},
        {"num_kvcache_blocks": 12, "enable_prefix_caching": False, "enable_overlap": True},
        {"enable_prefix_caching": False},
        {"enable_overlap": True},
        {"enable_overlap": True, "num_kvcache_blocks": 12, "max_num_batched_tokens": 9},
        {"kvcache_block_size": 64, "num_kvcache_blocks": 8, "enable_overlap": True},
        {"kvcache_block_size": 256, "num_kvcache_blocks": 3},
        {"enable_request_reordering": False, "max_num_seqs": 4},
    ],
    ids=str,
)
def test_greedy_tokens_equal_the_oracle_under_every_setting(tiny_llm, tiny_oracle, options):
    check_twice(tiny_llm(**options), tiny_oracle)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kvcache_blocks": 9},
        {"num_kvcache_blocks": 12, "max_num_batched_tokens": 9, "enable_overlap": True},
        {"num_kvcache_blocks": 12, "enable_prefix_caching": False, "enable_overlap": True},
        {"kvcache_block_size": 32, "num_kvcache_blocks": 6, "enable_overlap": True},
    ],
    ids=str,
)
def test_preempted_sequences_go_on_with_the_oracles_tokens(
    tiny_llm, tiny_oracle, optimistic, options
):
    """It strikes whole prompts, chunks, and answers half done."""
    llm = tiny_llm(**options)
    check_twice(llm, tiny_oracle)
    assert llm.metrics.num_preemptions > 0


def check_twice(llm, oracle):
    """The second time the prefix cache is warm."""
    prompts = make_prompts()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.prompt_token_ids == prompt
            assert len(output["token_ids"]) == NUM_TOKENS
            oracle.check_greedy(prompt, output["token_ids"])
    llm._engine.scheduler.check_invariants()
    blocks = llm._engine.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks
