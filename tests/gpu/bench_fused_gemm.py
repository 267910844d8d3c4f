"""Time decode layers of Qwen3-0.6B: `python -m tests.gpu.bench_fused_gemm`, about 45 s.

Each figure is 28 layers without attention, with weights of their own in one CUDA graph, so that
weights come from memory and kernels overlap as they do in a decode step.

    plain:    norm, library QKV, QK-norm+rope+store, output projection, norm, gate-up, SiLU, down
    used:     what `nanovllm.fused` runs with as many rows
    best:     the same with the best tiles found, tried one kernel after another

Tiles are block_m x columns x block_k, then warps w, stages s and the most registers r of a thread.
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
from nanovllm.fused.gemm_add import gemm_add_reference, gemm_add_triton
from nanovllm.fused.product import NUM_COUNTERS
from nanovllm.fused.qkv_rope_store import qkv_rope_store_reference, qkv_rope_store_triton
from nanovllm.fused.tiles import (
    FEW,
    FEW_ROWS,
    MAX_GATE_UP_ROWS,
    MAX_QKV_ROWS,
    Tiles,
    gate_up_tiles,
    qkv_tiles,
)
from nanovllm.kernels._triton import triton
from nanovllm.kernels.qk_norm_rope_store import qk_norm_rope_store_triton
from nanovllm.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from nanovllm.kernels.silu_and_mul import silu_and_mul_triton
from nanovllm.kernels.split_gemm import split_gemm
from tests.gpu.needs_gpu import need_gpus

BATCHES = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512)
NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, SIZE, PAGE = 28, 1024, 16, 8, 128, 3072, 64
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
EPS = 1e-6


def split(block_m: int, block_k: int, num_warps: int, width: int = 64) -> Tiles:
    limit = 512 // num_warps  # four programs to an SM
    return Tiles(block_m, block_k, num_warps, 1, width, is_split=True, max_registers=limit)


FEW_BY_REGISTERS = [FEW, *(replace(FEW, max_registers=limit) for limit in (None, 96, 128, 168))]
ADD_TILES = [
    *FEW_BY_REGISTERS, split(16, 512, 4, 32), split(16, 1024, 8, 32), split(16, 256, 4),
    split(16, 256, 8),
]  # fmt: skip
QKV_TILES = [
    *FEW_BY_REGISTERS, split(16, 512, 4), split(16, 256, 8), split(16, 256, 4),
    Tiles(16, 128, 4, 5), Tiles(16, 128, 8, 4), Tiles(16, 256, 8, 3), Tiles(32, 128, 4, 3),
    Tiles(64, 64, 4, 6), Tiles(64, 128, 4, 4), Tiles(64, 128, 8, 4), Tiles(128, 64, 8, 3),
    Tiles(128, 64, 8, 4),
]  # fmt: skip
GATE_UP_TILES = [
    *FEW_BY_REGISTERS, split(16, 512, 8, 32), split(16, 1024, 8, 32), split(16, 256, 8),
    Tiles(16, 128, 4, 4, 32), Tiles(32, 128, 4, 4, 32), Tiles(64, 128, 4, 4, 16),
    Tiles(64, 128, 4, 3, 32), Tiles(64, 128, 4, 3, 64), Tiles(64, 64, 4, 6, 32),
    Tiles(64, 64, 4, 4, 32), Tiles(64, 64, 4, 4, 64), Tiles(128, 64, 8, 4, 64),
    Tiles(128, 64, 8, 5, 32),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """How the fused kernels are compiled."""

    add: Tiles
    qkv: Tiles
    gate_up: Tiles


class Model:
    """The weights of all layers."""

    def __init__(self) -> None:
        def weight(*shape: int) -> list[torch.Tensor]:
            return [torch.randn(shape, **BF16) / shape[1] ** 0.5 for _ in range(NUM_LAYERS)]

        self.qkv = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.o = weight(HIDDEN, HEADS * HEAD_DIM)
        self.gate_up = weight(2 * SIZE, HIDDEN)
        self.down = weight(HIDDEN, SIZE)
        self.norm = torch.rand(HIDDEN, **BF16) + 0.5
        q_norm, k_norm = torch.rand(2, HEAD_DIM, **BF16) + 0.5
        self.head_norms = (q_norm, k_norm, EPS)
        angles = torch.rand(4096, HEAD_DIM // 2, device="cuda") * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.num_done = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device="cuda")


class Batch:
    """Inputs of one batch size, each row's token in a page of its own."""

    def __init__(self, model: Model, num_rows: int) -> None:
        self.model, self.num_rows = model, num_rows
        positions = torch.arange(num_rows, device="cuda") % PAGE
        slots = torch.randperm(num_rows, device="cuda") * PAGE + positions
        # Two caches in turn, as layers have their own.
        self.caches = torch.zeros(2, 2, num_rows, PAGE, KV_HEADS, HEAD_DIM, **BF16)
        self.x = torch.randn(num_rows, HIDDEN, **BF16)
        self.attended = torch.randn(num_rows, HEADS * HEAD_DIM, **BF16)
        self.residual = torch.zeros(num_rows, HIDDEN, **BF16)
        self.place = (model.cos_sin, positions, slots)

    def qkv(self, layer: int, x: torch.Tensor, tiles: Tiles, squares: Any = None) -> None:
        model = self.model
        places = (*self.place, *self.caches[layer % 2])
        qkv_rope_store_triton(
            x, model.qkv[layer], *model.head_norms, *places, HEADS, tiles, squares=squares,
            num_done=model.num_done,
        )  # fmt: skip

    def seven(self, choice: Choice | None) -> None:
        """Layers with norms of their own; plain ones without a choice."""
        model, x = self.model, self.x
        for layer in range(NUM_LAYERS):
            x, _ = add_rms_norm_triton(x, self.residual, model.norm, EPS)
            if choice is not None and self.num_rows <= MAX_QKV_ROWS:
                self.qkv(layer, x, choice.qkv)
            else:
                qkv = F.linear(x, model.qkv[layer])
                places = (*self.place, *self.caches[layer % 2])
                qk_norm_rope_store_triton(
                    qkv, *model.head_norms, *places, HEADS, KV_HEADS, HEAD_DIM
                )
            x = split_gemm(self.attended, model.o[layer])
            x, _ = add_rms_norm_triton(x, self.residual, model.norm, EPS)
            if choice is not None and self.num_rows <= MAX_GATE_UP_ROWS:
                x = gate_up_silu_triton(x, model.gate_up[layer], tiles=choice.gate_up)
            else:
                x = silu_and_mul_triton(F.linear(x, model.gate_up[layer]))
            x = split_gemm(x, model.down[layer])

    def five(self, choice: Choice) -> None:
        model = self.model
        x, squares = rms_norm_triton(self.x, model.norm, EPS), None
        end = (self.residual, model.norm, model.num_done, choice.add)
        for layer in range(NUM_LAYERS):
            self.qkv(layer, x, choice.qkv, squares)
            x, squares = gemm_add_triton(self.attended, model.o[layer], *end)
            x = gate_up_silu_triton(
                x, model.gate_up[layer], squares, EPS, model.num_done, choice.gate_up
            )
            x, squares = gemm_add_triton(x, model.down[layer], *end)

    def fused(self, choice: Choice) -> None:
        layers = self.five if self.num_rows <= FEW_ROWS else self.seven
        layers(choice)

    def candidates(self) -> dict[str, list[Tiles]]:
        """Tiles of each fused kernel that fit the number of rows."""
        is_few = self.num_rows <= FEW_ROWS
        all_tiles: dict[str, list[Tiles]] = {"add": [], "qkv": [], "gate_up": []}
        if is_few:
            all_tiles["add"] = ADD_TILES
        if self.num_rows <= MAX_QKV_ROWS:
            all_tiles["qkv"] = QKV_TILES
        if self.num_rows <= MAX_GATE_UP_ROWS:
            all_tiles["gate_up"] = GATE_UP_TILES

        def fits(kernel: str, how: Tiles) -> bool:
            fits_rows = how.block_m <= max(64, 2 * self.num_rows - 1)
            is_wasteful = self.num_rows > 4 * max(64, how.block_m)
            fits_rows = fits_rows and not is_wasteful
            return how.is_split is is_few and fits_rows and (kernel, how) not in _BROKEN

        return {
            kernel: [how for how in tiles if fits(kernel, how)]
            for kernel, tiles in all_tiles.items()
        }


