"""How the fused GEMMs are cut into programs, by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a fused GEMM is compiled."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    width: int = 64  # columns of each of the two products; half a head in the QKV projection
    prefetch: bool = True  # bring the weights into L2 while the kernel before still runs


# Up to so many rows; measured on an H200 by tests/gpu/bench_fused_gemm.py.
_QKV = {
    32: Tiles(16, 128, 4, 5),
    256: Tiles(64, 64, 4, 6),
    512: Tiles(128, 64, 8, 3),
}
_GATE_UP = {
    48: Tiles(64, 128, 4, 4, 16),
    64: Tiles(64, 128, 4, 3, 64),
    128: Tiles(64, 128, 4, 3, 32),
    512: Tiles(64, 64, 4, 4, 32),
}
MULTIPLE_OF_IN_FEATURES = 128  # the largest block_k
MAX_IN_FEATURES = 1024  # wider models fill an H200 with library GEMMs
MULTIPLE_OF_SIZE = 64  # the largest width
# Where one kernel beats two on an H200; a library GEMM is better at small and at large batches.
QKV_ROWS = range(17, 513)
GATE_UP_ROWS = range(17, 257)


def qkv_tiles(num_rows: int) -> Tiles:
    return _pick(_QKV, num_rows)


def gate_up_tiles(num_rows: int) -> Tiles:
    return _pick(_GATE_UP, num_rows)


def _pick(table: dict[int, Tiles], num_rows: int) -> Tiles:
    return next(tiles for limit, tiles in table.items() if num_rows <= limit)
