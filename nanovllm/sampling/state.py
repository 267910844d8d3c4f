"""What sampling must remember of each row beyond its header, and who redraws in a step.

Rules of rows stay on the host until they change; token counts for penalties and the last drawn
tokens for bad words live on the device, since with overlap only the device knows them in time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from nanovllm.engine.model_inputs import Uploader
from nanovllm.engine.step import Rule, SamplingFeature, SchedulerOutput
from nanovllm.sampling.penalties import IN_PROMPT

REDRAWN = (
    SamplingFeature.TOP_K_P
    | SamplingFeature.MIN_P
    | SamplingFeature.PENALTIES
    | SamplingFeature.TOKEN_RULES
    | SamplingFeature.PYTHON_PROCESSORS
)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Sampled rows that are looked at together, few enough that float32 copies stay small."""

    features: int  # the union over its rows
    places: np.ndarray  # [n] int32, among the step's sampled rows
    index: slice | torch.Tensor  # the same on the device, [n] int64, or a range
    rows: torch.Tensor  # [n] int64, device rows
    # Rules as coordinates, int64; the first column is the row's place in this slice.
    allowed_rows: torch.Tensor  # [num_allowed_rows]
    allowed: torch.Tensor  # [2, num_entries]: row, token id
    barred: torch.Tensor  # [2, num_entries], while the row is shorter than its MIN_LEN
    biases: torch.Tensor  # [3, num_entries]: row, token id, float32 bits
    bad_words: torch.Tensor  # [2 + history, num_runs]: row, last token, the tokens before (-1: any)


@dataclass(frozen=True, slots=True)
class RedrawPlan:
    """Which rows of a step draw again, and whose logprobs are wanted."""

    slices: list[RowSlice]
    logprob_slices: list[RowSlice]


@dataclass(slots=True)
class _RowRules:
    allowed: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    barred: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    biases: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int32))
    bad_words: list[np.ndarray] = field(default_factory=list)
    # Only until the row is set up on the device:
    prompt: np.ndarray | None = None
    output: np.ndarray | None = None


