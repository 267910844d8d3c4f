"""Log-probability columns of steps as the dicts that users read."""

from __future__ import annotations

from typing import Any

from nanovllm.engine.step import LogprobColumns
from nanovllm.outputs import Logprob
from nanovllm.sampling_params import SamplingParams


class SequenceLogprobs:
    """Owns the logprobs of one generation, and of its prompt if asked for."""

    def __init__(
        self, tokenizer: Any | None, params: SamplingParams, prompt_logprobs_from: int = 1
    ) -> None:
        self._tokenizer = tokenizer if params.detokenize else None
        self._num_wanted = params.logprobs
        self._num_prompt_wanted = params.prompt_logprobs
        self.cumulative = 0.0
        self.positions: list[dict[int, Logprob]] = []
        # The first prompt token has nothing before it; of others nobody may have asked.
        self.prompt_positions: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None] * prompt_logprobs_from
        )

    def push(self, columns: LogprobColumns, place: int) -> None:
        """Take in the token drawn at `place` of a step's columns."""
        assert self._num_wanted is not None
        self.positions.append(self._as_dict(columns, place, self._num_wanted))
        self.cumulative += float(columns.logprobs[place, 0])

    def keep(self, num_tokens: int) -> None:
        """Forget what was pushed after the first `num_tokens` tokens."""
        del self.positions[num_tokens:]
        self.cumulative = sum(next(iter(entry.values())).logprob for entry in self.positions)

    def push_prompt(
        self, columns: LogprobColumns, start: int, end: int, first_position: int
    ) -> None:
        """Take in prompt positions from `first_position` on; what a preempted run gave stays."""
        assert self._num_prompt_wanted is not None and self.prompt_positions is not None
        for place in range(start, end):
            if len(self.prompt_positions) == first_position + place - start:
                self.prompt_positions.append(self._as_dict(columns, place, self._num_prompt_wanted))

    def _as_dict(self, columns: LogprobColumns, place: int, num_wanted: int) -> dict[int, Logprob]:
        """The token itself first, then the likeliest; -1 wants all that there are."""
        ids = columns.token_ids[place].tolist()
        values = columns.logprobs[place].tolist()
        result = {ids[0]: Logprob(values[0], int(columns.ranks[place]), self._decode(ids[0]))}
        num_top = len(ids) - 1 if num_wanted < 0 else num_wanted
        for rank, (token_id, value) in enumerate(
            zip(ids[1 : num_top + 1], values[1:], strict=False), 1
        ):
            if token_id not in result:
                result[token_id] = Logprob(value, rank, self._decode(token_id))
        return result

    def _decode(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return str(self._tokenizer.decode([token_id]))
