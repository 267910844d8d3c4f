"""Sampling filters against straightforward reference implementations that sort."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.sampling import keep_top as keep_top_module
from nanovllm.sampling import penalties as penalties_module
from nanovllm.sampling.filters import (
    add_bias,
    allow_only,
    apply_temperature,
    bar,
    ends_with,
    run_processors,
)
from nanovllm.sampling.logprobs import token_logprobs

VOCAB = 517
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
KEEP_TOP = [keep_top_module.keep_top_reference]
PENALTIES = [penalties_module.apply_penalties_reference]
if HAS_TRITON:
    KEEP_TOP.append(keep_top_module.keep_top_triton)
    # Several tokens a lane, and more candidates than are gathered in some rows.
    KEEP_TOP.append(partial(keep_top_module.keep_top_triton, block=64, max_candidates=64))
    PENALTIES.append(penalties_module.apply_penalties_triton)


def kept_by_sorting(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> set[int]:
    """What vLLM keeps of one row: min_p, then top_k, then top_p, each over what is left."""
    scaled = [x / (temperature if temperature >= 1e-5 else 1.0) for x in logits]
    largest = max(scaled)
    floor = largest + math.log(min_p) if min_p else -INF
    left = [i for i, x in enumerate(scaled) if x >= floor]
    left = [i for i in left if scaled[i] > -INF]
    if 0 < top_k < len(left):
        edge = sorted((scaled[i] for i in left), reverse=True)[top_k - 1]
        left = [i for i in left if scaled[i] >= edge]
    if top_p < 1:
        weights = {i: 1.0 if scaled[i] == largest else math.exp(scaled[i] - largest) for i in left}
        total, above, kept = math.fsum(weights.values()), 0.0, set()
        for i in sorted(left, key=lambda i: (scaled[i], i), reverse=True):
            if not kept or above < top_p * total * (1 - 1e-9):
                kept.add(i)
            above += weights[i]
        left = sorted(kept)
    return set(left)


def columns(*values: tuple[float, float, int, float]) -> list[torch.Tensor]:
    """temperature, min_p, top_k, top_p of each row as strided columns."""
    table = torch.tensor(values, dtype=torch.float64, device=DEVICE)
    wide = table.float()  # columns of it are strided
    return [wide[:, 0], wide[:, 1], table[:, 2].int(), wide[:, 3]]


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(torch.nonzero(row > -INF).flatten().tolist()) for row in logits.cpu()]


def make_logits(n: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, vocab, generator=generator) * scale).to(DEVICE)


@pytest.mark.parametrize("keep_top", KEEP_TOP)
@pytest.mark.parametrize("rounding", [None, torch.bfloat16, 1], ids=str)
def test_kept_tokens_are_those_of_a_sort(keep_top, rounding):
    """Coarse rounding makes many ties, on the edges too."""
    settings_of_rows = [
        (1.0, 0.0, 0, 1.0), (1.0, 0.0, 1, 1.0), (0.7, 0.0, 5, 1.0), (1.0, 0.0, 516, 1.0),
        (1.0, 0.0, 517, 1.0), (1.0, 0.0, 2**31 - 1, 1.0), (1.3, 0.0, 0, 0.9), (1.0, 0.0, 0, 1e-6),
        (0.5, 0.0, 0, 0.5), (2.0, 0.0, 0, 0.999), (1.0, 0.1, 0, 1.0), (1.0, 1.0, 0, 1.0),
        (0.6, 0.02, 20, 0.8), (1.0, 0.3, 50, 0.31), (0.0, 0.0, 3, 0.9), (100.0, 0.0, 40, 0.37),
    ]  # fmt: skip
    logits = make_logits(len(settings_of_rows))
    if rounding == 1:
        logits = logits.round()
    elif rounding is not None:
        logits = logits.to(rounding).float()
    expected = [
        kept_by_sorting(row.tolist(), *setting)
        for row, setting in zip(logits, settings_of_rows, strict=True)
    ]
    filtered = logits.clone()
    keep_top(filtered, *columns(*settings_of_rows))
    assert kept(filtered) == expected
    is_kept = filtered > -INF
    assert torch.equal(filtered[is_kept], logits[is_kept]), "kept logits are not changed"


@pytest.mark.parametrize("keep_top", KEEP_TOP)
def test_special_values_pass_the_filters(keep_top):
    logits = torch.full((7, VOCAB), -INF, device=DEVICE)
    logits[1, 3] = 2.0
    logits[2, [3, 5]] = 2.0
    logits[3, 10:20] = -0.0
    logits[3, 15] = 0.0
    logits[4] = 1.5
    logits[5, [7, 9, 11]] = torch.tensor([INF, 3.0, INF], device=DEVICE)
    logits[6, :5] = torch.tensor([float("nan"), 1.0, 2.0, 3.0, 4.0], device=DEVICE)
    settings_of_rows = [
        (1.0, 0.1, 2, 0.5), (1.0, 0.1, 2, 0.5), (1.0, 0.0, 0, 0.4), (1.0, 0.0, 0, 0.35),
        (1.0, 0.0, 4, 0.1), (1.0, 0.0, 5, 0.9), (1.0, 0.0, 3, 1.0),
    ]  # fmt: skip
    keep_top(logits, *columns(*settings_of_rows))
    expected = [set(), {3}, {5}, {16, 17, 18, 19}, set(range(465, 517)), {7, 11}, {2, 3, 4}]
    assert kept(logits) == expected


@pytest.mark.parametrize("keep_top", KEEP_TOP)
def test_infinite_logits_share_all_the_mass(keep_top):
    """The reference made NaN of them, and so ignored top_p."""
    settings_of_rows = [
        (1.0, 0.0, 0, 0.9), (0.5, 0.0, 0, 0.4), (1.0, 0.0, 2, 0.6), (1.0, 0.0, 2, 1.0),
        (0.7, 0.2, 0, 1.0), (0.0, 0.1, 5, 0.1), (1.0, 0.0, 40, 0.99), (2.0, 0.0, 0, 1.0),
    ]  # fmt: skip
    logits = make_logits(len(settings_of_rows), 70)
    logits[::2, 7] = INF
    logits[1::2, [3, 60, 69]] = INF
    expected = [
        kept_by_sorting(row.tolist(), *setting)
        for row, setting in zip(logits, settings_of_rows, strict=True)
    ]
    keep_top(logits, *columns(*settings_of_rows))
    assert kept(logits) == expected


@pytest.mark.parametrize("keep_top", KEEP_TOP)
@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(st.integers(-30, 30), min_size=1, max_size=70),
    divisor=st.sampled_from([1.0, 3.0, 7.0]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    top_k=st.sampled_from([0, 1, 2, 7, 100]),
    top_p=st.sampled_from([0.123, 0.517, 0.913, 1.0]),
)
def test_any_small_row_is_filtered_like_a_sort(
    keep_top, values, divisor, temperature, min_p, top_k, top_p
):
    row = torch.tensor([values], dtype=torch.float32, device=DEVICE) / divisor
    setting = (temperature, min_p, top_k, top_p)
    exact = tuple(column.double().item() for column in columns(setting))
    expected = kept_by_sorting(row[0].tolist(), exact[0], exact[1], top_k, exact[3])
    keep_top(row, *columns(setting))
    assert kept(row) == [expected]


@pytest.mark.parametrize("keep_top", KEEP_TOP[:2])
def test_a_large_vocabulary_keeps_the_set_of_a_sort(keep_top):
    vocab = 151_936 if DEVICE == "cuda" else 20_011
    logits = make_logits(4, vocab, scale=2.0)
    setting = [(1.0, 0.0, 0, 0.9), (1.0, 0.0, 50, 1.0), (0.8, 0.01, 1000, 0.95), (1.0, 0, 0, 0.99)]
    values, order = logits.double().cpu().sort(dim=1, descending=True)
    keep_top(logits, *columns(*setting))
    sizes = [len(row) for row in kept(logits)]
    for row, (place, size) in enumerate(zip(kept(logits), sizes, strict=True)):
        assert place == set(order[row, :size].tolist()), "the kept ones are the largest"
    assert sizes[1] == 50
    for row in (0, 3):
        masses = values[row].softmax(0).cumsum(0)
        assert abs(sizes[row] - int((masses < setting[row][3]).sum()) - 1) <= 1


@pytest.mark.parametrize("apply_penalties", PENALTIES)
def test_penalties_follow_the_published_formulas(apply_penalties):
    logits = make_logits(4)
    logits[1, 7] = -INF
    prompts = [[1, 2, 2, 3], [7, 8], [], [5]]
    outputs = [[3, 3, 9], [], [4, 4, 4, 516], [5, 6]]
    rows = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=DEVICE)
    counts = torch.zeros((5, VOCAB), dtype=torch.int32)
    for row, prompt, output in zip(rows.tolist(), prompts, outputs, strict=True):
        for token in output:
            counts[row, token] += 1
        for token in set(prompt):
            counts[row, token] += penalties_module.IN_PROMPT
    params = [(1.5, 0.3, 0.7), (2.0, 0.0, 0.0), (0.8, -0.5, 1.1), (1.0, 0.0, 0.0)]
    expected = logits.clone()
    for i, (repetition, frequency, presence) in enumerate(params):
        for token in {*prompts[i], *outputs[i]}:
            value = float(logits[i, token])
            value = value / repetition if value > 0 else value * repetition
            value -= frequency * outputs[i].count(token)
            value -= presence * (token in outputs[i])
            expected[i, token] = value
    table = torch.tensor(params, device=DEVICE)
    apply_penalties(logits, counts.to(DEVICE), rows, table[:, 0], table[:, 1], table[:, 2])
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_only_allowed_tokens_keep_their_logits():
    logits = make_logits(3)
    before = logits.clone()
    index = [torch.tensor(x, device=DEVICE) for x in ([0, 2], [0, 0, 2], [5, 9, 516])]
    allow_only(logits, *index)
    assert kept(logits) == [{5, 9}, set(range(VOCAB)), {516}]
    assert torch.equal(logits[0, [5, 9]], before[0, [5, 9]])


def test_a_token_named_twice_is_barred_if_one_condition_holds():
    logits = make_logits(2)
    before = logits.clone()
    rows, ids = torch.tensor([[0, 0, 1, 1], [4, 4, 4, 6]], device=DEVICE)
    bar(logits, rows, ids, torch.tensor([True, False, False, True], device=DEVICE))
    assert logits[0, 4] == -INF and logits[1, 6] == -INF
    assert logits[1, 4] == before[1, 4]
    assert (logits == before).sum() == 2 * VOCAB - 2


def test_a_history_ends_with_a_run_whose_tokens_all_match():
    history = torch.tensor([[-1, 3, 4], [-1, 3, 4], [-1, 3, 4], [-1, -1, -1], [-1, -1, 4]])
    runs = torch.tensor([[-1, 3, 4], [-1, -1, 4], [2, 3, 4], [-1, -1, -1], [-1, 3, 4]])
    assert ends_with(history, runs).tolist() == [True, True, False, True, False]


def test_bias_is_added_and_temperature_divides_all_but_greedy_rows():
    logits = torch.zeros((3, 5)) + 2.0
    add_bias(logits, torch.tensor([0, 1]), torch.tensor([4, 0]), torch.tensor([1.5, -3.0]))
    scaled = apply_temperature(logits, torch.tensor([0.5, 0.0, 1e-6]))
    expected = [[4.0, 4.0, 4.0, 4.0, 7.0], [-1.0, 2.0, 2.0, 2.0, 2.0], [2.0] * 5]
    assert scaled.tolist() == expected, "as `sample` has it, 1e-6 is greedy too"


def test_processors_get_two_or_three_arguments_and_run_in_turn():
    row, seen, kept = torch.zeros(4), [], []

    def first(prompt, output, logits):
        seen.append((prompt, output))
        kept.append(logits)
        return logits + 1

    def second(output, logits):
        seen.append(output)
        logits[2] = 9
        return logits

    run_processors(row, [first, second], [1, 2], [3])
    assert seen == [([1, 2], [3]), [3]]
    kept[0].fill_(7.0)
    assert row.tolist() == [1, 1, 9, 1], "what a processor keeps is its own"
    with pytest.raises(TypeError, match=r"must return the logits, a tensor of shape \(4,\)"):
        run_processors(row, [lambda output, logits: None], [1], [])


def test_logprobs_and_ranks_are_those_of_a_log_softmax():
    logits = make_logits(6).to(torch.bfloat16)
    chosen = torch.tensor([0, 1, 5, 9, 100, 516], dtype=torch.int32, device=DEVICE)
    result = token_logprobs(logits, chosen, 4)
    expected = logits.double().log_softmax(1)
    for i, token in enumerate(chosen.tolist()):
        assert result.token_ids[i, 0] == token
        assert abs(float(result.logprobs[i, 0]) - float(expected[i, token])) < 1e-5
        assert int(result.ranks[i]) == 1 + int((logits[i] > logits[i, token]).sum())
        top = expected[i].sort(descending=True).values[:4]
        torch.testing.assert_close(result.logprobs[i, 1:].double(), top, rtol=0, atol=1e-5)
    assert token_logprobs(logits, chosen, 2**31 - 1).logprobs.shape == (6, 1 + VOCAB)
