"""Turn the packed device rows into one decode step's inputs, and count the token it will draw.

The first kernel of a captured step: position, slot and length come from the rows on the device, so
the host sends nothing in steady decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import tl, triton, use_triton


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One token a row; padding rows have token 0, position 0, slot -1 and seq_len 0."""

    input_ids: torch.Tensor  # [num_rows] int32
    positions: torch.Tensor  # [num_rows] int32
    slots: torch.Tensor  # [num_rows] int64
    seq_lens: torch.Tensor  # [num_rows] int32


def decode_inputs(
    rows: torch.Tensor, num_active: torch.Tensor, num_rows: int, block_size: int, table_column: int
) -> DecodeInputs:
    """Read `num_rows` rows, of which the first `num_active` are live, and advance their lengths.

    Args:
        rows: [max_num_seqs, width] int32; columns 0 and 1 are last token and length, the block
            table starts at `table_column`. Column 1 of live rows grows by one, in place.
        num_active: [1] int32 on the device
    """
    implementation = decode_inputs_triton if use_triton(rows) else decode_inputs_reference
    return implementation(rows, num_active, num_rows, block_size, table_column)


def decode_inputs_reference(
    rows: torch.Tensor, num_active: torch.Tensor, num_rows: int, block_size: int, table_column: int
) -> DecodeInputs:
    """Plain torch form of `decode_inputs`."""
    is_active = torch.arange(num_rows, device=rows.device) < num_active
    lens = rows[:num_rows, 1]
    positions = torch.where(is_active, lens - 1, 0)
    columns = table_column + positions // block_size
    block_ids = rows[:num_rows].gather(1, columns.long().unsqueeze(1)).squeeze(1).long()
    slots = torch.where(is_active, block_ids * block_size + positions % block_size, -1)
    inputs = DecodeInputs(
        torch.where(is_active, rows[:num_rows, 0], 0),
        positions,
        slots,
        torch.where(is_active, lens, 0),
    )
    lens += is_active.int()
    return inputs


def decode_inputs_triton(
    rows: torch.Tensor, num_active: torch.Tensor, num_rows: int, block_size: int, table_column: int
) -> DecodeInputs:
    """Triton form of `decode_inputs`: one kernel."""
    ints = torch.empty((3, num_rows), dtype=torch.int32, device=rows.device)
    slots = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    block = 128
    _decode_inputs_kernel[(triton.cdiv(num_rows, block),)](
        rows, num_active, ints, slots, rows.stride(0), num_rows,
        BLOCK_SIZE=block_size, TABLE_COLUMN=table_column, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return DecodeInputs(ints[0], ints[1], slots, ints[2])


@triton.jit(do_not_specialize=["num_rows"])
def _decode_inputs_kernel(
    rows, num_active, ints, slots, row_stride, num_rows, BLOCK_SIZE: tl.constexpr,
    TABLE_COLUMN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    is_active = row < tl.load(num_active)
    base = rows + row.to(tl.int64) * row_stride
    live = mask & is_active
    token = tl.load(base, mask=live, other=0)
    seq_len = tl.load(base + 1, mask=live, other=0)
    position = tl.maximum(seq_len - 1, 0)
    block_id = tl.load(base + TABLE_COLUMN + position // BLOCK_SIZE, mask=live, other=0)
    slot = block_id.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(ints + row, token, mask=mask)
    tl.store(ints + num_rows + row, position, mask=mask)
    tl.store(ints + 2 * num_rows + row, seq_len, mask=mask)
    tl.store(slots + row, tl.where(is_active, slot, -1), mask=mask)
    tl.store(base + 1, seq_len + 1, mask=live)
