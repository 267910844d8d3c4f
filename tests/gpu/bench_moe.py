"""Check and time layers of Qwen3-30B-A3B on a GPU: `python -m tests.gpu.bench_moe [--sweep]`.

With `--fp8 block` the experts are fp8 as in Qwen3-30B-A3B-FP8, with `--fp8 fp8` a scale a row.

Times are of calls inside a CUDA graph over several batches, so that weights come from memory and
experts change from call to call. A bound is bytes over copy bandwidth or flops over the peak that
dense GEMMs reach, whichever is longer; only experts that a batch asks for count.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from nanovllm.kernels.rms_norm import add_rms_norm_triton
from nanovllm.kernels.split_gemm import split_gemm
from nanovllm.layers.placement import Placement
from nanovllm.moe.grouped_gemm import (
    Scales,
    TileConfig,
    config_for,
    down_triton,
    gate_up_triton,
)
from nanovllm.moe.layer import SparseMLP
from nanovllm.moe.plan import Plan, make_plan_reference, make_plan_triton
from nanovllm.moe.routing import route_reference, route_triton
from nanovllm.quantization.experts import Fp8Experts
from nanovllm.quantization.formats import FORMATS
from nanovllm.quantization.kernels.quantize import quantize
from nanovllm.utils.parallel import ParallelContext
from tests.gpu.bench_kernels import BANDWIDTH, graph_us
from tests.gpu.needs_gpu import need_gpus

PEAK = 790e12  # flop/s that large bf16 GEMMs reach on an H200; of fp8 twice as many
HIDDEN, EXPERTS, TOP_K, SIZE = 2048, 128, 8, 768
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 8192)
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
# batch: rows a tile to try
SWEEP = {1: (16,), 16: (16,), 64: (16,), 128: (16, 32), 256: (16, 32, 64), 512: (32, 64)}
SWEEP |= {1024: (64, 128), 8192: (128,)}
SMALL = [
    TileConfig(*numbers)
    for numbers in [
        (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4),
        (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (64, 128, 8, 4),
    ]
]  # fmt: skip
FP8_SMALL = [
    TileConfig(*numbers)
    for numbers in [
        (32, 128, 4, 5), (64, 128, 4, 4), (64, 128, 4, 6), (128, 128, 4, 3), (128, 128, 4, 4),
        (128, 128, 8, 4), (64, 128, 2, 5), (256, 128, 8, 3),
    ]
]  # fmt: skip
FP8_LARGE = [
    TileConfig(*numbers)
    for numbers in [
        (64, 128, 4, 4), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4), (128, 128, 8, 4, 8),
        (256, 128, 8, 3), (256, 128, 8, 3, 8), (128, 128, 4, 4, 8), (256, 128, 8, 4, 8),
    ]
]  # fmt: skip
LARGE = [
    TileConfig(*numbers)
    for numbers in [
        (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (128, 64, 8, 4), (256, 64, 8, 3),
        (256, 64, 8, 4), (256, 64, 4, 3), (256, 64, 8, 3, 4), (256, 64, 8, 3, 32),
        (256, 64, 8, 4, 8), (128, 64, 8, 4, 8), (256, 128, 8, 2, 4),
    ]
]  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Rows and where a router sends them; skewed as a trained router's, some experts idle."""

    x: torch.Tensor
    pair_weights: torch.Tensor
    expert_ids: torch.Tensor


def make_layer(
    size: int = SIZE, num_experts: int = EXPERTS, top_k: int = TOP_K, *, fp8: str | None = None
) -> SparseMLP:
    """fp8: a name in FORMATS, for experts in it"""
    place = Placement(ParallelContext.single(), torch.device("cuda"), torch.bfloat16)
    layer = SparseMLP(num_experts, HIDDEN, size, place, top_k=top_k, is_normalized=True)
    for parameter in layer.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    if fp8 is not None:
        plain: Any = layer.experts
        layer.experts = Fp8Experts(plain, FORMATS[fp8], ParallelContext.single())
        layer.experts.fill_with_noise(torch.Generator("cuda").manual_seed(0))
    return layer


