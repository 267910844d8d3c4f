"""Prefill attention over the paged cache: the Triton kernel against torch."""

import os

import pytest
import torch

from nanovllm.attention.sdpa import causal_attention, gather_pages
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.paged_prefill import paged_prefill_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or (DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton, on a CPU its interpreter",
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SMALL = (16, 16, 4, 2)


def check(
    chunks,
    *,
    heads=(2, 1),
    head_dim=64,
    block_size=16,
    dtype=torch.float32,
    blocks=SMALL,
    is_fp8=False,
):
    """Compare on a cache that holds NaN wherever no token lies. chunks: (num_queries, seq_len)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = [-(-seq_len // block_size) for _, seq_len in chunks]
    ids = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    shape = (len(ids), block_size, heads[1], head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    rows = torch.full((len(chunks), 2 + max(num_blocks)), -7, dtype=torch.int32)
    for row, (_, seq_len) in enumerate(chunks):
        rows[row, 1] = seq_len
        for index in range(num_blocks[row]):
            block, used = ids.pop(), min(block_size, seq_len - index * block_size)
            rows[row, 2 + index] = block
            for cache in (k_cache, v_cache):
                cache[block, :used] = random(used, heads[1], head_dim)
    kv_scale = None
    if is_fp8:  # another scale for each head, and values up to about 400
        kv_scale = torch.randint(-7, -5, (2, heads[1]), generator=generator).float().exp2()
        k_cache, v_cache = (
            (cache / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            for cache, scale in zip((k_cache, v_cache), kv_scale, strict=True)
        )
        kv_scale = kv_scale.to(DEVICE)
    edges = torch.tensor([0] + [count for count, _ in chunks]).cumsum(0).to(torch.int32)
    q = random(int(edges[-1]), heads[0] + 2, head_dim).to(DEVICE)[:, : heads[0]]
    rows, caches, scale = rows.to(DEVICE), (k_cache.to(DEVICE), v_cache.to(DEVICE)), head_dim**-0.5
    max_seqlen_q = max(count for count, _ in chunks)
    actual = paged_prefill_triton(
        q, *caches, rows[:, 2:], rows[:, 1], edges.to(DEVICE), max_seqlen_q, scale, kv_scale,
        blocks=blocks,
    )  # fmt: skip
    expected = torch.empty_like(q)
    for seq, (count, seq_len) in enumerate(chunks):
        if count:
            chunk = slice(int(edges[seq]), int(edges[seq + 1]))
            pages = (rows[seq, 2:], seq_len, kv_scale, torch.float32)
            expected[chunk] = causal_attention(
                q[chunk].float(), *gather_pages(*caches, *pages), scale
            )
    # In fp8 the kernel's products are float16's also for float32 queries.
    tolerance = TOLERANCE[torch.float16 if is_fp8 and dtype == torch.float32 else dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_chunks_with_nothing_cached_match_the_reference():
    check([(1, 1), (15, 15), (16, 16), (17, 17), (40, 40)])


def test_chunks_after_a_cached_prefix_match_the_reference():
    check([(1, 50), (15, 16), (16, 33), (33, 64), (7, 100)])


def test_a_sequence_without_queries_is_skipped():
    check([(5, 9), (0, 20), (18, 30)])


def test_a_long_prefix_matches_the_reference():
    check([(20, 700), (3, 5)], block_size=64)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 2), (16, 1)], ids=str)
def test_every_group_size_matches_the_reference(heads):
    check([(18, 40), (3, 3)], heads=heads)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [[(70, 90), (1, 65)], [(40, 150), (64, 64)]], ids=str)
def test_head_dims_and_dtypes_match_the_reference_with_default_blocks(head_dim, dtype, chunks):
    check(chunks, head_dim=head_dim, dtype=dtype, block_size=64, blocks=None)


@pytest.mark.parametrize("block_size", [16, 48, 256])
@pytest.mark.parametrize("blocks", [(16, 64, 4, 2), (32, 16, 4, 2)], ids=str)
def test_pages_smaller_and_larger_than_a_tile_match_the_reference(block_size, blocks):
    check([(40, 300), (9, 9)], block_size=block_size, blocks=blocks)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (16, 1)], ids=str)
def test_fp8_in_every_group_size_matches_the_reference(heads):
    check([(18, 40), (3, 3), (1, 50)], heads=heads, is_fp8=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [[(70, 90), (1, 65)], [(40, 150), (64, 64)]], ids=str)
def test_fp8_in_head_dims_and_dtypes_matches_the_reference(head_dim, dtype, chunks):
    """Long and short chunks, which are cut in other ways."""
    options = {"heads": (4, 2), "head_dim": head_dim, "dtype": dtype, "block_size": 64}
    check(chunks, blocks=None, is_fp8=True, **options)
