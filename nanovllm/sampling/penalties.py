"""Repetition, frequency and presence penalties in one pass over the logits."""

import torch

from nanovllm.kernels._triton import tl, triton, use_triton

IN_PROMPT = 1 << 30  # set in a token's count if the prompt has it; the bits below count the output

_IN_PROMPT = tl.constexpr(IN_PROMPT)


def apply_penalties(
    logits: torch.Tensor,
    counts: torch.Tensor,
    rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Make tokens that came before less likely (or more), in place, by vLLM's formulas.

    Positive logits of tokens in the prompt or output are divided by `repetition`, others
    multiplied; then `frequency` is subtracted for each time a token came in the output, and
    `presence` once.

    Args:
        logits: [n, vocab_size] float32, last dim contiguous
        counts: [num_rows, vocab_size] int32, contiguous; times in the output, plus IN_PROMPT
        rows: [n] int32, whose counts are whose
        repetition, frequency, presence: [n] float32, 1, 0 and 0 are off; columns may be strided
    """
    implementation = apply_penalties_triton if use_triton(logits) else apply_penalties_reference
    implementation(logits, counts, rows, repetition, frequency, presence)


def apply_penalties_reference(
    logits: torch.Tensor,
    counts: torch.Tensor,
    rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Plain torch form of `apply_penalties`."""
    seen = counts[rows.long()]
    times = seen & (IN_PROMPT - 1)
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalised = torch.where(seen != 0, repeated, logits)
    penalised -= frequency.unsqueeze(1) * times
    penalised -= presence.unsqueeze(1) * (times > 0)
    # A row without penalties may have the counts of one that is gone; and -inf - 0 * x is -inf.
    logits.copy_(penalised)


def apply_penalties_triton(
    logits: torch.Tensor,
    counts: torch.Tensor,
    rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    block: int = 4096,
) -> None:
    """Triton form of `apply_penalties`; rows without penalties cost nothing."""
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1 and counts.is_contiguous(), "rows must be contiguous"
    if n == 0:
        return
    _penalties_kernel[(triton.cdiv(vocab_size, block), n)](
        logits,
        counts,
        rows,
        repetition,
        frequency,
        presence,
        logits.stride(0),
        rows.stride(0),
        repetition.stride(0),
        frequency.stride(0),
        presence.stride(0),
        vocab_size,
        BLOCK=block,
        num_warps=8,
    )


@triton.jit
def _penalties_kernel(
    logits,
    counts,
    rows,
    repetition_column,
    frequency_column,
    presence_column,
    logits_stride,
    rows_stride,
    repetition_stride,
    frequency_stride,
    presence_stride,
    size,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    repetition = tl.load(repetition_column + place * repetition_stride)
    frequency = tl.load(frequency_column + place * frequency_stride)
    presence = tl.load(presence_column + place * presence_stride)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        row = tl.load(rows + place * rows_stride).to(tl.int64)
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = ids < size
        seen = tl.load(counts + row * size + ids, mask=mask, other=0)
        mask = mask & (seen != 0)  # most tokens never came: their logits are not touched
        values = tl.load(logits + place * logits_stride + ids, mask=mask, other=0.0)
        times = seen & (_IN_PROMPT - 1)
        repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        repeated -= frequency * times.to(tl.float32)
        repeated -= tl.where(times > 0, presence, 0.0)
        tl.store(logits + place * logits_stride + ids, repeated, mask=mask)