def graph_ms(stream: torch.cuda.Stream, step: Callable[[], object], replays: int = 12) -> float:
    """Return the time of a step in milliseconds."""
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
    return start.elapsed_time(end) / replays


def name(how: Tiles, kernel: str) -> str:
    columns = how.width if kernel == "add" else 2 * how.width
    limit = f"{how.max_registers}r" if how.max_registers else ""
    tail = f"{how.num_warps}w{how.num_stages}s{limit}" + (" split" if how.is_split else "")
    return f"{how.block_m}x{columns}x{how.block_k} {tail}"


_BROKEN: set[tuple[str, Tiles]] = set()  # what does not compile, say for want of shared memory


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=atol)


def compile_all(model: Model) -> None:
    """Compile every candidate in threads, and hold them against their references."""
    num_rows = 70
    batch = Batch(model, num_rows)
    x, residual = batch.x, torch.randn(num_rows, HIDDEN, **BF16)
    some_squares = torch.rand(num_rows, 16, device="cuda") * 1e3
    qkv_inputs = (model.qkv[0], *model.head_norms, *batch.place)
    adds = [(batch.attended, model.o[0]), (torch.randn(num_rows, SIZE, **BF16), model.down[0])]
    expected: dict[str, Any] = {
        "add": [gemm_add_reference(*pair, residual, model.norm) for pair in adds]
    }
    for is_split, squares in ((True, some_squares), (False, None)):
        caches = torch.zeros_like(batch.caches[0])
        q = qkv_rope_store_reference(x, *qkv_inputs, *caches, HEADS, squares=squares)
        expected[f"qkv {is_split}"] = (q, caches)
        gated = gate_up_silu_reference(x, model.gate_up[0], squares, EPS)
        expected[f"gate_up {is_split}"] = gated

    def check(kernel: str, how: Tiles) -> None:
        squares = some_squares if how.is_split else None
        # One of its own: others run at the same time.
        num_done = torch.zeros_like(model.num_done)
        for _ in range(3):
            if kernel == "add":
                for pair, (right, right_squares, right_total) in zip(
                    adds, expected["add"], strict=True
                ):
                    total = residual.clone()
                    scaled, parts = gemm_add_triton(*pair, total, model.norm, num_done, how)
                    close(scaled, right, 2**-5)
                    close(parts.sum(1, keepdim=True), right_squares, 1.0)
                    close(total, right_total, 2**-5)
            elif kernel == "qkv":
                caches = torch.zeros_like(batch.caches[0])
                inputs = (x, *qkv_inputs, *caches, HEADS, how)
                qkv_rope_store_triton(*inputs, num_done=num_done)  # as in the first layer
                q = qkv_rope_store_triton(*inputs, squares=squares, num_done=num_done)
                right_q, right_caches = expected[f"qkv {how.is_split}"]
                close(q, right_q, 2**-4)
                close(caches, right_caches, 2**-4)
            else:  # one rounding of gate or up, times the other
                mine = gate_up_silu_triton(x, model.gate_up[0], squares, EPS, num_done, how)
                close(mine, expected[f"gate_up {how.is_split}"], 2**-4)
        assert not num_done.any(), "counters are not zero"

    def job(kernel: str, how: Tiles) -> None:
        try:
            check(kernel, how)
            torch.cuda.synchronize()
        except Exception as error:  # any: tiles that fail are left out, and said
            _BROKEN.add((kernel, how))
            text = str(error).strip().replace("\n", " ")[:120]
            print("left out:", kernel, name(how, kernel), text)

    all_tiles = {"add": ADD_TILES, "qkv": QKV_TILES, "gate_up": GATE_UP_TILES}
    jobs = [partial(job, kernel, how) for kernel, tiles in all_tiles.items() for how in tiles]
    for num_rows in (1, 32, 256):  # kernels that are not tried, and those of the first layer
        jobs.append(partial(Batch(model, num_rows).seven, None))
    run_in_threads(jobs, torch.device("cuda"), 20)


