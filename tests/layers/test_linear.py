"""Sharded linear layers: the ranks' parts together are the whole layer."""

import pytest
import torch
from torch.nn.functional import linear

from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.layers.placement import Placement
from nanovllm.utils.parallel import ParallelContext

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class NoGroup:
    """A process group that leaves each rank's part alone, so that the test can add them up."""

    def allreduce(self, tensors):
        return self

    def wait(self):
        pass


def placed(parallel, dtype=torch.float32):
    return Placement(parallel, torch.device("cpu"), dtype)


def ranks(tp_size):
    return [placed(ParallelContext(rank, tp_size, NoGroup())) for rank in range(tp_size)]


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def fill(layer, weights, biases):
    """Load full tensors by shard name."""
    for shard, weight in weights.items():
        layer.load_weight("weight", weight, shard)
    for shard, bias in biases.items():
        layer.load_weight("bias", bias, shard)
    return layer


def test_replicated_linear_is_linear():
    weight, bias = random(6, 8), random(6)
    layer = fill(
        ReplicatedLinear(8, 6, placed(ParallelContext.single()), bias=True),
        {None: weight},
        {None: bias},
    )
    assert torch.equal(layer(X), linear(X, weight, bias))


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_column_shards_concatenate(tp_size):
    weight, bias = random(6, 8), random(6)
    parts = [
        fill(
            MergedColumnParallelLinear(8, {"up": 6}, place, bias=True),
            {"up": weight},
            {"up": bias},
        )(X)
        for place in ranks(tp_size)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=-1), linear(X, weight, bias))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_row_shards_sum_and_count_the_bias_once(tp_size):
    """A 1-D bias was sharded along a dimension it lacks, or added on every rank."""
    weight, bias = random(6, 8), random(6)
    parts = [
        fill(
            RowParallelLinear(8, 6, place, bias=True),
            {None: weight},
            {None: bias},
        )(X.chunk(tp_size, dim=-1)[place.parallel.tp_rank])
        for place in ranks(tp_size)
    ]
    torch.testing.assert_close(sum(parts), linear(X, weight, bias))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_merged_shards_keep_gate_and_up_apart(tp_size):
    gate, up, gate_bias, up_bias = random(4, 8), random(6, 8), random(4), random(6)
    gates, ups = [], []
    for place in ranks(tp_size):
        layer = MergedColumnParallelLinear(8, {"gate": 4, "up": 6}, place, bias=True)
        # In any order: files are not sorted our way.
        fill(layer, {"up": up, "gate": gate}, {"up": up_bias, "gate": gate_bias})
        parts = layer(X).split([4 // tp_size, 6 // tp_size], dim=-1)
        gates.append(parts[0])
        ups.append(parts[1])
    torch.testing.assert_close(torch.cat(gates, dim=-1), linear(X, gate, gate_bias))
    torch.testing.assert_close(torch.cat(ups, dim=-1), linear(X, up, up_bias))


@pytest.mark.parametrize(
    ("tp_size", "num_kv_heads", "kv_head_of_rank"),
    [
        (1, 2, [[0, 1]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (4, 1, [[0]] * 4),
    ],
)
def test_qkv_heads_are_split_or_replicated(tp_size, num_kv_heads, kv_head_of_rank):
    head_dim, num_heads = 2, 4
    q = random(num_heads * head_dim, 8)
    k, v = random(num_kv_heads * head_dim, 8), random(num_kv_heads * head_dim, 8) + 1
    num_local = num_heads // tp_size
    for place in ranks(tp_size):
        layer = QKVParallelLinear(8, num_heads, num_kv_heads, head_dim, place)
        fill(layer, {"v": v, "q": q, "k": k}, {})
        kv_heads = kv_head_of_rank[place.parallel.tp_rank]
        assert (layer.num_heads, layer.num_kv_heads) == (num_local, len(kv_heads))
        first = place.parallel.tp_rank * num_local
        expected = [
            q.view(num_heads, head_dim, 8)[first : first + num_local],
            k.view(num_kv_heads, head_dim, 8)[kv_heads],
            v.view(num_kv_heads, head_dim, 8)[kv_heads],
        ]
        assert torch.equal(layer.weight.view(-1, head_dim, 8), torch.cat(expected))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size", "message"),
    [
        (6, 2, 4, "num_attention_heads = 6 .*tensor_parallel_size = 4"),
        (12, 3, 4, "num_key_value_heads = 3 .*tensor_parallel_size = 4"),
        (12, 3, 2, "num_key_value_heads = 3 .*tensor_parallel_size = 2"),
    ],
)
def test_heads_that_do_not_split_are_refused(num_heads, num_kv_heads, tp_size, message):
    with pytest.raises(ValueError, match=message):
        QKVParallelLinear(8, num_heads, num_kv_heads, 2, ranks(tp_size)[0])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_wrong_shape_names_both_full_shapes(tp_size):
    place = ranks(tp_size)[0]
    layers = [
        (MergedColumnParallelLinear(8, {"up": 6}, place), "up"),
        (RowParallelLinear(8, 6, place), None),
    ]
    for layer, shard in layers:
        with pytest.raises(ValueError, match=r"\(6, 9\) does not fit the model's \(6, 8\)"):
            layer.load_weight("weight", random(6, 9), shard)
    qkv = QKVParallelLinear(8, 4, 2, 2, place)
    with pytest.raises(ValueError, match=r"\(8, 8\) does not fit the model's \(4, 8\)"):
        qkv.load_weight("weight", random(8, 8), "k")
    with pytest.raises(ValueError, match="shard must be one of q, k, v, got 'gate'"):
        qkv.load_weight("weight", random(8, 8), "gate")


def test_loading_converts_dtype_and_keeps_the_address():
    layer = ReplicatedLinear(8, 6, placed(ParallelContext.single(), torch.bfloat16))
    address = layer.weight.data_ptr()
    weight = random(6, 8)
    layer.load_weight("weight", weight)
    assert layer.weight.data_ptr() == address
    assert torch.equal(layer.weight, weight.bfloat16())
    assert not layer.weight.requires_grad