def make_batch(layer: SparseMLP, n: int) -> Batch:
    x = torch.randn(n, HIDDEN, **BF16)
    logits = F.linear(x, layer.gate.weight)
    routes = route_triton(logits, layer._top_k, is_normalized=True, dtype=x.dtype)
    return Batch(x, *routes)


def by_loop(layer: SparseMLP, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """The definition: a Python loop over experts, which waits for the device at each."""
    x, experts = batch.x.to(dtype), layer.experts
    out = torch.zeros_like(x)
    for expert in range(len(experts.down_proj)):
        tokens, places = (batch.expert_ids == expert).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        gate, up = F.linear(x[tokens], experts.gate_up_proj[expert].to(dtype)).chunk(2, dim=-1)
        product = F.linear(F.silu(gate) * up, experts.down_proj[expert].to(dtype))
        weighted = product * batch.pair_weights[tokens, places].unsqueeze(1)
        out.index_add_(0, tokens, weighted.to(dtype))
    return out


# ---- are they right


def check() -> None:
    shapes = [(SIZE, EXPERTS, TOP_K), (384, EXPERTS, TOP_K), (96, 60, 4), (SIZE, 16, 1)]
    layers = [make_layer(*shape) for shape in shapes]
    sizes = (1, 7, 200, 513, 3000)
    with ThreadPoolExecutor(16) as pool:  # only to compile at once
        jobs = [(layer, torch.randn(n, HIDDEN, **BF16)) for layer in layers for n in sizes]
        list(pool.map(lambda job: job[0](job[1]), jobs))
    for layer, (size, num_experts, top_k) in zip(layers, shapes, strict=True):
        for n in sizes:
            check_batch(layer, n)
        print(f"check: size {size}, {num_experts} experts, top {top_k}: as the loop", flush=True)
        check_capture(layer)
    layer = make_layer(96, 16, 2)
    batch = make_batch(layer, 77)
    layer.float()
    ours = layer.experts(batch.x.float(), batch.pair_weights, batch.expert_ids).sum(0)
    expected = by_loop(layer, batch, torch.float64)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    print("check: float32 is float32, not TF32", flush=True)


def check_batch(layer: SparseMLP, n: int) -> None:
    batch = make_batch(layer, n)
    routing = {"is_normalized": True, "dtype": torch.bfloat16}
    for logits in (
        F.linear(batch.x, layer.gate.weight),
        torch.randn(4, n, 128, device=BF16["device"]),
    ):
        ours = route_triton(logits, layer._top_k, **routing)
        expected = route_reference(logits, layer._top_k, **routing)
        # Sums of shares may round to other neighbours, and equal logits then part.
        share_equal = (ours[1] == expected[1]).float().mean().item()
        assert share_equal > (0.98 if logits.dim() == 3 else 0.9999), share_equal
    num_experts = len(layer.experts.down_proj)
    block_m = config_for(batch.expert_ids.numel(), num_experts, torch.bfloat16).block_m
    plan = make_plan_triton(batch.expert_ids, num_experts, block_m)
    expected_plan = make_plan_reference(batch.expert_ids, num_experts, block_m)
    assert torch.equal(plan.order, expected_plan.order)
    assert torch.equal(plan.tiles, expected_plan.tiles)
    shares = layer.experts(batch.x, batch.pair_weights, batch.expert_ids)
    assert torch.equal(shares, layer.experts(batch.x, batch.pair_weights, batch.expert_ids))
    truth = by_loop(layer, batch, torch.float32)
    error = (shares.float().sum(0) - truth).abs().mean() / truth.abs().mean()
    loop_error = (by_loop(layer, batch, torch.bfloat16).float() - truth).abs().mean()
    loop_error = loop_error / truth.abs().mean()
    assert error < 1.2 * loop_error + 1e-4, (n, error.item(), loop_error.item())


def check_capture(layer: SparseMLP) -> None:
    """One graph, batches that fall on other experts, one of them all on the same."""
    x = torch.randn(48, HIDDEN, **BF16)
    with torch.cuda.stream(torch.cuda.Stream()):
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for kind in ("random", "same", "padded"):
        rows = torch.randn(48, HIDDEN, **BF16)
        if kind == "same":
            rows = rows[:1].expand(48, -1)
        x.copy_(rows)
        if kind == "padded":
            x[20:] = float("nan")
        graph.replay()
        expected = layer(x)
        num_live = 20 if kind == "padded" else 48
        assert torch.equal(out[:, :num_live], expected[:, :num_live]), kind
        assert out[:, :num_live].isfinite().all(), kind
    print("check: a captured layer follows its input", flush=True)


def check_fp8() -> None:
    """As torch with the same roundings, and captured."""
    for kind in ("fp8", "fp8_block"):
        for shape in ((SIZE, EXPERTS, TOP_K), (384, 16, 2)):
            layer = make_layer(*shape, fp8=kind)
            experts: Any = layer.experts
            for n in (1, 7, 200, 513, 3000):
                batch = make_batch(layer, n)
                rows = quantize(batch.x, experts._format.group_size, is_gathered=True)
                plan = make_plan_reference(batch.expert_ids, shape[1], n * shape[2])
                expected = experts._forward_reference(rows, plan, batch.pair_weights, batch.x.dtype)
                expected = expected.float()
                ours = experts(batch.x, batch.pair_weights, batch.expert_ids).float()
                error = (ours - expected).abs().mean() / expected.abs().mean()
                assert error < 0.01, (kind, shape, n, error.item())
            check_capture(layer)
        print(f"check: {kind} as torch", flush=True)


# ---- how fast are they


def bound_us(batch: Batch, weight_bytes: int, num_matrices: int = 3) -> float:
    """Of `num_matrices` of an expert's three."""
    num_active = len(batch.expert_ids.unique())
    num_bytes = float(weight_bytes) * num_matrices * HIDDEN * SIZE * num_active
    flops = 2.0 * num_matrices * HIDDEN * SIZE * batch.expert_ids.numel()
    return 1e6 * max(num_bytes / BANDWIDTH, flops / (PEAK * 2 / weight_bytes))


def bench(fp8: str | None) -> None:
    layer = make_layer(fp8=fp8)
    scale = torch.ones(HIDDEN, **BF16)
    dtype = layer.experts.down_proj.dtype
    print("us:      n    layer  bound  share | router  route   plan gate_up   down   norm |   loop")
    for n in BATCHES:
        batches = [make_batch(layer, n) for _ in range(2 if n > 512 else 12)]
        config = config_for(n * TOP_K, EXPERTS, dtype)
        plans = [make_plan_triton(b.expert_ids, EXPERTS, config.block_m) for b in batches]
        residual = torch.zeros(n, HIDDEN, **BF16)
        logits = [split_gemm(b.x, layer.gate.weight) for b in batches]
        shares = torch.randn(TOP_K, n, HIDDEN, **BF16)
        routing = {"is_normalized": True, "dtype": torch.bfloat16}

        def whole(batch: Batch, residual: torch.Tensor = residual) -> None:
            add_rms_norm_triton(layer(batch.x), residual, scale, 1e-6)

        parts = [
            [partial(split_gemm, b.x, layer.gate.weight) for b in batches],
            [partial(route_triton, item, TOP_K, **routing) for item in logits],
            [partial(make_plan_triton, b.expert_ids, EXPERTS, config.block_m) for b in batches],
            calls_of(layer, batches, plans, config.gate_up, True),
            calls_of(layer, batches, plans, config.down, False),
            [partial(add_rms_norm_triton, shares, residual, scale, 1e-6)] * len(batches),
        ]
        total = graph_us([partial(whole, b) for b in batches])
        bound = sum(bound_us(b, dtype.itemsize) for b in batches) / len(batches)
        times = " ".join(f"{graph_us(calls):6.1f}" for calls in parts)
        loop = 0.0 if fp8 else wall_us(partial(by_loop, layer, batches[0], torch.bfloat16))
        print(
            f"{n:10} {total:8.1f} {bound:6.1f} {bound / total:6.1%} | {times} | {loop:6.0f}",
            flush=True,
        )


def wall_us(call: Callable[[], object], repeats: int = 3) -> float:
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started) / repeats