class SamplingState:
    """Owns the rules of rows, their token counts and their last tokens, on every rank alike."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, *, max_slice_rows: int
    ) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._vocab_size = vocab_size
        self._device = device
        self._max_slice_rows = max_slice_rows
        self._uploader = Uploader(device)  # at most one upload a step: its buffers take turns
        # A row that left keeps its entry until another takes its place; nobody looks at it, since
        # the features of the new row say what it has.
        self._rules: dict[int, _RowRules] = {}
        # Made when the first row asks. The warm-up holds their memory back.
        self._counts: torch.Tensor | None = None  # [max_num_seqs, vocab_size] int32, see penalties
        self._history = torch.empty((max_num_seqs, 0), dtype=torch.int32, device=device)
        self._plan: RedrawPlan | None = None  # of the last decode step, while nothing changes
        self._plan_key: tuple[int, int] | None = None

    @property
    def counts(self) -> torch.Tensor:
        assert self._counts is not None, "a row with penalties joined before it is sampled"
        return self._counts

    @property
    def history(self) -> torch.Tensor:
        """[max_num_seqs, longest bad word less 1] int32, last drawn tokens; -1: not yet drawn."""
        return self._history

    def begin_step(
        self,
        output: SchedulerOutput,
        sampled_rows: np.ndarray,  # [num_sampled] int32
        features: np.ndarray,  # [num_sampled] int32, SamplingFeature bits of each
        *,
        is_processed: bool,
    ) -> RedrawPlan | None:
        """Follow a record's moves and rules; return what has to be drawn again, None for nothing.

        is_processed: logprobs are those of the processed logits, so their rows are drawn again too
        """
        moves, joined = output.moves, self._take_rules(output)
        self._widen_history(joined)
        has_moves = len(moves) and (self._counts is not None or self._history.shape[1])
        key = (output.num_decode_rows, output.features)
        if output.prefill is not None or len(moves) or len(joined):
            self._plan_key = None
        wanted = output.features & (REDRAWN | SamplingFeature.LOGPROBS)
        is_planned = bool(wanted) and self._plan_key != key
        arrays = [moves if has_moves else moves[:0], *self._join_arrays(joined)]
        num_fixed = len(arrays)
        groups: list[_SliceArrays] = []
        num_redrawn = 0
        if is_planned:
            redrawn = REDRAWN | (SamplingFeature.LOGPROBS if is_processed else 0)
            groups = self._groups(sampled_rows, features, redrawn)
            num_redrawn = len(groups)
            if not is_processed:
                groups += self._groups(sampled_rows, features, SamplingFeature.LOGPROBS)
            arrays += [array for group in groups for array in group.arrays]
        tensors: list[torch.Tensor] = []
        if any(array.size for array in arrays):
            tensors = self._uploader.upload(arrays)
            if has_moves:
                self._move(tensors[0].long())
            self._join(joined, tensors[1:num_fixed])
        if not wanted:
            return None
        if is_planned:
            slices = [
                group.on_device(tensors[num_fixed + 7 * i : num_fixed + 7 * (i + 1)])
                for i, group in enumerate(groups)
            ]
            logprob_slices = slices[num_redrawn:]
            if is_processed:
                logprob_slices = [s for s in slices if s.features & SamplingFeature.LOGPROBS]
            self._plan = RedrawPlan(slices[:num_redrawn], logprob_slices)
            self._plan_key = key if output.prefill is None else None
        return self._plan

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor, features: int) -> None:
        """Remember drawn tokens on the device. rows: [n] int64, token_ids: [n] int32"""
        # Rows of the slice that have no such rule are counted too: a join clears what it needs.
        if features & SamplingFeature.PENALTIES:
            places = rows * self._vocab_size + token_ids
            self.counts.view(-1).index_add_(0, places, torch.ones_like(token_ids))
        if features & SamplingFeature.TOKEN_RULES and self._history.shape[1]:
            shifted = torch.cat([self._history[rows, 1:], token_ids.unsqueeze(1)], dim=1)
            self._history[rows] = shifted

    def forget(self) -> None:
        """Free all device memory. No row may be running."""
        self._rules.clear()
        self._counts, self._plan, self._plan_key = None, None, None
        self._history = self._history[:, :0].clone()

    # ---- rows that move and join

    def _take_rules(self, output: SchedulerOutput) -> list[int]:
        """Take moves and rules into the host's dict; return the rows that joined with rules."""
        moved = [(to, self._rules.pop(at, None)) for at, to in output.moves.tolist()]
        for to, rules in moved:
            self._rules.pop(to, None)
            if rules is not None:
                self._rules[to] = rules
        joined: dict[int, _RowRules] = {}
        data, start = output.rules, 0
        while start < len(data):
            row, rule, count = data[start : start + 3].tolist()
            values = data[start + 3 : start + 3 + count].copy()
            start += 3 + count
            rules = joined.setdefault(row, _RowRules())
            if rule == Rule.PROMPT:
                rules.prompt = values
            elif rule == Rule.OUTPUT:
                rules.output = values
            elif rule == Rule.BIAS:
                rules.biases = values.reshape(-1, 2)
            elif rule == Rule.ALLOWED:
                rules.allowed = values
            elif rule == Rule.BARRED_UNTIL_MIN_LEN:
                # A tokenizer may know ids that the model has no logits for.
                rules.barred = values[values < self._vocab_size]
            elif rule == Rule.BAD_WORD and (values < self._vocab_size).all():
                rules.bad_words.append(values)
        self._rules.update(joined)
        return list(joined)

    def _widen_history(self, joined: list[int]) -> None:
        longest = max((len(w) - 1 for row in joined for w in self._rules[row].bad_words), default=0)
        missing = longest - self._history.shape[1]
        if missing > 0:
            # Rows that are here already have shorter bad words, which do not look so far back.
            self._history = torch.nn.functional.pad(self._history, (missing, 0), value=-1)

    def _join_arrays(self, joined: list[int]) -> list[np.ndarray]:
        """Rows to clear, (row, token, amount) to count, rows and their last tokens."""
        width = self._history.shape[1]
        cleared: list[int] = []
        counted = [np.zeros((3, 0), dtype=np.int32)]
        remembered: list[int] = []
        histories = [np.zeros((0, width), dtype=np.int32)]
        for row in joined:
            rules = self._rules[row]
            output = np.zeros(0, dtype=np.int32) if rules.output is None else rules.output
            if rules.prompt is not None:
                cleared.append(row)
                for ids, amount in ((np.unique(rules.prompt), IN_PROMPT), (output, 1)):
                    entries = np.empty((3, len(ids)), dtype=np.int32)
                    entries[0], entries[1], entries[2] = row, ids, amount
                    counted.append(entries)
            if rules.bad_words and width:
                remembered.append(row)
                history = np.full((1, width), -1, dtype=np.int32)
                last = output[-width:]
                history[0, width - len(last) :] = last
                histories.append(history)
            rules.prompt = rules.output = None
        return [
            np.array(cleared, dtype=np.int32),
            np.concatenate(counted, axis=1),
            np.array(remembered, dtype=np.int32),
            np.concatenate(histories),
        ]

    def _move(self, moves: torch.Tensor) -> None:
        source, target = moves[:, 0], moves[:, 1]
        if self._counts is not None:
            self._counts[target] = self._counts[source]
        self._history[target] = self._history[source]

    def _join(self, joined: list[int], tensors: list[torch.Tensor]) -> None:
        cleared, counted, remembered, histories = tensors
        if len(cleared):
            if self._counts is None:
                self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._counts.index_fill_(0, cleared.long(), 0)
            places = counted[0].long() * self._vocab_size + counted[1]
            self._counts.view(-1).index_add_(0, places, counted[2])
        if len(remembered):
            self._history[remembered.long()] = histories

    # ---- plans

    def _groups(
        self, sampled_rows: np.ndarray, features: np.ndarray, wanted: int
    ) -> list[_SliceArrays]:
        places = np.flatnonzero(features & wanted).astype(np.int32)
        groups = []
        for start in range(0, len(places), self._max_slice_rows):
            part = places[start : start + self._max_slice_rows]
            bits = int(np.bitwise_or.reduce(features[part]))
            groups.append(self._slice_arrays(part, sampled_rows[part], features[part], bits))
        return groups

    def _slice_arrays(
        self, places: np.ndarray, rows: np.ndarray, features: np.ndarray, bits: int
    ) -> _SliceArrays:
        width = self._history.shape[1]
        allowed_rows: list[int] = []
        allowed, barred = [_entries(0, np.zeros((0, 1)))], [_entries(0, np.zeros((0, 1)))]
        biases = [_entries(0, np.zeros((0, 2)))]
        bad_words = [_entries(0, np.zeros((0, 1 + width)))]
        for place in np.flatnonzero(features & SamplingFeature.TOKEN_RULES).tolist():
            rules = self._rules[int(rows[place])]
            if len(rules.allowed):
                allowed_rows.append(place)
                allowed.append(_entries(place, rules.allowed[:, None]))
            barred.append(_entries(place, rules.barred[:, None]))
            biases.append(_entries(place, rules.biases))
            for word in rules.bad_words:
                run = np.full((1, 1 + width), -1, dtype=np.int32)
                run[0, 0] = word[-1]
                run[0, 2 + width - len(word) :] = word[:-1]
                bad_words.append(_entries(place, run))
        parts = [np.concatenate(e, axis=1) for e in (allowed, barred, biases, bad_words)]
        arrays = [places, rows.astype(np.int32), np.array(allowed_rows, dtype=np.int32), *parts]
        return _SliceArrays(bits, places, arrays)


def _entries(place: int, columns: np.ndarray) -> np.ndarray:
    """[num_entries, m] values of one row as [1 + m, num_entries], its place in front."""
    entries = np.empty((1 + columns.shape[1], len(columns)), dtype=np.int32)
    entries[0] = place
    entries[1:] = columns.T
    return entries


@dataclass(frozen=True, slots=True)
class _SliceArrays:
    """A RowSlice on the host."""

    features: int
    places: np.ndarray
    arrays: list[np.ndarray]  # places, rows, and the rules

    def on_device(self, tensors: list[torch.Tensor]) -> RowSlice:
        places, rows, *rules = (tensor.long() for tensor in tensors)
        first, last = int(self.places[0]), int(self.places[-1])
        is_range = last - first + 1 == len(self.places)
        index = slice(first, last + 1) if is_range else places
        return RowSlice(self.features, self.places, index, rows, *rules)
