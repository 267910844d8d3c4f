"""Sequences that leave before they are done: preempted, aborted, or lost in a fault."""

from __future__ import annotations

import numpy as np
import pytest
from step_replay import (
    Engine,
    answers,
    eos_prompt,
    expected_answers,
    make_seq,
    make_seqs,
    prompt_of,
)

from nanovllm.engine.sequence import SequenceStatus
from nanovllm.engine.step import StepOutput

# ---- preemption


def preempting_engine(num_blocks=13, **options):
    """An engine that takes every sequence to end soon, and so admits more than will fit."""
    engine = Engine(num_blocks=num_blocks, block_size=4, **options)
    for _ in range(16):
        engine.scheduler._predictor.observe(1)
    return engine


def growing_seqs(num_seqs, num_prompt_tokens=7, num_output_tokens=40):
    """Sequences whose end the engine cannot know ahead: they heed eos, and do not meet it."""
    return [
        make_seq(
            prompt_of(num_prompt_tokens, seed),
            num_output_tokens,
            seq_id=seed,
            ignore_eos=False,
            min_tokens=num_output_tokens,
        )
        for seed in range(num_seqs)
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_youngest_is_preempted_and_goes_before_those_that_never_ran(overlap):
    engine = preempting_engine(enable_overlap=overlap)
    seqs = growing_seqs(3)
    engine.scheduler.add(seqs)
    while not engine.scheduler.num_preemptions:
        engine.step()
    first, second, third = seqs
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (second.row, second.block_table) == (-1, [])
    assert second.num_output_tokens > 10
    assert engine.scheduler.waiting.seqs() == [second, third]
    engine.run(max_steps=300)
    assert answers(seqs) == expected_answers(seqs)
    assert [seq.num_output_tokens for seq in seqs] == [40, 40, 40]
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_a_preempted_sequence_computes_prompt_and_generated_tokens_again():
    engine = preempting_engine(enable_prefix_caching=False)
    seqs = growing_seqs(2)
    engine.scheduler.add(seqs)
    while not engine.scheduler.num_preemptions:
        engine.step()
    known = list(seqs[1].token_ids)
    while seqs[1].status is SequenceStatus.WAITING:
        output = engine.launch()
        engine.bring_in()
    assert output.prefill.token_ids.tolist() == known and len(known) > 17
    assert len(seqs[1].token_ids) == len(known) + 1, "the re-prefill's token counts"


def test_hits_on_its_own_blocks_are_not_counted_as_cached_tokens():
    engine = preempting_engine()
    seqs = growing_seqs(2)
    engine.scheduler.add(seqs)
    while not engine.scheduler.num_preemptions or seqs[1].status is SequenceStatus.WAITING:
        output = engine.launch()
        engine.bring_in()
    assert output.prefill.first_positions[0] > 0, "what was not overwritten is hit"
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0]


def test_a_preempted_sequence_waits_for_its_tokens_in_flight():
    engine = preempting_engine()
    seqs = growing_seqs(2)
    engine.scheduler.add(seqs)
    while not engine.scheduler.num_preemptions:
        engine.launch()
        if len(engine.in_flight) > 3:
            engine.bring_in()
    assert seqs[1].has_token_in_flight
    engine.scheduler.finish(seqs[0], "abort")  # room, and still not yet
    assert engine.launch() is None
    while engine.in_flight:
        engine.bring_in()
    engine.run(max_steps=200)
    assert answers(seqs[1:]) == expected_answers(seqs[1:])


def test_last_in_is_first_out():
    engine = preempting_engine(num_blocks=24)
    seqs = growing_seqs(4, num_prompt_tokens=4)
    engine.scheduler.add(seqs)
    order, before = [], [0] * 4
    while engine.scheduler.has_unfinished():
        engine.step()
        now = [seq.num_preemptions for seq in seqs]
        order += [i for i in reversed(range(4)) if now[i] > before[i]]
        before = now
    assert order[:2] == [3, 2]
    assert seqs[0].num_preemptions == 0
    assert answers(seqs) == expected_answers(seqs)


def test_one_sequence_may_fill_the_whole_cache():
    engine = Engine(num_blocks=3, block_size=4)
    seq = make_seq(prompt_of(5), 50, max_model_len=13)  # 12 in the cache and one more
    engine.scheduler.add([seq])
    assert engine.run(max_steps=20) == [seq]
    assert (len(seq.token_ids), seq.finish_reason) == (13, "length")
    assert engine.scheduler.num_preemptions == 0


# ---- abort


def abort_states(overlap):
    """(engine, sequence) with the sequence in each state that it can be in."""
    engine = Engine(enable_overlap=overlap)
    seqs = make_seqs([5, 6], max_tokens=4)
    yield "waiting", engine, seqs, 0
    for name, num_launches, num_back in [
        ("prefill in flight", 1, 0),
        ("running", 1, 1),
        ("decode in flight", 2, 1),
        ("two in flight", 2, 0),
        ("draining", 4, 3),
        ("finished", 4, 4),
    ]:
        engine = Engine(enable_overlap=overlap)
        seqs = make_seqs([5, 6], max_tokens=4)
        engine.scheduler.add(seqs)
        for _ in range(num_launches):
            engine.launch()
        if name == "draining":
            assert engine.scheduler.schedule() is None
        for _ in range(num_back):
            engine.bring_in()
        yield name, engine, seqs, num_launches


