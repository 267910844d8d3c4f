"""Time decode's projections, fused and not: `python -m tests.gpu.bench_fused_gemm`, about 60 s.

Each figure is a chain of 28 layers with weights of their own in one CUDA graph, so that weights
come from memory and kernels overlap as they do in a decode step of Qwen3-0.6B; divided by 28.

    chain A: add+norm, qkv, QK-norm+rope+store
    chain B: add+norm, gate_up, silu, down
    layer:   A, output projection, B: a layer without attention

Settings are printed as block_m x columns x block_k, warps w, stages s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from nanovllm.engine.warmup import run_in_threads
from nanovllm.fused.gate_up_silu import gate_up_silu_reference, gate_up_silu_triton
from nanovllm.fused.qkv_rope_store import qkv_rope_store_reference, qkv_rope_store_triton
from nanovllm.fused.tiles import Tiles
from nanovllm.kernels._triton import pdl_options, triton
from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.paged_attention import paged_attention_triton
from nanovllm.kernels.qk_norm_rope_store import qk_norm_rope_store_triton
from nanovllm.kernels.rms_norm import add_rms_norm_triton
from nanovllm.kernels.silu_and_mul import silu_and_mul_triton
from nanovllm.kernels.split_gemm import _split_gemm_kernel, split_gemm

BANDWIDTH = 4.24e12  # bytes/s, what a plain copy reaches on an H200
WITH_ATTENTION = (16, 64, 128, 256)
BATCHES = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512)
NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, SIZE, PAGE = 28, 1024, 16, 8, 128, 3072, 64
Timer = Callable[[Callable[[], object]], float]
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
EPS = 1e-6

# Largest block_m first; a batch tries those that it fills at least half of, in 8 row tiles or less.
QKV_TILES = [
    Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 4), Tiles(128, 128, 8, 3), Tiles(128, 64, 4, 4),
    Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 4), Tiles(64, 64, 4, 6), Tiles(64, 128, 4, 3),
    Tiles(64, 64, 8, 4), Tiles(64, 128, 4, 4),
    Tiles(32, 64, 4, 4), Tiles(32, 64, 4, 7), Tiles(32, 128, 4, 3), Tiles(32, 128, 8, 4),
    Tiles(16, 64, 4, 4), Tiles(16, 64, 4, 8), Tiles(16, 128, 4, 3), Tiles(16, 128, 4, 5),
    Tiles(16, 128, 8, 4), Tiles(16, 256, 8, 3),
]  # fmt: skip
GATE_UP_TILES = [
    Tiles(128, 64, 8, 3, 64), Tiles(128, 64, 8, 4, 64), Tiles(128, 64, 4, 4, 32),
    Tiles(128, 64, 8, 5, 32), Tiles(128, 128, 8, 3, 64), Tiles(128, 128, 8, 3, 32),
    Tiles(64, 64, 4, 4, 64), Tiles(64, 64, 4, 4, 32), Tiles(64, 64, 4, 6, 32),
    Tiles(64, 128, 4, 3, 32), Tiles(64, 128, 4, 4, 16), Tiles(64, 128, 4, 3, 64),
    Tiles(32, 64, 4, 6, 32), Tiles(32, 128, 4, 4, 32), Tiles(32, 128, 4, 4, 16),
    Tiles(16, 64, 4, 6, 32), Tiles(16, 128, 4, 4, 32), Tiles(16, 128, 4, 4, 16),
    Tiles(16, 128, 4, 6, 16), Tiles(16, 256, 4, 3, 16), Tiles(16, 128, 2, 5, 16),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Split:
    """How the split GEMM is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_splits: int
    num_warps: int = 4