# ---- which tiles


def sweep(fp8: str | None) -> None:
    """Time every cut of both products; the best of each batch first, in per cent of the bound."""
    layer = make_layer(fp8=fp8)
    small, large = sorted({m for ms in SWEEP.values() for m in ms if m < 64}), (64, 128)
    tiles = (FP8_SMALL, FP8_LARGE) if fp8 else (SMALL, LARGE)
    cuts = [*itertools.product(small, tiles[0]), *itertools.product(large, tiles[1])]
    started = time.perf_counter()
    batch = make_batch(layer, 8)
    usable = compile_all(layer, batch, cuts)
    print(f"compiled {len(usable)} of {2 * len(cuts)} in {time.perf_counter() - started:.0f} s")
    for n, rows in SWEEP.items():
        batches = [make_batch(layer, n) for _ in range(2 if n > 1024 else 8)]
        found: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
        for block_m in rows:
            plans = [make_plan_triton(b.expert_ids, EXPERTS, block_m) for b in batches]
            for m, tile in cuts:
                for is_gated in (True, False):
                    if m != block_m or (is_gated, m, tile) not in usable:
                        continue
                    calls = calls_of(layer, batches, plans, tile, is_gated)
                    us = graph_us(calls, replays=5)
                    name = f"{m}: {tile.block_n},{tile.block_k},{tile.num_warps},{tile.num_stages}"
                    found[is_gated].append((us, f"{name},{tile.group_m}"))
        for is_gated, times in found.items():
            size = layer.experts.down_proj.itemsize
            bounds = [bound_us(b, size, 2 if is_gated else 1) for b in batches]
            bound = sum(bounds) / len(bounds)
            best = "; ".join(f"{us:.1f} ({name})" for us, name in sorted(times)[:5])
            what = "gate_up" if is_gated else "down"
            print(f"n={n:<5} {what:<8} bound {bound:6.1f} us, best {best}", flush=True)


