"""The same numbers at every edge on CUDA, with captured graphs: see tests/test_numbers.py."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from number_checks import (
    check_likeliest,
    check_tokens,
    edge_batches,
    edge_lengths,
    exact_logprobs,
    logprobs_of,
    mean_distance,
    prompts_of,
)
from oracle import Oracle
from tiny_models import write_tiny_qwen3
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu
LONGEST, MARGIN = 260, 2e-3  # float32 sums run in another order than on the CPU
BACKENDS = ["triton", "sdpa", *(["flash_attn"] if find_spec("flash_attn") else [])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_qwen3(tmp_path_factory.mktemp("numbers") / "model", head_dim=64)


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)


@pytest.mark.parametrize(
    ("enforce_eager", "backend", "block_size"),
    [(False, "auto", 16), (True, "auto", 48), (False, "auto", 256), (True, "sdpa", 128)],
)
def test_lengths_batches_and_chunks_in_float32(model, oracle, enforce_eager, backend, block_size):
    """Every edge of block, chunk and context, then batches around every graph size."""
    options: dict[str, Any] = {"max_num_batched_tokens": 100, "max_num_seqs": 40}
    with LLM(
        model,
        dtype="float32",
        enforce_eager=enforce_eager,
        attention_backend=backend,
        kvcache_block_size=block_size,
        num_kvcache_blocks=6400 // block_size,
        max_model_len=LONGEST,
        **options,
    ) as llm:
        lengths = edge_lengths(LONGEST, block_size, 100)
        check_tokens(llm, oracle, prompts_of(lengths, 500), 3, MARGIN)
        # Downward too: rows of a larger batch must not show in the padding of a smaller one.
        sizes = edge_batches(40)
        check_batches(llm, oracle, [*sizes, *reversed(sizes)])


def check_batches(llm: LLM, oracle: Oracle, sizes: list[int]) -> None:
    prompts = prompts_of([5 + i % 20 for i in range(41)], 500, seed=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for size in sizes:
        batch = (prompts * (size // 41 + 1))[:size]
        for prompt, output in zip(batch, llm.generate(batch, params, use_tqdm=False), strict=True):
            oracle.check_greedy(prompt, output["token_ids"], MARGIN)


def test_batches_around_every_graph_size_of_the_default(model, oracle):
    with LLM(model, dtype="float32", num_kvcache_blocks=600, max_model_len=64) as llm:
        assert llm._engine.config.max_num_seqs == 512
        check_batches(llm, oracle, [size for size in edge_batches(512) if size > 41])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "block_size"), [("bfloat16", 64), ("bfloat16", 256), ("float16", 16)]
)
def test_halves_are_as_near_as_transformers_own(model, oracle, backend, dtype, block_size):
    """Mean distance from float32 at most 1.5 times that of transformers in the same dtype."""
    if backend == "flash_attn" and block_size == 16:
        pytest.skip("flash-attn's own prefill of cached prefixes takes larger blocks")
    prompts = prompts_of([2, 17, 64, 130, 257], 500, seed=2)
    exact = exact_logprobs(oracle, prompts)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).cuda()
    with torch.inference_mode():
        theirs = [
            reference(torch.tensor([ids], device="cuda"))
            .logits[0, :-1]
            .float()
            .cpu()
            .log_softmax(-1)
            for ids in prompts
        ]
    with LLM(
        model,
        dtype=dtype,
        attention_backend=backend,
        kvcache_block_size=block_size,
        num_kvcache_blocks=64,
        max_num_batched_tokens=150,
        max_num_seqs=16,
        max_model_len=LONGEST,
    ) as llm:
        ours = logprobs_of(llm, prompts)
        # What prefill and a captured decode say of one position: the same but for rounding.
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
        distances = []
        for output in llm.generate(prompts[:4], params, use_tqdm=False):
            ids = output.prompt_token_ids + output["token_ids"]
            again = oracle.logits(ids).float().log_softmax(-1)
            for place, position in enumerate(output.outputs[0].logprobs):
                token_id = output["token_ids"][place]
                right = float(again[len(output.prompt_token_ids) + place - 1, token_id])
                distances.append(abs(position[token_id].logprob - right))
    distance = mean_distance(theirs, exact)
    assert mean_distance(ours, exact) <= 1.5 * distance
    assert sum(distances) / len(distances) <= 3 * distance + 0.05


@pytest.mark.parametrize("vocab_size", [32, 33, 151_937, 300_000])
def test_vocabularies_of_every_size(tmp_path, vocab_size):
    """Neither a power of two nor a multiple of a kernel's tile; the last token is found too."""
    model = write_tiny_qwen3(tmp_path / "model", vocab_size=vocab_size)
    oracle = Oracle(model)
    prompts = [[*ids, vocab_size - 1] for ids in prompts_of([1, 15, 16], vocab_size)]
    with LLM(
        model, dtype="float32", num_kvcache_blocks=64, max_model_len=LONGEST, max_num_seqs=16
    ) as llm:
        check_tokens(llm, oracle, prompts, 4, MARGIN)
        check_likeliest(llm, oracle, prompts)
        for token_id in (0, vocab_size // 2, vocab_size - 1):
            rules: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.9}, {"logprobs": 2}]
            params = [
                SamplingParams(
                    max_tokens=2, seed=1, ignore_eos=True, logit_bias={token_id: 1000.0}, **rule
                )
                for rule in rules
            ]
            for output in llm.generate([prompts[0]] * len(rules), params, use_tqdm=False):
                assert output["token_ids"] == [token_id] * 2
