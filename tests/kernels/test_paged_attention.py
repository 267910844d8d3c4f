"""Decode attention: the Triton kernel and its work list against torch."""

import os

import pytest
import torch

from nanovllm.attention.sdpa import decode_attention
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.decode_plan import DecodePlan, DecodeTuning, default_tuning
from nanovllm.kernels.paged_attention import paged_attention_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    not HAS_TRITON or (DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton, on a CPU its interpreter",
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Small parts, so that short rows are cut too: the interpreter is slow.
FINE = DecodeTuning(tile=16, programs_per_sm=8, overhead_tokens=4)


class Case:
    """A filled cache of one layer, with NaN wherever no token of a row lies."""

    def __init__(
        self,
        lens,
        *,
        heads=(2, 1),
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
        seed=0,
        is_fp8=False,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.head_dim, self.dtype = heads, head_dim, dtype
        num_blocks = [-(-seq_len // block_size) for seq_len in lens]
        ids = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
        shape = (len(ids), block_size, heads[1], head_dim)
        caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]
        # As the engine has them: a header column before the table, and garbage past a row's end.
        rows = torch.full((len(lens) + 1, 2 + max(1, *num_blocks)), -7, dtype=torch.int32)
        for row, (seq_len, count) in enumerate(zip(lens, num_blocks, strict=True)):
            rows[row, 1] = seq_len
            for index in range(count):
                block, used = ids.pop(), min(block_size, seq_len - index * block_size)
                rows[row, 2 + index] = block
                for cache in caches:
                    cache[block, :used] = torch.randn(
                        used, heads[1], head_dim, generator=generator
                    ).to(dtype)
        rows = rows.to(DEVICE)
        self.kv_scale = None
        if is_fp8:  # another scale for each head, and values up to about 400
            exponents = torch.randint(-7, -5, (2, heads[1]), generator=generator)
            self.kv_scale = exponents.float().exp2()
            caches = [
                (cache / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
                for cache, scale in zip(caches, self.kv_scale, strict=True)
            ]
            self.kv_scale = self.kv_scale.to(DEVICE)
        self.k_cache, self.v_cache = (cache.to(DEVICE) for cache in caches)
        self.seq_lens, self.block_tables = rows[: len(lens), 1], rows[: len(lens), 2:]
        qkv = torch.randn(len(lens), heads[0] + 2, head_dim, generator=generator)
        self.q = qkv.to(dtype).to(DEVICE)[:, : heads[0]]  # strided rows

    def plan(self, max_num_seqs=None, tuning=FINE):
        return DecodePlan(
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            max_num_seqs=max_num_seqs or len(self.seq_lens),
            dtype=self.k_cache.dtype,
            device=DEVICE,
            tuning=tuning,
        )

    def arguments(self, q, *work):
        tensors = (q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens)
        return *tensors, self.head_dim**-0.5, *work, self.kv_scale

    def check(self, plan):
        expected = decode_attention(*self.arguments(self.q.float())).to(self.dtype)
        work = plan.cut(self.seq_lens)
        # Partial results of earlier calls must not leak in. Also an ordinary kernel after the cut.
        plan.partial_out.fill_(float("nan"))
        plan.partial_lse.fill_(float("nan"))
        actual = paged_attention_triton(*self.arguments(self.q, work))
        # In fp8 the kernel's products are float16's also for float32 queries.
        is_fp32 = self.dtype == torch.float32 and self.kv_scale is not None
        tolerance = TOLERANCE[torch.float16 if is_fp32 else self.dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        assert not plan.num_done.any()


def items_of(work):
    fields = work.items[: int(work.num_items), :5].tolist()
    return [tuple(item) for item in fields]  # (row, begin, end, num_parts, first_item)


def test_lengths_around_a_tile_match_the_reference():
    case = Case([0, 1, 15, 16, 17, 40, 0])
    case.check(case.plan())


def test_uncut_rows_match_the_reference():
    case = Case([33, 0, 64, 5])
    case.check(case.plan(tuning=DecodeTuning(tile=32, overhead_tokens=4096)))


@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 1), (3, 1), (8, 2), (8, 1), (16, 1), (20, 1)], ids=str
)
def test_every_group_size_matches_the_reference(heads):
    case = Case([50, 3], heads=heads)
    case.check(case.plan())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims_and_dtypes_match_the_reference(head_dim, dtype):
    case = Case([70, 1], head_dim=head_dim, dtype=dtype, block_size=32)
    case.check(case.plan(tuning=default_tuning(head_dim, dtype, 8)))


def test_no_warp_adds_up_more_than_128_dims():
    assert default_tuning(128, torch.bfloat16, 16).num_warps == 1
    assert default_tuning(256, torch.bfloat16, 16).num_warps == 2


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 2), (8, 2), (20, 1)], ids=str)
def test_fp8_in_every_group_size_matches_the_reference(heads):
    case = Case([50, 0, 3, 17], heads=heads, is_fp8=True)
    case.check(case.plan())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fp8_in_head_dims_and_dtypes_matches_the_reference(head_dim, dtype):
    case = Case([150, 1], heads=(4, 2), head_dim=head_dim, dtype=dtype, block_size=64, is_fp8=True)
    for num_seqs in (1, 128):
        case.check(case.plan(tuning=default_tuning(head_dim, torch.float8_e4m3fn, num_seqs)))