def test_an_abort_in_any_state_frees_once_and_leaves_the_others_alone():
    for name, engine, seqs, _ in abort_states(True):
        if name == "waiting":
            engine.scheduler.add(seqs)
        victim, other = seqs
        was_finished = victim.is_finished
        num_tokens = len(victim.token_ids)
        for _ in range(2):  # idempotent
            engine.scheduler.finish(victim, "abort")
            engine.scheduler.check_invariants()
        assert victim.finish_reason == ("length" if was_finished else "abort"), name
        engine.run(max_steps=40)
        assert len(victim.token_ids) == num_tokens, f"{name}: nothing is added after an abort"
        assert answers([other]) == expected_answers([other]), name
        assert engine.blocks.num_free_blocks == engine.blocks.num_blocks, name
        assert not engine.scheduler.has_unfinished()


def test_tokens_that_two_steps_draw_behind_an_end_are_dropped_and_not_counted():
    engine = Engine()
    seqs = make_seqs([4, 5, 6], max_tokens=8)
    engine.scheduler.add(seqs)
    engine.step()
    engine.launch()
    engine.launch()
    engine.scheduler.finish(seqs[1], "abort")
    assert [engine.bring_in().num_new_tokens for _ in range(2)] == [2, 2]
    assert [len(answer) for answer in answers(seqs)] == [3, 1, 3]
    engine.run(max_steps=20)
    assert answers(seqs[::2]) == expected_answers(seqs[::2])


def test_abort_and_eos_in_the_same_step():
    prompt, answer = eos_prompt()
    engine = Engine(enable_overlap=True)
    seq = make_seq(prompt, 40, ignore_eos=False)
    engine.scheduler.add([seq])
    for _ in answer:
        engine.launch()
    for _ in answer[1:]:
        engine.bring_in()
    engine.scheduler.finish(seq, "abort")
    assert engine.bring_in().finished == []
    assert seq.finish_reason == "abort"
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_aborting_all_that_waits_leaves_an_idle_scheduler():
    engine = Engine()
    seqs = make_seqs([5, 6, 7])
    engine.scheduler.add(seqs)
    for seq in seqs:
        engine.scheduler.finish(seq, "abort")
    assert not engine.scheduler.has_unfinished()
    assert engine.scheduler.schedule() is None
    again = make_seqs([5])
    engine.scheduler.add(again)
    engine.run(max_steps=10)
    assert answers(again) == expected_answers(again)


def test_a_waiting_head_that_is_aborted_does_not_hold_up_the_rest():
    engine = Engine(num_blocks=8, block_size=4)
    running, large, small = make_seqs([4, 24, 4], max_tokens=4)
    engine.scheduler.add([running, large, small])
    engine.step()
    assert large.status is SequenceStatus.WAITING
    engine.scheduler.finish(large, "abort")
    engine.run(max_steps=30)
    assert answers([running, small]) == expected_answers([running, small])


# ---- faults


def test_a_sequence_that_can_never_be_admitted_raises_instead_of_spinning():
    engine = Engine(num_blocks=2, block_size=4)
    engine.scheduler.add([make_seq(prompt_of(20), seq_id=77)])
    with pytest.raises(RuntimeError, match="No progress: request 77 .20 tokens.*2 of 2 KV blocks"):
        engine.step()


def test_steps_come_back_in_order():
    engine = Engine()
    engine.scheduler.add(make_seqs([4]))
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    with pytest.raises(AssertionError, match="order"):
        engine.scheduler.update(second, StepOutput(np.array([3], dtype=np.int32)))
    assert first.step_id + 1 == second.step_id


@pytest.mark.parametrize("num_launched", range(6))
@pytest.mark.parametrize("num_back", [0, 1, 4])
def test_after_a_fault_everything_runs_again_to_the_same_tokens(num_launched, num_back):
    engine = Engine(block_size=4, enable_overlap=True)
    seqs = make_seqs([5, 6, 13], max_tokens=4)
    engine.scheduler.add(seqs)
    for _ in range(num_launched):
        if engine.launch() is None:
            break
    for _ in range(min(num_back, len(engine.in_flight))):
        engine.bring_in()
    engine.recover()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    assert engine.blocks.find_prefix([*seqs[2].token_ids, 3]) == []
    engine.run(max_steps=60)
    assert answers(seqs) == expected_answers(seqs)


def test_after_a_fault_the_order_of_admission_is_kept():
    engine = Engine(max_num_seqs=3)
    seqs = make_seqs([4, 5, 6, 7, 8])
    engine.scheduler.add(seqs)
    engine.step()
    engine.recover()
    assert engine.scheduler.waiting.seqs() == seqs