def sweep(model: Model, num_rows: int, timer: Callable[..., float]) -> None:
    """Print the times of each kind of layers, and the best tiles of each kernel."""
    batch = Batch(model, num_rows)
    used = best = Choice(
        FEW, qkv_tiles(min(num_rows, MAX_QKV_ROWS)), gate_up_tiles(min(num_rows, MAX_GATE_UP_ROWS))
    )
    plain_ms = timer(partial(batch.seven, None))
    used_ms = best_ms = timer(partial(batch.fused, used))
    lines = []
    for kernel, tiles in batch.candidates().items():
        tried = [replace(best, **{kernel: how}) for how in tiles]
        timed = [(timer(partial(batch.fused, choice)), choice) for choice in tried]
        timed.sort(key=lambda pair: pair[0])
        if timed and timed[0][0] < best_ms:
            best_ms, best = timed[0]
        shown = [f"{name(getattr(choice, kernel), kernel)} {ms:.3f}" for ms, choice in timed[:3]]
        lines += [f"{kernel}: {'; '.join(shown)}"] if shown else []
    print(f"M={num_rows} ms: plain {plain_ms:.3f}, used {used_ms:.3f}, best {best_ms:.3f}")
    for line in lines:
        print(f"    {line}", flush=True)


def run(batches: Iterable[int]) -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    started = time.perf_counter()
    model = Model()
    compile_all(model)
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    timer = partial(graph_ms, torch.cuda.Stream())
    for num_rows in batches:
        sweep(model, num_rows, timer)
    print(f"done after {time.perf_counter() - started:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    arguments = parser.parse_args()
    need_gpus()
    run(arguments.batches)


if __name__ == "__main__":
    main()
