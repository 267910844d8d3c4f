"""How the fused GEMMs are cut into programs, by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a fused GEMM is compiled."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    width: int = 64  # columns of each of the two products; half a head in the QKV projection
    share: int = 0  # features of the input that one program sums; 0: all of them
    # Bring the weights into L2 while the kernel before still runs; to where the product takes them
    # from, whatever this says, if one block_k is all that a program sums.
    prefetch: bool = True


@dataclass(frozen=True, slots=True)
class AddTiles:
    """How `gemm_add` is compiled."""

    block_m: int
    block_n: int
    block_k: int
    share: int  # as in Tiles
    num_warps: int
    num_stages: int
    prefetch: bool = True


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
_ADD = {
    128: AddTiles(64, 64, 128, 512, 4, 4),
    512: AddTiles(64, 64, 128, 1024, 4, 4),
}
# What the tiles above ask of a model, and for how many rows it is faster on an H200.
MAX_HIDDEN_SIZE = 1024  # wider models fill an H200 with library GEMMs
MULTIPLE_OF_HIDDEN_SIZE = 128
MULTIPLE_OF_WIDTH = 1024  # inputs of the output and the down projection: the largest share
ROWS = range(1, 257)


def qkv_tiles(num_rows: int) -> Tiles:
    return _pick(_QKV, num_rows)


def gate_up_tiles(num_rows: int) -> Tiles:
    return _pick(_GATE_UP, num_rows)


def add_tiles(num_rows: int) -> AddTiles:
    return _pick(_ADD, num_rows)


def _pick(table: dict[int, _T], num_rows: int) -> _T:
    return next(tiles for limit, tiles in table.items() if num_rows <= limit)
