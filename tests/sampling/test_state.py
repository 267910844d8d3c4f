"""What sampling remembers of rows: rules, counts and last tokens through joins and moves."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.engine.kv_cache import SAMPLING_WORKSPACE_BYTES, sampling_bytes
from nanovllm.engine.step import PrefillWork, Rule, SamplingFeature, SchedulerOutput
from nanovllm.sampling.penalties import IN_PROMPT
from nanovllm.sampling.state import RedrawPlan, SamplingState

PENALTIES, TOKEN_RULES = int(SamplingFeature.PENALTIES), int(SamplingFeature.TOKEN_RULES)
LOGPROBS, TOP = int(SamplingFeature.LOGPROBS), int(SamplingFeature.TOP_K_P)


def make_state(max_slice_rows: int = 100) -> SamplingState:
    return SamplingState(8, 20, torch.device("cpu"), max_slice_rows=max_slice_rows)


def begin(
    state: SamplingState,
    features: list[int],
    rules=(),
    moves=(),
    *,
    is_prefill: bool = False,
    rows: list[int] | None = None,
    is_processed: bool = False,
) -> RedrawPlan | None:
    """One step over `rows` (0, 1, ... if None); rules: (row, rule, values)"""
    runs = [np.array([row, rule, len(v), *v], dtype=np.int32) for row, rule, v in rules]
    empty = np.zeros(0, dtype=np.int32)
    output = SchedulerOutput(
        step_id=1,
        num_decode_rows=0 if is_prefill else len(features),
        features=int(np.bitwise_or.reduce(features)) if features else 0,
        max_logprobs=-1,
        moves=np.array(moves, dtype=np.int32).reshape(-1, 2),
        cells=np.zeros((0, 2), dtype=np.int32),
        rules=np.concatenate([*runs, empty]).astype(np.int32),
        prefill=PrefillWork(*[empty] * 8) if is_prefill else None,
    )
    output = SchedulerOutput.from_bytes(output.to_bytes())
    sampled = np.arange(len(features)) if rows is None else np.array(rows)
    return state.begin_step(
        output,
        sampled.astype(np.int32),
        np.array(features, dtype=np.int32),
        is_processed=is_processed,
    )


def entries(coordinates: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(entry) for entry in coordinates.t().tolist()]


def penalty_rules(row: int, prompt: list[int], output: list[int]) -> list:
    return [(row, Rule.OUTPUT, output), (row, Rule.PROMPT, prompt)]


def counts_of(state: SamplingState, row: int) -> dict[int, int]:
    return {i: n for i, n in enumerate(state.counts[row].tolist()) if n}


def test_counts_take_memory_only_once_a_row_asks():
    state = make_state()
    assert begin(state, [0, 0]) is None
    assert state._counts is None
    begin(state, [PENALTIES], penalty_rules(0, [1], []), is_prefill=True)
    assert state.counts.nbytes == sampling_bytes(*state.counts.shape) - SAMPLING_WORKSPACE_BYTES


def test_a_joining_row_counts_its_prompt_once_and_its_output_each_time():
    state = make_state()
    begin(state, [PENALTIES], penalty_rules(0, [3, 3, 5], [5, 7, 7]), is_prefill=True)
    assert counts_of(state, 0) == {3: IN_PROMPT, 5: IN_PROMPT + 1, 7: 2}


def test_drawn_tokens_are_counted():
    state = make_state()
    begin(state, [PENALTIES], penalty_rules(2, [3], []), rows=[2], is_prefill=True)
    for token in (4, 4, 3):
        state.count(torch.tensor([2]), torch.tensor([token], dtype=torch.int32), PENALTIES)
    assert counts_of(state, 2) == {3: IN_PROMPT + 1, 4: 2}


def test_counts_move_with_their_row_and_a_new_row_starts_anew():
    state = make_state()
    rules = [*penalty_rules(0, [1], []), *penalty_rules(1, [2], []), *penalty_rules(2, [3], [9])]
    begin(state, [PENALTIES] * 3, rules, is_prefill=True)
    rules = penalty_rules(2, [4], [])
    begin(state, [PENALTIES] * 3, rules, moves=[(2, 0)], is_prefill=True)
    assert [counts_of(state, row) for row in range(3)] == [
        {3: IN_PROMPT, 9: 1}, {2: IN_PROMPT}, {4: IN_PROMPT},
    ]  # fmt: skip


def test_the_history_holds_the_last_output_tokens_as_far_as_bad_words_look_back():
    state = make_state()
    rules = [(1, Rule.OUTPUT, [5, 6, 7]), (1, Rule.BAD_WORD, [6, 7, 8]), (1, Rule.BAD_WORD, [9])]
    plan = begin(state, [TOKEN_RULES], rules, rows=[1], is_prefill=True)
    assert plan is not None
    assert entries(plan.slices[0].bad_words) == [(0, 8, 6, 7), (0, 9, -1, -1)]
    assert state.history[1].tolist() == [6, 7]
    state.count(torch.tensor([1]), torch.tensor([8], dtype=torch.int32), TOKEN_RULES)
    assert state.history[1].tolist() == [7, 8]
    # A longer word of another row widens it; the row moves with it.
    rules = [(1, Rule.OUTPUT, [4]), (1, Rule.BAD_WORD, [1, 2, 3, 4])]
    plan = begin(state, [TOKEN_RULES] * 2, rules, moves=[(1, 0)], is_prefill=True)
    assert state.history[:2].tolist() == [[-1, 7, 8], [-1, -1, 4]]
    assert plan is not None
    assert entries(plan.slices[0].bad_words) == [
        (0, 8, -1, 6, 7), (0, 9, -1, -1, -1), (1, 4, 1, 2, 3),
    ]  # fmt: skip


def test_rules_of_a_row_that_left_do_not_reach_its_successor():
    state = make_state()
    bits = int(np.float32(2.5).view(np.int32))
    rules = [(0, Rule.OUTPUT, []), (0, Rule.BIAS, [7, bits]), (0, Rule.ALLOWED, [7, 8])]
    plan = begin(state, [TOKEN_RULES], rules, is_prefill=True)
    assert plan is not None
    part = plan.slices[0]
    assert entries(part.biases) == [(0, 7, bits)]
    assert entries(part.allowed) == [(0, 7), (0, 8)]
    assert part.allowed_rows.tolist() == [0]
    # One without rules, among others that ask for something else, then one with other rules.
    plan = begin(state, [TOP], is_prefill=True)
    assert plan is not None and not plan.slices[0].biases.numel()
    rules = [(0, Rule.OUTPUT, []), (0, Rule.BARRED_UNTIL_MIN_LEN, [2, 19, 25])]
    plan = begin(state, [TOKEN_RULES], rules, is_prefill=True)
    assert plan is not None
    part = plan.slices[0]
    assert not part.biases.numel() and not part.allowed.numel()
    assert entries(part.barred) == [(0, 2), (0, 19)], "25 is no token of the model"


def test_only_rows_that_ask_are_drawn_again_a_slice_after_another():
    state = make_state(max_slice_rows=2)
    plan = begin(state, [0, TOP, LOGPROBS, TOP, TOP | LOGPROBS, 0])
    assert plan is not None
    assert [part.places.tolist() for part in plan.slices] == [[1, 3], [4]]
    assert [part.places.tolist() for part in plan.logprob_slices] == [[2, 4]]
    assert [part.rows.tolist() for part in plan.slices] == [[1, 3], [4]]
    assert plan.slices[1].index == slice(4, 5)
    plan = begin(state, [TOP, 0, LOGPROBS], rows=[5, 1, 7], is_prefill=True, is_processed=True)
    assert plan is not None
    assert [part.rows.tolist() for part in plan.slices] == [[5, 7]]
    assert plan.logprob_slices == plan.slices


def test_a_plan_is_kept_until_rows_change():
    state = make_state()
    features = [TOP, TOP]
    plan = begin(state, features)
    assert begin(state, features) is plan
    assert begin(state, [TOP] * 3) is not plan
    plan = begin(state, features)
    assert begin(state, features, moves=[(3, 1)]) is not plan
    plan = begin(state, features)
    begin(state, [], is_prefill=True)
    assert begin(state, features) is not plan
