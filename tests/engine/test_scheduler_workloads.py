"""Random workloads through the scheduler to the last token; and its records through bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_replay import (
    Engine,
    answers,
    expected_answers,
    make_seq,
    prompt_of,
)

from nanovllm.engine.step import PrefillWork, SchedulerOutput

# ---- records


@pytest.mark.parametrize("has_prefill", [False, True])
def test_a_record_survives_the_way_through_bytes(has_prefill):
    def ints(*values):
        return np.array(values, dtype=np.int32)

    prefill = PrefillWork(
        rows=ints(0, 3),
        token_ids=ints(5, 6, 7),
        num_tokens=ints(1, 2),
        first_positions=ints(0, 9),
        is_sampled=ints(1, 0),
        prompt_places=ints(1, 2),
        prompt_targets=ints(7, 8),
        max_prompt_logprobs=ints(-1),
    )
    output = SchedulerOutput(
        2**40,
        0 if has_prefill else 3,
        5,
        -1,
        ints(4, 1, 5, 2).reshape(2, 2),
        np.zeros((0, 2), dtype=np.int32),
        ints(1, 2, 1, 2**31 - 1),
        prefill if has_prefill else None,
    )
    again = SchedulerOutput.from_bytes(memoryview(output.to_bytes()))
    for name in ("step_id", "num_decode_rows", "features", "max_logprobs"):
        assert getattr(again, name) == getattr(output, name)
    for name in ("moves", "cells", "rules"):
        assert np.array_equal(getattr(again, name), getattr(output, name))
        assert getattr(again, name).shape == getattr(output, name).shape
    assert (again.prefill is not None) == has_prefill
    if has_prefill:
        for name in PrefillWork.__dataclass_fields__:
            assert np.array_equal(getattr(again.prefill, name), getattr(prefill, name))


# ---- random workloads


@st.composite
def workloads(draw):
    block_size = draw(st.sampled_from([1, 2, 4]))
    num_blocks = draw(st.integers(3, 24))
    options = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(1, 20)),
        "enable_prefix_caching": draw(st.booleans()),
        "enable_overlap": draw(st.booleans()),
        "reorder": draw(st.booleans()),
        "max_model_len": draw(st.integers(4, 60)),
    }
    cache_tokens = num_blocks * block_size
    longest = min(options["max_model_len"] - 1, cache_tokens)
    stems = [prompt_of(60, seed) for seed in range(2)]
    requests = draw(
        st.lists(
            st.tuples(
                st.integers(0, 1),  # stem
                st.integers(0, longest),  # tokens of it
                st.integers(0, 3),  # own tokens
                st.integers(1, 20),  # max_tokens
                st.booleans(),  # ignore_eos
                st.integers(0, 3),  # min_tokens
            ),
            min_size=1,
            max_size=9,
        )
    )
    seqs = []
    for i, (stem, num_common, num_own, max_tokens, ignore_eos, min_tokens) in enumerate(requests):
        prompt = (stems[stem][:num_common] + prompt_of(num_own, 10 + i))[:longest] or [2]
        limit = min(options["max_model_len"], cache_tokens + 1)
        seqs.append(
            make_seq(
                prompt,
                max_tokens,
                seq_id=i,
                max_model_len=limit,
                ignore_eos=ignore_eos,
                min_tokens=min(min_tokens, max_tokens),
            )
        )
    arrivals = sorted(draw(st.lists(st.integers(0, 12), min_size=len(seqs), max_size=len(seqs))))
    aborts = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=3))
    faults = draw(st.lists(st.integers(0, 40), max_size=2))
    short_guess = draw(st.booleans())
    return options, seqs, arrivals, aborts, faults, short_guess


@settings(max_examples=400, deadline=None)
@given(workloads())
def test_random_workloads_give_the_right_tokens(workload):
    """Any mix of prompts, caches, budgets, aborts and faults ends, with each one's own tokens."""
    options, seqs, arrivals, aborts, faults, short_guess = workload
    engine = Engine(**options)
    if short_guess:  # admits more than the cache holds at the end: preemption
        for _ in range(16):
            engine.scheduler._predictor.observe(1)
    aborted, finished, pending = set(), [], list(zip(arrivals, seqs, strict=True))
    turn = 0
    work = sum(seq.max_num_tokens for seq in seqs)
    max_turns = 100 + 30 * work
    while pending or engine.scheduler.has_unfinished():
        while pending and pending[0][0] <= turn:
            engine.scheduler.add([pending.pop(0)[1]])
        for at, victim in aborts:
            if at == turn and victim < len(seqs) and all(s is not seqs[victim] for _, s in pending):
                if not seqs[victim].is_finished:
                    aborted.add(victim)
                engine.scheduler.finish(seqs[victim], "abort")
                engine.scheduler.check_invariants()
        if turn in faults:
            engine.scheduler.schedule()  # a step that is lost on its way to the device
            engine.recover()
        finished += engine.step()
        turn += 1
        assert turn <= max_turns, "no progress"
    assert not engine.in_flight
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    assert sorted(seq.seq_id for seq in finished) == sorted(set(range(len(seqs))) - aborted)
    for i, (seq, ours, right) in enumerate(
        zip(seqs, answers(seqs), expected_answers(seqs), strict=True)
    ):
        if i in aborted:
            assert ours == right[: len(ours)] and seq.finish_reason == "abort"
        else:
            assert ours == right
