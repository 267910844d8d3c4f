"""Which tokens run next: the waiting queue, the packed running rows, preemption, and the end of a
sequence by token or length.

The scheduler never sees a tensor. `schedule` may be called again before the tokens of the step it
returned last are known (one step of overlap); `update` brings them in.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from nanovllm.engine.admission import LengthPredictor, predicted_peak_tokens
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.chunks import Chunk, PromptSpan, pack, processor_calls, prompt_spans
from nanovllm.engine.rows import RowTable
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import PrefillWork, SamplingFeature, SchedulerOutput, StepOutput
from nanovllm.engine.waiting import WaitingQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """Whose token comes back in which place of a launched step's output."""

    step_id: int
    seqs: list[Sequence]
    needs_look: np.ndarray  # [num_sampled] bool, watched or at its length limit
    ignores_eos: np.ndarray  # [num_sampled] bool
    prompt_spans: list[PromptSpan]
    # (sequence, its final number of tokens) of those that ended after the launch
    ended: list[tuple[Sequence, int]] = field(default_factory=list)


@dataclass(slots=True)
class SequenceUpdates:
    """What a step changed that somebody outside the scheduler must hear of."""

    finished: list[Sequence] = field(default_factory=list)
    # (sequence, its place in the step's output) of watched sequences that got a token
    watched: list[tuple[Sequence, int]] = field(default_factory=list)
    prompt_spans: list[PromptSpan] = field(default_factory=list)
    num_new_tokens: int = 0


