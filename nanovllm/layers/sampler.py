"""From logits to drawn tokens: greedy or Gumbel-max, on whole or sharded vocabularies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from nanovllm.kernels.sample import sample
from nanovllm.utils.parallel import ParallelContext


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each sampled row draws. Columns may be strided views of the device rows."""

    temperatures: torch.Tensor  # [num_sampled] float32
    key_lo: torch.Tensor  # [num_sampled] int32
    key_hi: torch.Tensor  # [num_sampled] int32
    positions: torch.Tensor  # [num_sampled] int32, index in its sequence of the token drawn


class VocabularyShard(Protocol):
    """Which columns of the vocabulary a rank's logits are."""

    vocab_start: int
    num_valid: int


def draw(
    logits: torch.Tensor,
    inputs: SamplingInputs,
    shard: VocabularyShard,
    parallel: ParallelContext,
    out: torch.Tensor,
) -> None:
    """Write each row's token into `out`, [num_sampled] int32, the same on every rank.

    logits: [num_sampled, shard_size], this rank's columns. Ranks exchange only their best
    (score, id) of each row.
    """
    values, token_ids = sample(
        logits,
        inputs.temperatures,
        inputs.key_lo,
        inputs.key_hi,
        inputs.positions,
        shard.vocab_start,
        shard.num_valid,
        out=out,
    )
    if parallel.tp_size > 1:
        local = torch.stack([values.view(torch.int32), token_ids])
        shards = parallel.all_gather(local.unsqueeze(0), dim=0)  # [tp_size, 2, num_sampled]
        # argmax takes the first of equal scores: the lowest rank, so the lowest id.
        best = shards[:, 0].view(torch.float32).argmax(dim=0, keepdim=True)
        out.copy_(shards[:, 1].gather(0, best).squeeze(0))
