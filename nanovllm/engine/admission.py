"""How long sequences will get, and whether one more fits beside those that run.

Admitting by the predicted peak of KV use means that nothing has to be preempted later; preemption
stays for wrong guesses.
"""

from __future__ import annotations

import numpy as np

from nanovllm.engine.sequence import Sequence

_FIRST_GUESS = 1024  # output tokens, until enough sequences have finished
_NUM_REMEMBERED = 512


class LengthPredictor:
    """Owns what is known of output lengths: the running 90th percentile of finished ones."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._guess = _FIRST_GUESS

    def observe(self, num_output_tokens: int) -> None:
        self._lengths.append(num_output_tokens)
        # A percentile of hundreds of values barely moves with one more: refresh every 16th.
        if len(self._lengths) % 16 == 0:
            self._lengths = self._lengths[-_NUM_REMEMBERED:]
            self._guess = int(np.percentile(self._lengths, 90))

    def predicted_num_tokens(self, seq: Sequence) -> int:
        """Predicted final length of `seq`, prompt included; exact where its end is known."""
        if seq.params.ignore_eos and not seq.params.stop and not seq.params.stop_token_ids:
            return seq.max_num_tokens
        # Past its guess a sequence is taken to go on for a while, not to end at once.
        at_least = seq.num_expected_tokens + 16
        return min(seq.max_num_tokens, max(seq.num_prompt_tokens + self._guess, at_least))


def predicted_peak_tokens(lengths: np.ndarray, final_lengths: np.ndarray, granule: int) -> int:
    """Most KV entries in use at any later step if nothing else is admitted.

    lengths, final_lengths: [num_seqs] now and at the end; granule: tokens of a block, of which
    every sequence wastes half a one on average.
    """
    if len(lengths) == 0:
        return 0
    remaining = final_lengths - lengths
    order = np.argsort(-remaining, kind="stable")
    # When the i-th longest-lived sequence is at its end, i + 1 are alive and all grew alike.
    alive = np.arange(1, len(order) + 1)
    usage = np.cumsum(lengths[order]) + alive * (remaining[order] + granule // 2)
    return int(usage.max())
