"""The host's mirror of the packed device rows, and the changes to them that the next step carries.

Steady decode touches whole NumPy columns only; Python loops run over rows that join, leave or need
blocks.
"""

from __future__ import annotations

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.row_params import num_logprobs, param_cells, row_features, row_rules
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Column, row_width

# Rows that need a block within so many steps get theirs together: steps in between send nothing.
_STEPS_AHEAD = 16
_NO_CHANGES = np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32), np.zeros(0, np.int32)


class RowTable:
    """Owns which running sequence sits in which device row, and columns of facts about each."""

    def __init__(self, max_num_seqs: int, blocks: BlockManager, max_model_len: int) -> None:
        self._blocks = blocks
        self._width = row_width(blocks.num_blocks_for(max_model_len))
        self._rows: list[Sequence | None] = []  # None is a hole that the next step packs
        self._holes: list[int] = []
        self._num_joined = 0
        # One column a fact, indexed by row.
        self._len = np.zeros(max_num_seqs, dtype=np.int64)  # tokens, any in flight included
        self._limit = np.zeros(max_num_seqs, dtype=np.int64)
        self._final_len = np.zeros(max_num_seqs, dtype=np.int64)  # predicted
        self._shared = np.zeros(max_num_seqs, dtype=np.int64)  # tokens in blocks found by prefix
        self._capacity = np.zeros(max_num_seqs, dtype=np.int64)  # tokens the block table can hold
        self._has_drawn = np.zeros(max_num_seqs, dtype=bool)  # the prefill is behind it
        self._is_watched = np.zeros(max_num_seqs, dtype=bool)
        self._ignores_eos = np.zeros(max_num_seqs, dtype=bool)
        self._features = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self._order = np.zeros(max_num_seqs, dtype=np.int64)  # of admission
        self._columns = (
            self._len, self._limit, self._final_len, self._shared, self._capacity, self._has_drawn,
            self._is_watched, self._ignores_eos, self._features, self._num_logprobs, self._order,
        )  # fmt: skip
        self._sources: dict[int, int] = {}  # row -> the row it was moved from since the last step
        self._cells: list[np.ndarray] = []
        self._rules: list[np.ndarray] = []

    @property
    def num_seqs(self) -> int:
        return len(self._rows) - len(self._holes)

    def join(self, seq: Sequence, final_len: int) -> None:
        """Append a row for `seq`, whose block table covers all its known tokens."""
        self._pack()
        row = len(self._rows)
        self._rows.append(seq)
        seq.row = row
        num_tokens = len(seq.token_ids)
        params = seq.params
        self._len[row] = num_tokens
        self._limit[row] = seq.max_num_tokens
        self._final_len[row] = final_len
        self._shared[row] = seq.num_computed_tokens
        self._capacity[row] = len(seq.block_table) * self._blocks.block_size
        self._has_drawn[row] = False
        self._is_watched[row] = seq.is_watched or bool(params.stop_token_ids)
        self._ignores_eos[row] = params.ignore_eos
        self._features[row] = row_features(params)
        self._num_logprobs[row] = num_logprobs(params.logprobs)
        self._order[row] = self._num_joined
        self._num_joined += 1
        # The token that the prefill draws is counted at once: no step reads the field earlier.
        cells = param_cells(seq)
        cells[Column.SEQ_LEN] = num_tokens + 1
        header = np.array(list(cells.items()), dtype=np.int64)
        header[:, 0] += row * self._width
        self._cells.append(header)
        self._set_blocks(row, np.arange(len(seq.block_table)), seq.block_table)
        self._rules.extend(row_rules(seq))

    def leave(self, seq: Sequence) -> int:
        """Take `seq` out of its row; return its expected number of tokens."""
        row, seq.row = seq.row, -1
        self._rows[row] = None
        self._holes.append(row)
        return int(self._len[row])

    def extend_block_tables(self) -> bool:
        """Give every row blocks for its next token; False, nothing done, if there are too few."""
        self._pack()
        rows, block_size = slice(len(self._rows)), self._blocks.block_size
        lens, capacity = self._len[rows], self._capacity[rows]
        short = (lens > capacity).nonzero()[0]
        if not len(short):
            return True
        last_lens = self._limit[rows] - 1
        soon = (np.minimum(lens + _STEPS_AHEAD, last_lens) > capacity).nonzero()[0]
        if len(soon) <= self._blocks.num_free_blocks:
            short = soon  # all that need one by then get it, so none waits for another's
        elif len(short) > self._blocks.num_free_blocks:
            return False
        seqs = self.packed_seqs()
        tables = [seqs[row].block_table for row in short.tolist()]
        new_ids = [self._blocks.append(table, 1)[0] for table in tables]
        self._set_blocks(short, capacity[short] // block_size, new_ids)
        capacity[short] += block_size
        return True

    def draw(self, rows: slice | list[int]) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Count the token that a step is about to draw in each of `rows`.

        Returns:
            needs_look: [num_rows] bool, watched or at its limit with this token
            ignores_eos: [num_rows] bool
            the union of the rows' SamplingFeature bits, and their largest `logprobs` (-1: none)
        """
        self._len[rows] += 1
        self._has_drawn[rows] = True
        needs_look = self._is_watched[rows] | (self._len[rows] >= self._limit[rows])
        features = int(np.bitwise_or.reduce(self._features[rows], initial=0))
        max_logprobs = int(self._num_logprobs[rows].max(initial=-1)) if features else -1
        return needs_look, self._ignores_eos[rows].copy(), features, max_logprobs

    def take_changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Moves, cells and rules since the last call, as `SchedulerOutput` wants them."""
        self._pack()
        if not (self._sources or self._cells or self._rules):
            return _NO_CHANGES
        moves = [(source, row) for row, source in self._sources.items()]
        no_moves, no_cells, no_rules = _NO_CHANGES
        cells = np.concatenate([no_cells, *self._cells]).astype(np.int32)
        rules = np.concatenate([no_rules, *self._rules]).astype(np.int32)
        self._sources, self._cells, self._rules = {}, [], []
        return np.array(moves or no_moves, dtype=np.int32), cells, rules

    def packed_seqs(self) -> list[Sequence]:
        """The running sequences in row order; the table must be packed."""
        assert not self._holes
        return list(self._rows)  # type: ignore[arg-type]  # no holes: no None

    def num_computed_tokens(self, seq: Sequence) -> int:
        """Tokens whose KV is computed by steps launched so far."""
        has_drawn = self._has_drawn[seq.row]
        return int(self._len[seq.row]) - 1 if has_drawn else seq.num_computed_tokens

    def lengths_with(self, num_tokens: int, final_len: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Own KV entries now and at the predicted end, of each row and of one more sequence; and
        how many blocks the rows hold that they did not find by prefix.
        """
        self._pack()
        rows = slice(len(self._rows))
        lengths = self._len[rows]
        final = np.minimum(np.maximum(self._final_len[rows], lengths + 16), self._limit[rows])
        shared = self._shared[rows]
        num_own_blocks = int((self._capacity[rows] - shared).sum()) // self._blocks.block_size
        own = np.append(lengths - shared, num_tokens)
        return own, np.append(final - shared, final_len), num_own_blocks

    def seqs_at_limit(self) -> list[Sequence]:
        num_rows = len(self._rows)
        is_full = self._len[:num_rows] >= self._limit[:num_rows]
        full = [self._rows[row] for row in is_full.nonzero()[0].tolist()]
        return [seq for seq in full if seq is not None]

    def seqs_by_admission(self) -> list[Sequence]:
        seqs = [seq for seq in self._rows if seq is not None]
        return sorted(seqs, key=lambda seq: int(self._order[seq.row]))

    def check_invariants(self) -> None:
        assert self._rows.count(None) == len(self._holes)
        for row, seq in enumerate(self._rows):
            if seq is not None:
                assert seq.row == row
                assert self._capacity[row] == len(seq.block_table) * self._blocks.block_size
                assert self.num_computed_tokens(seq) <= self._capacity[row]
                assert self._len[row] <= self._limit[row]

    def _set_blocks(self, rows: int | np.ndarray, places: np.ndarray, block_ids: list[int]) -> None:
        cells = np.empty((len(block_ids), 2), dtype=np.int64)
        cells[:, 0] = rows * self._width + int(Column.BLOCK_TABLE) + places
        cells[:, 1] = block_ids
        self._cells.append(cells)

    def _pack(self) -> None:
        """Move rows from the end into holes. Only before rows join in a step: moves come first."""
        if not self._holes:
            return
        num_rows = self.num_seqs
        holes = sorted(hole for hole in self._holes if hole < num_rows)
        tail = [row for row in range(num_rows, len(self._rows)) if self._rows[row] is not None]
        for source, hole in zip(tail, holes, strict=True):
            seq = self._rows[source]
            assert seq is not None
            self._rows[hole], seq.row = seq, hole
            for column in self._columns:
                column[hole] = column[source]
            # A row may move twice between two steps; the device copies all rows at once.
            self._sources[hole] = self._sources.pop(source, source)
        del self._rows[num_rows:]
        self._holes = []
