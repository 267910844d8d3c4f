"""The same numbers at every edge: lengths, batches, vocabularies, dtypes, block sizes, backends.

`tests/gpu/test_numbers.py` does it on CUDA, with captured graphs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_harness import load, on_ranks, prefill_logits
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
from oracle import MARGIN, Oracle
from safetensors.torch import load_file
from tiny_models import write_tiny_qwen3
from transformers import AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.engine.step import PrefillWork, SchedulerOutput
from nanovllm.kernels._triton import HAS_TRITON

LONGEST = 130
ENGINE = {"device": "cpu", "dtype": "float32", "max_model_len": LONGEST}


@pytest.mark.parametrize(
    "options",
    [
        {"kvcache_block_size": 16, "max_num_batched_tokens": 33},
        {"kvcache_block_size": 48, "max_num_batched_tokens": 64, "enable_overlap": True},
        {"kvcache_block_size": 256},
    ],
    ids=str,
)
def test_prompts_of_every_length_up_to_the_limit(tiny_model, tiny_oracle, make_llm, options):
    llm = make_llm(tiny_model, num_kvcache_blocks=200, **ENGINE, **options)
    granules = (options["kvcache_block_size"], options.get("max_num_batched_tokens", 100))
    lengths = edge_lengths(LONGEST, *granules)
    check_tokens(llm, tiny_oracle, prompts_of(lengths, 500), 3, MARGIN)


def test_batches_around_every_graph_size(tiny_model, tiny_oracle, make_llm):
    llm = make_llm(tiny_model, max_num_seqs=40, num_kvcache_blocks=200, **ENGINE)
    prompts = prompts_of([5 + i % 20 for i in range(41)], 500, seed=1)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for size in edge_batches(40):
        for prompt, output in zip(
            prompts[:size], llm.generate(prompts[:size], params, False), strict=True
        ):
            tiny_oracle.check_greedy(prompt, output["token_ids"])


@pytest.mark.parametrize("vocab_size", [32, 33, 127, 1025, 32_000, 300_000])
def test_vocabularies_of_every_size(tmp_path, make_llm, vocab_size):
    """Neither a power of two, nor a multiple of a kernel's tile, nor of the number of ranks."""
    hidden = {"hidden_size": 32, "head_dim": 16} if vocab_size > 10_000 else {}
    model = write_tiny_qwen3(tmp_path / "model", vocab_size=vocab_size, **hidden)
    oracle = Oracle(model)
    llm = make_llm(model, num_kvcache_blocks=64, **ENGINE)
    prompts = [[*ids, vocab_size - 1] for ids in prompts_of([1, 15, 16], vocab_size)]
    check_tokens(llm, oracle, prompts, 4, MARGIN)
    check_likeliest(llm, oracle, prompts)
    # The likeliest token is found wherever it is, also in the last tile.
    for token_id in (0, vocab_size // 2, vocab_size - 1):
        for rules in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 2}):
            params = SamplingParams(
                max_tokens=2, seed=1, ignore_eos=True, logit_bias={token_id: 1000.0}, **rules
            )
            (output,) = llm.generate([prompts[0]], params, use_tqdm=False)
            assert output["token_ids"] == [token_id] * 2


@pytest.mark.parametrize("vocab_size", [33, 130, 1021])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_vocabularies_that_ranks_cannot_share_evenly(tmp_path, vocab_size, tp_size):
    model_dir = write_tiny_qwen3(tmp_path / "model", vocab_size=vocab_size)
    ids = torch.tensor(prompts_of([20], vocab_size)[0] + [vocab_size - 1])
    expected = prefill_logits(load(model_dir), ids)
    assert expected.shape[-1] == vocab_size
    for logits in on_ranks(
        tp_size, lambda parallel: prefill_logits(load(model_dir, parallel=parallel), ids)
    ):
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_as_near_as_transformers_own(
    tiny_model, tiny_oracle, make_llm, dtype, block_size
):
    """Mean distance from float32 at most 1.5 times that of transformers in the same dtype."""
    llm = make_llm(
        tiny_model,
        **{**ENGINE, "dtype": dtype},
        kvcache_block_size=block_size,
        num_kvcache_blocks=20,
        max_num_batched_tokens=70,
    )
    prompts = prompts_of([2, 17, 64, 129], 500, seed=2)
    exact = exact_logprobs(tiny_oracle, prompts)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        theirs = [
            model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1) for ids in prompts
        ]
    assert mean_distance(logprobs_of(llm, prompts), exact) <= 1.5 * mean_distance(theirs, exact)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_numbers.py does it there")
@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [
        ("float32", 16),
        pytest.param("float16", 64, marks=pytest.mark.slow),
        pytest.param("bfloat16", 256, marks=pytest.mark.slow),
    ],
)
def test_backends_agree(tiny_model, tiny_oracle, make_llm, dtype, block_size):
    """Triton's kernels, interpreted, against SDPA: chunks, cached prefixes and decode."""
    prompts = prompts_of([15, 17, 30], 500, seed=3)
    prompts += [prompts[2][:17] + [7]]
    found = {}
    for backend in ("sdpa", "triton"):
        llm = make_llm(
            tiny_model,
            **{**ENGINE, "dtype": dtype},
            attention_backend=backend,
            kvcache_block_size=block_size,
            num_kvcache_blocks=20,
            max_num_batched_tokens=24,
        )
        if dtype == "float32":
            check_tokens(llm, tiny_oracle, prompts, 2, MARGIN)
        found[backend] = logprobs_of(llm, prompts[2:])
    distance = mean_distance(found["triton"], found["sdpa"])
    assert distance < (1e-4 if dtype == "float32" else 2e-2)


def test_a_record_of_a_hundred_megabytes_survives():
    """A step of 25 million tokens, far beyond any: lengths and offsets do not overflow."""
    num_tokens = 25_000_000
    ints = np.arange(num_tokens, dtype=np.int32)
    few = np.array([0], dtype=np.int32)
    work = PrefillWork(few, ints, few, few, few, few, few, few)
    pairs = np.zeros((0, 2), dtype=np.int32)
    counts = {"step_id": 1, "num_decode_rows": 0, "features": 0}
    output = SchedulerOutput(
        **counts, max_logprobs=-1, moves=pairs, cells=pairs, rules=few, prefill=work
    )
    again = SchedulerOutput.from_bytes(output.to_bytes())
    assert again.prefill is not None and np.array_equal(again.prefill.token_ids, ints)


@pytest.mark.slow
def test_a_weight_of_a_hundred_megabytes_reaches_every_rank(tmp_path, make_llm):
    """The largest message that ranks are sent: a whole tensor, here the embedding's."""
    shape = {"vocab_size": 300_000, "hidden_size": 96, "tie_word_embeddings": True}
    model = write_tiny_qwen3(tmp_path / "model", **shape)
    prompt, params = [299_999, 5, 150_000], SamplingParams(temperature=0, max_tokens=4)
    options = {**ENGINE, "num_kvcache_blocks": 8, "tensor_parallel_size": 2}
    llm = make_llm(model, **options)
    before = llm.generate([prompt], params, use_tqdm=False)[0]["token_ids"]
    name = "model.embed_tokens.weight"
    weight = load_file(model / "model.safetensors")[name]
    assert weight.nbytes > 100 * 10**6
    turned = weight.roll(1, dims=0)  # each token is now called by the next number
    llm.load_weights([(name, turned)])
    after = llm.generate([[0, 6, 150_001]], params, use_tqdm=False)[0]["token_ids"]
    assert after == [(token_id + 1) % 300_000 for token_id in before]
