"""Token embedding and language-model head, split over ranks by vocabulary."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.layers.placement import Placement
from nanovllm.utils.loader import check_shape, copy_weight


class VocabParallelEmbedding(nn.Module):
    """Owns this rank's rows of a [vocab_size, hidden_size] table, as many on every rank: padded."""

    shards: tuple[str | None, ...] = (None,)

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        place: Placement,
        *,
        weight: nn.Parameter | None = None,  # share this one instead of making one
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._parallel = place.parallel
        shard_size = -(-vocab_size // self._parallel.tp_size)
        self.vocab_start = min(self._parallel.tp_rank * shard_size, vocab_size)
        # Rows that are real tokens; the last ranks may have fewer, even none.
        self.num_valid = min(shard_size, vocab_size - self.vocab_start)
        if weight is None:
            weight = place.parameter(shard_size, hidden_size)
            weight[self.num_valid :].zero_()
        self.weight = weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # [n] -> [n, hidden_size]
        if self._parallel.tp_size == 1:
            return F.embedding(input_ids, self.weight)
        local_ids = input_ids - self.vocab_start
        is_foreign = (local_ids < 0) | (local_ids >= self.num_valid)
        rows = F.embedding(local_ids.masked_fill(is_foreign, 0), self.weight)
        return self._parallel.all_reduce(rows.masked_fill(is_foreign.unsqueeze(-1), 0.0))

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None = None) -> None:
        """Copy this rank's rows of the full table in place."""
        copy_weight(self.weight[: self.num_valid], self._local_rows(tensor))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this rank's rows already equal those of the full table `tensor`."""
        mine = self.weight[: self.num_valid]
        return torch.equal(mine, self._local_rows(tensor).to(mine))

    def _local_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        expected = (self.vocab_size, self.weight.shape[1])
        check_shape(tensor, expected)
        return tensor.narrow(0, self.vocab_start, self.num_valid)


class ParallelLMHead(VocabParallelEmbedding):
    """Logits of this rank's part of the vocabulary. Tied, it is given the embedding's weight."""

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden_size] -> local logits [n, shard_size]; columns past `num_valid` are padding.

        Written into `out` where it is given: one buffer then serves every captured batch size.
        """
        return torch.matmul(hidden, self.weight.t(), out=out)

    def gather_logits(self, local_logits: torch.Tensor) -> torch.Tensor:
        """Collect all ranks' [n, shard_size] into [n, vocab_size], the same on every rank."""
        # Every rank but the last ones is full, so all padding is at the end.
        return self._parallel.all_gather(local_logits, dim=-1)[..., : self.vocab_size]