SPLITS = [
    Split(128, 64, 64, 5, 4), Split(128, 64, 64, 5, 2), Split(128, 128, 64, 4, 4, 8),
    Split(128, 64, 64, 5, 2, 8), Split(128, 128, 64, 4, 2, 8),
    Split(64, 64, 128, 4, 4), Split(64, 64, 64, 6, 2), Split(64, 64, 128, 3, 2),
    Split(64, 32, 128, 4, 4), Split(64, 32, 128, 4, 2), Split(64, 64, 128, 3, 8),
    Split(64, 64, 64, 5, 4), Split(64, 64, 128, 4, 2), Split(64, 128, 64, 4, 4, 8),
    Split(128, 32, 64, 5, 4),
    Split(32, 32, 128, 4, 4), Split(32, 64, 128, 4, 8), Split(32, 32, 128, 4, 2),
    Split(16, 32, 128, 4, 4), Split(16, 64, 128, 4, 8), Split(16, 32, 256, 3, 4),
    Split(16, 16, 256, 3, 2),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kernels a chain is made of; None is today's."""

    qkv: Tiles | None = None
    gate_up: Tiles | None = None
    o: Split | None = None
    down: Split | None = None


def split(x: torch.Tensor, weight: torch.Tensor, how: Split | None) -> torch.Tensor:
    if how is None:
        return split_gemm(x, weight)
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    shape = (how.num_splits, num_rows, out_features)
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_rows, how.block_m), out_features // how.block_n, how.num_splits)
    _split_gemm_kernel[grid](
        x, weight, out, num_rows, x.stride(0), OUT_FEATURES=out_features, IN_FEATURES=in_features,
        BLOCK_M=how.block_m, BLOCK_N=how.block_n, BLOCK_K=how.block_k, NUM_SPLITS=how.num_splits,
        num_warps=how.num_warps, num_stages=how.num_stages, **pdl_options(x),
    )  # fmt: skip
    return out


