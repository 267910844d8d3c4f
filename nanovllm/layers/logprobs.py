"""Log-probabilities of drawn or given tokens, their ranks, and the likeliest tokens beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of some positions: the token there first, then the k likeliest."""

    token_ids: torch.Tensor  # [num_positions, 1 + k] int32
    logprobs: torch.Tensor  # [num_positions, 1 + k] float32
    ranks: torch.Tensor  # [num_positions] int32, 1 is likeliest

    def to_host(self) -> TokenLogprobs:
        """Start the copy to pinned memory; it is done when the device has come that far."""
        return TokenLogprobs(*(_to_host(x) for x in (self.token_ids, self.logprobs, self.ranks)))


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> TokenLogprobs:
    """Look at the log-softmax of `logits` in float32; ties with the token do not worsen its rank.

    logits: [n, vocab_size], any float dtype; token_ids: [n]; num_top: how many likeliest, at most
    the whole vocabulary
    """
    values = logits.float()
    # Not log_softmax: only a few of its columns are wanted.
    total = values.logsumexp(dim=1, keepdim=True)
    chosen = token_ids.long().unsqueeze(1)
    chosen_values = values.gather(1, chosen)
    ranks = (values > chosen_values).sum(dim=1, dtype=torch.int32) + 1
    top_values, top_ids = values.topk(min(num_top, values.shape[1]), dim=1)
    return TokenLogprobs(
        torch.cat([chosen, top_ids], dim=1).int(),
        torch.cat([chosen_values, top_values], dim=1) - total,
        ranks,
    )


def _to_host(x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
