"""The two products of the experts, over pairs that a plan has sorted by expert.

Up: rows of tokens times gate and up weights, with the gated activation behind. Down: activations
times down weights, times the routing weight, back at the pair's own place; the sum over a token's
experts is the business of whatever reads them, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
from torch.nn import functional as F

from nanovllm.kernels._triton import pdl_options, pdl_wait, tl, triton, use_triton
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.moe.plan import Plan


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one grouped GEMM is cut; rows a tile are the plan's."""

    block_n: int  # rows of weights
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1  # tiles that pass over the weights' blocks together


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """How both products of a layer are cut."""

    block_m: int
    gate_up: TileConfig
    down: TileConfig


class Scales(NamedTuple):
    """Scales of fp8 rows and weights, float32, and the dtype that products come out in."""

    x: torch.Tensor  # [num_rows, num_groups], any strides; one group if group_size is None
    weight: torch.Tensor  # [num_experts, out_features, 1], or [num_experts, blocks, num_groups]
    group_size: int | None  # numbers of a row that share a scale, and side of a weight's blocks
    dtype: torch.dtype


# Up to so many pairs an expert on average: rows a tile, and both products. The best of
# `python -m tests.gpu.bench_moe --sweep` for Qwen3-30B-A3B's 128 experts on an H200, or within 1 %.
_CONFIGS = {
    8: ExpertsConfig(16, TileConfig(64, 256, 4, 3), TileConfig(128, 128, 4, 3)),
    16: ExpertsConfig(32, TileConfig(128, 128, 4, 3), TileConfig(128, 128, 4, 3)),
    48: ExpertsConfig(64, TileConfig(256, 64, 8, 4), TileConfig(128, 64, 8, 4, 8)),
}
_LARGEST = ExpertsConfig(128, TileConfig(256, 64, 8, 4, 8), TileConfig(256, 64, 8, 4, 8))
# The same with --fp8 block, within 5 % also of a scale a row.
_FP8_CONFIGS = {
    8: ExpertsConfig(16, TileConfig(64, 128, 2, 5), TileConfig(128, 128, 4, 3)),
    16: ExpertsConfig(32, TileConfig(128, 128, 4, 3), TileConfig(128, 128, 4, 4)),
    64: ExpertsConfig(64, TileConfig(128, 128, 4, 4), TileConfig(128, 128, 4, 4, 8)),
}
_LARGEST_FP8 = ExpertsConfig(128, TileConfig(64, 128, 4, 4), TileConfig(64, 128, 4, 4))
_FLOAT32 = ExpertsConfig(32, TileConfig(64, 32, 4, 2), TileConfig(64, 32, 4, 2))


def config_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertsConfig:
    """Return how to cut a batch; it follows from shapes, not from where the pairs fall.

    dtype: the weights'
    """
    if dtype == torch.float32:
        return _FLOAT32
    configs, largest = (_CONFIGS, _LARGEST) if dtype.itemsize > 1 else (_FP8_CONFIGS, _LARGEST_FP8)
    fitting = (c for limit, c in configs.items() if num_pairs <= limit * num_experts)
    return next(fitting, largest)


def gate_up(x: torch.Tensor, weight: torch.Tensor, plan: Plan, config: TileConfig) -> torch.Tensor:
    """Return `silu(gate) * up` of all pairs in the plan's order, [num_pairs, size].

    x: [num_tokens, hidden_size]; weight: [num_experts, 2 * size, hidden_size], gate first
    """
    if use_triton(x):
        return gate_up_triton(x, weight, plan, config)
    return gate_up_reference(x, weight, plan)


