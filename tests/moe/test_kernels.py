"""The kernels of sparse layers against plain torch, on batches that fall unevenly on experts."""

import pytest
import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.moe.grouped_gemm import (
    TileConfig,
    config_for,
    down_reference,
    down_triton,
    gate_up_reference,
    gate_up_triton,
)
from nanovllm.moe.plan import make_plan_reference, make_plan_triton, max_num_tiles
from nanovllm.moe.routing import route_reference, route_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a CPU the finer one: a tolerance lets less through.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TILE = TileConfig(block_n=64, block_k=32, num_warps=4, num_stages=2, group_m=3)
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def spread(num_tokens, top_k, num_experts, seed=0):
    """Different experts for each token, as a router chooses them."""
    return randn(num_tokens, num_experts, seed=seed).argsort(dim=1)[:, :top_k].int().contiguous()


BATCHES = {
    "one token": spread(1, 8, 16),
    "odd, most experts of k = 1 idle": spread(7, 1, 40),
    "odd": spread(37, 2, 6),
    "k = 8": spread(33, 8, 10),
    "all on the last expert": torch.full((33, 1), 4, dtype=torch.int32, device=DEVICE),
    "more than the kernel counts at once": spread(301, 8, 12),
}
NUM_EXPERTS = {"odd, most experts of k = 1 idle": 40, "one token": 16, "odd": 6, "k = 8": 10}


@needs_triton
@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_plans_equal_the_references(name, block_m):
    expert_ids, num_experts = BATCHES[name], NUM_EXPERTS.get(name, 12)
    plan = make_plan_triton(expert_ids, num_experts, block_m)
    expected = make_plan_reference(expert_ids, num_experts, block_m)
    assert torch.equal(plan.order, expected.order)
    assert torch.equal(plan.tiles, expected.tiles)


@pytest.mark.parametrize("name", BATCHES)
def test_tiles_hold_every_pair_once_with_its_expert(name):
    expert_ids, num_experts = BATCHES[name], NUM_EXPERTS.get(name, 12)
    plan = make_plan_reference(expert_ids, num_experts, 16)
    found = {}
    for expert, first, end in plan.tiles.T.tolist():
        assert end - first <= 16
        found |= dict.fromkeys(plan.order[first:end].tolist(), expert)
    assert found == dict(enumerate(expert_ids.flatten().tolist()))


def test_there_are_tiles_enough_for_the_worst_batch():
    assert max_num_tiles(8, 128, 16) == 8
    # 3 experts with one pair each, and the rest on the fourth
    counts = [1, 1, 1, 30]
    assert max_num_tiles(33, 4, 16) >= sum(-(-count // 16) for count in counts) == 5


@needs_triton
@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 128, 8), (7, 6, 1), (9, 16, 16), (33, 60, 3)]
)
def test_routes_equal_the_references(num_tokens, num_experts, top_k, is_normalized):
    logits = 2 * randn(num_tokens, num_experts).to(DTYPE)
    logits[0, :4] = logits[0].max()  # the lower id wins
    options = {"is_normalized": is_normalized, "dtype": DTYPE}
    weights, ids = route_triton(logits, top_k, **options)
    expected_weights, expected_ids = route_reference(logits, top_k, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    shares = randn(4, num_tokens, num_experts)
    weights, ids = route_triton(shares, top_k, **options)
    expected_weights, expected_ids = route_reference(shares, top_k, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@needs_triton
@pytest.mark.parametrize("route", [route_reference, route_triton])
def test_whatever_a_padding_row_holds_its_experts_exist(route):
    logits = randn(5, 6)
    logits[4, 1] = float("nan")
    logits[1] = float("nan")
    logits[2, 1:] = -float("inf")
    logits[3, 2] = float("inf")
    expected, _ = route(logits[:1].clone(), 3, is_normalized=True, dtype=DTYPE)
    weights, ids = route(logits, 3, is_normalized=True, dtype=DTYPE)
    assert torch.equal(weights[:1], expected)
    assert ids.tolist()[1:4] == [[0, 1, 2], [0, 1, 2], [2, *ids.tolist()[3][1:]]]
    others = [expert for expert in logits[4].argsort(descending=True).tolist() if expert != 1]
    assert ids[4].tolist() == others[:3] and bool(weights[4].isfinite().all())
    assert all(len(set(row)) == 3 and max(row) < 6 for row in ids.tolist())


@needs_triton
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(("hidden_size", "size"), [(64, 32), (96, 24)])
@pytest.mark.parametrize("name", list(BATCHES)[:-1])
def test_products_equal_the_references(name, hidden_size, size, block_m):
    """The second shape has tails in every dimension."""
    expert_ids, num_experts = BATCHES[name], NUM_EXPERTS.get(name, 12)
    num_tokens, top_k = expert_ids.shape
    x = randn(num_tokens, 2 * hidden_size).to(DTYPE)[:, :hidden_size]  # rows may be strided
    gate_up = (randn(num_experts, 2 * size, hidden_size) / hidden_size**0.5).to(DTYPE)
    down = (randn(num_experts, hidden_size, size, seed=1) / size**0.5).to(DTYPE)
    pair_weights = torch.rand(num_tokens, top_k, device=DEVICE)
    plan = make_plan_reference(expert_ids, num_experts, block_m)
    activated = gate_up_triton(x, gate_up, plan, TILE)
    close(activated, gate_up_reference(x, gate_up, plan))
    shares = down_triton(activated, down, plan, pair_weights, TILE)
    assert shares.shape == (top_k, num_tokens, hidden_size)
    close(shares, down_reference(activated, down, plan, pair_weights))
    # And both against the definition, for one token.
    token, ids = num_tokens - 1, expert_ids[-1].tolist()
    expected = torch.zeros(hidden_size, device=DEVICE)
    for place, expert in enumerate(ids):
        gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
        product = down[expert].float() @ (F.silu(gate) * up)
        expected += pair_weights[token, place] * product
    close(shares.float().sum(0)[token], expected)


@needs_triton
def test_a_row_does_not_depend_on_the_rows_beside_it():
    """Padding rows of a captured step share tiles with live ones."""
    expert_ids = spread(20, 2, 6)
    x, pair_weights = randn(20, 64).to(DTYPE), torch.rand(20, 2, device=DEVICE)
    gate_up, down = randn(6, 64, 64).to(DTYPE) / 8, randn(6, 64, 32).to(DTYPE) / 6
    results = []
    for padding in (0.0, float("nan")):
        x[11:] = padding
        plan = make_plan_triton(expert_ids, 6, 16)
        activated = gate_up_triton(x, gate_up, plan, TILE)
        results.append(down_triton(activated, down, plan, pair_weights, TILE)[:, :11])
    assert torch.equal(*results)
    assert results[0].isfinite().all()


def test_the_cut_follows_from_shapes():
    rows = [config_for(n * 8, 128, torch.bfloat16).block_m for n in (1, 128, 256, 512, 8192)]
    assert rows == sorted(rows)
    assert config_for(8, 128, torch.float32).block_m == 32


def close(actual, expected):
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2e-2, atol=2e-2)
