"""Log-probabilities of drawn or given tokens, their ranks, and the likeliest tokens beside them."""

from __future__ import annotations

import torch

from nanovllm.engine.step_handle import TokenLogprobs


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
