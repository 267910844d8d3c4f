"""Vocabulary shards: any vocabulary size on any number of ranks."""

import pytest
import torch
from model_harness import on_ranks
from torch.nn.functional import embedding, linear

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.placement import Placement
from nanovllm.utils.parallel import ParallelContext


def placed(parallel):
    return Placement(parallel, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(("vocab_size", "tp_size"), [(7, 1), (8, 2), (7, 2), (5, 4), (2, 4)])
def test_lookup_and_logits_equal_the_whole_table(vocab_size, tp_size):
    """A vocabulary that the ranks do not divide was an assertion, or a short last shard."""
    table = torch.randn(vocab_size, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(vocab_size).flip(0)
    hidden = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))

    def work(parallel):
        embed = VocabParallelEmbedding(vocab_size, 3, placed(parallel))
        head = ParallelLMHead(vocab_size, 3, placed(parallel), weight=embed.weight)
        embed.load_weight("weight", table)
        assert head.holds(table)
        local = head(hidden)
        assert local.shape == (4, -(-vocab_size // tp_size))
        valid = local[:, : head.num_valid]
        return embed(ids), head.gather_logits(local), head.vocab_start, valid

    expected = linear(hidden, table)
    for rows, logits, vocab_start, valid in on_ranks(tp_size, work):
        assert torch.equal(rows, embedding(ids, table))
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(valid, expected[:, vocab_start : vocab_start + valid.shape[1]])


def test_shards_cover_the_vocabulary_once():
    spans = []
    for rank in range(4):
        head = ParallelLMHead(5, 3, placed(ParallelContext(rank, 4, None)))
        spans.append((head.vocab_start, head.num_valid))
    assert spans == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_wrong_vocabulary_names_both_shapes():
    embed = VocabParallelEmbedding(5, 3, placed(ParallelContext(1, 2, None)))
    with pytest.raises(ValueError, match=r"\(6, 3\) does not fit the model's \(5, 3\)"):
        embed.load_weight("weight", torch.zeros(6, 3))
