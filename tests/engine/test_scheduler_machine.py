"""A scheduler and its device through any order of events: nothing lost, stale, starved or shared.

Hypothesis chooses what happens next. The device is `step_replay`'s, whose tokens depend on every
cached position, so the checks here are on the books: what each block, row and column holds.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from step_replay import VOCAB, Engine, FakeDevice, kv_value, make_seq, right_answer

from nanovllm.engine.admission import predicted_peak_tokens
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import SchedulerOutput

_MASK = (1 << 64) - 1
STEMS = [[2 + (i * step) % (VOCAB - 2) for i in range(60)] for step in (3, 5)]


def history_of(token_ids: list[int]) -> list[int]:
    """The KV of each position, as it must be."""
    values, history = [], 0
    for position, token_id in enumerate(token_ids):
        values.append(kv_value(history, token_id, position))
        history = (history + values[-1]) & _MASK
    return values


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(3, 20),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        is_caching=st.booleans(),
        reorder=st.booleans(),
    )
    def start(self, block_size, num_blocks, max_num_seqs, budget, is_caching, reorder):
        self.size = {
            "num_rows": max_num_seqs,
            "max_model_len": 60,
            "num_blocks": num_blocks,
            "block_size": block_size,
        }
        self.engine = Engine(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=60,
            enable_prefix_caching=is_caching,
            enable_overlap=True,
            reorder=reorder,
        )
        self.scheduler = self.engine.scheduler
        self.is_fifo = not reorder
        self.seqs: list[Sequence] = []
        self.admitted: list[int] = []  # seq ids, in the order of their first admission
        self.cut: set[int] = set()  # ended from outside
        self.finished: list[Sequence] = []
        self.records: list[bytes] = []

    # ---- events

    @rule(
        stem=st.sampled_from(STEMS),
        num_common=st.integers(0, 40),
        own=st.lists(st.integers(2, VOCAB - 1), max_size=4),
        max_tokens=st.integers(1, 25),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        is_watched=st.booleans(),
        copies=st.integers(1, 3),
    )
    def add(
        self,
        stem,
        num_common,
        own,
        max_tokens,
        ignore_eos,
        min_tokens,
        stop_ids,
        is_watched,
        copies,
    ):
        self.add_prompt(
            [*stem[:num_common], *own] or [2],
            max_tokens,
            copies,
            is_watched=is_watched,
            ignore_eos=ignore_eos,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=stop_ids,
        )

    @rule(data=st.data(), num_more=st.integers(0, 3), max_tokens=st.integers(1, 9))
    def add_next_turn(self, data, num_more, max_tokens):
        """A prompt that goes on where an answer stands now: its generated blocks may be hit."""
        if self.seqs:
            before = data.draw(st.sampled_from(self.seqs))
            own = [2 + i for i in range(num_more)]
            self.add_prompt([*before.token_ids, *own], max_tokens)

    def add_prompt(self, prompt, max_tokens, copies=1, **options):
        num_cache_tokens = self.size["num_blocks"] * self.size["block_size"]
        new = [
            make_seq(
                prompt[: min(59, num_cache_tokens)],
                max_tokens,
                seq_id=len(self.seqs) + i,
                max_model_len=min(60, num_cache_tokens + 1),
                **options,
            )
            for i in range(copies)
        ]
        self.seqs += new
        self.scheduler.add(new)

    @rule()
    def launch(self):
        """As the engine does: at most two steps are on their way."""
        output = self.engine.launch()
        if output is not None:
            self.records.append(output.to_bytes())
        self._note_admissions()
        if output is None or len(self.engine.in_flight) == 2:
            self.bring_in()

    @rule()
    def bring_in(self):
        if self.engine.in_flight:
            updates = self.engine.bring_in()
            self.finished += updates.finished
            assert all(seq.is_finished for seq in updates.finished)

    @rule(data=st.data())
    def stop_string(self, data):
        """A watched sequence got a token and its text says stop: `finish` behind `update`."""
        if not self.engine.in_flight:
            return
        updates = self.engine.bring_in()
        self.finished += updates.finished
        for seq, _ in updates.watched:
            if not seq.is_finished and data.draw(st.booleans()):
                self.scheduler.finish(seq, "stop", "x")
                self.cut.add(seq.seq_id)

    @rule(data=st.data())
    def abort(self, data):
        if self.seqs:
            seq = data.draw(st.sampled_from(self.seqs))
            if not seq.is_finished:
                self.cut.add(seq.seq_id)
            self.scheduler.finish(seq, "abort")
            self.scheduler.finish(seq, "abort")  # idempotent

    @rule(reaches_device=st.booleans())
    def fail_a_step(self, reaches_device):
        output = self.scheduler.schedule()
        if output is not None and reaches_device:
            self.engine.device.run(output)
            self.records.append(output.to_bytes())
        self._note_admissions()
        self.engine.recover()
        self.scheduler = self.engine.scheduler
        assert self.engine.blocks.num_free_blocks == self.engine.blocks.num_blocks
        assert not any(self.engine.blocks.find_prefix([*stem, 2]) for stem in STEMS)

    @rule()
    def reset_cache(self):
        self.engine.blocks.reset_prefix_index()
        assert not any(self.engine.blocks.find_prefix([*stem, 2]) for stem in STEMS)

    @rule(length=st.sampled_from([1, 25]))
    def learn(self, length):
        for _ in range(16):
            self.scheduler._predictor.observe(length)

    @precondition(lambda self: len(self.seqs) > 3)
    @rule(num_turns=st.integers(1, 12))
    def run_for_a_while(self, num_turns):
        for _ in range(num_turns):
            self.launch()

    # ---- what always holds

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler, blocks = self.scheduler, self.engine.blocks
        scheduler.check_invariants()
        running = scheduler.rows.seqs_by_admission()
        held = {block_id for seq in running for block_id in seq.block_table}
        assert len(held) + blocks.num_free_blocks == blocks.num_blocks
        assert not any(seq.block_table for seq in self.seqs if seq not in running)
        counts = {s: sum(seq.status is s for seq in self.seqs) for s in SequenceStatus}
        assert counts[SequenceStatus.RUNNING] == scheduler.num_running
        assert counts[SequenceStatus.WAITING] == len(scheduler.waiting)
        drawing = [seq for flight in scheduler._in_flight for seq in flight.seqs]
        for seq in running:
            self._check_row(seq, drawing.count(seq))
        for seq in self.seqs:
            if seq.status is SequenceStatus.DRAINING:
                assert drawing.count(seq) >= 1 and not seq.block_table and seq.row < 0
        self._check_shared(running)

    def _check_row(self, seq: Sequence, num_drawing: int) -> None:
        """Host columns equal the sequence; the cache holds what its tokens give."""
        rows, row = self.scheduler.rows, seq.row
        assert rows._len[row] == len(seq.token_ids) + num_drawing
        assert rows._limit[row] == seq.max_num_tokens
        assert rows._ignores_eos[row] == seq.params.ignore_eos
        assert rows._is_watched[row] == (seq.is_watched or bool(seq.params.stop_token_ids))
        num_computed = rows.num_computed_tokens(seq)
        assert num_computed <= len(seq.block_table) * self.size["block_size"]
        num_known = min(num_computed, len(seq.token_ids))
        values = history_of(seq.token_ids[:num_known])
        size = self.size["block_size"]
        slots = [seq.block_table[p // size] * size + p % size for p in range(num_known)]
        assert self.engine.device.kv[slots].tolist() == values, f"stale KV of {seq.seq_id}"

    def _check_shared(self, running: list[Sequence]) -> None:
        """A block in two tables stands at one place in both, after equal tokens."""
        size = self.size["block_size"]
        owners: dict[int, tuple[int, list[int]]] = {}
        for seq in running:
            assert len(set(seq.block_table)) == len(seq.block_table)
            for index, block_id in enumerate(seq.block_table):
                tokens = seq.token_ids[: (index + 1) * size]
                if block_id in owners:
                    assert owners[block_id] == (index, tokens)
                    assert len(tokens) == (index + 1) * size, "only full blocks are shared"
                owners[block_id] = (index, tokens)

    def _note_admissions(self) -> None:
        for seq in self.scheduler.rows.seqs_by_admission():
            if seq.seq_id not in self.admitted:
                overtaken = self.is_fifo and [
                    other
                    for other in self.seqs[: seq.seq_id]
                    if other.status is SequenceStatus.WAITING and other.seq_id not in self.admitted
                ]
                assert not overtaken, "first come, first admitted"
                self.admitted.append(seq.seq_id)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        num_turns = 0
        while self.scheduler.has_unfinished() or self.engine.in_flight:
            self.launch()
            num_turns += 1
            assert num_turns < 5000, "no progress"
        blocks = self.engine.blocks
        assert blocks.num_free_blocks == blocks.num_blocks
        ids = [seq.seq_id for seq in self.finished]
        assert sorted(ids) == sorted({seq.seq_id for seq in self.seqs} - self.cut)
        for seq in self.seqs:
            answer = seq.token_ids[seq.num_prompt_tokens :]
            right = right_answer(
                seq.token_ids[: seq.num_prompt_tokens], seq.params, seq.max_num_tokens
            )
            assert seq.is_finished and len(seq.token_ids) <= seq.max_num_tokens
            assert answer == (right[: len(answer)] if seq.seq_id in self.cut else right)
        self._replay()

    def _replay(self) -> None:
        """A worker that sees the same records has the same rows and the same cache."""
        worker = FakeDevice(**self.size)
        for record in self.records:
            worker.run(SchedulerOutput.from_bytes(record))
        assert np.array_equal(worker.rows, self.engine.device.rows)
        assert np.array_equal(worker.kv, self.engine.device.kv)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_the_predicted_peak_is_that_of_a_run_to_the_end(pairs):
    lengths = np.array([length for length, _ in pairs], dtype=int)
    finals = lengths + np.array([more for _, more in pairs], dtype=int)
    peak = 0
    for step in range(32):
        grown = lengths + step
        peak = max(peak, int(grown[grown <= finals].sum()))
    assert predicted_peak_tokens(lengths, finals, 0) == peak
