"""Draw the next token of every row in one pass over the logits."""

import math

import torch

from nanovllm.kernels._triton import tl, triton, use_triton
from nanovllm.kernels.noise import gumbel, random_bits_device, row_words_device, uniform_device
from nanovllm.sampling_params import GREEDY_TEMPERATURE

_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
_LOG2_LN_2 = tl.constexpr(math.log2(math.log(2.0)))
_NEAR_ONE = tl.constexpr(2.0**-11)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, key_lo: torch.Tensor, key_hi: torch.Tensor,
    positions: torch.Tensor, vocab_start: int = 0, num_valid: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return each row's winning score, [n] float32, and token id, [n] int32.

    A row with temperature 0 takes the largest logit, another one the largest of
    `logit / temperature + Gumbel noise`, which is a draw from the softmax. The lowest id wins a
    tie, NaN never wins, and a row of -inf or NaN alone gives `vocab_start`. Scores let shards of
    the vocabulary be merged.

    Args:
        logits: [n, vocab_size], any float dtype; rows may be strided
        temperatures: [n] float32; key_lo, key_hi, positions: [n] int32; all may be strided
        vocab_start: token id of column 0
        num_valid: columns that are tokens; the rest is padding (None: all)
        out: [n] int32, maybe strided; written and returned as the ids when given
    """
    implementation = sample_triton if use_triton(logits) else sample_reference
    return implementation(
        logits, temperatures, key_lo, key_hi, positions, vocab_start, num_valid, out
    )


def sample_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, key_lo: torch.Tensor, key_hi: torch.Tensor,
    positions: torch.Tensor, vocab_start: int = 0, num_valid: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain torch form of `sample`."""
    scores = logits[:, :num_valid].float()
    is_sampled = temperatures >= GREEDY_TEMPERATURE
    # On the CPU noise is most of the cost: an all-greedy batch makes none.
    if scores.is_cuda or is_sampled.any():
        token_ids = torch.arange(
            vocab_start, vocab_start + scores.shape[1], device=logits.device, dtype=torch.int64
        )
        noise = gumbel(key_lo, key_hi, positions, token_ids)
        noisy = scores / temperatures.clamp_min(GREEDY_TEMPERATURE).unsqueeze(1) + noise
        scores = torch.where(is_sampled.unsqueeze(1), noisy, scores)
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    columns = scores.argmax(dim=1)
    values = scores.gather(1, columns.unsqueeze(1)).squeeze(1)
    winners = (columns + vocab_start).int()
    return values, winners if out is None else out.copy_(winners)