class Model:
    """The weights of all layers, and what a step of `num_rows` rows needs beside them."""

    def __init__(self) -> None:
        def weight(*shape: int) -> list[torch.Tensor]:
            return [torch.randn(shape, **BF16) / shape[1] ** 0.5 for _ in range(NUM_LAYERS)]

        self.qkv = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.o = weight(HIDDEN, HEADS * HEAD_DIM)
        self.gate_up = weight(2 * SIZE, HIDDEN)
        self.down = weight(HIDDEN, SIZE)
        self.norm = torch.rand(HIDDEN, **BF16) + 0.5
        self.q_norm, self.k_norm = torch.rand(2, HEAD_DIM, **BF16) + 0.5
        angles = torch.rand(4096, HEAD_DIM // 2, device="cuda") * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def batch(self, num_rows: int, context: int = 800) -> Batch:
        return Batch(self, num_rows, context)


class Batch:
    """Inputs of one batch size: lengths of 0.2 to 1.8 times the mean, pages in disorder."""

    def __init__(self, model: Model, num_rows: int, context: int, num_caches: int = 2) -> None:
        self.model, self.num_rows, self.num_caches = model, num_rows, num_caches
        lens = torch.linspace(0.2 * context, 1.8 * context, num_rows).int()
        lens = lens[torch.randperm(num_rows)] if num_rows > 1 else torch.tensor([context]).int()
        pages = -(-lens // PAGE)
        width = 16 + int(pages.max()) // 16 * 16
        ids = torch.randperm(int(pages.sum()), dtype=torch.int32)
        self.tables = torch.zeros(num_rows, width, dtype=torch.int32)
        slots = torch.zeros(num_rows, dtype=torch.int64)
        start = 0
        for row, (count, seq_len) in enumerate(zip(pages.tolist(), lens.tolist(), strict=True)):
            self.tables[row, :count] = ids[start : start + count]
            slots[row] = self.tables[row, (seq_len - 1) // PAGE] * PAGE + (seq_len - 1) % PAGE
            start += count
        self.tables, self.slots = self.tables.cuda(), slots.cuda()
        self.seq_lens = lens.cuda()
        self.positions = self.seq_lens - 1
        shape = (num_caches, 2, len(ids), PAGE, KV_HEADS, HEAD_DIM)
        self.caches = torch.randn(shape, **BF16)
        self.x = torch.randn(num_rows, HIDDEN, **BF16)
        self.wide = torch.randn(num_rows, HEADS * HEAD_DIM, **BF16)
        self.residual = torch.zeros(num_rows, HIDDEN, **BF16)
        self.plan: DecodePlan | None = None  # graphs hold its addresses

    def qkv(self, layer: int, x: torch.Tensor, tiles: Tiles | None) -> torch.Tensor:
        """From the normed x to q, [num_rows, HEADS, HEAD_DIM]; k and v are stored."""
        model = self.model
        k_cache, v_cache = self.caches[layer % self.num_caches]
        norms = (model.q_norm, model.k_norm, EPS)
        place = (model.cos_sin, self.positions, self.slots, k_cache, v_cache)
        if tiles is not None:
            return qkv_rope_store_triton(x, model.qkv[layer], *norms, *place, HEADS, tiles)
        qkv = F.linear(x, model.qkv[layer])
        qk_norm_rope_store_triton(qkv, *norms, *place, HEADS, KV_HEADS, HEAD_DIM)
        return qkv.view(self.num_rows, -1, HEAD_DIM)[:, :HEADS]

    def mlp(self, layer: int, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        weight = self.model.gate_up[layer]
        if choice.gate_up is None:
            activated = silu_and_mul_triton(F.linear(x, weight))
        else:
            activated = gate_up_silu_triton(x, weight, choice.gate_up)
        return split(activated, self.model.down[layer], choice.down)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return add_rms_norm_triton(x, self.residual, self.model.norm, EPS)[0]

    def chain_a(self, choice: Choice) -> None:
        for layer in range(NUM_LAYERS):
            self.qkv(layer, self.norm(self.x), choice.qkv)

    def chain_b(self, choice: Choice) -> None:
        x = self.x
        for layer in range(NUM_LAYERS):
            x = self.mlp(layer, self.norm(x), choice)

    def layers(self, choice: Choice, attend: Callable[..., torch.Tensor] | None = None) -> None:
        x = self.x
        for layer in range(NUM_LAYERS):
            q = self.qkv(layer, self.norm(x), choice.qkv)
            wide = self.wide if attend is None else attend(q, layer).view(self.num_rows, -1)
            x = split(wide, self.model.o[layer], choice.o)
            x = self.mlp(layer, self.norm(x), choice)

    def layers_with_attention(self, choice: Choice) -> None:
        if self.plan is None:
            self.plan = DecodePlan(
                num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                max_num_seqs=self.num_rows, dtype=torch.bfloat16, device=torch.device("cuda"),
            )  # fmt: skip
        work = self.plan.cut(self.seq_lens)
        self.residual.zero_()  # an ordinary kernel stands between, as the embedding does

        def attend(q: torch.Tensor, layer: int) -> torch.Tensor:
            k_cache, v_cache = self.caches[layer % self.num_caches]
            tensors = (q, k_cache, v_cache, self.tables, self.seq_lens)
            return paged_attention_triton(*tensors, HEAD_DIM**-0.5, work)

        self.layers(choice, attend)


def graph_us(step: Callable[[], object], stream: torch.cuda.Stream, replays: int = 12) -> float:
    """Return the time of a step's layer in microseconds."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        # Not `torch.cuda.graph`, which may collect garbage.
        graph.capture_begin()
        try:
            step()
        finally:
            graph.capture_end()
        for _ in range(2):
            graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / replays / NUM_LAYERS


def fits(block_m: int, num_rows: int) -> bool:
    return block_m <= max(64, 2 * num_rows - 1) and num_rows <= 8 * block_m


def name(how: Tiles | Split | None) -> str:
    if how is None:
        return "today"
    if isinstance(how, Tiles):
        shape = f"{how.block_m}x2*{how.width}x{how.block_k}"
        return f"{shape} {how.num_warps}w{how.num_stages}s" + ("" if how.prefetch else " nopf")
    return f"{how.block_m}x{how.block_n}x{how.block_k}/{how.num_splits} " + (
        f"{how.num_warps}w{how.num_stages}s"
    )


def best(
    candidates: Iterable[Any], num_rows: int, time_of: Callable[[Any], float]
) -> list[tuple[float, Any]]:
    """Return (us, setting) of those that fit and run, fastest first."""
    found = []
    for how in candidates:
        if fits(how.block_m, num_rows) and how not in _BROKEN:
            found.append((time_of(how), how))
    return sorted(found, key=lambda pair: pair[0])


_BROKEN: set[Any] = set()  # what does not compile, say for want of shared memory


def compile_all(model: Model) -> None:
    """Compile every candidate in threads, and hold the fused ones against their references."""
    batch = Batch(model, 40, 100)
    x = batch.norm(batch.x)
    expected = gate_up_silu_reference(x, model.gate_up[0])
    norms = (model.q_norm, model.k_norm, EPS)
    caches = torch.zeros_like(batch.caches[0])
    place = (model.cos_sin, batch.positions, batch.slots)
    expected_q = qkv_rope_store_reference(x, model.qkv[0], *norms, *place, *caches, HEADS)

    def try_gate_up(how: Tiles) -> None:
        # One rounding of gate or up, times the other.
        close(gate_up_silu_triton(x, model.gate_up[0], how), expected, 2**-5)

    def try_qkv(how: Tiles) -> None:
        mine = torch.zeros_like(caches)
        q = qkv_rope_store_triton(x, model.qkv[0], *norms, *place, *mine, HEADS, how)
        close(q, expected_q, 2**-4)
        close(mine, caches, 2**-4)

    def try_split(how: Split) -> None:
        shares = split(batch.wide, model.o[0], how)
        close(shares.sum(0).to(x.dtype), F.linear(batch.wide, model.o[0]), 2**-5)
        split(expected, model.down[0], how)

    def job(function: Callable[[Any], None], how: Any) -> None:
        try:
            function(how)
            torch.cuda.synchronize()
        except Exception as error:  # any: a setting that fails is left out, and said
            _BROKEN.add(how)
            print("left out:", name(how), str(error).strip().replace("\n", " ")[:160])

    jobs = [partial(job, try_qkv, how) for how in QKV_TILES]
    jobs += [partial(job, try_gate_up, how) for how in GATE_UP_TILES]
    jobs += [partial(job, try_split, how) for how in SPLITS]
    for num_rows in (1, *WITH_ATTENTION):  # today's, and attention
        batch = Batch(model, num_rows, 100)
        jobs.append(partial(batch.layers_with_attention, Choice()))
    run_in_threads(jobs, torch.device("cuda"), 16)


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=atol)


def bound_us(*sizes: int) -> float:
    """Time that the weights' bytes alone take."""
    return 2 * HIDDEN * sum(sizes) / BANDWIDTH * 1e6


def line(label: str, today: float, found: list[tuple[float, Any]], bound: float) -> None:
    shown = [f"{name(how)} {us:.2f}" for us, how in found[:3]]
    us = found[0][0] if found else today
    print(f"  {label:<6} {today:6.2f} -> {us:6.2f} ({bound / us:4.0%}): {'; '.join(shown)}")


def sweep(model: Model, batches: Iterable[int], timer: Timer) -> dict[int, Choice]:
    chosen = {}
    a_bound, o_bound, b_bound = bound_us(4096), bound_us(2048), bound_us(6144, 3072)
    for num_rows in batches:
        batch = model.batch(num_rows, 16)
        print(f"M={num_rows}")
        today = timer(partial(batch.chain_a, Choice()))
        a = best(QKV_TILES, num_rows, lambda how, b=batch: timer(
            partial(b.chain_a, Choice(qkv=how))))  # fmt: skip
        line("A", today, a, a_bound)
        today = timer(partial(batch.chain_b, Choice()))
        b = best(GATE_UP_TILES, num_rows, lambda how, b=batch: timer(
            partial(b.chain_b, Choice(gate_up=how))))  # fmt: skip
        line("B", today, b, b_bound)
        fused = Choice(qkv=a[0][1], gate_up=b[0][1])
        total = timer(partial(batch.layers, Choice()))
        with_fused = timer(partial(batch.layers, fused))

        def with_split(how: Split, f: Choice = fused, b: Batch = batch) -> float:
            return timer(partial(b.layers, Choice(f.qkv, f.gate_up, how, how)))

        splits = best(SPLITS, num_rows, with_split) or [(with_fused, None)]
        line("split", with_fused, splits, o_bound + b_bound + a_bound)
        if splits[0][0] < with_fused - 0.1:
            fused = Choice(fused.qkv, fused.gate_up, splits[0][1], splits[0][1])
        no_prefetch = Choice(
            replace(fused.qkv, prefetch=False), replace(fused.gate_up, prefetch=False),
            fused.o, fused.down,
        )  # fmt: skip
        parts = {
            "today": total,
            "A": timer(partial(batch.layers, Choice(qkv=fused.qkv))),
            "B": timer(partial(batch.layers, Choice(gate_up=fused.gate_up))),
            "A+B": with_fused,
            "+split": splits[0][0],
        }
        if num_rows in (64, 256):  # each compiles two kernels
            parts["without prefetch"] = timer(partial(batch.layers, no_prefetch))
        text = ", ".join(f"{label} {us * NUM_LAYERS / 1000:.3f}" for label, us in parts.items())
        print(f"  step without attention, ms: {text}", flush=True)
        chosen[num_rows] = fused
    return chosen


def with_attention(model: Model, chosen: dict[int, Choice], timer: Timer) -> None:
    """All layers at a mean context of 800."""
    for num_rows, choice in chosen.items():
        batch = model.batch(num_rows)
        today, fused = (
            timer(partial(batch.layers_with_attention, how)) * NUM_LAYERS / 1000
            for how in (Choice(), choice)
        )
        print(f"M={num_rows} layers at context 800, ms: {today:.3f}, fused {fused:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    started = time.perf_counter()
    model = Model()
    compile_all(model)
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    timer = partial(graph_us, stream=torch.cuda.Stream())
    chosen = sweep(model, arguments.batches, timer)
    print(f"swept after {time.perf_counter() - started:.1f} s", flush=True)
    with_attention(model, {n: c for n, c in chosen.items() if n in WITH_ATTENTION}, timer)
    print(f"done after {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
