"""An engine never changes the current device of the thread that uses it: that is the user's."""

from __future__ import annotations

import pytest
import torch

from nanovllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
PROMPTS = ["12+34=", "5+6="]
SAMPLED = SamplingParams(temperature=0.5, top_k=5, logprobs=1, max_tokens=4)
CASES = {
    "the second GPU": {"device": "cuda:1"},
    "two GPUs, seen from the second": {"tensor_parallel_size": 2},
    "one of two, seen from the other": {"device": "cuda:0"},
    "an fp8 cache on the second GPU": {"device": "cuda:1", "kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_current_device_stays_as_it_was(demo_model, name):
    """Kernels of Triton were once launched where the engine had moved its user to."""
    greedy = SamplingParams(temperature=0, max_tokens=4)
    mine = 0 if CASES[name].get("device") == "cuda:1" else 1
    with torch.cuda.device(mine):
        with LLM(demo_model, num_kvcache_blocks=256, **CASES[name]) as llm:

            def check():
                assert torch.cuda.current_device() == mine
                texts = [out["text"] for out in llm.generate(PROMPTS, greedy, use_tqdm=False)]
                assert texts == ["46", "11"]
                assert len(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)) == 2
                assert torch.cuda.current_device() == mine

            check()
            for level in (1, 2):
                llm.sleep(level)
                assert torch.cuda.current_device() == mine
                llm.wake_up()
                check()
        assert torch.cuda.current_device() == mine
        assert torch.ones(3, device="cuda").device.index == mine
