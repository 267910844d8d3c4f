"""Linear layers at decode batch sizes, where the library's GEMM leaves SMs without work.

A layer of a small model has too few output tiles for the device, so K is split over programs.
Each writes a float32 partial tile, and the last one of a tile to arrive adds them up in a fixed
order: the same bits in every run, unlike float atomics.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import tl, triton, use_triton

MAX_SMALL_GEMM_ROWS = 128


@dataclass(frozen=True, slots=True)
class SmallGemmConfig:
    """How one (out_features, in_features, rows) is cut up. Changes speed, and rounding a little."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


# (out_features, in_features): one config for each bucket of rows, up to 16, 32, 64 and 128.
# From `python -m tests.gpu.bench_kernels --gemm-sweep` on an H200; what is not here is F.linear.
_BUCKETS = (16, 32, 64, 128)
_CONFIGS: dict[tuple[int, int], tuple[SmallGemmConfig | None, ...]] = {
    (4096, 1024): (
        SmallGemmConfig(16, 64, 128, 4, 4, 3),
        SmallGemmConfig(32, 64, 128, 4, 4, 3),
        SmallGemmConfig(64, 64, 128, 2, 4, 4),
        SmallGemmConfig(128, 64, 64, 2, 4, 4),
    ),
    (1024, 2048): (
        SmallGemmConfig(16, 32, 128, 8, 4, 3),
        SmallGemmConfig(32, 32, 128, 8, 4, 3),
        SmallGemmConfig(64, 64, 128, 8, 4, 3),
        SmallGemmConfig(128, 64, 64, 8, 4, 4),
    ),
    (6144, 1024): (
        SmallGemmConfig(16, 64, 128, 4, 4, 3),
        SmallGemmConfig(32, 64, 128, 4, 4, 3),
        SmallGemmConfig(64, 64, 128, 2, 4, 4),
        SmallGemmConfig(128, 64, 64, 1, 4, 4),
    ),
    (1024, 3072): (
        SmallGemmConfig(16, 32, 128, 8, 4, 3),
        SmallGemmConfig(32, 32, 128, 8, 4, 3),
        SmallGemmConfig(64, 64, 128, 8, 4, 3),
        SmallGemmConfig(128, 64, 64, 8, 4, 4),
    ),
}


@dataclass(frozen=True, slots=True)
class SmallGemmWorkspace:
    """Scratch memory that calls on one stream share; the counters are 0 between calls."""

    partials: torch.Tensor  # [size] float32
    counters: torch.Tensor  # [max_tiles] int32


def make_workspace(device: torch.device | str) -> SmallGemmWorkspace:
    """Allocate what the largest config needs."""
    return SmallGemmWorkspace(
        torch.empty(4 * 2**20, dtype=torch.float32, device=device),
        torch.zeros(1024, dtype=torch.int32, device=device),
    )


def find_config(num_rows: int, out_features: int, in_features: int) -> SmallGemmConfig | None:
    """Return the measured config for a shape, or None where F.linear is the better choice."""
    configs = _CONFIGS.get((out_features, in_features))
    if configs is None or not 0 < num_rows <= MAX_SMALL_GEMM_ROWS:
        return None
    return next(c for c, limit in zip(configs, _BUCKETS, strict=True) if num_rows <= limit)


def small_gemm(
    x: torch.Tensor, weight: torch.Tensor, workspace: SmallGemmWorkspace
) -> torch.Tensor:
    """Return `x @ weight.T`, [num_rows, out_features]; `F.linear` for shapes without a config.

    x: [num_rows, in_features], rows may be strided; weight: [out_features, in_features]
    """
    config = find_config(x.shape[0], *weight.shape) if use_triton(x) else None
    if config is None or x.dtype == torch.float32:
        return small_gemm_reference(x, weight, workspace)
    return small_gemm_triton(x, weight, workspace, config)


def small_gemm_reference(
    x: torch.Tensor, weight: torch.Tensor, workspace: SmallGemmWorkspace | None = None
) -> torch.Tensor:
    """Library form of `small_gemm`."""
    return F.linear(x, weight)


def small_gemm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: SmallGemmWorkspace,
    config: SmallGemmConfig,
) -> torch.Tensor:
    """Triton form of `small_gemm`: a program takes one output tile's share of K."""
    num_rows, in_features = x.shape
    out_features = weight.shape[0]
    assert x.stride(1) == 1, "rows must be contiguous"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert out_features % config.block_n == 0, "the config does not fit out_features"
    assert in_features % (config.split_k * config.block_k) == 0, "does not fit in_features"
    grid = (
        out_features // config.block_n,
        config.split_k,
        triton.cdiv(num_rows, config.block_m),
    )
    num_tiles = grid[0] * grid[2]
    partial_size = num_tiles * config.split_k * config.block_m * config.block_n
    if config.split_k > 1:
        assert num_tiles <= workspace.counters.numel(), "the workspace is too small"
        assert partial_size <= workspace.partials.numel(), "the workspace is too small"
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    _small_gemm_kernel[grid](
        x,
        weight,
        out,
        workspace.partials,
        workspace.counters,
        num_rows,
        x.stride(0),
        OUT_FEATURES=out_features,
        IN_FEATURES=in_features,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@triton.jit
def _small_gemm_kernel(
    x,
    weight,
    out,
    partials,
    counters,
    num_rows,
    x_stride,
    OUT_FEATURES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    column_tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    SHARE: tl.constexpr = IN_FEATURES // SPLIT_K
    features = split * SHARE + tl.arange(0, BLOCK_K)
    row_mask = rows[:, None] < num_rows

    x_pointers = x + rows[:, None] * x_stride + features[None, :]
    weight_pointers = weight + columns[None, :] * IN_FEATURES + features[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, SHARE, BLOCK_K):
        left = tl.load(x_pointers, mask=row_mask, other=0.0)
        sums = tl.dot(left, tl.load(weight_pointers), sums)
        x_pointers += BLOCK_K
        weight_pointers += BLOCK_K

    out_pointers = out + rows[:, None] * OUT_FEATURES + columns[None, :]
    if SPLIT_K == 1:
        tl.store(out_pointers, sums.to(out.dtype.element_ty), mask=row_mask)
    else:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        tile = tl.program_id(2) * tl.num_programs(0) + column_tile
        inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tile_partials = partials + tile * (SPLIT_K * TILE) + inside
        tl.store(tile_partials + split * TILE, sums, mask=row_mask)
        # All threads' stores come before the one thread's release below.
        tl.debug_barrier()
        num_before = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if num_before == SPLIT_K - 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLIT_K):
                # From L2: another SM wrote it, and this SM's L1 may hold the last call's.
                total += tl.load(
                    tile_partials + other * TILE, mask=row_mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(out_pointers, total.to(out.dtype.element_ty), mask=row_mask)
            tl.store(counters + tile, 0)
