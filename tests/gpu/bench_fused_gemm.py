"""Time decode layers of Qwen3-0.6B: `python -m tests.gpu.bench_fused_gemm`, about 60 s.

Each figure is 28 layers with weights of their own in one CUDA graph, so that weights come from
memory and kernels overlap as they do in a decode step; without attention unless it is said.

    plain:    norm, library QKV, QK-norm+rope+store, output projection, norm, gate-up, SiLU, down
    seven:    the same with QKV and gate-up fused with what follows them
    five:     norms and adds in the projections too: what `nanovllm.fused` runs

Settings of `five` are tried one kernel after another: block_m x columns x block_k, for the adding
projections "/ features a program sums", then warps w and stages s.
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
from nanovllm.fused.tiles import AddTiles, Tiles, add_tiles, gate_up_tiles, qkv_tiles
from nanovllm.kernels._triton import triton
from nanovllm.kernels.decode_plan import DecodePlan
from nanovllm.kernels.paged_attention import paged_attention_triton
from nanovllm.kernels.qk_norm_rope_store import qk_norm_rope_store_triton
from nanovllm.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from nanovllm.kernels.silu_and_mul import silu_and_mul_triton
from nanovllm.kernels.split_gemm import split_gemm

WITH_ATTENTION = (16, 64, 128, 256)
BATCHES = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512)
NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, SIZE, PAGE = 28, 1024, 16, 8, 128, 3072, 64
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
EPS = 1e-6

QKV_TILES = [
    Tiles(16, 128, 4, 5), Tiles(16, 128, 4, 3), Tiles(16, 128, 8, 4), Tiles(16, 256, 8, 3),
    Tiles(32, 128, 4, 3), Tiles(32, 128, 8, 4), Tiles(64, 64, 4, 6), Tiles(64, 128, 4, 4),
    Tiles(64, 128, 8, 4), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 4),
    Tiles(16, 512, 8, 1, 64, 512), Tiles(16, 256, 8, 1, 64, 256), Tiles(16, 128, 4, 4, 64, 512),
    Tiles(32, 512, 8, 1, 64, 512), Tiles(32, 256, 8, 1, 64, 256),
    Tiles(64, 512, 8, 1, 64, 512), Tiles(64, 256, 8, 1, 64, 256), Tiles(64, 128, 4, 4, 64, 512),
    Tiles(128, 128, 8, 3, 64, 512),
]  # fmt: skip
GATE_UP_TILES = [
    Tiles(16, 128, 4, 6, 16), Tiles(16, 128, 4, 4, 32), Tiles(16, 256, 4, 3, 16),
    Tiles(32, 128, 4, 4, 32), Tiles(64, 128, 4, 4, 16), Tiles(64, 128, 4, 3, 32),
    Tiles(64, 128, 4, 3, 64), Tiles(64, 64, 4, 6, 32), Tiles(64, 64, 4, 4, 32),
    Tiles(64, 64, 4, 4, 64), Tiles(128, 64, 8, 4, 64), Tiles(128, 64, 8, 5, 32),
    Tiles(16, 1024, 8, 1, 32), Tiles(16, 1024, 8, 1, 16), Tiles(32, 1024, 8, 1, 32),
    Tiles(32, 1024, 8, 1, 16), Tiles(64, 1024, 8, 1, 16),
    Tiles(16, 512, 8, 1, 64, 512), Tiles(16, 256, 8, 1, 64, 256), Tiles(16, 512, 8, 1, 32, 512),
    Tiles(32, 512, 8, 1, 64, 512), Tiles(32, 256, 8, 1, 64, 256), Tiles(32, 512, 8, 1, 32, 512),
    Tiles(64, 512, 8, 1, 64, 512), Tiles(64, 256, 8, 1, 64, 256), Tiles(64, 512, 8, 1, 32, 512),
    Tiles(64, 128, 4, 4, 64, 512),
]  # fmt: skip
ADD_TILES = [
    AddTiles(16, 16, 128, 0, 2, 6), AddTiles(16, 16, 256, 0, 4, 4), AddTiles(16, 32, 128, 0, 4, 6),
    AddTiles(16, 32, 128, 1024, 4, 5), AddTiles(16, 32, 128, 512, 4, 4),
    AddTiles(16, 64, 128, 512, 4, 4), AddTiles(16, 32, 512, 512, 4, 1),
    AddTiles(16, 32, 1024, 1024, 8, 1), AddTiles(16, 64, 512, 512, 8, 1),
    AddTiles(32, 32, 128, 1024, 4, 4), AddTiles(32, 64, 128, 512, 4, 4),
    AddTiles(32, 32, 512, 512, 8, 1), AddTiles(32, 64, 512, 512, 8, 1),
    AddTiles(64, 16, 128, 0, 4, 6), AddTiles(64, 16, 128, 1024, 4, 5),
    AddTiles(64, 32, 128, 1024, 4, 4), AddTiles(64, 32, 128, 512, 4, 4),
    AddTiles(64, 64, 128, 512, 4, 4), AddTiles(64, 64, 128, 1024, 4, 4),
    AddTiles(64, 64, 128, 256, 4, 2), AddTiles(64, 64, 128, 512, 8, 4),
    AddTiles(64, 64, 256, 256, 8, 1), AddTiles(64, 32, 256, 256, 4, 1),
    AddTiles(64, 64, 512, 512, 8, 1), AddTiles(64, 32, 512, 512, 8, 1),
    AddTiles(64, 64, 128, 0, 4, 4), AddTiles(128, 64, 64, 1024, 8, 4),
    AddTiles(128, 64, 64, 512, 4, 5), AddTiles(128, 64, 64, 0, 8, 5),
    AddTiles(128, 128, 64, 1024, 8, 4), AddTiles(128, 128, 64, 512, 8, 4),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """How the kernels of `five` are compiled."""

    qkv: Tiles
    gate_up: Tiles
    add: AddTiles


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
    """Inputs of one batch size: lengths of 0.2 to 1.8 times the mean, pages in disorder."""

    def __init__(self, model: Model, num_rows: int, context: int = 16) -> None:
        self.model, self.num_rows = model, num_rows
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
        self.tables, self.slots, self.seq_lens = self.tables.cuda(), slots.cuda(), lens.cuda()
        # Two caches in turn: what a layer reads is not in L2 from the one before.
        self.caches = torch.randn(2, 2, len(ids), PAGE, KV_HEADS, HEAD_DIM, **BF16)
        self.x = torch.randn(num_rows, HIDDEN, **BF16)
        self.wide = torch.randn(num_rows, HEADS * HEAD_DIM, **BF16)
        self.residual = torch.zeros(num_rows, HIDDEN, **BF16)
        self.place = (model.cos_sin, self.seq_lens - 1, self.slots)
        self.plan: DecodePlan | None = None  # graphs hold its addresses
        self.work: Any = None

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        work = self.work  # read once: while kernels are compiled, other threads set it
        if work is None:
            return self.wide
        tensors = (q, *self.caches[layer % 2], self.tables, self.seq_lens)
        return paged_attention_triton(*tensors, HEAD_DIM**-0.5, work).view(self.num_rows, -1)

    def qkv(self, layer: int, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """From the normed x to q, [num_rows, HEADS, HEAD_DIM]; k and v are stored."""
        model = self.model
        places = (*self.place, *self.caches[layer % 2])
        return qkv_rope_store_triton(
            x, model.qkv[layer], *model.head_norms, *places, HEADS, num_done=model.num_done,
            **options,
        )  # fmt: skip

    def old(self, fused_qkv: bool, fused_gate_up: bool) -> None:
        model, x = self.model, self.x
        for layer in range(NUM_LAYERS):
            x, _ = add_rms_norm_triton(x, self.residual, model.norm, EPS)
            if fused_qkv:
                q = self.qkv(layer, x)
            else:
                qkv = F.linear(x, model.qkv[layer])
                places = (*self.place, *self.caches[layer % 2])
                qk_norm_rope_store_triton(
                    qkv, *model.head_norms, *places, HEADS, KV_HEADS, HEAD_DIM
                )
                q = qkv.view(self.num_rows, -1, HEAD_DIM)[:, :HEADS]
            x = split_gemm(self.attend(layer, q), model.o[layer])
            x, _ = add_rms_norm_triton(x, self.residual, model.norm, EPS)
            if fused_gate_up:
                x = gate_up_silu_triton(x, model.gate_up[layer])
            else:
                x = silu_and_mul_triton(F.linear(x, model.gate_up[layer]))
            x = split_gemm(x, model.down[layer])

    def five(self, choice: Choice) -> None:
        x, squares = rms_norm_triton(self.x, self.model.norm, EPS), None
        for layer in range(NUM_LAYERS):
            q = self.qkv(layer, x, tiles=choice.qkv, squares=squares)
            x, squares = self.add(self.attend(layer, q), self.model.o[layer], choice)
            x = self.gate_up(layer, x, squares, choice)
            x, squares = self.add(x, self.model.down[layer], choice)

    def gate_up(self, layer: int, x: torch.Tensor, squares: Any, choice: Choice) -> torch.Tensor:
        model = self.model
        return gate_up_silu_triton(
            x, model.gate_up[layer], squares, EPS, model.num_done, choice.gate_up
        )

    def add(self, x: torch.Tensor, weight: torch.Tensor, choice: Choice) -> Any:
        model = self.model
        return gemm_add_triton(x, weight, self.residual, model.norm, model.num_done, choice.add)

    def alone(self, kernel: str, choice: Choice) -> None:
        """One kernel of each layer, again and again."""
        model = self.model
        hidden, size = self.x, torch.empty(self.num_rows, SIZE, **BF16)
        squares = torch.empty(self.num_rows, HIDDEN // choice.add.block_n, device="cuda")
        for layer in range(NUM_LAYERS):
            if kernel == "qkv":
                self.qkv(layer, hidden, tiles=choice.qkv, squares=squares)
            elif kernel == "o":
                self.add(self.wide, model.o[layer], choice)
            elif kernel == "gate_up":
                self.gate_up(layer, hidden, squares, choice)
            elif kernel == "down":
                self.add(size, model.down[layer], choice)
            else:
                add_rms_norm_triton(hidden, self.residual, model.norm, EPS)

    def with_attention(self, layers: Callable[[], None]) -> None:
        if self.plan is None:
            self.plan = DecodePlan(
                num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                max_num_seqs=self.num_rows, dtype=torch.bfloat16, device=torch.device("cuda"),
            )  # fmt: skip
        self.work = self.plan.cut(self.seq_lens)
        self.residual.zero_()  # an ordinary kernel stands between, as the embedding does
        layers()
        self.work = None


def graph_ms(step: Callable[[], object], stream: torch.cuda.Stream, replays: int = 12) -> float:
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


def name(how: Tiles | AddTiles) -> str:
    columns = f"{how.block_n}" if isinstance(how, AddTiles) else f"2*{how.width}"
    share = f"/{how.share}" if how.share else ""
    tail = f"{how.num_warps}w{how.num_stages}s" + ("" if how.prefetch else " nopf")
    return f"{how.block_m}x{columns}x{how.block_k}{share} {tail}"


_BROKEN: set[Any] = set()  # what does not compile, say for want of shared memory


def fits(how: Tiles | AddTiles, num_rows: int) -> bool:
    block_m = how.block_m
    if how in _BROKEN or block_m > max(64, 2 * num_rows - 1):
        return False
    return num_rows <= (2 if isinstance(how, AddTiles) else 4) * max(64, block_m)


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=atol)


def compile_all(model: Model) -> None:
    """Compile every candidate in threads, and hold them against their references."""
    batch = Batch(model, 70, 100)
    x, squares = 30 * batch.x, torch.rand(70, 16, device="cuda") * 1e5
    expected = gate_up_silu_reference(x, model.gate_up[0], squares, EPS)
    caches = torch.zeros_like(batch.caches[0])
    qkv_inputs = (model.qkv[0], *model.head_norms, *batch.place)
    expected_q = qkv_rope_store_reference(x, *qkv_inputs, *caches, HEADS, squares=squares)
    adds = [(batch.wide, model.o[0]), (torch.randn(70, SIZE, **BF16), model.down[0])]
    residual = torch.randn(70, HIDDEN, **BF16)
    expected_adds = [gemm_add_reference(*pair, residual, model.norm) for pair in adds]

    def try_gate_up(how: Tiles) -> None:
        # One rounding of gate or up, times the other.
        num_done = torch.zeros_like(model.num_done)
        inputs = (x, model.gate_up[0], squares, EPS, num_done)
        for _ in range(3):
            close(gate_up_silu_triton(*inputs, how), expected, 2**-4)
        assert not num_done.any(), "counters are not zero"

    def try_qkv(how: Tiles) -> None:
        mine, num_done = torch.zeros_like(caches), torch.zeros_like(model.num_done)
        options: dict[str, Any] = {"tiles": how, "num_done": num_done}
        for _ in range(3):
            q = qkv_rope_store_triton(x, *qkv_inputs, *mine, HEADS, squares=squares, **options)
            close(q, expected_q, 2**-4)
            close(mine, caches, 2**-4)
        qkv_rope_store_triton(x, *qkv_inputs, *mine, HEADS, **options)  # as in the first layer
        assert not num_done.any(), "counters are not zero"

    def try_add(how: AddTiles) -> None:
        num_done = torch.zeros_like(model.num_done)
        for pair, (scaled, total_squares, total) in zip(adds, expected_adds, strict=True):
            for _ in range(3):
                mine = residual.clone()
                my_scaled, my_squares = gemm_add_triton(*pair, mine, model.norm, num_done, how)
                close(mine, total, 2**-5)
                close(my_scaled, scaled, 2**-5)
                close(my_squares.sum(1, keepdim=True), total_squares, 1.0)
        assert not num_done.any(), "counters are not zero"

    def job(function: Callable[[Any], None], how: Any) -> None:
        try:
            function(how)
            torch.cuda.synchronize()
        except Exception as error:  # any: a setting that fails is left out, and said
            _BROKEN.add(how)
            print("left out:", name(how), str(error).strip().replace("\n", " ")[:120])

    jobs = [partial(job, try_qkv, how) for how in QKV_TILES]
    jobs += [partial(job, try_gate_up, how) for how in GATE_UP_TILES]
    jobs += [partial(job, try_add, how) for how in ADD_TILES]
    for num_rows in (1, 32, 48, *WITH_ATTENTION, 512):  # the old kernels, and attention
        other = Batch(model, num_rows, 100)
        jobs.append(partial(other.with_attention, partial(other.old, True, True)))
        jobs.append(partial(other.old, False, False))
        jobs.append(partial(other.five, current(num_rows)))
    run_in_threads(jobs, torch.device("cuda"), 20)


def current(num_rows: int) -> Choice:
    return Choice(qkv_tiles(num_rows), gate_up_tiles(num_rows), add_tiles(num_rows))


def sweep(model: Model, batches: Iterable[int], timer: Callable[..., float]) -> dict[int, Choice]:
    """Print the times of every kind of layer, and of the best settings of each kernel."""
    chosen = {}
    for num_rows in batches:
        batch, best = Batch(model, num_rows), current(num_rows)
        plain = timer(partial(batch.old, False, False))
        seven = timer(partial(batch.old, True, True))
        start = timer(partial(batch.five, best))
        texts = {}
        left: dict[str, list[Any]] = {
            field: [how for how in candidates if fits(how, num_rows)]
            for field, candidates in {
                "add": ADD_TILES, "qkv": QKV_TILES, "gate_up": GATE_UP_TILES,
            }.items()
        }  # fmt: skip
        for field in [*left, *left]:  # the best ones again, as kernels overlap with one another
            tried = [replace(best, **{field: how}) for how in left[field]]
            timed = [(timer(partial(batch.five, choice)), choice) for choice in tried]
            timed.sort(key=lambda pair: pair[0])
            if timed[0][0] < timer(partial(batch.five, best)):
                best = timed[0][1]
            left[field] = [getattr(choice, field) for _, choice in timed[:6]]
            shown = [f"{name(getattr(c, field))} {ms:.3f}" for ms, c in timed[:3]]
            texts[field] = f"{field}: {'; '.join(shown)}"
        bare = Choice(*(replace(getattr(best, f), prefetch=False) for f in Choice.__slots__))
        print(
            f"M={num_rows} ms: plain {plain:.3f}, seven {seven:.3f}, five {start:.3f}, "
            f"best {timer(partial(batch.five, best)):.3f}"
            + (f", nopf {timer(partial(batch.five, bare)):.3f}" if num_rows in (64, 256) else "")
        )
        print(f"    {texts['add']}\n    {texts['qkv']} | {texts['gate_up']}", flush=True)
        if num_rows in (16, 64, 256):
            kernels = ("qkv", "o", "gate_up", "down", "norm")
            us = [1e3 / 28 * timer(partial(batch.alone, kernel, best)) for kernel in kernels]
            print("    alone, us:", *(f"{k} {t:.2f}" for k, t in zip(kernels, us, strict=True)))
        chosen[num_rows] = best
    return chosen


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
    timer = partial(graph_ms, stream=torch.cuda.Stream())
    chosen = sweep(model, arguments.batches, timer)
    for num_rows, best in chosen.items():
        if num_rows in WITH_ATTENTION:
            batch = Batch(model, num_rows, 800)
            kinds = {
                "plain": partial(batch.old, False, False),
                "seven": partial(batch.old, True, True),
                "five": partial(batch.five, current(num_rows)),
                "best": partial(batch.five, best),
            }
            times = {k: timer(partial(batch.with_attention, how)) for k, how in kinds.items()}
            text = ", ".join(f"{kind} {ms:.3f}" for kind, ms in times.items())
            print(f"M={num_rows} at context 800, ms: {text}", flush=True)
    print(f"done after {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
