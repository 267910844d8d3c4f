"""Which tokens run next: gates, chunks, preemption, ends; random workloads to the last token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_replay import (
    Engine,
    answers,
    eos_prompt,
    expected_answers,
    make_seq,
    make_seqs,
    prompt_of,
    right_answer,
)

from nanovllm.engine.admission import LengthPredictor, predicted_peak_tokens
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.engine.step import PrefillWork, SchedulerOutput, StepOutput
from nanovllm.engine.waiting import WaitingQueue

# ---- the three gates


def test_max_num_seqs_counts_everything_that_runs():
    engine = Engine(max_num_seqs=4, max_num_batched_tokens=40, num_blocks=200)
    seqs = make_seqs([9] * 12, max_tokens=6)
    engine.scheduler.add(seqs)
    most = 0
    while engine.scheduler.has_unfinished():
        engine.step()
        most = max(most, engine.scheduler.num_running)
    assert most == 4
    assert answers(seqs) == expected_answers(seqs)


@pytest.mark.parametrize("enable_overlap", [False, True])
def test_a_decode_step_computes_no_more_tokens_than_the_budget(caplog, enable_overlap):
    """With max_num_seqs above max_num_batched_tokens a decode step took a token for each row."""
    with caplog.at_level("INFO", logger="nanovllm"):
        engine = Engine(max_num_seqs=8, max_num_batched_tokens=3, enable_overlap=enable_overlap)
    assert [record.getMessage() for record in caplog.records] == [
        "max_num_batched_tokens = 3 lets fewer sequences run at once than max_num_seqs = 8"
    ]
    seqs = make_seqs([2] * 9, max_tokens=6)
    engine.scheduler.add(seqs)
    most = 0
    while engine.scheduler.has_unfinished():
        engine.step()
        most = max(most, engine.scheduler.num_running)
    assert most == 3
    assert answers(seqs) == expected_answers(seqs)


def test_a_budget_that_holds_all_rows_is_not_spoken_of(caplog):
    with caplog.at_level("INFO", logger="nanovllm"):
        Engine(max_num_seqs=8, max_num_batched_tokens=8)
    assert not caplog.records


def test_a_prefill_step_computes_no_more_tokens_than_the_budget():
    engine = Engine(max_num_batched_tokens=10)
    engine.scheduler.add(make_seqs([4, 4, 4, 4]))
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert first.prefill.num_tokens.tolist() == [4, 4, 2]
    assert first.prefill.is_sampled.tolist() == [1, 1, 0]
    assert second.prefill.num_tokens.tolist() == [2, 4]
    assert second.prefill.first_positions.tolist() == [2, 0]
    assert second.prefill.rows.tolist() == [2, 3]


def test_a_prompt_waits_until_its_blocks_are_free():
    engine = Engine(num_blocks=4, block_size=4)
    first, second = make_seqs([9, 5], max_tokens=3)  # 3 blocks each, and 2
    engine.scheduler.add([first, second])
    engine.step()
    assert (first.status, second.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    engine.run(max_steps=20)
    assert answers([first, second]) == expected_answers([first, second])
    assert engine.scheduler.num_preemptions == 0


def test_a_sequence_takes_blocks_for_its_prompt_and_the_token_it_draws():
    engine = Engine(num_blocks=9, block_size=4)
    seqs = make_seqs([4, 3], max_tokens=9)
    engine.scheduler.add(seqs)
    engine.launch()
    assert [len(seq.block_table) for seq in seqs] == [2, 1]


def test_a_last_token_needs_no_slot():
    engine = Engine(num_blocks=1, block_size=4)
    (seq,) = make_seqs([4], max_tokens=1)
    engine.scheduler.add([seq])
    assert engine.run(max_steps=2) == [seq]
    assert len(seq.token_ids) == 5


def test_the_predicted_peak_keeps_prompts_waiting_rather_than_preempting_later():
    engine = Engine(num_blocks=12, block_size=4)
    seqs = make_seqs([4] * 6, max_tokens=20)  # 6 blocks each at their end
    engine.scheduler.add(seqs)
    engine.run(max_steps=200)
    assert engine.scheduler.num_preemptions == 0
    assert answers(seqs) == expected_answers(seqs)


# ---- chunks


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_draws_once():
    engine = Engine(max_num_batched_tokens=8)
    (seq,) = make_seqs([20])
    engine.scheduler.add([seq])
    chunks = []
    for _ in range(3):
        output = engine.launch()
        chunks.append((int(output.prefill.first_positions[0]), len(output.prefill.token_ids)))
        updates = engine.bring_in()
        assert updates.num_new_tokens == (1 if len(chunks) == 3 else 0)
        assert seq.num_output_tokens == updates.num_new_tokens
    assert chunks == [(0, 8), (8, 8), (16, 4)]
    assert engine.launch().num_decode_rows == 1


def test_decoding_waits_while_prompts_are_computed():
    engine = Engine(max_num_batched_tokens=8)
    seqs = make_seqs([4, 20])
    engine.scheduler.add(seqs)
    kinds = [engine.launch().num_decode_rows for _ in range(4)]
    assert kinds == [0, 0, 0, 2]


# ---- prefix cache


def test_rows_of_one_step_share_their_prefix():
    engine = Engine(block_size=4)
    common = prompt_of(8)
    seqs = [make_seq([*common, 2 + i], seq_id=i) for i in range(3)]
    engine.scheduler.add(seqs)
    output = engine.launch()
    assert output.prefill.num_tokens.tolist() == [9, 1, 1]
    assert output.prefill.first_positions.tolist() == [0, 8, 8]
    tables = [seq.block_table for seq in seqs]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert [seq.num_cached_tokens for seq in seqs] == [0, 8, 8]
    engine.bring_in()
    engine.run(max_steps=10)
    assert answers(seqs) == expected_answers(seqs)


def test_only_blocks_of_scheduled_chunks_are_hit():
    engine = Engine(block_size=4, max_num_batched_tokens=10)
    prompt = prompt_of(17)
    seqs = [make_seq(prompt, seq_id=i) for i in range(2)]
    engine.scheduler.add(seqs)
    engine.launch()
    assert seqs[0].num_computed_tokens == 10
    assert engine.blocks.find_prefix(prompt) == seqs[0].block_table[:2]
    engine.bring_in()
    engine.run(max_steps=10)
    assert answers(seqs) == expected_answers(seqs)


@pytest.mark.parametrize("num_tokens", [4, 8, 9, 12])
def test_a_prompt_in_the_cache_recomputes_its_last_block_or_token(num_tokens):
    engine = Engine(block_size=4)
    prompt = prompt_of(num_tokens)
    first, second = (make_seq(prompt, seq_id=i) for i in range(2))
    for seq in (first, second):
        engine.scheduler.add([seq])
        engine.run(max_steps=20)
    assert second.num_cached_tokens == (num_tokens - 1) // 4 * 4
    assert answers([second]) == answers([first]) == expected_answers([first])


def test_generated_tokens_are_found_by_the_next_turn():
    for overlap in (False, True):
        engine = Engine(block_size=4, enable_overlap=overlap)
        first = make_seq(prompt_of(5), 10)
        engine.scheduler.add([first])
        engine.run(max_steps=30)
        # 15 tokens, of which the last was never computed: three whole blocks of four.
        second = make_seq([*first.token_ids, 5, 6], 2, seq_id=1)
        engine.scheduler.add([second])
        engine.run(max_steps=60)
        assert second.num_cached_tokens == 12
        assert answers([second]) == expected_answers([second])


@pytest.mark.parametrize("num_output", [8, 9])
def test_a_block_that_a_last_step_filled_is_found_too(num_output):
    """Of 13 tokens the last but one fills a block, just as its sequence leaves."""
    for overlap in (False, True):
        engine = Engine(block_size=4, enable_overlap=overlap)
        first = make_seq(prompt_of(4), num_output)
        engine.scheduler.add([first])
        engine.run(max_steps=30)
        second = make_seq([*first.token_ids, 5, 6], 2, seq_id=1)
        engine.scheduler.add([second])
        engine.run(max_steps=60)
        assert second.num_cached_tokens == (num_output + 3) // 4 * 4
        assert answers([second]) == expected_answers([second])


def test_prompt_logprobs_are_computed_without_the_cache():
    engine = Engine(block_size=4)
    first = make_seq(prompt_of(9))
    second = make_seq(prompt_of(9), seq_id=1, prompt_logprobs=0)
    for seq in (first, second):
        engine.scheduler.add([seq])
        output = engine.launch()
        engine.bring_in()
        engine.run(max_steps=30)
    assert second.num_cached_tokens == 0
    assert output.prefill.num_tokens.tolist() == [9]
    assert output.prefill.prompt_places.tolist() == list(range(8)), "of all but the first"


def test_prompt_logprobs_of_a_prompts_end_take_hits_before_it():
    engine = Engine(block_size=4)
    first = make_seq(prompt_of(15))
    second = make_seq(prompt_of(15), seq_id=1, prompt_logprobs=0)
    third = make_seq(prompt_of(15), seq_id=2, prompt_logprobs=0)
    # The logits after token 8 are the first that count, and its block ends there: no hit.
    second.prompt_logprobs_from, third.prompt_logprobs_from = 9, 8
    for seq in (first, second, third):
        engine.scheduler.add([seq])
        output = engine.launch()
        engine.bring_in()
        engine.run(max_steps=30)
        if seq is second:
            assert output.prefill.first_positions.tolist() == [8]
            assert output.prefill.prompt_places.tolist() == list(range(6))
            assert output.prefill.prompt_targets.tolist() == seq.token_ids[9:15]
    assert output.prefill.first_positions.tolist() == [4], "it needs the logits after token 7"
    assert output.prefill.prompt_places.tolist() == list(range(3, 10))
    assert output.prefill.prompt_targets.tolist() == third.token_ids[8:15]


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


# ---- ends


def test_a_length_that_is_known_ahead_takes_no_step_too_many():
    engine = Engine(enable_overlap=True)
    (seq,) = make_seqs([4], max_tokens=3)
    engine.scheduler.add([seq])
    assert [engine.launch().num_decode_rows for _ in range(3)] == [0, 1, 1]
    assert engine.scheduler.schedule() is None
    assert seq.status is SequenceStatus.DRAINING
    assert engine.blocks.num_free_blocks == 32, "freed while the last token is on its way"
    assert not engine.bring_in().finished and not engine.bring_in().finished
    assert engine.bring_in().finished == [seq]
    assert (seq.finish_reason, seq.num_output_tokens) == ("length", 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_drawn_after_eos_is_dropped(overlap):
    prompt, answer = eos_prompt()
    engine = Engine(enable_overlap=overlap)
    seq = make_seq(prompt, 40, ignore_eos=False)
    other = make_seq(prompt_of(6), 20, seq_id=1)
    engine.scheduler.add([seq, other])
    engine.run(max_steps=30)
    assert answers([seq]) == [answer]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", None)
    assert answers([other]) == expected_answers([other])
    # The step after eos ran with overlap only.
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_the_step_in_flight_when_eos_arrives_frees_nothing_twice():
    prompt, answer = eos_prompt()
    engine = Engine(enable_overlap=True)
    seq = make_seq(prompt, 40, ignore_eos=False)
    engine.scheduler.add([seq])
    for _ in range(len(answer) + 1):
        engine.launch()
    finished = []
    while engine.in_flight:
        finished += engine.bring_in().finished
    assert finished == [seq] and answers([seq]) == [answer]
    assert not engine.scheduler.has_unfinished()


def test_a_stop_id_ends_with_its_id_and_eos_does_not_before_min_tokens():
    prompt = prompt_of(5)
    free = right_answer(prompt, make_seq(prompt, 12).params, 17)
    place = next(i for i in range(3, 12) if free[i] not in free[:i])
    engine = Engine()
    early = make_seq(prompt, 12, stop_token_ids=[free[place]])
    late = make_seq(prompt, 12, seq_id=1, stop_token_ids=[free[0]], min_tokens=1)
    engine.scheduler.add([early, late])
    engine.run(max_steps=30)
    assert answers([early]) == [free[: place + 1]]
    assert (early.finish_reason, early.stop_reason) == ("stop", free[place])
    assert late.num_output_tokens > 1


def test_ignore_eos_goes_on():
    prompt, answer = eos_prompt()
    engine = Engine()
    seq = make_seq(prompt, 12, ignore_eos=True)
    engine.scheduler.add([seq])
    engine.run(max_steps=30)
    assert seq.num_output_tokens == 12
    assert answers([seq])[0][: len(answer)] == answer


def test_watched_sequences_are_reported_with_their_place():
    engine = Engine()
    plain, watched = make_seqs([4, 5])
    watched.is_watched = True
    engine.scheduler.add([plain, watched])
    engine.launch()
    assert engine.bring_in().watched == [(watched, 1)]


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


# ---- rows


def test_a_row_that_leaves_is_filled_by_the_last_one():
    engine = Engine()
    seqs = make_seqs([4, 5, 6, 7], max_tokens=8)
    engine.scheduler.add(seqs)
    engine.step()
    engine.scheduler.finish(seqs[1], "abort")
    output = engine.launch()
    assert output.moves.tolist() == [[3, 1]]
    assert [seq.row for seq in seqs] == [0, -1, 2, 1]
    assert output.num_decode_rows == 3


def test_a_row_may_move_twice_between_two_steps():
    engine = Engine()
    seqs = make_seqs([4, 5, 6, 7], max_tokens=8)
    engine.scheduler.add(seqs)
    engine.step()
    engine.scheduler.finish(seqs[2], "abort")
    assert engine.scheduler.rows.extend_block_tables()  # packs: 3 to 2
    engine.scheduler.finish(seqs[0], "abort")
    output = engine.launch()  # packs: 2 to 0
    assert output.moves.tolist() == [[3, 0]], "the device copies all rows at once"
    engine.bring_in()
    engine.run(max_steps=20)
    kept = [seqs[1], seqs[3]]
    assert answers(kept) == expected_answers(kept)


def test_steady_decode_sends_no_changes():
    engine = Engine(block_size=16)
    engine.scheduler.add(make_seqs([4, 5], max_tokens=8))
    engine.step()
    output = engine.launch()
    assert (len(output.moves), len(output.cells), len(output.rules)) == (0, 0, 0)


def test_rows_get_their_blocks_together_so_that_most_steps_send_nothing():
    """With 512 rows there was one at a block border, and a transfer, in nearly every step."""
    engine = Engine(block_size=16, num_blocks=100, max_num_batched_tokens=256, max_model_len=256)
    seqs = make_seqs([3, 17, 22, 27, 30, 45, 51, 60], max_tokens=81)
    engine.scheduler.add(seqs)
    engine.step()
    num_cells = []
    for _ in range(80):
        num_cells.append(len(engine.launch().cells))
        engine.bring_in()
    assert sum(count > 0 for count in num_cells) <= 80 // 16
    # No block is taken that is not used.
    assert sum(num_cells) == sum(-(-(len(s.token_ids) - 1) // 16) for s in seqs) - (
        sum(-(-(s.num_prompt_tokens + 1) // 16) for s in seqs)
    )
    assert answers(seqs) == expected_answers(seqs)


def test_blocks_given_ahead_are_not_those_that_another_row_needs_now():
    engine = Engine(block_size=16, num_blocks=3)
    # The first needs the last free block, the second one later on, when that is free again.
    seqs = [make_seq(prompt_of(15), 3), make_seq(prompt_of(10, seed=1), 10, seq_id=1)]
    engine.scheduler.add(seqs)
    engine.run(max_steps=12)
    assert engine.scheduler.num_preemptions == 0
    assert answers(seqs) == expected_answers(seqs)


# ---- the order of waiting


def order_of(queue):
    predictor, order = LengthPredictor(), []
    while len(queue):
        order.append(queue.peek(predictor).seq_id)
        queue.pop()
    return order


def test_without_reordering_first_come_first_in():
    queue = WaitingQueue(block_size=4, window=0)
    queue.add(make_seqs([3, 9, 5], max_tokens=8))
    queue.add([make_seq([5] * 30, 4, seq_id=9)])
    assert order_of(queue) == [0, 1, 2, 9]


def seqs_of_answers(*lengths, first_id=0):
    return [make_seq([5 + i], n, seq_id=i) for i, n in enumerate(lengths, first_id)]


def test_longer_answers_run_first():
    queue = WaitingQueue(block_size=4, window=100)
    queue.add(seqs_of_answers(3, 9, 5, 9))
    assert order_of(queue) == [1, 3, 2, 0]


def test_sequences_that_begin_alike_run_together():
    queue = WaitingQueue(block_size=4, window=100)
    a, b = [2] * 4, [3] * 4
    prompts = [([*a, 1], 3), ([*b, 1, 1, 1], 9), ([*a, 1, 1], 5), ([*b, 1], 2), ([7, 7], 4)]
    queue.add(make_seq(prompt, num, seq_id=i) for i, (prompt, num) in enumerate(prompts))
    assert order_of(queue) == [1, 3, 2, 0, 4]


def test_only_a_window_of_the_queue_is_reordered():
    queue = WaitingQueue(block_size=4, window=2)
    queue.add(seqs_of_answers(3, 4, 50, 60))
    assert order_of(queue) == [1, 0, 3, 2]


def test_preempted_ones_go_before_the_window():
    queue = WaitingQueue(block_size=4, window=100)
    queue.add(seqs_of_answers(30, 40))
    queue.add_first(make_seq([1, 2], seq_id=8))
    queue.add_first(make_seq([1, 2], seq_id=9))
    assert order_of(queue) == [9, 8, 1, 0]


def test_the_peak_of_two_that_grow_together():
    # 10 -> 20 and 4 -> 8: after 4 steps 14 + 8, at the end 20.
    peak = predicted_peak_tokens(np.array([10, 4]), np.array([20, 8]), 0)
    assert peak == 22
    assert predicted_peak_tokens(np.array([], dtype=int), np.array([], dtype=int), 4) == 0


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
