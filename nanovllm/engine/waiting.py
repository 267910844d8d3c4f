"""The waiting queue: preempted sequences first, then arrivals, reordered within a window.

Within a window, sequences that begin alike run together, so that the prefix cache hits while it is
warm, and long ones run first, so that the batch stays full to the end. Results are sorted back into
input order by the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from nanovllm.engine.admission import LengthPredictor
from nanovllm.engine.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """Owns the order of sequences that hold no row."""

    def __init__(self, *, block_size: int, window: int) -> None:
        self._block_size = block_size
        self._window = window  # 0 keeps the order of arrival
        self._arrived: deque[Sequence] = deque()
        self._ordered: deque[Sequence] = deque()
        self._num_seqs = 0

    def __len__(self) -> int:
        return self._num_seqs

    def add(self, seqs: Iterable[Sequence]) -> None:
        before = len(self._arrived)
        self._arrived.extend(seqs)
        self._num_seqs += len(self._arrived) - before

    def add_first(self, seq: Sequence) -> None:
        """Put a preempted sequence before everything else."""
        self._ordered.appendleft(seq)
        self._num_seqs += 1

    def peek(self, predictor: LengthPredictor) -> Sequence:
        """The sequence to admit next; the queue must not be empty."""
        while True:
            if not self._ordered:
                self._order_next_window(predictor)
            if self._ordered[0].status is SequenceStatus.WAITING:
                return self._ordered[0]
            self._ordered.popleft()  # ended while waiting, already counted out by `remove`

    def pop(self) -> Sequence:
        """Take what `peek` returned."""
        self._num_seqs -= 1
        return self._ordered.popleft()

    def remove(self, seq: Sequence) -> None:
        """Count out a sequence whose status is about to change; it is skipped later."""
        assert seq.status is SequenceStatus.WAITING
        self._num_seqs -= 1

    def seqs(self) -> list[Sequence]:
        both = [*self._ordered, *self._arrived]
        return [seq for seq in both if seq.status is SequenceStatus.WAITING]

    def _order_next_window(self, predictor: LengthPredictor) -> None:
        if not self._window:
            self._ordered, self._arrived = self._arrived, self._ordered
            return
        count = min(self._window, len(self._arrived))
        window = [self._arrived.popleft() for _ in range(count)]
        # Steps to come, not tokens: a prompt is computed in one step whatever its length.
        lengths = [predictor.predicted_num_tokens(seq) - len(seq.token_ids) for seq in window]
        groups: dict[tuple[int, ...], int] = {}  # first block -> longest predicted answer in it
        keys = []
        for place, (seq, length) in enumerate(zip(window, lengths, strict=True)):
            block = tuple(seq.token_ids[: self._block_size])
            # Too short to share a block: a group of its own.
            key = block if len(seq.token_ids) > self._block_size else (-1, place)
            groups[key] = max(groups.get(key, 0), length)
            keys.append(key)
        first_seen = {key: place for place, key in reversed(list(enumerate(keys)))}
        order = sorted(
            range(count),
            key=lambda i: (-groups[keys[i]], first_seen[keys[i]], -lengths[i], i),
        )
        self._ordered.extend(window[i] for i in order)
