"""A device made of NumPy: replays scheduler records on a row matrix, with a model that needs every
cached position to be the right one.

The "KV" of a position is a hash of its token and of all KV before it, read through the block table;
the token drawn is a function of the last KV. So one stale, missing or foreign block anywhere in a
prefix changes the tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler, SequenceUpdates
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Column, SchedulerOutput, StepOutput, row_width
from nanovllm.sampling_params import SamplingParams

VOCAB = 23
EOS = 1
_MASK = (1 << 64) - 1


def kv_value(history: int, token_id: int, position: int) -> int:
    """The KV of one position, from the sum of all KV before it."""
    x = (history * 0x9E3779B97F4A7C15 + token_id * 0xC2B2AE3D27D4EB4F + position + 1) & _MASK
    x ^= x >> 29
    x = (x * 0xBF58476D1CE4E5B9) & _MASK
    return x ^ (x >> 32)


def drawn_token(value: int) -> int:
    return (value >> 17) % VOCAB


def right_answer(prompt: list[int], params: SamplingParams, max_num_tokens: int) -> list[int]:
    """What a sequence must generate, worked out alone and without any cache."""
    history, value, answer = 0, 0, []
    tokens = list(prompt)
    done = 0
    while True:
        for position in range(done, len(tokens)):
            value = kv_value(history, tokens[position], position)
            history = (history + value) & _MASK
        done = len(tokens)
        token_id = drawn_token(value)
        tokens.append(token_id)
        answer.append(token_id)
        can_stop = len(answer) > params.min_tokens
        if can_stop and (
            (token_id == EOS and not params.ignore_eos) or token_id in params.stop_token_ids
        ):
            return answer
        if len(tokens) >= max_num_tokens:
            return answer


def make_seq(
    token_ids: Iterable[int],
    max_tokens: int = 4,
    *,
    seq_id: int = 0,
    max_model_len: int = 1 << 20,
    is_watched: bool = False,
    **options: object,
) -> Sequence:
    token_ids = list(token_ids)
    params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **options})
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        token_ids=token_ids,
        params=params,
        max_num_tokens=min(len(token_ids) + max_tokens, max_model_len),
        noise_key=(seq_id, -seq_id),
        is_watched=is_watched,
    )


def answers(seqs):
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]


def expected_answers(seqs):
    return [
        right_answer(seq.token_ids[: seq.num_prompt_tokens], seq.params, seq.max_num_tokens)
        for seq in seqs
    ]


def prompt_of(num_tokens, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(num_tokens)]


def make_seqs(lengths, max_tokens=4, **options):
    return [
        make_seq(prompt_of(n, seed=i), max_tokens, seq_id=i, **options)
        for i, n in enumerate(lengths)
    ]


def eos_prompt(min_answer=2, max_answer=8):
    """A prompt whose answer ends in eos after a few tokens."""
    for seed in range(1000):
        prompt = prompt_of(5, seed)
        answer = right_answer(prompt, make_seq(prompt, 40, ignore_eos=False).params, 45)
        if answer[-1] == EOS and min_answer <= len(answer) <= max_answer:
            return prompt, answer
    raise AssertionError


class FakeDevice:
    """Rows and KV cache of one rank."""

    def __init__(self, num_rows: int, max_model_len: int, num_blocks: int, block_size: int):
        self.width = row_width(-(-max_model_len // block_size))
        self.block_size = block_size
        self.rows = np.full((num_rows, self.width), -99, dtype=np.int32)
        self.kv = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self.written: list[tuple[int, int, int]] = []  # (row, position, slot) of the last step

    def run(self, output: SchedulerOutput) -> np.ndarray:
        """Apply a record; return the tokens of its sampled rows."""
        moves, cells = output.moves, output.cells
        assert not set(moves[:, 0].tolist()) & set(moves[:, 1].tolist()), "moves are disjoint"
        assert len(set(cells[:, 0].tolist())) == len(cells), "a cell is set once in a step"
        self.rows[moves[:, 1]] = self.rows[moves[:, 0]]
        self.rows.reshape(-1)[cells[:, 0]] = cells[:, 1]
        self.written = []
        drawn = self._decode(output) if output.prefill is None else self._prefill(output)
        slots = [slot for _, _, slot in self.written]
        assert len(set(slots)) == len(slots), "no slot is written twice in a step"
        return np.array(drawn, dtype=np.int32)

    def _prefill(self, output: SchedulerOutput) -> list[int]:
        work = output.prefill
        assert work is not None and output.num_decode_rows == 0
        assert int(work.num_tokens.sum()) == len(work.token_ids)
        assert len(set(work.rows.tolist())) == len(work.rows)
        assert (work.num_tokens > 0).all()
        drawn, start = [], 0
        for i, row in enumerate(work.rows.tolist()):
            count, first = int(work.num_tokens[i]), int(work.first_positions[i])
            value = 0
            for offset in range(count):
                token_id = int(work.token_ids[start + offset])
                value = self._compute(row, first + offset, token_id)
            start += count
            if work.is_sampled[i]:
                assert self.rows[row, Column.SEQ_LEN] == first + count + 1
                drawn.append(drawn_token(value))
                self.rows[row, Column.LAST_TOKEN] = drawn[-1]
        return drawn

    def _decode(self, output: SchedulerOutput) -> list[int]:
        drawn = []
        assert output.num_decode_rows > 0
        for row in range(output.num_decode_rows):
            seq_len = int(self.rows[row, Column.SEQ_LEN])
            value = self._compute(row, seq_len - 1, int(self.rows[row, Column.LAST_TOKEN]))
            drawn.append(drawn_token(value))
            self.rows[row, Column.LAST_TOKEN] = drawn[-1]
            self.rows[row, Column.SEQ_LEN] += 1
        return drawn

    def _compute(self, row: int, position: int, token_id: int) -> int:
        table = self.rows[row, Column.BLOCK_TABLE :].astype(np.int64)
        places = np.arange(position + 1)
        slots = table[places // self.block_size] * self.block_size + places % self.block_size
        assert (slots >= 0).all() and (slots < len(self.kv)).all()
        history = int(self.kv[slots[:-1]].sum(dtype=np.uint64))
        value = kv_value(history, token_id, position)
        self.kv[slots[-1]] = value
        self.written.append((row, position, int(slots[-1])))
        return value


class Engine:
    """The step loop around a scheduler and a fake device, with every check after every call."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        enable_prefix_caching: bool = True,
        enable_overlap: bool = False,
        reorder: bool = False,
    ) -> None:
        def make_scheduler() -> Scheduler:
            return Scheduler(
                BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                eos_token_ids=[EOS],
                vocab_size=VOCAB,
                enable_request_reordering=reorder,
            )

        self.make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.enable_overlap = enable_overlap
        self.device = FakeDevice(max_num_seqs, max_model_len, num_blocks, block_size)
        self.in_flight: deque[tuple[SchedulerOutput, np.ndarray]] = deque()
        self.next_position: dict[int, tuple[int, int]] = {}  # seq_id -> (preemptions, position)
        self.num_steps = self.num_turns = 0
        self.num_recoveries = 0

    @property
    def blocks(self) -> BlockManager:
        return self.scheduler.blocks

    def launch(self) -> SchedulerOutput | None:
        """Schedule and run a step on the device; its tokens stay in flight."""
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if output is None:
            return None
        self.num_steps += 1
        seqs = self.scheduler.rows.packed_seqs()
        assert len(seqs) <= self.max_num_seqs
        assert output.num_decode_rows <= self.budget
        if output.prefill is not None:
            assert len(output.prefill.token_ids) <= self.budget
        again = SchedulerOutput.from_bytes(output.to_bytes())
        tokens = self.device.run(again)
        self._check_rows(seqs, output)
        self.in_flight.append((output, tokens))
        return output

    def bring_in(self) -> SequenceUpdates:
        """Hand the oldest step's tokens to the scheduler."""
        output, tokens = self.in_flight.popleft()
        updates = self.scheduler.update(output, StepOutput(tokens))
        self.scheduler.check_invariants()
        return updates

    def step(self) -> list[Sequence]:
        """One turn of the engine's loop; the sequences that finished."""
        self.num_turns += 1
        assert self.num_turns < 20_000, "the test waits for something that does not come"
        output = self.launch()
        num_kept = 1 if output is not None and self.enable_overlap else 0
        finished = []
        while len(self.in_flight) > num_kept:
            finished += self.bring_in().finished
        return finished

    def run(self, *, max_steps: int) -> list[Sequence]:
        """Step until nothing is left."""
        finished = []
        while self.scheduler.has_unfinished() or self.in_flight:
            finished += self.step()
            assert self.num_steps <= max_steps, "no progress"
        return finished

    def recover(self) -> None:
        """What the engine does after a fault: steps in flight are lost, the books begun anew."""
        self.in_flight.clear()
        old = self.scheduler
        lost = [seq for flight in old._in_flight for seq in flight.seqs]
        seqs = {*old.rows.seqs_by_admission(), *lost, *old.waiting.seqs()}
        self.scheduler = self.make_scheduler()
        for seq in sorted(seqs, key=lambda seq: seq.seq_id):
            if not seq.is_finished:
                seq.restart()
                self.scheduler.add([seq])
        self.num_recoveries += 1
        self.scheduler.check_invariants()

    def _check_rows(self, seqs: list[Sequence], output: SchedulerOutput) -> None:
        """The device's rows are the scheduler's, and each position is computed once."""
        for row, seq in enumerate(seqs):
            held = self.device.rows[row, Column.BLOCK_TABLE :][: len(seq.block_table)]
            assert held.tolist() == seq.block_table
            assert self.device.rows[row, Column.KEY_LO] == seq.noise_key[0]
            assert self.device.rows[row, Column.KEY_HI] == seq.noise_key[1]
        block_size = self.blocks.block_size
        for row, position, slot in self.device.written:
            seq = seqs[row]
            assert slot // block_size == seq.block_table[position // block_size]
            epoch = seq.num_preemptions + 1000 * self.num_recoveries
            known_epoch, expected = self.next_position.get(seq.seq_id, (-1, 0))
            if epoch == known_epoch:
                assert position == expected, "positions are computed in order, and once"
            else:
                assert position % block_size == 0, "a prefix hit is whole blocks"
            self.next_position[seq.seq_id] = (epoch, position + 1)