def sample_triton(
    logits: torch.Tensor, temperatures: torch.Tensor, key_lo: torch.Tensor, key_hi: torch.Tensor,
    positions: torch.Tensor, vocab_start: int = 0, num_valid: int | None = None,
    out: torch.Tensor | None = None, chunk_size: int | None = None, block: int = 1024,
    num_warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Triton form of `sample`: a winner for each chunk of a row, then the best of those.

    chunk_size (tokens a program), block (tokens a step) and num_warps change speed alone.
    """
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1, "rows must be contiguous"
    size = vocab_size if num_valid is None else num_valid
    ids = torch.empty(n, dtype=torch.int32, device=logits.device) if out is None else out
    values = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n == 0:
        return values, ids
    chunk = chunk_size or _chunk_size(n)
    num_chunks = triton.cdiv(size, chunk)
    chunk_values = torch.empty((n, num_chunks), dtype=torch.float32, device=logits.device)
    chunk_ids = torch.empty((n, num_chunks), dtype=torch.int32, device=logits.device)
    # FAST_LOG only there: the interpreter knows no inline assembly.
    _sample_chunk_kernel[(num_chunks, n)](
        logits, temperatures, key_lo, key_hi, positions, chunk_values, chunk_ids, logits.stride(0),
        temperatures.stride(0), key_lo.stride(0), key_hi.stride(0), positions.stride(0),
        vocab_start, size, CHUNK=chunk, BLOCK=block, FAST_LOG=logits.is_cuda, num_warps=num_warps,
    )  # fmt: skip
    _best_chunk_kernel[(n,)](
        chunk_values, chunk_ids, values, ids, ids.stride(0), num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks), num_warps=1,
    )  # fmt: skip
    return values, ids


def _chunk_size(n: int) -> int:
    """Fewer tokens a program where rows alone do not fill the device."""
    return 2048 if n <= 16 else 4096 if n <= 64 else 8192


@triton.jit
def _sample_chunk_kernel(
    logits, temperatures, key_lo, key_hi, positions, chunk_values, chunk_ids, logits_stride,
    temperatures_stride, key_lo_stride, key_hi_stride, positions_stride, vocab_start, size,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, FAST_LOG: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    start = chunk * CHUNK
    lanes = tl.arange(0, BLOCK)
    pointers = logits + row * logits_stride + start + lanes
    temperature = tl.load(temperatures + row * temperatures_stride)

    # Each lane keeps its own best and the step it came from; lanes meet once, at the end.
    # A later token must be larger to win, so the lowest id keeps a tie; NaN is never larger.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_step = tl.zeros([BLOCK], tl.int32)
    if temperature >= _GREEDY_TEMPERATURE:
        word_1, word_2 = row_words_device(
            tl.load(key_lo + row * key_lo_stride),
            tl.load(key_hi + row * key_hi_stride),
            tl.load(positions + row * positions_stride),
        )
        # Scores are in units of log 2, and without a constant, until the winner is known.
        factor = _LOG2_E / temperature
        for step in tl.range(0, CHUNK, BLOCK):
            mask = start + step + lanes < size
            values = tl.load(pointers + step, mask=mask, other=float("-inf")).to(tl.float32)
            bits = random_bits_device(word_1, word_2, vocab_start + start + step + lanes)
            uniform = uniform_device(bits)
            # The instruction is off by 2**-22, much of the small exponentials that win: near 1
            # -ln u = 1 - u is closer. Both are within 2**-11 of the exponential where they meet.
            rest = 1.0 - uniform
            exponential = tl.where(rest < _NEAR_ONE, rest * _LOG2_E, -_log2(uniform, FAST_LOG))
            scores = values * factor - _log2(exponential, FAST_LOG)
            is_better = scores > best
            best = tl.where(is_better, scores, best)
            best_step = tl.where(is_better, step, best_step)
        # -ln(-ln u) = -ln2 * (log2(-log2 u) + log2(ln 2))
        best = (best - _LOG2_LN_2) * _LN_2
    else:
        for step in tl.range(0, CHUNK, BLOCK):
            mask = start + step + lanes < size
            values = tl.load(pointers + step, mask=mask, other=float("-inf")).to(tl.float32)
            is_better = values > best
            best = tl.where(is_better, values, best)
            best_step = tl.where(is_better, step, best_step)

    value, token_id = _best_of(best, vocab_start + start + best_step + lanes)
    target = row * tl.num_programs(0) + chunk
    tl.store(chunk_values + target, value)
    tl.store(chunk_ids + target, token_id)


@triton.jit
def _best_chunk_kernel(
    chunk_values, chunk_ids, values, ids, ids_stride, num_chunks, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    mask = chunks < num_chunks
    source = row * num_chunks + chunks
    best = tl.load(chunk_values + source, mask=mask, other=float("-inf"))
    token_ids = tl.load(chunk_ids + source, mask=mask, other=0x7FFFFFFF)
    value, token_id = _best_of(best, token_ids)
    tl.store(values + row, value)
    tl.store(ids + row * ids_stride, token_id)


@triton.jit
def _best_of(values, token_ids):
    """Return the largest value and the lowest id that has it."""
    value = tl.max(values, axis=0)
    return value, tl.min(tl.where(values == value, token_ids, 0x7FFFFFFF), axis=0)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    # tl.log2 guards against subnormals, which no argument here is; the instruction alone is
    # several times cheaper.
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)
