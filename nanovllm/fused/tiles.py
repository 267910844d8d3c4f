"""How the fused GEMMs are cut into programs, by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a fused GEMM is compiled."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    # Columns; in the gate-up projection of each of the two products, in QKV half a head.
    width: int = 64
    # Several programs to a tile, which sum block_k features each with weights that they load before
    # the kernel before has ended; if not, one sums all features, block_k at a time.
    is_split: bool = False
    # Of a thread. What ptxas takes with no limit changes with every edit of the kernel, and with it
    # how many programs an SM holds and how many of their weights they ask for at once.
    max_registers: int | None = None

    def options(self) -> dict[str, int | None]:
        """Return what a launch passes beside the arguments of a kernel."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
        }


# Measured on an H200 by tests/gpu/bench_fused_gemm.py. Up to FEW_ROWS all GEMMs have such tiles;
# with so few registers an SM holds four programs.
FEW_ROWS = 16
FEW = Tiles(16, 512, 8, 1, is_split=True, max_registers=64)
# Up to so many rows; with more a library GEMM is better.
_QKV = {
    FEW_ROWS: replace(FEW, num_warps=4, max_registers=128),
    64: Tiles(16, 128, 4, 5),
    256: Tiles(64, 64, 4, 6),
    512: Tiles(128, 64, 8, 3),
}
_GATE_UP = {
    FEW_ROWS: FEW,
    64: Tiles(64, 128, 4, 4, 16),
    128: Tiles(64, 128, 4, 3, 32),
    256: Tiles(64, 64, 4, 4, 32),
}
MAX_QKV_ROWS, MAX_GATE_UP_ROWS = max(_QKV), max(_GATE_UP)
# What the tiles above ask of a model.
MAX_HIDDEN_SIZE = 1024  # wider models fill an H200 with library GEMMs
MULTIPLE_OF_FEATURES = 512  # the largest block_k, of all inputs


def qkv_tiles(num_rows: int) -> Tiles:
    return _pick(_QKV, num_rows)


def gate_up_tiles(num_rows: int) -> Tiles:
    return _pick(_GATE_UP, num_rows)


def _pick(table: dict[int, Tiles], num_rows: int) -> Tiles:
    return next(tiles for limit, tiles in table.items() if num_rows <= limit)
