"""Every field of SamplingParams, against transformers, plain Python and exact distributions."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.frontend import request_builder
from nanovllm.kernels.sample import sample
from nanovllm.sampling import redraw as redraw_module
from nanovllm.sampling.filters import add_bias, allow_only, bar
from nanovllm.sampling.keep_top import keep_top
from nanovllm.sampling.penalties import IN_PROMPT, apply_penalties
from nanovllm.utils.tokenizer import encode_texts

NUM_DRAWS = 100_000
MARGIN = 1e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
SETTINGS = [
    {},
    {"max_num_batched_tokens": 7},
    {"enable_overlap": True},
    {"enable_overlap": True, "num_kvcache_blocks": 12, "max_num_seqs": 6},
    {"enable_overlap": True, "max_num_seqs": 3, "enable_prefix_caching": False},
]


def make_prompts(num_prompts: int = 8) -> list[list[int]]:
    """Some begin with the same 40 tokens."""
    rng = random.Random(11)
    common = [rng.randrange(3, 500) for _ in range(40)]
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(2, 40))] for _ in range(5)]
    return [*prompts, *(common + [rng.randrange(3, 500)] * n for n in range(num_prompts - 5))]


PROMPTS = make_prompts()


# ---- distributions


def exact_distribution(logits: list[float], temperature: float = 1.0, **filters: float) -> list:
    """Softmax after min_p, top_k and top_p, by sorting in plain Python."""
    scaled = [x / temperature for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    min_p = filters.get("min_p", 0.0)
    order = sorted(
        (i for i in range(len(logits)) if weights[i] >= min_p), key=lambda i: -weights[i]
    )
    order = order[: int(filters.get("top_k", 0)) or None]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass < filters.get("top_p", 1.0) * total:
            kept.append(i)
        mass += weights[i]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def assert_drawn_from(probabilities: list[float], tokens: torch.Tensor) -> None:
    """Chi-square at a level of about 1e-5; draws are the same in every run."""
    counts = torch.bincount(tokens.cpu(), minlength=len(probabilities)).tolist()
    num = sum(counts)
    assert not any(c for c, p in zip(counts, probabilities, strict=True) if p == 0), "kept out"
    # Cells of few expected draws are put together, as the test needs.
    cells = [(c, p * num) for c, p in zip(counts, probabilities, strict=True) if p * num >= 10]
    rest_c, rest_e = num - sum(c for c, _ in cells), num - sum(e for _, e in cells)
    if rest_e > 1:
        cells.append((rest_c, rest_e))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    degrees = max(1, len(cells) - 1)
    # Wilson and Hilferty's approximation of the quantile.
    limit = degrees * (1 - 2 / (9 * degrees) + 4.27 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} of {degrees} degrees, limit {limit:.1f}"


LOGITS = [2.0 * math.sin(1.7 * i) + 0.013 * i for i in range(24)]


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.7},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"temperature": 0.7, "min_p": 0.03, "top_k": 9, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_have_the_exact_distribution(filters):
    probabilities = exact_distribution(LOGITS, **filters)
    assert_drawn_from(probabilities, draw_many(LOGITS, **filters))


def draw_many(
    logits: list[float] | torch.Tensor, temperature: float = 1.0, **filters
) -> torch.Tensor:
    """Draws of one row at as many positions, in batches that a kernel's grid can hold."""
    drawn = []
    for start in range(0, NUM_DRAWS, 50_000):
        n = 50_000
        rows = torch.as_tensor(logits, dtype=torch.float32, device=DEVICE).repeat(n, 1)
        column = {
            name: torch.full((n,), value, device=DEVICE, dtype=torch.float32)
            for name, value in [("t", temperature), ("m", filters.get("min_p", 0.0)),
                                ("p", filters.get("top_p", 1.0))]
        }  # fmt: skip
        top_k = torch.full((n,), filters.get("top_k", 0), device=DEVICE, dtype=torch.int32)
        keep_top(rows, column["t"], column["m"], top_k, column["p"])
        positions = torch.arange(start, start + n, device=DEVICE, dtype=torch.int32)
        key = torch.full((n,), 12345, device=DEVICE, dtype=torch.int32)
        drawn.append(sample(rows, column["t"], key, key + 1, positions)[1])
    return torch.cat(drawn)


