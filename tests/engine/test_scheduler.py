"""Which tokens run next: gates, chunks, prefix hits, ends, and the rows that hold it all."""

from __future__ import annotations

import pytest
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

from nanovllm.engine.sequence import SequenceStatus

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