@pytest.mark.parametrize("block_size", [16, 48, 256])
def test_fp8_in_pages_smaller_and_larger_than_a_tile_matches_the_reference(block_size):
    case = Case([260, 17], block_size=block_size, is_fp8=True)
    case.check(case.plan(tuning=DecodeTuning(tile=64)))


@pytest.mark.parametrize("block_size", [16, 48, 64, 256])
@pytest.mark.parametrize("tile", [16, 64])
def test_pages_smaller_and_larger_than_a_tile_match_the_reference(block_size, tile):
    case = Case([260, 17], block_size=block_size)
    case.check(case.plan(tuning=DecodeTuning(tile=tile)))


def test_one_very_long_row_is_cut_and_matches_the_reference():
    case = Case([20, 1500, 0, 33], block_size=64)
    plan = case.plan()
    case.check(plan)
    assert max(end - begin for _, begin, end, *_ in items_of(plan.cut(case.seq_lens))) <= 64


def test_a_plan_is_reused_after_lengths_shrink():
    """A stale work list or counter would read rows that no longer exist."""
    long = Case([200, 90, 120, 64])
    plan = long.plan(max_num_seqs=9)
    for case in (long, Case([0, 5]), Case([31, 0, 2, 0, 16, 0, 0, 0, 90], seed=1), long):
        case.check(plan)
        case.check(plan)


def test_repeated_calls_on_one_plan_agree_bit_for_bit():
    """As in a step, where all layers share a plan; the merge must not depend on who comes last."""
    case = Case([300, 7, 120], heads=(4, 2))
    plan = case.plan()
    work = plan.cut(case.seq_lens)
    plan.partial_out.zero_()  # an ordinary kernel stands between, as the embedding does
    first = paged_attention_triton(*case.arguments(case.q, work))
    for _ in range(50 if DEVICE.type == "cuda" else 1):
        assert torch.equal(paged_attention_triton(*case.arguments(case.q, work)), first)


def planned(lens, tuning=FINE, max_num_seqs=None):
    plan = DecodePlan(
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        max_num_seqs=max_num_seqs or len(lens),
        dtype=torch.float32,
        device=DEVICE,
        tuning=tuning,
    )
    return plan.cut(torch.tensor(lens, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize(
    "lens",
    [[0], [1], [16] * 20, [1000, 1, 1], [0, 0, 7], [30000] + [300] * 70, list(range(0, 900, 7))],
    ids=lambda lens: str(lens[:3]),
)
def test_items_cover_each_token_once_longest_first_within_the_grid(lens):
    work = planned(lens, max_num_seqs=len(lens) + 5)
    items = items_of(work)
    assert len(items) <= work.plan.max_items(len(lens)) == len(work.items)
    for row, seq_len in enumerate(lens):
        parts = [(index, item) for index, item in enumerate(items) if item[0] == row]
        edges = [item[1] for _, item in parts] + [parts[-1][1][2]]
        assert edges[0] == 0 and edges[-1] == seq_len
        assert [item[2] for _, item in parts] == edges[1:]
        assert all(edge % FINE.tile == 0 for edge in edges[:-1])
        for offset, (index, item) in enumerate(parts):
            assert item[3] == len(parts) and index == item[4] + offset
    row_sizes = [item[2] - item[1] for item in items if item[1] == 0]
    assert [-(-size // FINE.tile) for size in row_sizes] == sorted(
        (-(-size // FINE.tile) for size in row_sizes), reverse=True
    )


def test_an_equal_batch_fills_the_grid_evenly():
    work = planned([64] * 4, DecodeTuning(tile=16, programs_per_sm=512, overhead_tokens=4))
    assert [item[1:3] for item in items_of(work)] == [(0, 16), (16, 32), (32, 48), (48, 64)] * 4


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts on the interpreter's four SMs")
def test_few_rows_are_cut_into_one_wave_that_is_nearly_full():
    work = planned([160 + 80 * i for i in range(16)], DecodeTuning(tile=16, programs_per_sm=12))
    assert 44 <= int(work.num_items) <= 48


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts on the interpreter's four SMs")
def test_many_rows_stay_whole():
    lens = [160 + 10 * i for i in range(128)]
    work = planned(lens, DecodeTuning(tile=16, programs_per_sm=8))
    assert int(work.num_items) == 128