def test_draws_under_token_rules_and_penalties_have_the_exact_distribution():
    logits = torch.tensor([LOGITS], device=DEVICE)
    expected = list(LOGITS)
    index = torch.tensor([[0, 0, 0], [1, 5, 9]], device=DEVICE)
    bar(logits, index[0], index[1], torch.tensor([True, False, True], device=DEVICE))
    expected[1] = expected[9] = -INF
    add_bias(logits, index[0][:2], index[1][1:], torch.tensor([1.5, 3.0], device=DEVICE))
    expected[5] += 1.5
    counts = torch.zeros((1, 24), dtype=torch.int32, device=DEVICE)
    counts[0, 5], counts[0, 13], counts[0, 20] = 2, IN_PROMPT, IN_PROMPT + 1
    row = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    penalties = [torch.tensor([x], device=DEVICE) for x in (1.3, 0.4, 0.5)]
    apply_penalties(logits, counts, row, *penalties)
    for token, times in ((5, 2), (13, 0), (20, 1)):
        value = expected[token]
        value = value / 1.3 if value > 0 else value * 1.3
        expected[token] = value - 0.4 * times - 0.5 * (times > 0)
    allowed = list(range(22))
    allow_only(
        logits,
        torch.tensor([0], device=DEVICE),
        torch.zeros(22, dtype=torch.int64, device=DEVICE),
        torch.tensor(allowed, device=DEVICE),
    )
    expected[22] = expected[23] = -INF
    probabilities = exact_distribution(expected, temperature=0.9)
    assert_drawn_from(probabilities, draw_many(logits[0], temperature=0.9))


# ---- the engine against a loop of plain Python


def processed_logits(logits: torch.Tensor, prompt, output, params, *, barred=(), bad_words=()):
    """Allowed ids, bad words, min_tokens, bias, penalties: a loop over single numbers."""
    values = logits.tolist()
    if params.allowed_token_ids is not None:
        values = [x if i in params.allowed_token_ids else -INF for i, x in enumerate(values)]
    for *before, last in bad_words:
        if before == output[len(output) - len(before) :]:
            values[last] = -INF
    if len(output) < params.min_tokens:
        for token in barred:
            values[token] = -INF
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, times in Counter(output).items():
        values[token] -= params.frequency_penalty * times + params.presence_penalty
    return values


def check_greedy(oracle, prompt, answer, params, **rules) -> None:
    """Each token of `answer` is the best one given those before it, or nearly ties with it."""
    all_logits = oracle.logits([*prompt, *answer])
    assert answer
    for place, token in enumerate(answer):
        output = answer[:place]
        logits = all_logits[len(prompt) + place - 1]
        values = processed_logits(logits, prompt, output, params, **rules)
        best = max(values)
        assert values[token] > best - MARGIN, f"token {place} is {token}, not {values.index(best)}"


PENALISED = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **fields)
    for fields in (
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.2},
        {"repetition_penalty": 1.2, "presence_penalty": 0.8, "frequency_penalty": 0.9},
        {"repetition_penalty": 0.7, "frequency_penalty": -0.4},
        {"logit_bias": {5: 12.0, 9: -100.0}, "presence_penalty": 1.5},
        {"allowed_token_ids": [4, 5, 6, 7, 8, 9, 300, 516]},
        {},
    )
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_greedy_with_penalties_bias_and_allowed_ids_equals_plain_python(
    tiny_llm, tiny_oracle, optimistic, options
):
    llm = tiny_llm(**options)
    order = list(range(len(PROMPTS)))
    for _ in range(2):  # the second time shuffled, and with a warm prefix cache
        prompts, params = [PROMPTS[i] for i in order], [PENALISED[i] for i in order]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, one, output in zip(prompts, params, outputs, strict=True):
            answer = output.outputs[0].token_ids
            assert len(answer) == 20
            check_greedy(tiny_oracle, prompt, answer, one)
        random.Random(1).shuffle(order)
    if "num_kvcache_blocks" in options:
        assert llm._engine.scheduler.num_preemptions > 0
    llm._engine.scheduler.check_invariants()


