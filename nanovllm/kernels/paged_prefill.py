"""Prefill attention over the paged KV cache: packed chunks whose K and V are already stored."""

import torch

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.paged_attention import block_ids

_LOG2_E = 1.4426950408889634


def paged_prefill_triton(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int, scale: float,
    kv_scale: torch.Tensor | None = None, *,
    blocks: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend causally from packed chunks to their sequences, [num_tokens, num_heads, head_dim].

    A chunk's queries are the last tokens of its `seq_len`. Rows of q after the last chunk come out
    undefined. The torch form of a chunk is `nanovllm.attention.sdpa.causal_attention`.

    Args:
        q: [num_tokens, num_heads, head_dim], rows may be strided
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the chunks' included
        block_tables: [num_seqs, max_blocks] int32, rows may be strided
        seq_lens: [num_seqs] int32, may be strided
        cu_seqlens_q: [num_seqs + 1] int32
        kv_scale: [2, num_kv_heads] float32 for a cache in fp8, as `store_kv` has it
        blocks: (queries, keys, warps, stages) of a program, for tuning
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    assert q.stride(2) == 1 and q.stride(1) == head_dim, "heads of a row must be contiguous"
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    assert block_tables.stride(1) == 1, "block tables may be strided between rows only"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if blocks is None:
        blocks = default_blocks(head_dim, q.dtype, max_seqlen_q, is_fp8=kv_scale is not None)
    block_m, block_n, num_warps, num_stages = blocks
    num_blocks = triton.cdiv(max_seqlen_q, block_m)
    if num_blocks == 0:
        return out
    _prefill_kernel[(num_heads, num_blocks, len(seq_lens))](
        q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, out,
        q.stride(0), block_tables.stride(0), seq_lens.stride(0), *k_cache.stride()[:3],
        scale * _LOG2_E, kv_scale, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        PAGE=k_cache.shape[1], BLOCK_M=block_m, BLOCK_N=block_n,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def default_blocks(
    head_dim: int, dtype: torch.dtype, max_seqlen_q: int, *, is_fp8: bool
) -> tuple[int, int, int, int]:
    """Return (queries, keys, warps, stages) of a program, the fastest on an H200 that were tried.

    dtype: the queries'; is_fp8: whether the cache is
    """
    if dtype == torch.float32:  # no tensor cores
        return (32, 32, 8, 2) if head_dim <= 128 else (16, 16, 4, 2)
    # Up to 64 queries are short tails after cached prefixes, in 128 rows mostly padding.
    if head_dim > 128:
        return (64, 32, 4, 2) if max_seqlen_q <= 64 else (128, 32, 8, 2)
    if is_fp8:  # whose conversion more rows share
        return (64, 128, 4, 2) if max_seqlen_q <= 64 else (128, 64, 4, 3)
    return (64, 64, 4, 3) if max_seqlen_q <= 64 else (64, 64, 4, 2)


# The table's width follows the longest sequence: specialising on it would only compile more often.
@triton.jit(do_not_specialize=["stride_table"])
def _prefill_kernel(
    q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, out,
    stride_q, stride_table, stride_seq_lens, stride_block, stride_token, stride_head,
    scale,  # in log2 units
    kv_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Heads are neighbours in the grid, so those of a group read the same K and V from L2 together.
    head = tl.program_id(0)
    seq = tl.program_id(2)
    chunk_begin = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - chunk_begin
    # Last block first: it attends to the most, and long programs must not start last.
    block = tl.cdiv(num_queries, BLOCK_M) - 1 - tl.program_id(1)
    if block < 0:
        return
    seq_len = tl.load(seq_lens + seq * stride_seq_lens)

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)[None, :]
    is_row = (rows < num_queries)[:, None]
    row_ids = (chunk_begin + rows).to(tl.int64)[:, None]
    q_tile = tl.load(q + row_ids * stride_q + head * HEAD_DIM + dims, mask=is_row, other=0.0)
    kv_head = head // GROUP
    if kv_scale is not None:
        scale *= tl.load(kv_scale + kv_head)
        q_tile = q_tile.to(tl.float16)  # as in decode: e4m3 becomes it without rounding
    k_head = k_cache + kv_head * stride_head + dims
    v_head = v_cache + kv_head * stride_head + dims
    table = block_tables + seq.to(tl.int64) * stride_table

    positions = seq_len - num_queries + rows
    first_position = seq_len - num_queries + block * BLOCK_M
    end = tl.minimum(first_position + BLOCK_M, seq_len)
    # Whole tiles that the block's first row sees to the last token need no mask.
    masked_begin = (first_position + 1) // BLOCK_N * BLOCK_N
    max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    acc, total, max_score = _attend(
        acc, total, max_score, q_tile, k_head, v_head, table, positions, 0, masked_begin, seq_len,
        stride_block, stride_token, scale, PAGE, BLOCK_N, PRECISION, IS_MASKED=False,
    )  # fmt: skip
    acc, total, max_score = _attend(
        acc, total, max_score, q_tile, k_head, v_head, table, positions, masked_begin, end, seq_len,
        stride_block, stride_token, scale, PAGE, BLOCK_N, PRECISION, IS_MASKED=True,
    )  # fmt: skip
    num_heads = tl.num_programs(0)
    if kv_scale is not None:
        acc *= tl.load(kv_scale + num_heads // GROUP + kv_head)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row_ids * num_heads + head) * HEAD_DIM + dims, result, mask=is_row)


@triton.jit
def _attend(
    acc, total, max_score, q_tile, k_head, v_head, table, positions, begin, end, seq_len,
    stride_block, stride_token, scale,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the tokens from `begin` to `end` into the running softmax."""
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        blocks = block_ids(table, start, seq_len, PAGE, BLOCK_N)
        offsets = blocks.to(tl.int64) * stride_block + (tokens % PAGE) * stride_token
        # Unwritten cache may hold NaN, and 0 * NaN is NaN: what no row sees is not read.
        is_token = (tokens < seq_len)[:, None]
        if IS_MASKED:
            keys = tl.load(k_head + offsets[:, None], mask=is_token, other=0.0)
        else:
            keys = tl.load(k_head + offsets[:, None])
        keys = keys.to(q_tile.dtype)
        scores = tl.dot(q_tile, tl.trans(keys), input_precision=PRECISION) * scale
        if IS_MASKED:
            scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(max_score - new_max)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        if IS_MASKED:
            values = tl.load(v_head + offsets[:, None], mask=is_token, other=0.0)
        else:
            values = tl.load(v_head + offsets[:, None])
        values = values.to(q_tile.dtype)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        max_score = new_max
    return acc, total, max_score