class Scheduler:
    """Owns the queues, the row of each running sequence, and every field of a Sequence."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int = 0,
        enable_request_reordering: bool = True,
    ) -> None:
        self.blocks = block_manager
        # A decode step takes a token of each running sequence, so the budget bounds these too.
        self._max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        if self._max_num_seqs < max_num_seqs:
            logger.info(
                "max_num_batched_tokens = %d lets fewer sequences run at once than "
                "max_num_seqs = %d",
                max_num_batched_tokens,
                max_num_seqs,
            )
        self.rows = RowTable(max_num_seqs, block_manager, max_model_len)
        self.waiting = WaitingQueue(
            block_size=block_manager.block_size,
            window=8 * max_num_seqs if enable_request_reordering else 0,
        )
        self._predictor = LengthPredictor()
        self._token_budget = max_num_batched_tokens
        self._in_flight: deque[_StepInFlight] = deque()
        self._prefilling: list[Sequence] = []  # admitted, not all known tokens scheduled yet
        self._num_steps = 0
        self._is_blocked = False  # the last admission stopped at a gate
        self._num_left = 0  # rows that left since
        self.num_preemptions = 0
        eos_ids = sorted(set(eos_token_ids))
        self._is_eos = np.zeros(max([vocab_size, *(i + 1 for i in eos_ids)], default=0), dtype=bool)
        self._is_eos[eos_ids] = True

    @property
    def num_running(self) -> int:
        return self.rows.num_seqs

    def has_unfinished(self) -> bool:
        return bool(self._in_flight or self.rows.num_seqs or len(self.waiting))

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Queue new sequences, first come first in but for the reordering within a window."""
        self.waiting.add(seqs)

    def schedule(self) -> SchedulerOutput | None:
        """Put the next step together, or None if nothing can run before `update` is called."""
        self._drain_full_length_rows()
        chunks = self._schedule_prefill()
        if not chunks and self.rows.num_seqs:
            self._make_room_to_decode()
        elif not chunks and len(self.waiting) and not self._in_flight:
            head = self.waiting.peek(self._predictor)
            raise RuntimeError(
                f"No progress: request {head.request_id} ({len(head.token_ids)} tokens) cannot be "
                f"admitted though nothing runs; {self.blocks.num_free_blocks} of "
                f"{self.blocks.num_blocks} KV blocks are free. This is a bug in nanovllm."
            )
        changes = self.rows.take_changes()
        if chunks:
            sampled = [chunk.seq for chunk in chunks if chunk.end == len(chunk.seq.token_ids)]
            prefill = pack(chunks)
        elif self.rows.num_seqs:
            sampled, prefill = self.rows.packed_seqs(), None
        else:
            return None
        self._num_steps += 1
        return self._launch(sampled, prefill, changes, prompt_spans(chunks))

    def update(self, output: SchedulerOutput, step_output: StepOutput) -> SequenceUpdates:
        """Bring in the tokens that the oldest step in flight drew; end sequences that are done."""
        flight = self._in_flight.popleft()
        assert flight.step_id == output.step_id, "steps come back in the order they were launched"
        token_ids = step_output.token_ids
        updates = SequenceUpdates(prompt_spans=flight.prompt_spans)
        updates.num_new_tokens = len(flight.seqs)
        # No loop of ours over the rows: it would be most of `update`.
        known = [seq.token_ids for seq in flight.seqs]
        deque(map(list.append, known, token_ids.tolist()), maxlen=0)
        for seq, num_tokens in flight.ended:
            updates.num_new_tokens -= len(seq.token_ids) - num_tokens
            del seq.token_ids[num_tokens:]
        is_eos = self._is_eos[token_ids] & ~flight.ignores_eos
        for place in (is_eos | flight.needs_look).nonzero()[0].tolist():
            seq = flight.seqs[place]
            if seq.status is SequenceStatus.FINISHED:
                continue
            if seq.is_watched:
                updates.watched.append((seq, place))
            if self._end_if_done(seq, bool(is_eos[place])):
                updates.finished.append(seq)
        return updates

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence from outside: a stop string or an abort. A finished one stays so."""
        if seq.status is SequenceStatus.FINISHED:
            return
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        self._leave(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        for flight in self._in_flight:  # which may draw for it once more
            flight.ended.append((seq, len(seq.token_ids)))
        if reason != "abort":
            self._predictor.observe(seq.num_output_tokens)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls. For tests."""
        running = self.rows.seqs_by_admission()
        waiting = self.waiting.seqs()
        assert len(running) <= self._max_num_seqs, "max_num_seqs counts everything that runs"
        assert all(seq.status is SequenceStatus.RUNNING for seq in running)
        assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
        assert not any(seq.block_table or seq.row >= 0 for seq in waiting)
        self.blocks.check_invariants([seq.block_table for seq in running])
        self.rows.check_invariants()

    # ---- admission and prefill

    def _schedule_prefill(self) -> list[Chunk]:
        budget = self._token_budget
        chunks: list[Chunk] = []
        for seq in self._prefilling:
            if budget:
                chunks.append(self._take_chunk(seq, budget))
                budget -= chunks[-1].end - chunks[-1].start
        if budget and self._is_admission_due():
            self._is_blocked, self._num_left = False, 0
            while budget and (admitted := self._admit_next()) is not None:
                chunks.append(self._take_chunk(admitted, budget))
                budget -= chunks[-1].end - chunks[-1].start
        self._prefilling = [
            seq
            for seq in dict.fromkeys([*self._prefilling, *(chunk.seq for chunk in chunks)])
            if seq.num_computed_tokens < len(seq.token_ids)
        ]
        return chunks

    def _is_admission_due(self) -> bool:
        """Prompts are gathered: one prefill step for several that can start, not one for each."""
        if not len(self.waiting):
            return False
        num_rows = self.rows.num_seqs
        return not self._is_blocked or not num_rows or self._num_left >= max(1, num_rows // 32)

    def _admit_next(self) -> Sequence | None:
        """Give the head of the queue a row and blocks if every gate is open."""
        if not len(self.waiting):
            return None
        seq = self.waiting.peek(self._predictor)
        num_tokens = len(seq.token_ids)
        is_open = self.rows.num_seqs < self._max_num_seqs and not seq.has_token_in_flight
        if is_open:
            hits = self.blocks.find_prefix(seq.token_ids, seq.num_cacheable_tokens)
            # The token that the prefill draws needs a slot next, unless it is the last one.
            num_slots = min(num_tokens + 1, seq.max_num_tokens - 1)
            num_new = self.blocks.num_blocks_for(num_slots) - len(hits)
            is_open = num_new <= self.blocks.num_free_blocks_after_hits(hits)
        if not is_open or not self._fits_predicted_peak(seq, hits):
            self._is_blocked = True
            return None
        self.waiting.pop()
        self.blocks.share(seq.block_table, hits)
        self.blocks.append(seq.block_table, num_new)
        seq.num_computed_tokens = len(hits) * self.blocks.block_size
        seq.num_indexed_blocks = len(hits)
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.status = SequenceStatus.RUNNING
        self.rows.join(seq, self._predictor.predicted_num_tokens(seq))
        return seq

    def _fits_predicted_peak(self, seq: Sequence, hits: list[int]) -> bool:
        if not self.rows.num_seqs:
            return True
        blocks, num_shared = self.blocks, len(hits) * self.blocks.block_size
        lengths, final_lengths, num_own_blocks = self.rows.lengths_with(
            len(seq.token_ids) - num_shared,
            self._predictor.predicted_num_tokens(seq) - num_shared,
        )
        peak = predicted_peak_tokens(lengths, final_lengths, blocks.block_size)
        # Prefixes that rows, or this sequence, have found and whose first owner is gone.
        num_found = blocks.num_blocks - blocks.num_free_blocks_after_hits(hits) - num_own_blocks
        return peak <= (blocks.num_blocks - num_found) * blocks.block_size

    def _take_chunk(self, seq: Sequence, budget: int) -> Chunk:
        start = seq.num_computed_tokens
        end = min(len(seq.token_ids), start + budget)
        seq.num_computed_tokens = end
        # As soon as scheduled: layers store K and V before they attend, so a row of this very step
        # may already share the block.
        self._index_full_blocks(seq, end)
        return Chunk(seq, start, end)

    # ---- decode

    def _drain_full_length_rows(self) -> None:
        """Rows whose last allowed token is drawn or being drawn do not run again."""
        for seq in self.rows.seqs_at_limit():
            self._leave(seq)
            seq.status = SequenceStatus.DRAINING

    def _make_room_to_decode(self) -> None:
        """Extend tables of rows at a block border; preempt the youngest if blocks run out."""
        while not self.rows.extend_block_tables():
            victim = self.rows.seqs_by_admission()[-1]
            self.num_preemptions += 1
            victim.num_preemptions += 1
            self._preempt(victim)

    def _preempt(self, seq: Sequence) -> None:
        """Back to the front of the queue; everything is computed again, nothing is drawn twice."""
        self._leave(seq)
        seq.num_computed_tokens = seq.num_indexed_blocks = 0
        seq.status = SequenceStatus.WAITING
        self.waiting.add_first(seq)

    def _leave(self, seq: Sequence) -> None:
        if seq.row >= 0:
            # Not while it decodes: no prompt goes on where an answer has not ended.
            num_known = min(len(seq.token_ids), self.rows.num_computed_tokens(seq))
            self._index_full_blocks(seq, num_known)
            seq.num_expected_tokens = self.rows.leave(seq)
            self._num_left += 1
            if seq in self._prefilling:
                self._prefilling.remove(seq)
        self.blocks.release(seq.block_table)

    # ---- step bookkeeping

    def _launch(
        self,
        sampled: list[Sequence],
        prefill: PrefillWork | None,
        changes: tuple[np.ndarray, np.ndarray, np.ndarray],
        prompt_spans: list[PromptSpan],
    ) -> SchedulerOutput:
        # Decode draws in all rows, in order.
        num_decode_rows = len(sampled) if prefill is None else 0
        rows = slice(0, num_decode_rows) if prefill is None else [seq.row for seq in sampled]
        needs_look, ignores_eos, features, max_logprobs = self.rows.draw(rows)
        self._in_flight.append(
            _StepInFlight(self._num_steps, sampled, needs_look, ignores_eos, prompt_spans)
        )
        head = (self._num_steps, num_decode_rows, features, max_logprobs)
        needs_host = features & SamplingFeature.PYTHON_PROCESSORS.value
        calls = processor_calls(sampled) if needs_host else ()
        return SchedulerOutput(*head, *changes, prefill, calls)

    def _end_if_done(self, seq: Sequence, is_eos: bool) -> bool:
        token_id = seq.token_ids[-1]
        num_output = seq.num_output_tokens
        can_stop = num_output > seq.params.min_tokens
        if is_eos and can_stop:
            self.finish(seq, "stop")
        elif can_stop and token_id in seq.params.stop_token_ids:
            self.finish(seq, "stop", token_id)
        elif len(seq.token_ids) >= seq.max_num_tokens:
            self.finish(seq, "length")
        return seq.is_finished

    def _index_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Index blocks full of the first `num_tokens`: known, and computed by launched steps."""
        start, end = seq.num_indexed_blocks, num_tokens // self.blocks.block_size
        if end > start:
            self.blocks.index_blocks(seq.block_table, seq.token_ids, start, end)
            seq.num_indexed_blocks = end