@pytest.mark.parametrize(
    "options", [{}, {"enable_overlap": True, "num_kvcache_blocks": 12}], ids=str
)
def test_bad_words_and_min_tokens_bar_their_tokens_only_when_due(
    tiny_llm, tiny_oracle, optimistic, options
):
    llm = tiny_llm(**options)
    plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    free = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, plain, use_tqdm=False)]
    decode, encode = llm.get_tokenizer().decode, llm.get_tokenizer().encode
    params, words, stops = [], [], []
    for answer in free:
        # Words that the free answer has, of one and more tokens, where they survive a round trip.
        texts = [decode(answer[i : i + n]) for n in (1, 2, 3) for i in (1, 6)]
        texts = [t for t in texts if t.strip() and "\ufffd" not in t]
        runs = [encode(s, add_special_tokens=False) for t in texts for s in (t, " " + t.lstrip())]
        words.append(runs)
        stops.append((answer[3], 2))  # an id of the user's, and eos
        params.append(plain.clone(bad_words=texts, min_tokens=9, stop_token_ids=[answer[3]]))
    assert any(len(run) > 1 for runs in words for run in runs)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, one, output, runs, barred in zip(
        PROMPTS, params, outputs, words, stops, strict=True
    ):
        answer = output.outputs[0].token_ids
        assert len(answer) >= 9
        assert not {*answer[:9]} & {*barred}
        check_greedy(tiny_oracle, prompt, answer, one, barred=barred, bad_words=runs)


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
@pytest.mark.parametrize("options", [{}, {"enable_overlap": True}], ids=str)
def test_an_end_that_is_wanted_comes_right_after_min_tokens(tiny_llm, options, min_tokens):
    """Not a token later; and not earlier either, as an eos that does not end the text."""
    wants_to_end = {"logit_bias": {2: 2000.0, 9: 1000.0}, "min_tokens": min_tokens}
    params = SamplingParams(temperature=0, max_tokens=12, **wants_to_end)
    outputs = tiny_llm(**options).generate(PROMPTS, params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output["token_ids"] == [9] * min_tokens + [2], prompt
        assert output.outputs[0].finish_reason == "stop"


def test_bad_words_that_many_requests_share_are_tokenised_once(tiny_llm, monkeypatch):
    """A thousand of them kept ten thousand prompts from starting for half an hour."""
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=1, bad_words=["one", "two"])
    other = params.clone(bad_words=["three"])
    texts = []

    def spy(tokenizer, some, **options):
        texts.extend(some)
        return encode_texts(tokenizer, some, **options)

    monkeypatch.setattr(request_builder, "encode_texts", spy)
    llm.generate([[5, 6]] * 6, [params, other, SamplingParams(max_tokens=1)] * 2, use_tqdm=False)
    assert texts == ["one", " one", "two", " two", "three", " three"]


def test_a_bad_word_of_several_tokens_is_found_in_the_drawn_history(tiny_llm, tiny_oracle):
    """Ids as they are: whatever the tokenizer makes of text, runs are matched on the device."""
    llm = tiny_llm(enable_overlap=True)
    plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    free = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, plain, use_tqdm=False)]
    runs = [
        [answer[i : i + n] for i, n in ((0, 1), (1, 2), (3, 4))][: 1 + place % 3]
        for place, answer in enumerate(free)
    ]
    requests = llm._engine.builder.build(
        list(PROMPTS), [plain.clone(bad_words=["x"])] * len(PROMPTS)
    )
    for request, words in zip(requests, runs, strict=True):
        request.seqs[0].bad_word_ids = tuple(map(tuple, words))
    llm._engine.add(requests)
    finished = {}
    while llm._engine.has_unfinished():
        finished.update((o.request_id, o) for o in llm._engine.step())
    for prompt, request, words in zip(PROMPTS, requests, runs, strict=True):
        answer = finished[request.request_id].outputs[0].token_ids
        text = ",".join(map(str, answer)) + ","
        assert not any(f",{','.join(map(str, w))}," in "," + text for w in words)
        check_greedy(tiny_oracle, prompt, answer, plain, bad_words=words)


