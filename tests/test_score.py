"""`LLM.score` and partial prompt logprobs, against the log-softmax of transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.scoring import encode_pairs

RNG = random.Random(5)
COMMON = [RNG.randrange(3, 500) for _ in range(75)]
CONTEXTS = [COMMON, COMMON, COMMON, COMMON[:33], COMMON[:32], COMMON[:31], COMMON[:1], [9, 8, 7]]
CONTINUATIONS = [[RNG.randrange(3, 500) for _ in range(n)] for n in (1, 3, 20, 5, 1, 2, 40, 17)]
OPTIONS = [
    {},
    {"max_num_batched_tokens": 7},
    {"num_kvcache_blocks": 9, "max_num_seqs": 3},
    {"enable_prefix_caching": False},
    {"enable_overlap": True},
]


def check_scores(oracle, contexts, continuations, scores):
    for context, continuation, score in zip(contexts, continuations, scores, strict=True):
        logits = oracle.logits([*context, *continuation])[len(context) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(continuation)[:, None])[:, 0]
        assert score.token_ids == continuation
        torch.testing.assert_close(torch.tensor(score.token_logprobs), expected, rtol=0, atol=1e-4)
        assert score.logprob == pytest.approx(sum(score.token_logprobs))
        assert score.is_greedy == (logits.argmax(-1).tolist() == continuation)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scores_equal_transformers_cold_and_warm(tiny_llm, tiny_oracle, options):
    llm = tiny_llm(**options)
    greedy, _ = tiny_oracle.greedy(COMMON, 4)
    contexts, continuations = [*CONTEXTS, COMMON], [*CONTINUATIONS, greedy]
    for _ in range(2):
        scores = llm.score(contexts, continuations, use_tqdm=False)
        check_scores(tiny_oracle, contexts, continuations, scores)
    assert scores[-1].is_greedy and not scores[0].is_greedy
    llm._engine.scheduler.check_invariants()


def test_a_shared_context_is_computed_once(tiny_llm, tiny_oracle):
    llm = tiny_llm(kvcache_block_size=16)
    continuations = [[token, 7] for token in range(10, 40)]
    scores = llm.score(COMMON, continuations, use_tqdm=False)
    check_scores(tiny_oracle, [COMMON] * 30, continuations, scores)
    # 75 tokens: the four whole blocks before the last one, whose logits count, are shared.
    computed = llm.metrics.num_computed_prompt_tokens
    assert computed == 30 * 77 - 29 * 64
    llm.score(COMMON, continuations[:5], use_tqdm=False)
    assert llm.metrics.num_computed_prompt_tokens - computed == 5 * (77 - 64)


def test_scores_of_a_cache_that_generate_has_warmed(tiny_llm, tiny_oracle):
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (output,) = llm.generate([COMMON], params, use_tqdm=False)
    answer = output["token_ids"]
    before = llm.metrics.num_cached_tokens
    (score,) = llm.score([COMMON], [answer], use_tqdm=False)
    assert llm.metrics.num_cached_tokens - before == 64, "blocks of the answer are not taken"
    check_scores(tiny_oracle, [COMMON], [answer], [score])
    assert score.is_greedy
    # And what a score has computed serves prompts that follow.
    (again,) = llm.generate([COMMON + answer], params, use_tqdm=False)
    assert again.num_cached_tokens == 96
    tiny_oracle.check_greedy(COMMON + answer, again["token_ids"])


def test_whole_prompt_logprobs_still_need_the_whole_prompt(tiny_llm, tiny_oracle):
    llm = tiny_llm()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for _ in range(2):
        (output,) = llm.generate([COMMON], params, use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs[0] is None and None not in output.prompt_logprobs[1:]


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("hello world", " one two"),
        ("hello ", "world"),  # the space goes to the continuation
        ("the quick", "er fox"),
        ("日本", "語"),
    ],
)
def test_texts_are_encoded_whole_and_cut_as_lm_eval_does(
    tiny_llm, tiny_oracle, context, continuation
):
    llm = tiny_llm()
    encode = llm.get_tokenizer().encode
    bare = context.rstrip()
    first = encode(bare)
    second = encode(context + continuation)[len(first) :]
    (score,) = llm.score(context, [continuation], use_tqdm=False)
    assert score.token_ids == second
    check_scores(tiny_oracle, [first], [second], [score])


def test_an_empty_context_stands_for_bos_or_eos(tiny_llm, tiny_oracle):
    llm = tiny_llm()
    ids = llm.get_tokenizer().encode("hello world")
    (score,) = llm.score("", ["hello world"], use_tqdm=False)
    check_scores(tiny_oracle, [[2]], [ids], [score])
    mixed = llm.score(["hello", [5, 6], ""], [[7, 8], "world", [9]], use_tqdm=False)
    world = llm.get_tokenizer().encode("world")
    hello = llm.get_tokenizer().encode("hello")
    check_scores(tiny_oracle, [hello, [5, 6], [2]], [[7, 8], world, [9]], mixed)


def test_the_longest_pair_that_fits_is_scored(tiny_llm, tiny_oracle):
    llm = tiny_llm()
    context = [RNG.randrange(3, 500) for _ in range(500)]
    (score,) = llm.score(context, [[5] * 11], use_tqdm=False)
    check_scores(tiny_oracle, [context], [[5] * 11], [score])


@pytest.mark.parametrize(
    ("contexts", "continuations", "match"),
    [
        ([[5], [6]], [[7]], "contexts has 2 entries for 1 continuations"),
        ([[5]], ["", "x"], "contexts has 1 entries for 2"),
        (["hello"], [""], "continuation 0 has no token of its own"),
        (["hello", "you"], [["a", "b"], ["c"]], "continuation 0 must be .*a list with a string"),
        ([[5], []], [[7], [8]], "context 1 has no token"),
        ([[5], None], [[7], [8]], "context 1 must be a string or token ids, got NoneType"),
        ([[5]], [[9999]], "prompt 0 has token id 9999"),
        ([[5], [6]], [[7], [5] * 600], "prompt 1 has 601 tokens"),
        (5, [[5]], "must be a string"),
        (["x", "\ud800"], ["y", "y"], "context 1 cannot be encoded"),
        ("x", ["y", "\ud800"], "continuation 1 cannot be encoded"),
        ([torch.empty(3, device="meta")], [[7]], "context 0 cannot be read as a list"),
        ([[5]], [torch.tensor([[7], [8]])], r"prompt 0 has \[7\] among its token ids"),
    ],
)
def test_what_cannot_be_scored_is_named(tiny_llm, contexts, continuations, match):
    llm = tiny_llm()
    with pytest.raises((TypeError, ValueError), match=match):
        llm.score(contexts, continuations, use_tqdm=False)
    assert llm.is_finished()


@pytest.mark.parametrize("array", [np.array, torch.tensor, tuple])
def test_ids_in_any_form_are_scored_alike(tiny_llm, array):
    llm = tiny_llm()
    expected = llm.score([[5, 6], [7]], [[8], [9, 4]], use_tqdm=False)
    contexts, continuations = map(array, ([5, 6], [7])), map(array, ([8], [9, 4]))
    scores = llm.score(list(contexts), list(continuations), use_tqdm=False)
    assert [score.token_ids for score in scores] == [[8], [9, 4]]
    assert [s.logprob for s in scores] == pytest.approx([s.logprob for s in expected], abs=1e-4)


def test_no_pairs_give_no_scores(tiny_llm):
    llm = tiny_llm()
    assert llm.score([], [], use_tqdm=False) == []
    assert encode_pairs(None, [], [], max_tokens=8) == []


def test_scores_under_tensor_parallelism(tiny_llm, tiny_oracle):
    llm = tiny_llm(tensor_parallel_size=2)
    scores = llm.score(CONTEXTS, CONTINUATIONS, use_tqdm=False)
    check_scores(tiny_oracle, CONTEXTS, CONTINUATIONS, scores)


def test_a_continuation_that_the_tokenizer_joins_with_its_context_is_told_so(demo_model, make_llm):
    llm = make_llm(demo_model)
    assert len(llm.get_tokenizer().encode("ab")) == 1
    with pytest.raises(ValueError, match="continuation 0 .*joins it with the context's end"):
        llm.score("a", ["b"], use_tqdm=False)