def calls_of(
    layer: SparseMLP,
    batches: Sequence[Batch],
    plans: Sequence[Plan],
    tile: TileConfig,
    is_gated: bool,
) -> list[Callable[[], object]]:
    """Of gate and up, or of down; of fp8 without the quantisation before them."""
    experts: Any = layer.experts
    group_size = experts._format.group_size if isinstance(experts, Fp8Experts) else None
    pairs = list(zip(batches, plans, strict=True))
    inner = torch.randn(batches[0].expert_ids.numel(), SIZE, **BF16)
    calls: list[Callable[[], object]] = []
    for batch, plan in pairs:
        x = batch.x if is_gated else inner
        weight = experts.gate_up_proj if is_gated else experts.down_proj
        scales = None
        if isinstance(experts, Fp8Experts):
            x, x_scale = quantize(x, group_size, is_gathered=True)
            weight_scale = experts.gate_up_proj_scale if is_gated else experts.down_proj_scale
            scales = Scales(x_scale, weight_scale, group_size, torch.bfloat16)
        if is_gated:
            calls.append(partial(gate_up_triton, x, weight, plan, tile, scales))
        else:
            calls.append(partial(down_triton, x, weight, plan, batch.pair_weights, tile, scales))
    return calls


def compile_all(
    layer: SparseMLP, batch: Batch, cuts: Sequence[tuple[int, TileConfig]]
) -> set[tuple[bool, int, TileConfig]]:
    """Compile in threads; return those that fit into the device."""
    usable = set()

    def first_call(is_gated: bool, block_m: int, tile: TileConfig) -> None:
        plan = make_plan_triton(batch.expert_ids, EXPERTS, block_m)
        try:
            calls_of(layer, [batch], [plan], tile, is_gated)[0]()
            usable.add((is_gated, block_m, tile))
        except Exception as error:
            print(f"left out {block_m} {tile}: {str(error)[:80]}")

    with ThreadPoolExecutor(16) as pool:
        jobs = [(gated, *cut) for gated in (True, False) for cut in cuts]
        list(pool.map(lambda job: first_call(*job), jobs))
    torch.cuda.synchronize()
    return usable


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="time all cuts, not the layer")
    parser.add_argument("--fp8", choices=("fp8", "block"), help="experts in fp8")
    arguments = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    fp8 = {"block": "fp8_block"}.get(arguments.fp8, arguments.fp8)
    if arguments.sweep:
        sweep(fp8)
    else:
        check_fp8() if fp8 else check()
        bench(fp8)


if __name__ == "__main__":
    main()