def test_python_processors_see_all_tokens_and_change_the_draw(tiny_llm, tiny_oracle):
    llm = tiny_llm(enable_overlap=True, max_num_batched_tokens=32)
    calls = []

    def no_repeat(prompt, output, logits):
        calls.append((tuple(prompt), tuple(output)))
        logits[output] = -INF
        return logits

    def even_only(output, logits):
        logits[1::2] = -INF
        return logits

    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    params = [plain.clone(logits_processors=[no_repeat, even_only]) if i % 2 else plain
              for i in range(len(PROMPTS))]  # fmt: skip
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        answer = output.outputs[0].token_ids
        if i % 2 == 0:
            tiny_oracle.check_greedy(prompt, answer)
            continue
        assert len(set(answer)) == 12 and all(token % 2 == 0 for token in answer)
        assert {(tuple(prompt), tuple(answer[:n])) for n in range(12)} <= {*calls}
        logits = tiny_oracle.logits([*prompt, *answer])
        for place, token in enumerate(answer):
            row = logits[len(prompt) + place - 1].clone()
            row[answer[:place]] = -INF
            row[1::2] = -INF
            assert row[token] > row.max() - MARGIN


def test_a_failing_processor_fails_its_call_and_the_engine_goes_on(tiny_llm, tiny_oracle):
    llm = tiny_llm()
    bad = SamplingParams(temperature=0, max_tokens=4, logits_processors=[lambda o, x: None])
    with pytest.raises(TypeError, match="must return the logits"):
        llm.generate([PROMPTS[0]], bad, use_tqdm=False)
    good = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    output = llm.generate([PROMPTS[0]], good, use_tqdm=False)[0]
    tiny_oracle.check_greedy(PROMPTS[0], output.outputs[0].token_ids)


# ---- log-probabilities