def gate_up_reference(x: torch.Tensor, weight: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Plain torch form of `gate_up`; waits for the device."""
    top_k = len(plan.order) // len(x)
    out = x.new_empty(len(plan.order), weight.shape[1] // 2)
    for expert, first, end in plan.tiles.T.tolist():
        tokens = plan.order[first:end] // top_k
        out[first:end] = silu_and_mul_reference(F.linear(x[tokens], weight[expert]))
    return out


def down(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: Plan,
    pair_weights: torch.Tensor,
    config: TileConfig,
) -> torch.Tensor:
    """Return each pair's weighted product, [top_k, num_tokens, hidden_size], to be summed over 0.

    Args:
        x: [num_pairs, size], in the plan's order, contiguous
        weight: [num_experts, hidden_size, size]
        pair_weights: [num_tokens, top_k] float32
    """
    if use_triton(x):
        return down_triton(x, weight, plan, pair_weights, config)
    return down_reference(x, weight, plan, pair_weights)


def down_reference(
    x: torch.Tensor, weight: torch.Tensor, plan: Plan, pair_weights: torch.Tensor
) -> torch.Tensor:
    """Plain torch form of `down`; waits for the device."""
    out = x.new_empty(pair_weights.numel(), weight.shape[1])
    for expert, first, end in plan.tiles.T.tolist():
        pairs = plan.order[first:end]
        product = F.linear(x[first:end], weight[expert])
        scaled = product.float() * pair_weights.flatten()[pairs].unsqueeze(1)
        out[pairs] = scaled.to(x.dtype)
    return out.view(*pair_weights.shape, -1).transpose(0, 1)


def gate_up_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: Plan,
    config: TileConfig,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Triton form of `gate_up`, of fp8 too."""
    dtype = x.dtype if scales is None else scales.dtype
    out = x.new_empty(len(plan.order), weight.shape[1] // 2, dtype=dtype)
    _launch(x, weight, out, plan, None, len(plan.order) // len(x), config, scales)
    return out


def down_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: Plan,
    pair_weights: torch.Tensor,
    config: TileConfig,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Triton form of `down`, of fp8 too."""
    num_tokens, top_k = pair_weights.shape
    dtype = x.dtype if scales is None else scales.dtype
    out = x.new_empty(top_k, num_tokens, weight.shape[1], dtype=dtype)
    _launch(x, weight, out, plan, pair_weights, top_k, config, scales)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    plan: Plan,
    pair_weights: torch.Tensor | None,
    top_k: int,
    config: TileConfig,
    scales: Scales | None,
) -> None:
    _, out_features, in_features = weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows and weights must be contiguous"
    assert plan.tiles.is_contiguous(), "fields one after another"
    # A slice of a size, as ranks have it, may be no multiple: shorter steps beat masked loads.
    even = gcd(in_features, config.block_k)
    x_scale = weight_scale = group_size = None
    scale_strides: tuple[int, ...] = (0, 0)
    if scales is not None:
        x_scale, weight_scale, group_size = scales.x, scales.weight, scales.group_size
        scale_strides = scales.x.stride()
    block_k = group_size or (even if even >= 32 else config.block_k)
    stage_bytes = (plan.block_m + config.block_n) * block_k * x.element_size()
    num_stages = max(min(config.num_stages, _shared_memory_bytes(x.device) // stage_bytes), 1)
    num_tiles = plan.tiles.shape[1]
    _grouped_gemm_kernel[(num_tiles * triton.cdiv(out_features, config.block_n),)](
        x, weight, x_scale, weight_scale, out, plan.order, plan.tiles, pair_weights,
        len(plan.order), num_tiles, x.stride(0), *scale_strides,
        TOP_K=top_k, IN_FEATURES=in_features, OUT_FEATURES=out_features,
        IS_GATED=pair_weights is None, HAS_GROUPS=group_size is not None,
        BLOCK_M=plan.block_m, BLOCK_N=config.block_n, BLOCK_K=block_k, GROUP_M=config.group_m,
        num_warps=config.num_warps, num_stages=num_stages, **pdl_options(x),
    )  # fmt: skip


@cache
def _shared_memory_bytes(device: torch.device) -> int:
    """What one program may use: GPUs before and beside Hopper have less, so fewer stages."""
    if device.type != "cuda":
        return 2**18
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 2**17)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "scale_stride", "group_stride"])
def _grouped_gemm_kernel(
    x, weight, x_scale, weight_scale, out, order, tiles, pair_weights, num_pairs, num_tiles,
    x_stride, scale_stride, group_stride,
    TOP_K: tl.constexpr, IN_FEATURES: tl.constexpr, OUT_FEATURES: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    WIDTH: tl.constexpr = OUT_FEATURES // 2 if IS_GATED else OUT_FEATURES
    # Blocks of weights first, within groups of tiles: what runs together fits into the L2 cache.
    NUM_BLOCKS: tl.constexpr = (OUT_FEATURES + BLOCK_N - 1) // BLOCK_N
    first_of_group = tl.program_id(0) // (GROUP_M * NUM_BLOCKS) * GROUP_M
    within = tl.program_id(0) % (GROUP_M * NUM_BLOCKS)
    group_size = tl.minimum(num_tiles - first_of_group, GROUP_M)
    tile = first_of_group + within % group_size
    block = within // group_size
    # All three before the branch, so that they wait for memory together.
    expert = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + num_tiles + tile)
    end = tl.load(tiles + 2 * num_tiles + tile)
    if first >= end:
        return
    places = first + tl.arange(0, BLOCK_M)
    is_row = (places < end)[:, None]
    readable = tl.minimum(places, end - 1)
    pairs = tl.load(order + readable)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    features = tl.arange(0, BLOCK_K)
    weight_rows = tl.minimum(columns, OUT_FEATURES - 1)
    if IS_GATED:
        # Gate and up alternate, so that each thread's sums hold both of a pair.
        weight_rows = weight_rows // 2 + (weight_rows % 2) * (OUT_FEATURES // 2)
        x_rows = pairs // TOP_K
    else:
        x_rows = readable
    x_pointers = x + x_rows[:, None].to(tl.int64) * x_stride + features[None, :]
    weight_pointers = weight + expert * OUT_FEATURES * IN_FEATURES
    weight_pointers += weight_rows[None, :] * IN_FEATURES + features[:, None]
    NUM_GROUPS: tl.constexpr = (IN_FEATURES + BLOCK_K - 1) // BLOCK_K if HAS_GROUPS else 1
    if x_scale is not None:
        SIDE: tl.constexpr = BLOCK_K if HAS_GROUPS else 1
        x_scales = x_scale + x_rows.to(tl.int64) * scale_stride
        weight_scales = weight_scale + expert * ((OUT_FEATURES + SIDE - 1) // SIDE * NUM_GROUPS)
        weight_scales += weight_rows // SIDE * NUM_GROUPS
        row_scales = tl.load(x_scales, mask=places < end, other=0.0)
        column_scales = tl.load(weight_scales)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        if IN_FEATURES % BLOCK_K == 0:
            # Masked, not clamped: many programs that read one line wait for it.
            a = tl.load(x_pointers, mask=is_row, other=0.0)
            b = tl.load(weight_pointers)
        else:
            is_inside = features < IN_FEATURES - start
            a = tl.load(x_pointers, mask=is_row & is_inside[None, :], other=0.0)
            b = tl.load(weight_pointers, mask=is_inside[:, None], other=0.0)
        if x_scale is None:
            sums = tl.dot(a, b, sums, input_precision="ieee")
        else:
            # Added up outside of the tensor core, which keeps 14 bits of a sum of fp8 products.
            product = tl.dot(a, b)
            if HAS_GROUPS:
                product *= row_scales[:, None] * column_scales[None, :]
                # Those of the next block, so that no product waits for them.
                following = tl.minimum(start // BLOCK_K + 1, NUM_GROUPS - 1)
                row_scales = tl.load(
                    x_scales + following * group_stride, mask=places < end, other=0.0
                )
                column_scales = tl.load(weight_scales + following)
            sums += product
        x_pointers += BLOCK_K
        weight_pointers += BLOCK_K
    if x_scale is not None and not HAS_GROUPS:
        sums *= row_scales[:, None] * column_scales[None, :]
    if IS_GATED:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_M, BLOCK_N // 2, 2]))
        result = gate / (1.0 + tl.exp(-gate)) * up
        out_rows = places.to(tl.int64)
        columns = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        result = sums * tl.load(pair_weights + pairs)[:, None]
        out_rows = (pairs % TOP_K).to(tl.int64) * (num_pairs // TOP_K) + pairs // TOP_K
    mask = is_row & (columns < WIDTH)[None, :]
    targets = out + out_rows[:, None] * WIDTH + columns[None, :]
    tl.store(targets, result.to(out.dtype.element_ty), mask=mask)
