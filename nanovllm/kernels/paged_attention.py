"""Decode attention over the paged KV cache: one query token per sequence.

Program (kv_head, i) takes item i of the plan's work list: some tokens of one row. Rows of one part
write their output; of a row with several, the part that finishes last merges them.
"""

import torch

from nanovllm.kernels._triton import pdl_options, tl, triton
from nanovllm.kernels.decode_plan import ITEM_WIDTH, DecodeWork
from nanovllm.kernels.store_kv import as_words

_LOG2_E = 1.4426950408889634
# Two int16 to their two low and their two high bytes. Triton's own casts take 40 % more
# instructions in all for the whole loop.
_UNPACK_E4M3 = (
    "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
    " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)


def paged_attention_triton(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, work: DecodeWork, kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend from one query per row to the row's cached tokens, [num_seqs, num_heads, head_dim].

    The torch form is `nanovllm.attention.sdpa.decode_attention`.

    Args:
        q: [num_seqs, num_heads, head_dim], rows may be strided
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]
        block_tables: [num_seqs, max_blocks] int32, rows may be strided
        seq_lens: [num_seqs] int32, may be strided; 0 marks a padding row, whose output is zeros
        work: cut from these seq_lens; the partial results of its plan are overwritten.
            Since it was cut, and since block_tables were written, an ordinary kernel (without
            programmatic dependent launch) must have been launched
        kv_scale: [2, num_kv_heads] float32 for a cache in fp8, as `store_kv` has it
    """
    plan = work.plan
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    assert q.stride(2) == 1 and q.stride(1) == head_dim, "heads of a row must be contiguous"
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    assert block_tables.stride(1) == 1, "block tables may be strided between rows only"
    k_cache, v_cache = as_words(k_cache), as_words(v_cache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tuning = plan.tuning(num_seqs)
    block_group = triton.next_power_of_2(group)
    _decode_kernel[(num_kv_heads, plan.max_items(num_seqs))](
        q, k_cache, v_cache, block_tables, out,
        work.items, work.num_items, plan.num_done, plan.partial_out, plan.partial_lse,
        q.stride(0), block_tables.stride(0), *k_cache.stride()[:3], scale * _LOG2_E, kv_scale,
        GROUP=group, HEAD_DIM=head_dim, PAGE=k_cache.shape[1], TILE=tuning.tile,
        ITEM_WIDTH=ITEM_WIDTH,
        # The tensor cores' smallest tile has 16 rows; what is above `group` is padding.
        BLOCK_GROUP=max(16, block_group),
        MERGE_GROUP=block_group,
        # 32 values a thread; 64 would halve the programs that fit an SM.
        MERGE_PARTS=max(1, min(16, 1024 * tuning.num_warps // (block_group * head_dim))),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        UNPACK=_UNPACK_E4M3 if q.is_cuda else None,  # the interpreter knows no PTX
        num_warps=tuning.num_warps, num_stages=tuning.num_stages, **pdl_options(q),
    )  # fmt: skip
    return out


@triton.jit
def _decode_kernel(
    q, k_cache, v_cache, block_tables, out,
    items, num_items, num_done, partial_out, partial_lse,
    stride_q, stride_table, stride_block, stride_token, stride_head,
    scale,  # in log2 units
    kv_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    ITEM_WIDTH: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    MERGE_GROUP: tl.constexpr, MERGE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr, UNPACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # kv heads are neighbours in the grid, so the programs that share pages run together.
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    index = tl.program_id(1)
    item = items + index * ITEM_WIDTH
    row = tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    num_parts = tl.load(item + 3)
    first_index = tl.load(item + 4)
    # Checked after the loads, which then run together; items past the end are stale, not absent.
    if index >= tl.load(num_items):
        return
    table = block_tables + row.to(tl.int64) * stride_table
    next_blocks = block_ids(table, begin, end, PAGE, TILE)
    if PDL:
        # Not before: items and tables were complete when an ordinary kernel (the embedding) began,
        # which no kernel after it overtakes, so reading them need not wait for the kernel before.
        # Program 0 always has an item and comes here: this kernel never ends before that one.
        tl.extra.cuda.gdc_wait()

    heads = tl.arange(0, BLOCK_GROUP)[:, None]
    dims = tl.arange(0, HEAD_DIM)[None, :]
    is_head = heads < GROUP
    head_offsets = (kv_head * GROUP + heads) * HEAD_DIM + dims
    q_row = q + row.to(tl.int64) * stride_q
    if kv_scale is None:
        columns = dims
        q_tile = tl.load(q_row + head_offsets, mask=is_head, other=0.0)
        acc = tl.zeros([BLOCK_GROUP, HEAD_DIM], tl.float32)
    else:
        # e4m3 comes in pairs, as int16, since no instruction transposes a tile of single bytes on
        # its way to the tensor cores; even and odd dims then go separate ways. It becomes float16:
        # one instruction for two, and nothing is rounded.
        columns = tl.arange(0, HEAD_DIM // 2)[None, :]
        q_pairs = q_row + (kv_head * GROUP + heads) * HEAD_DIM + 2 * columns
        q_tile = tl.load(q_pairs, mask=is_head, other=0.0).to(tl.float16)
        q_odd = tl.load(q_pairs + 1, mask=is_head, other=0.0).to(tl.float16)
        acc = tl.zeros([BLOCK_GROUP, HEAD_DIM // 2], tl.float32)
        acc_odd = acc
        scale *= tl.load(kv_scale + kv_head)
    k_head = k_cache + kv_head * stride_head + columns
    v_head = v_cache + kv_head * stride_head + columns

    max_score = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    for start in range(begin, end, TILE):
        # Read one turn ahead: else each turn's loads would wait for the table's.
        blocks = next_blocks
        next_blocks = block_ids(table, start + TILE, end, PAGE, TILE)
        tokens = start + tl.arange(0, TILE)
        offsets = blocks.to(tl.int64) * stride_block + (tokens % PAGE) * stride_token
        # Masked, as unwritten cache may hold NaN, and 0 * NaN is NaN.
        is_token = tokens < end
        keys = tl.load(k_head + offsets[:, None], mask=is_token[:, None], other=0.0)
        if kv_scale is None:
            scores = tl.dot(q_tile, tl.trans(keys), input_precision=PRECISION) * scale
        else:
            even, odd = _unpack(keys, UNPACK)
            scores = tl.dot(q_odd, tl.trans(odd), tl.dot(q_tile, tl.trans(even))) * scale
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(max_score - new_max)
        total = total * decay + tl.sum(weights, axis=1)
        values = tl.load(v_head + offsets[:, None], mask=is_token[:, None], other=0.0)
        acc = acc * decay[:, None]
        weights = weights.to(q_tile.dtype)
        if kv_scale is None:
            acc = tl.dot(weights, values, acc, input_precision=PRECISION)
        else:
            even, odd = _unpack(values, UNPACK)
            acc = tl.dot(weights, even, acc)
            acc_odd = tl.dot(weights, odd, acc_odd * decay[:, None])
        max_score = new_max

    if PDL:
        # Not earlier: waiting programs of the next kernel would take room from those that read.
        tl.extra.cuda.gdc_launch_dependents()
    if kv_scale is not None:
        acc = tl.interleave(acc, acc_odd) * tl.load(kv_scale + num_kv_heads + kv_head)
    # A padding row has no tokens: 0 / 1.
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = out + row.to(tl.int64) * (num_kv_heads * GROUP * HEAD_DIM)
    if num_parts == 1:
        tl.store(out_row + head_offsets, result.to(out.dtype.element_ty), mask=is_head)
    else:
        slot = (index.to(tl.int64) * num_kv_heads + kv_head) * GROUP
        tl.store(partial_out + slot * HEAD_DIM + heads * HEAD_DIM + dims, result, mask=is_head)
        lse = max_score + tl.log2(total)
        tl.store(partial_lse + slot + heads, lse[:, None], mask=is_head)
        # Every thread's stores come before the barrier, the barrier before one thread's release;
        # the last part's acquire then sees them all. A second kernel would cost a launch a layer.
        tl.debug_barrier()
        done = num_done + row * num_kv_heads + kv_head
        if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            tl.store(done, 0)
            first_slot = (first_index.to(tl.int64) * num_kv_heads + kv_head) * GROUP
            _merge_parts(
                partial_out + first_slot * HEAD_DIM, partial_lse + first_slot,
                out_row + kv_head * GROUP * HEAD_DIM, num_parts, num_kv_heads * GROUP,
                GROUP, HEAD_DIM, MERGE_GROUP, MERGE_PARTS,
            )  # fmt: skip


@triton.jit
def _unpack(pairs, PTX: tl.constexpr):
    """Return the low and the high bytes of int16, which are e4m3, as float16."""
    if PTX is not None:
        # The dtypes not by a name: Triton 3.9 takes no constexpr that is a tuple of them.
        return tl.inline_asm_elementwise(PTX, "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2)
    low = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True)
    high = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def _merge_parts(
    partial_out, partial_lse, out, num_parts,
    stride_part,  # in heads
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    MERGE_GROUP: tl.constexpr, MERGE_PARTS: tl.constexpr,
):  # fmt: skip
    """Write one row's output of one kv head: its parts weighted by 2**lse."""
    # Few values at a time: the kernel's registers are the most that any part of it needs.
    heads = tl.arange(0, MERGE_GROUP)
    head_offsets = heads[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    # Finite, so that heads above the group give 0 / 0 rather than a trap in inf - inf.
    max_lse = tl.full([MERGE_GROUP], -1e30, tl.float32)
    total = tl.zeros([MERGE_GROUP], tl.float32)
    acc = tl.zeros([MERGE_GROUP, HEAD_DIM], tl.float32)
    for first in range(0, num_parts, MERGE_PARTS):
        parts = first + tl.arange(0, MERGE_PARTS)
        mask = (parts < num_parts)[:, None] & (heads < GROUP)[None, :]
        slots = (parts * stride_part)[:, None] + heads[None, :]
        # Not through L1: other SMs wrote these.
        lse = tl.load(partial_lse + slots, mask=mask, other=float("-inf"), cache_modifier=".cg")
        offsets = (parts * stride_part * HEAD_DIM)[:, None, None] + head_offsets[None, :, :]
        values = tl.load(
            partial_out + offsets, mask=mask[:, :, None], other=0.0, cache_modifier=".cg"
        )
        new_max = tl.maximum(max_lse, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_max[None, :])
        decay = tl.exp2(max_lse - new_max)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, axis=0)
        max_lse = new_max
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + head_offsets, result.to(out.dtype.element_ty), mask=(heads < GROUP)[:, None])


@triton.jit
def block_ids(table, start, end, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the cache block of each of TILE tokens from `start`, or the one block of all."""
    # Clamped to the last token that exists: the table holds nothing for those after it.
    last = tl.maximum(end - 1, 0)
    if PAGE % TILE == 0:
        return tl.load(table + tl.minimum(start, last) // PAGE)
    else:
        return tl.load(table + tl.minimum(start + tl.arange(0, TILE), last) // PAGE)
