"""Records as columns and tensors: slots, packed prompts, the host's rows, uploads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.model_inputs import RowMirror, Uploader, prefill_columns, slot_mapping
from nanovllm.engine.step import Column, PrefillWork, row_width


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def work(rows, token_lists, firsts, is_sampled) -> PrefillWork:
    return PrefillWork(
        rows=ints(*rows),
        token_ids=ints(*(t for tokens in token_lists for t in tokens)),
        num_tokens=ints(*map(len, token_lists)),
        first_positions=ints(*firsts),
        is_sampled=ints(*is_sampled),
        prompt_places=ints(),
        prompt_targets=ints(),
        max_prompt_logprobs=ints(-1),
    )


def test_slots_follow_the_block_table_across_a_block_edge():
    block_tables = np.array([[4, 1], [0, 2]], dtype=np.int32)
    rows, positions = np.array([0, 0, 0, 1]), np.array([2, 3, 4, 4])
    assert slot_mapping(block_tables, rows, positions, block_size=4).tolist() == [18, 19, 4, 8]


def test_prompts_are_packed_one_after_another():
    block_tables = np.array([[4, 1], [7, 7], [0, 2]], dtype=np.int32)
    columns = prefill_columns(
        work([2, 0], [[11, 12, 13], [21, 22]], [3, 0], [1, 0]), block_tables, block_size=4
    )
    assert columns.token_ids.tolist() == [11, 12, 13, 21, 22]
    assert columns.positions.tolist() == [3, 4, 5, 0, 1]
    assert columns.slots.tolist() == [3, 8, 9, 16, 17]
    assert columns.rows.tolist() == [2, 0]
    assert columns.seq_lens.tolist() == [6, 2]
    assert columns.cu_seqlens_q.tolist() == [0, 3, 5]
    assert columns.cu_seqlens_k.tolist() == [0, 6, 8]
    assert columns.sampled_rows.tolist() == [2]
    assert columns.sampled_tokens.tolist() == [2]


def test_a_step_of_partial_chunks_samples_nothing():
    columns = prefill_columns(work([0], [[5, 6]], [0], [0]), np.array([[3]], dtype=np.int32), 4)
    assert len(columns.sampled_rows) == len(columns.sampled_tokens) == 0


def test_all_columns_are_int32():
    columns = prefill_columns(
        work([0, 1], [[5], [6, 7]], [9, 0], [1, 1]), np.arange(8, dtype=np.int32).reshape(2, 4), 4
    )
    assert {array.dtype for array in columns.arrays()} == {np.dtype(np.int32)}


@settings(max_examples=100, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.booleans()), min_size=1),
    block_size=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_columns_equal_a_loop_over_tokens(chunks, block_size, data):
    num_rows, num_blocks = len(chunks) + 2, 40
    tables = np.random.default_rng(0).permutation(num_rows * num_blocks)
    tables = tables.reshape(num_rows, num_blocks).astype(np.int32)
    rows = data.draw(st.permutations(range(num_rows)))[: len(chunks)]
    tokens = [list(range(i, i + count)) for i, (_, count, _) in enumerate(chunks)]
    firsts, flags = [c[0] for c in chunks], [int(c[2]) for c in chunks]
    columns = prefill_columns(work(rows, tokens, firsts, flags), tables, block_size)
    positions, slots, ends = [], [], []
    for row, first, ids in zip(rows, firsts, tokens, strict=True):
        for place in range(first, first + len(ids)):
            positions.append(place)
            slots.append(tables[row, place // block_size] * block_size + place % block_size)
        ends.append(len(positions))
    assert columns.positions.tolist() == positions
    assert columns.slots.tolist() == slots
    assert columns.cu_seqlens_q.tolist() == [0, *ends]
    picked = [i for i, flag in enumerate(flags) if flag]
    assert columns.sampled_tokens.tolist() == [ends[i] - 1 for i in picked]
    assert columns.sampled_rows.tolist() == [rows[i] for i in picked]


def test_the_places_of_prompt_logprobs_are_passed_on():
    columns = prefill_columns(
        PrefillWork(
            rows=ints(0, 1, 2),
            token_ids=ints(5, 6, 7, 8, 9, 10),
            num_tokens=ints(3, 1, 2),
            first_positions=ints(0, 0, 4),
            is_sampled=ints(1, 1, 1),
            prompt_places=ints(0, 1, 4),
            prompt_targets=ints(6, 7, 10),
            max_prompt_logprobs=ints(3),
        ),
        np.zeros((3, 4), dtype=np.int32),
        4,
    )
    assert columns.prompt_places.tolist() == [0, 1, 4]
    assert columns.prompt_targets.tolist() == [6, 7, 10]


def test_the_mirror_moves_rows_before_it_sets_cells():
    width = row_width(2)
    mirror = RowMirror(4, width)
    table = int(Column.BLOCK_TABLE)
    cells = [[row * width + table + i, 10 * row + i] for row in range(4) for i in range(2)]
    mirror.apply(np.zeros((0, 2), dtype=np.int32), np.array(cells, dtype=np.int32))
    assert mirror.block_tables.tolist() == [[0, 1], [10, 11], [20, 21], [30, 31]]
    moves = np.array([[3, 0], [2, 1]], dtype=np.int32)
    mirror.apply(moves, np.array([[width + table + 1, 99]], dtype=np.int32))
    assert mirror.block_tables[:2].tolist() == [[30, 31], [20, 99]]


def test_the_mirror_reads_all_moved_rows_before_it_writes_any():
    mirror = RowMirror(3, row_width(1))
    width, table = row_width(1), int(Column.BLOCK_TABLE)
    nothing = np.zeros((0, 2), dtype=np.int32)
    mirror.apply(nothing, np.array([[r * width + table, r + 5] for r in range(3)], dtype=np.int32))
    mirror.apply(np.array([[1, 0], [2, 1]], dtype=np.int32), nothing)
    assert mirror.block_tables[:2, 0].tolist() == [6, 7]


def test_uploads_keep_shapes_and_values_and_outlive_later_ones():
    uploader = Uploader(torch.device("cpu"))
    kept = []
    for turn in range(8):  # more turns than staging buffers, of growing size
        arrays = [
            np.full((3, 2), turn, dtype=np.int32),
            np.zeros((0, 2), dtype=np.int32),
            np.arange(turn * 2000, dtype=np.int32),
        ]
        kept.append((arrays, uploader.upload(arrays)))
    for arrays, tensors in kept:
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.dtype == torch.int32 and tuple(tensor.shape) == array.shape
            assert tensor.numpy().tolist() == array.tolist()


def test_an_upload_takes_strided_and_read_only_arrays():
    matrix = np.arange(12, dtype=np.int32).reshape(3, 4)
    frozen = np.frombuffer(np.arange(3, dtype=np.int32).tobytes(), dtype=np.int32)
    column, row = Uploader(torch.device("cpu")).upload([matrix[:, 1], frozen])
    assert column.tolist() == [1, 5, 9] and row.tolist() == [0, 1, 2]


def test_uploaded_arrays_start_on_16_byte_borders():
    """Triton compiled a kernel anew for each mix of aligned and odd pointers: a second each."""
    arrays = [np.arange(size, dtype=np.int32) for size in (3, 0, 5, 4, 1)]
    tensors = Uploader(torch.device("cpu")).upload(arrays)
    base = tensors[0].data_ptr()
    assert all((tensor.data_ptr() - base) % 16 == 0 for tensor in tensors)
    assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]


@pytest.mark.parametrize("num_arrays", [0, 1])
def test_an_upload_of_nothing_is_fine(num_arrays):
    arrays = [np.zeros(0, dtype=np.int32)] * num_arrays
    assert [t.numel() for t in Uploader(torch.device("cpu")).upload(arrays)] == [0] * num_arrays


def test_a_buffer_is_written_again_only_when_its_copy_is_done():
    """After faults the device may lag behind by more steps than there are buffers."""
    uploader = Uploader(torch.device("cpu"))
    uploader.upload([ints(1)])
    log = []

    class Event:
        def __init__(self, turn: int) -> None:
            self.turn = turn

        def synchronize(self) -> None:
            log.append(("wait", self.turn, int(uploader._buffers[self.turn][:1].sum())))

        def record(self) -> None:
            log.append(("copied", self.turn, int(uploader._buffers[self.turn][0])))

    uploader._copied = [Event(turn) for turn in range(3)]
    for number in (2, 3, 4):
        uploader.upload([ints(number)])
    assert log == [
        *(("wait", 2, 0), ("copied", 2, 2)),
        *(("wait", 0, 0), ("copied", 0, 3)),
        *(("wait", 1, 1), ("copied", 1, 4)),  # what the first upload left is there until then
    ]