def check_logprobs(positions, tokens, logprobs: torch.Tensor, num_top: int) -> None:
    """positions: dicts of the engine; logprobs: [len(tokens), vocab_size] of the oracle."""
    assert len(positions) == len(tokens)
    for found, token, expected in zip(positions, tokens, logprobs, strict=True):
        top = expected.sort(descending=True)
        assert num_top <= len(found) <= num_top + 1
        assert token in found, "the token that is there always is among them"
        for token_id, logprob in found.items():
            assert abs(logprob.logprob - float(expected[token_id])) < 1e-4
        rank = 1 + int((expected > expected[token]).sum())
        nearest = (top.values - expected[token]).abs().sort().values[1]
        assert found[token].rank == rank or nearest < MARGIN
        best = sorted((x.logprob for x in found.values()), reverse=True)[:num_top]
        torch.testing.assert_close(torch.tensor(best), top.values[:num_top], rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_logprobs_equal_transformers(tiny_llm, tiny_oracle, optimistic, options):
    llm = tiny_llm(**options)
    params = [
        SamplingParams(
            temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True, top_k=30, detokenize=False,
            logprobs=[None, 0, 3, -1][i % 4], prompt_logprobs=[2, None, -1, 0, 5][i % 5],
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip
    order = list(range(len(PROMPTS)))
    for _ in range(2):
        prompts, asked = [PROMPTS[i] for i in order], [params[i] for i in order]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        for prompt, one, output in zip(prompts, asked, outputs, strict=True):
            completion = output.outputs[0]
            answer = completion.token_ids
            expected = tiny_oracle.logits([*prompt, *answer]).log_softmax(-1)
            if one.logprobs is None:
                assert completion.logprobs is None and completion.cumulative_logprob is None
            else:
                num_top = 517 if one.logprobs == -1 else one.logprobs
                check_logprobs(completion.logprobs, answer, expected[len(prompt) - 1 : -1], num_top)
                pairs = zip(completion.logprobs, answer, strict=True)
                total = sum(found[token].logprob for found, token in pairs)
                assert abs(completion.cumulative_logprob - total) < 1e-4
            if one.prompt_logprobs is None:
                assert output.prompt_logprobs is None
            else:
                num_top = 517 if one.prompt_logprobs == -1 else one.prompt_logprobs
                assert output.prompt_logprobs[0] is None
                check_logprobs(
                    output.prompt_logprobs[1:], prompt[1:], expected[: len(prompt) - 1], num_top
                )
        random.Random(2).shuffle(order)
    if "num_kvcache_blocks" in options:
        assert llm._engine.scheduler.num_preemptions > 0


def test_processed_logprobs_are_those_of_what_was_drawn_from(tiny_llm, tiny_oracle):
    llm = tiny_llm(logprobs_mode="processed_logprobs")
    params = [
        SamplingParams(temperature=0.7, top_k=4, seed=1, max_tokens=6, logprobs=4, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=2, max_tokens=6, logprobs=4, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=6, logprobs=4, ignore_eos=True,
                       repetition_penalty=1.4),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    ]  # fmt: skip
    outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=False):
        answer, positions = output.outputs[0].token_ids, output.outputs[0].logprobs
        if one.logprobs is None:
            assert positions is None
            continue
        logits = tiny_oracle.logits([*prompt, *answer])
        for place, token in enumerate(answer):
            row = logits[len(prompt) + place - 1]
            row = torch.tensor(processed_logits(row, prompt, answer[:place], one))
            row = row / (one.temperature or 1.0)
            if one.top_k:
                row[row < row.sort().values[-one.top_k]] = -INF
            expected = row.log_softmax(0)
            for token_id, logprob in positions[place].items():
                assert abs(logprob.logprob - float(expected[token_id])) < 1e-4
            assert positions[place][token].logprob > -INF


# ---- seeds, neighbours, samples


MIXED = [
    SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, **fields)
    for fields in (
        {},
        {"top_p": 0.8},
        {"top_k": 6, "repetition_penalty": 1.3},
        {"min_p": 0.05, "logprobs": 2},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logit_bias": {7: 4.0}},
        {"allowed_token_ids": list(range(3, 400))},
        {"min_tokens": 3, "stop_token_ids": [17]},
    )
]


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def mixed_alone(tiny_model):
    """What each request of MIXED draws when it is alone."""
    with LLM(tiny_model, device="cpu", dtype="float32", num_kvcache_blocks=64) as llm:
        return [
            tokens_of(llm.generate([prompt], params, use_tqdm=False))[0]
            for prompt, params in zip(PROMPTS, MIXED, strict=True)
        ]


@pytest.mark.parametrize(
    "options", [*SETTINGS, {"tensor_parallel_size": 2, "enable_overlap": True}], ids=str
)
def test_a_seed_draws_the_same_alone_and_in_any_batch(tiny_llm, optimistic, mixed_alone, options):
    llm = tiny_llm(**options)
    order = list(range(len(PROMPTS)))
    for _ in range(2):
        outputs = llm.generate(
            [PROMPTS[i] for i in order], [MIXED[i] for i in order], use_tqdm=False
        )
        assert tokens_of(outputs) == [mixed_alone[i] for i in order]
        random.Random(3).shuffle(order)
    if "tensor_parallel_size" in options:
        with pytest.raises(ValueError, match="logits_processors, which run in one process only"):
            llm.generate([PROMPTS[0]], SamplingParams(logits_processors=[lambda o, x: x]))


def test_an_inactive_filter_draws_what_the_captured_step_draws(tiny_llm):
    """Scores are the same numbers on both ways, so no filter means no difference."""
    llm = tiny_llm()
    plain = SamplingParams(temperature=0.9, seed=3, max_tokens=16, ignore_eos=True)
    redrawn = plain.clone(min_p=1e-30, top_k=516)
    expected = tokens_of(llm.generate(PROMPTS, plain, use_tqdm=False))
    bias = plain.clone(logit_bias={5: 0.0})
    assert tokens_of(llm.generate(PROMPTS, bias, use_tqdm=False)) == expected
    assert tokens_of(llm.generate(PROMPTS, redrawn, use_tqdm=False)) == expected


def test_samples_differ_and_share_the_prompts_blocks(tiny_llm):
    llm = tiny_llm()
    params = SamplingParams(
        n=4, temperature=1.0, top_p=0.95, max_tokens=8, ignore_eos=True, prompt_logprobs=1
    )
    output = llm.generate([PROMPTS[5]], params, use_tqdm=False)[0]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len(output.prompt_logprobs) == len(PROMPTS[5])


def test_results_do_not_depend_on_how_many_rows_are_looked_at_together(
    tiny_llm, tiny_oracle, mixed_alone, monkeypatch
):
    monkeypatch.setattr(redraw_module, "SLICE_BYTES", 3 * 4 * 517)
    llm = tiny_llm()
    params = [one.clone(logprobs=2, prompt_logprobs=1) for one in MIXED]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert tokens_of(outputs) == mixed_alone
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = output.outputs[0].token_ids
        expected = tiny_oracle.logits([*prompt, *answer]).log_softmax(-1)
        check_logprobs(output.outputs[0].logprobs, answer, expected[len(prompt) - 1 : -1], 2)
        check_logprobs(output.prompt_logprobs[1:], prompt[1:], expected[: len(prompt) - 1], 1)
