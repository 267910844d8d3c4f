"""Who is admitted next, and when: predicted lengths, their peak, and the order of waiting."""

from __future__ import annotations

import numpy as np
import pytest
from step_replay import Engine, answers, expected_answers, make_seq, make_seqs, prompt_of

from nanovllm.engine.admission import LengthPredictor, predicted_peak_tokens
from nanovllm.engine.waiting import WaitingQueue

# ---- predicted lengths


def predicted(predictor, num_prompt_tokens=10, max_tokens=5000, **options):
    seq = make_seq(prompt_of(num_prompt_tokens), max_tokens, **{"ignore_eos": False, **options})
    return predictor.predicted_num_tokens(seq)


def test_a_limit_is_the_length_where_nothing_can_end_a_sequence_before():
    predictor = LengthPredictor()
    assert predicted(predictor, ignore_eos=True) == 5010
    assert predicted(predictor, ignore_eos=True, stop=["x"]) == 1034
    assert predicted(predictor, ignore_eos=True, stop_token_ids=[5]) == 1034
    assert predicted(predictor) == 1034, "the first guess is 1,024 tokens"
    assert predicted(predictor, max_tokens=7) == 17


def test_the_guess_is_the_90th_percentile_of_the_last_512_lengths():
    predictor = LengthPredictor()
    for length in range(1, 17):
        assert predicted(predictor) == 1034, "of few ends nothing is concluded"
        predictor.observe(length)
    assert predicted(predictor, num_prompt_tokens=100) == 100 + 16, "14, but 16 to come at least"
    for length in range(1000, 1000 + 512):
        predictor.observe(length)
    assert predicted(predictor) == 10 + 1459
    for _ in range(512):
        predictor.observe(100)
    assert predicted(predictor) == 110


def test_a_sequence_past_its_guess_is_taken_to_go_on_for_a_while():
    predictor = LengthPredictor()
    for _ in range(16):
        predictor.observe(20)
    seq = make_seq(prompt_of(10), 60, ignore_eos=False)
    guesses = []
    for num_output in (0, 10, 30, 55):
        seq.num_expected_tokens = 10 + num_output
        guesses.append(predictor.predicted_num_tokens(seq))
    assert guesses == [30, 36, 56, 70]


def test_what_is_aborted_says_nothing_of_lengths():
    engine = Engine()
    seqs = make_seqs([4] * 32, max_tokens=5, ignore_eos=False, min_tokens=5)
    engine.scheduler.add(seqs)
    for seq in seqs[:16]:
        engine.scheduler.finish(seq, "abort")
    predictor = engine.scheduler._predictor
    assert predicted(predictor) == 1034
    engine.run(max_steps=100)
    assert predicted(predictor) == 10 + 16


# ---- their peak


def test_the_peak_of_two_that_grow_together():
    # 10 -> 20 and 4 -> 8: after 4 steps 14 + 8, at the end 20.
    peak = predicted_peak_tokens(np.array([10, 4]), np.array([20, 8]), 0)
    assert peak == 22
    assert predicted_peak_tokens(np.array([], dtype=int), np.array([], dtype=int), 4) == 0


def test_each_sequence_wastes_half_a_block_in_the_mean():
    lengths, final_lengths = np.array([10, 4]), np.array([20, 8])
    assert predicted_peak_tokens(lengths, final_lengths, 4) == 22 + 2 * 2


@pytest.mark.parametrize(("num_blocks", "num_at_once"), [(6, 1), (8, 2), (11, 3)])
def test_a_shared_prefix_counts_once_in_the_peak(num_blocks, num_at_once):
    """4 blocks are shared, and each sequence has up to 2 of its own."""
    engine = Engine(block_size=4, num_blocks=num_blocks)
    common = prompt_of(16)
    seqs = [make_seq([*common, 2 + i], 5, seq_id=i) for i in range(3)]
    engine.scheduler.add(seqs)
    most = 0
    while engine.scheduler.has_unfinished():
        engine.step()
        most = max(most, engine.scheduler.num_running)
    assert engine.scheduler.num_preemptions == 0
    assert most == num_at_once
    assert answers(seqs) == expected_answers(seqs)


def test_prompts_that_found_a_gate_closed_are_gathered_for_one_step():
    """A prefill step for each row that ends would stop the other 95 as many times."""
    engine = Engine(max_num_seqs=96, num_blocks=500, max_num_batched_tokens=1000)
    seqs = [make_seq(prompt_of(3, i), n, seq_id=i) for i, n in enumerate([3, 6, *[12] * 94, 2, 2])]
    engine.scheduler.add(seqs)
    num_prompts = []
    while engine.scheduler.has_unfinished():
        output = engine.launch()
        num_prompts.append(0 if output.prefill is None else len(output.prefill.rows))
        engine.bring_in()
    # The first token of a row is the prefill's; rows end after 2 and 5 decode steps.
    assert num_prompts == [96, 0, 0, 0, 0, 0, 2, *[0] * 6]
    assert answers(seqs) == expected_answers(seqs)


def test_rows_past_their_guess_count_as_going_on_for_a_while():
    engine = Engine(num_blocks=100)
    for _ in range(16):
        engine.scheduler._predictor.observe(10)
    (seq,) = make_seqs([4], max_tokens=60, ignore_eos=False, min_tokens=60)
    engine.scheduler.add([seq])
    found = []
    for _ in range(60):
        engine.step()
        if seq.num_output_tokens in (1, 12, 55):
            lengths, final_lengths, _ = engine.scheduler.rows.lengths_with(0, 0)
            found.append((int(lengths[0]), int(final_lengths[0])))
    assert found == [(5, 5 + 16), (16, 16 + 16), (59, 64)], "no further than their limit"


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


def order_of_seqs(*seqs):
    queue = WaitingQueue(block_size=4, window=100)
    queue.add(seqs)
    return order_of(queue)


def test_longer_answers_run_first_however_long_their_prompts_are():
    lengths = [(30, 4), (3, 20), (9, 12)]
    seqs = [make_seq(prompt_of(p, i), n, seq_id=i) for i, (p, n) in enumerate(lengths)]
    assert order_of_seqs(*seqs) == [1, 2, 0]


def test_prompts_of_one_block_share_nothing_and_are_no_group():
    block = [5, 6, 7, 8]
    for more, order in (([], [0, 1, 2]), ([3], [0, 2, 1])):
        prompts = [(block + more, 20), ([9, *more], 10), (block + more, 5)]
        seqs = [make_seq(prompt, n, seq_id=i) for i, (prompt, n) in enumerate(prompts)]
        assert order_of_seqs(*seqs) == order
