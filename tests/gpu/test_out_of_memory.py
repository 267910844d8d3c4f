"""The device's memory runs out in a step: what to lower is said, and the engine goes on."""

from __future__ import annotations

import pytest
import torch

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SUMS = {"12+34=": "46", "40+41=": "81", "8+10=": "18"}
OPTIONS = {"kvcache_block_size": 16, "num_kvcache_blocks": 4096, "max_num_seqs": 64}


def take_the_rest(left_bytes: int) -> list[torch.Tensor]:
    """Allocate what is free but for `left_bytes`, for other programs too: only for a moment."""
    torch.cuda.empty_cache()
    taken, size = [], 2**33
    while size >= 2**20:
        try:
            free, _ = torch.cuda.mem_get_info()
            if free - size < left_bytes:
                raise torch.OutOfMemoryError
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


def check(llm: LLM) -> None:
    outputs = llm.generate(list(SUMS), GREEDY, use_tqdm=False)
    assert [output["text"].strip() for output in outputs] == list(SUMS.values())
    scheduler = llm._engine.scheduler
    scheduler.check_invariants()
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks


def test_a_prefill_without_memory_is_a_memory_error_and_the_next_call_is_right(demo_model):
    with LLM(demo_model, max_num_batched_tokens=16384, **OPTIONS) as llm:
        check(llm)
        taken = take_the_rest(left_bytes=2**24)
        try:
            prompts = [[5 + i % 900 for i in range(n, n + 1000)] for n in range(40)]
            with pytest.raises(MemoryError, match="lower gpu_memory_utilization"):
                llm.generate(prompts, GREEDY, use_tqdm=False)
        finally:
            del taken
            torch.cuda.empty_cache()
        check(llm)


def test_a_capture_without_memory_is_no_harm_later(demo_model):
    """A graph size that is needed for the first time when nothing is left."""
    with LLM(demo_model, max_num_batched_tokens=512, **OPTIONS) as llm:
        check(llm)
        taken = take_the_rest(left_bytes=2**21)
        prompts = ["12+34="] * 40
        try:
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert {output["text"].strip() for output in outputs} == {"46"}, "there was room"
        except MemoryError as error:
            assert "lower gpu_memory_utilization" in str(error)
        finally:
            del taken
            torch.cuda.empty_cache()
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert {output["text"].strip() for output in outputs} == {"46"}
        check(llm)


def test_a_start_without_memory_gives_all_back(demo_model):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with pytest.raises((MemoryError, ValueError), match="[Ll]ower"):
        LLM(demo_model, kvcache_block_size=16, num_kvcache_blocks=10**9)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
    with LLM(demo_model, **OPTIONS) as llm:
        check(llm)
