"""Micro-benchmark of the attention kernels on a GPU; a script, not a test.

    python -m tests.gpu.bench_attention            # decode and prefill with the defaults
    python -m tests.gpu.bench_attention --small    # decode of few rows, with and without overlap
    python -m tests.gpu.bench_attention --sweep    # decode settings: best per batch, best overall
    any of these with --fp8                        # the same of a KV cache in fp8

Decode runs inside a CUDA graph over several layers, so that L2 holds nothing between them. Results
are first checked against the torch reference.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from nanovllm.attention.sdpa import causal_attention, decode_attention, gather_pages
from nanovllm.kernels.decode_plan import DecodePlan, DecodeTuning, DecodeWork, default_tuning
from nanovllm.kernels.paged_attention import paged_attention_triton
from nanovllm.kernels.paged_prefill import default_blocks, paged_prefill_triton
from tests.gpu.needs_gpu import need_gpus

DEVICE, DTYPE, FP8 = torch.device("cuda"), torch.bfloat16, torch.float8_e4m3fn
PAGE, HEAD_DIM, MAX_NUM_SEQS = 64, 128, 512
COPY_BANDWIDTH = 4.24e12  # bytes/s of a plain copy on an H200
L2_BYTES = 250e6  # rotate through several times the 50 MB there are


class DecodeCase:
    """One batch with its own pages in several layers; table rows are strided as in the engine."""

    def __init__(
        self, lens: list[int], num_heads: int, num_kv_heads: int, dtype: torch.dtype = DTYPE
    ) -> None:
        self.lens, self.num_heads, self.num_kv_heads = lens, num_heads, num_kv_heads
        num_blocks = [-(-seq_len // PAGE) for seq_len in lens]
        self.layer_bytes = 2 * sum(lens) * num_kv_heads * HEAD_DIM * dtype.itemsize
        self.num_layers = min(64, max(4, round(L2_BYTES / self.layer_bytes)))
        shape = (2, self.num_layers, sum(num_blocks), PAGE, num_kv_heads, HEAD_DIM)
        self.kv_cache, self.kv_scale = filled_cache(shape, dtype)
        # Strides of one divisibility: else each case would compile its own kernels.
        width = 16 + -(-max(num_blocks) // 16) * 16
        rows = torch.zeros(len(lens) + 1, width, dtype=torch.int32)
        ids = torch.randperm(sum(num_blocks)).tolist()
        for row, count in enumerate(num_blocks):
            rows[row, 0] = lens[row]
            rows[row, 16 : 16 + count] = torch.tensor([ids.pop() for _ in range(count)])
        rows = rows.to(DEVICE)
        self.seq_lens, self.block_tables = rows[:-1, 0], rows[:-1, 16:]
        qkv = torch.randn(len(lens), num_heads + 2 * num_kv_heads, HEAD_DIM, device=DEVICE)
        self.q = qkv.to(DTYPE)[:, :num_heads]
        self.spacer = torch.zeros(1024, device=DEVICE)

    def plan(self, tuning: DecodeTuning | None) -> DecodePlan:
        return DecodePlan(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=HEAD_DIM,
            max_num_seqs=max(MAX_NUM_SEQS, len(self.lens)), dtype=self.kv_cache.dtype,
            device=DEVICE, tuning=tuning,
        )  # fmt: skip

    def cut(self, plan: DecodePlan) -> DecodeWork:
        work = plan.cut(self.seq_lens)
        self.spacer.zero_()  # an ordinary kernel stands between, as the embedding does
        return work

    def attend(self, layer: int, work: DecodeWork) -> torch.Tensor:
        k_cache, v_cache = self.kv_cache[0, layer], self.kv_cache[1, layer]
        tensors = (self.q, k_cache, v_cache, self.block_tables, self.seq_lens)
        return paged_attention_triton(*tensors, HEAD_DIM**-0.5, work, self.kv_scale)

    def expected(self, layer: int) -> torch.Tensor:
        k_cache, v_cache = self.kv_cache[0, layer], self.kv_cache[1, layer]
        tensors = (self.q.float(), k_cache, v_cache, self.block_tables, self.seq_lens)
        return decode_attention(*tensors, HEAD_DIM**-0.5, self.kv_scale).to(DTYPE)

    def time(
        self, tuning: DecodeTuning | None, *, check: bool = False, repeats: int = 12,
        has_spacer: bool = False,
    ) -> float:  # fmt: skip
        """Return seconds a layer; with a spacer, an ordinary kernel ends before each starts."""
        plan = self.plan(tuning)
        work = self.cut(plan)
        out = self.attend(0, work)
        last: list[torch.Tensor] = []

        def layers() -> None:
            for layer in range(self.num_layers):
                if has_spacer:
                    self.spacer.add_(1)
                last[:] = [self.attend(layer, work)]

        def spacers() -> None:
            for _ in range(self.num_layers):
                self.spacer.add_(1)

        seconds = graph_time(layers, repeats)
        if has_spacer:
            seconds -= graph_time(spacers, repeats)
        if check:  # after many merges the counters are back and the bits are the same
            assert not plan.num_done.any() and torch.equal(self.attend(0, work), out)
            for layer, actual in ((0, out), (self.num_layers - 1, last[0])):
                torch.testing.assert_close(actual, self.expected(layer), atol=2e-3, rtol=2e-2)
        return seconds / self.num_layers


def filled_cache(
    shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return normal noise, and the scales of a cache in fp8."""
    if dtype != FP8:
        return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(), None
    cache = torch.empty(shape, dtype=dtype, device=DEVICE)
    for half, scale in ((0, 2.0**-5), (1, 2.0**-6)):
        for part in cache[half]:  # by parts, as the noise is four times as large
            part.copy_(torch.randn(part.shape, device=DEVICE).div_(scale).clamp_(-448, 448))
    scales = torch.tensor([[2.0**-5], [2.0**-6]], device=DEVICE)
    return cache, scales.expand(2, shape[-2]).contiguous()


def graph_time(function: Callable[[], None], repeats: int = 12) -> float:
    """Return the median seconds of a replay of `function` as a CUDA graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return event_time(graph.replay, repeats)


def event_time(function: Callable[[], object], repeats: int = 12) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def spread(batch: int, mean: int = 800) -> list[int]:
    """Lengths of 0.2 to 1.8 times the mean, in random order."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch, generator=generator)
    return [round(mean * (0.2 + 1.6 * (i + 0.5) / batch)) for i in order.tolist()]


def report(label: str, case: DecodeCase, seconds: float) -> None:
    rate = case.layer_bytes / seconds
    print(
        f"{label:56s} {seconds * 1e6:8.1f} us {case.layer_bytes / 1e6:9.1f} MB "
        f"{rate / 1e12:6.2f} TB/s {100 * rate / COPY_BANDWIDTH:5.1f} %",
        flush=True,
    )


def decode(dtype: torch.dtype) -> None:
    print(f"decode, page {PAGE}, head_dim {HEAD_DIM}, {dtype}")
    for heads in ((16, 8), (32, 8)):
        for batch in (1, 8, 16, 32, 64, 128, 256, 512):
            case = DecodeCase(spread(batch), *heads, dtype)
            report(f"{heads} {batch} x 800 spread", case, case.time(None, check=True))
        for label, lens in (
            ("256 x 800 equal", [800] * 256),
            ("8 x 8000", [8000] * 8),
            ("1 x 30000", [30000]),
            ("30000 among 63 x 800", [800] * 40 + [30000] + [800] * 23),
            ("30000 among 255 x 800", [800] * 40 + [30000] + [800] * 215),
            ("64 x 800 + 192 padding", spread(64) + [0] * 192),
        ):
            case = DecodeCase(lens, *heads, dtype)
            report(f"{heads} {label}", case, case.time(None, check=True))
    time_plans(None)


def small(dtype: torch.dtype) -> None:
    """Time decode of few rows after itself, which it overlaps, and alone: after a spacer.

    `tests.gpu.bench_fused_gemm` has whole layers.
    """
    for batch in (8, 16, 32, 48, 64, 96, 128, 256):
        case = DecodeCase(spread(batch), 16, 8, dtype)
        for label, has_spacer in (("chain", False), ("alone", True)):
            seconds = case.time(None, check=True, has_spacer=has_spacer)
            report(f"{batch} x 800 spread, {label}", case, seconds)


def time_plans(tuning: DecodeTuning | None) -> None:
    for batch in (1, 64, 512):
        case = DecodeCase(spread(batch), 16, 8)
        plan = case.plan(tuning)

        def updates(plan: DecodePlan = plan, case: DecodeCase = case) -> None:
            for _ in range(50):
                plan.cut(case.seq_lens)

        print(f"plan update, batch {batch}: {graph_time(updates) / 50 * 1e6:.1f} us")


def describe(tuning: DecodeTuning) -> str:
    compiled = f"{tuning.tile}, {tuning.num_warps}, {tuning.num_stages}"
    return f"({compiled}) per_sm {tuning.programs_per_sm} overhead {tuning.overhead_tokens}"


# (tile, warps, stages) and the programs of an SM that shared memory and registers allow
VARIANTS = {
    DTYPE: {
        (64, 4, 3): (2, 3), (64, 4, 2): (4,), (64, 4, 4): (2,), (64, 8, 3): (3,),
        (32, 4, 3): (4, 5), (32, 4, 4): (3, 4), (32, 4, 5): (3,), (32, 2, 4): (4,),
        (32, 1, 4): (4,), (128, 8, 2): (3,),
    },
    FP8: {
        (64, 4, 3): (3, 4, 5), (64, 4, 4): (3, 4), (64, 2, 3): (4, 5), (64, 2, 4): (4,),
        (32, 2, 4): (5, 7), (32, 1, 4): (6,), (128, 4, 3): (2, 3), (128, 4, 2): (4,),
        (128, 8, 3): (3,),
    },
}  # fmt: skip


def sweep(dtype: torch.dtype) -> None:
    """Print the best settings per case, then those that lose least over all cases."""
    began = time.perf_counter()
    base = default_tuning(HEAD_DIM, dtype, 64)
    settings = [
        replace(base, tile=tile, num_warps=warps, num_stages=stages, programs_per_sm=programs)
        for (tile, warps, stages), counts in VARIANTS[dtype].items()
        for programs in counts
    ]
    cases = [DecodeCase(lens, 16, 8, dtype) for lens in (spread(16), [20000, 5, 700])]
    if dtype == FP8:
        cases.append(DecodeCase(spread(16), 32, 8, dtype))
    expected_outs = [case.attend(0, None) for case in cases]

    def check(tuning: DecodeTuning) -> str | None:
        """Compile and compare once; what fails is reported and left out."""
        try:
            for case, expected in zip(cases, expected_outs, strict=True):
                work = case.cut(case.plan(tuning))
                torch.testing.assert_close(case.attend(0, work), expected, atol=2e-3, rtol=2e-2)
        except Exception as error:  # one setting must not end the sweep
            return f"{type(error).__name__}: {str(error)[:200]!r}"
        return None

    message = check(base)
    assert message is None, message
    # Threads, as compiling releases the interpreter's lock.
    with ThreadPoolExecutor(8) as pool:
        for tuning, message in zip(settings, pool.map(check, settings), strict=True):
            if message is not None:
                print(f"left out: {describe(tuning)}: {message}")
                settings = [other for other in settings if other is not tuning]
    print(f"compiled and checked after {time.perf_counter() - began:.1f} s", flush=True)

    overheads = (base.overhead_tokens, 48, 192, 1 << 20)  # the last leaves all rows whole
    sweep_cases = [
        *(((16, 8), f"{n} x 800 spread", spread(n)) for n in (8, 16, 32, 64, 128, 256, 1)),
        ((16, 8), "256 x 800 equal", [800] * 256),
        ((16, 8), "8 x 8000", [8000] * 8),
        ((16, 8), "1 x 30000", [30000]),
        ((16, 8), "30000 among 63 x 800", [800] * 63 + [30000]),
    ]
    if dtype == FP8:
        overheads = (base.overhead_tokens, 96)
        heads_and_batches = [(heads, n) for n in (256, 128, 64, 32) for heads in ((16, 8), (32, 8))]
        sweep_cases = [(heads, f"{n} x 800 spread", spread(n)) for heads, n in heads_and_batches]
    candidates = [replace(tuning, overhead_tokens=n) for n in overheads for tuning in settings]
    slowdowns: dict[DecodeTuning, list[float]] = {}
    for heads, label, lens in sweep_cases:
        if time.perf_counter() - began > 45:
            print(f"out of time before {label}")
            break
        case = DecodeCase(lens, *heads, dtype)
        default = default_tuning(HEAD_DIM, dtype, len(lens))
        seconds = case.time(default, check=True)
        report(f"{heads} {label}: default {describe(default)}", case, seconds)
        timed = {}
        for tuning in candidates:
            # Whole rows only where there are enough; little else changes with the default's policy.
            if tuning.overhead_tokens < 1 << 20 or len(lens) >= 64:
                timed[tuning] = case.time(tuning, repeats=6)
        best = min(timed.values())
        for tuning in sorted(timed, key=lambda tuning: timed[tuning])[:4]:
            report(f"  {describe(tuning)}", case, timed[tuning])
        for tuning, seconds in timed.items():
            slowdowns.setdefault(tuning, []).append(seconds / best)
    print("over all cases: mean and largest slowdown against each case's best")
    num_cases = max(map(len, slowdowns.values()))
    means = {
        tuning: math.exp(statistics.fmean(map(math.log, values)))
        for tuning, values in slowdowns.items()
        if len(values) == num_cases
    }
    for tuning in sorted(means, key=lambda tuning: means[tuning])[:12]:
        values = " ".join(f"{value:.2f}" for value in slowdowns[tuning])
        loss = f"{means[tuning]:.3f} {max(slowdowns[tuning]):.3f}"
        print(f"  {describe(tuning):56s} {loss}: {values}")
    time_plans(base)
    print(f"swept in {time.perf_counter() - began:.1f} s")


class PrefillCase:
    """Chunks of (num_queries, seq_len) with their pages in order."""

    def __init__(
        self, chunks: list[tuple[int, int]], num_heads: int, num_kv_heads: int,
        dtype: torch.dtype = DTYPE,
    ) -> None:  # fmt: skip
        self.chunks = chunks
        counts, lens = zip(*chunks, strict=True)
        blocks = [-(-seq_len // PAGE) for seq_len in lens]
        table = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
        ids = torch.randperm(sum(blocks)).tolist()
        for row, count in enumerate(blocks):
            table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
        shape = (2, sum(blocks), PAGE, num_kv_heads, HEAD_DIM)
        self.kv_cache, self.kv_scale = filled_cache(shape, dtype)
        self.block_tables = table.to(DEVICE)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        self.max_q = max(counts)
        self.cu_q = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
        qkv = torch.randn(sum(counts), num_heads + 2 * num_kv_heads, HEAD_DIM, device=DEVICE)
        self.q = qkv.to(DTYPE)[:, :num_heads]
        pairs = sum(n * k - n * (n - 1) // 2 for n, k in chunks)
        self.flops = 4 * num_heads * HEAD_DIM * pairs

    def paged(self, blocks: tuple[int, int, int, int] | None = None) -> torch.Tensor:
        caches = (self.kv_cache[0], self.kv_cache[1], self.block_tables, self.seq_lens, self.cu_q)
        options = (self.max_q, HEAD_DIM**-0.5, self.kv_scale)
        return paged_prefill_triton(self.q, *caches, *options, blocks=blocks)

    def check(self) -> None:
        last = min(64, min(count for count, _ in self.chunks))
        out = self.paged()
        scale = HEAD_DIM**-0.5
        for seq in {0, len(self.chunks) - 1}:
            end = int(self.cu_q[seq + 1])
            pages = (self.block_tables[seq], int(self.seq_lens[seq]), self.kv_scale, torch.float32)
            keys, values = gather_pages(self.kv_cache[0], self.kv_cache[1], *pages)
            expected = causal_attention(self.q[end - last : end].float(), keys, values, scale)
            actual = out[end - last : end].float()
            torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-2)

    def report(self, label: str, function: Callable[[], object]) -> None:
        try:
            seconds = event_time(function, repeats=7)
        except Exception as error:  # a benchmark goes on: some settings do not compile
            print(f"{label:46s} {type(error).__name__}: {str(error)[:90]!r}")
            return
        print(f"{label:46s} {seconds * 1e3:8.3f} ms {self.flops / seconds / 1e12:7.1f} TFLOP/s")


def prefill(dtype: torch.dtype) -> None:
    heads = (16, 8)
    settings = [(128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 4)]
    default = default_blocks(HEAD_DIM, DTYPE, 1024, is_fp8=dtype == FP8)
    case = PrefillCase([(1024, 1024)] * 16, *heads, dtype)
    case.check()
    print(f"prefill of 16 x 1024, {heads}, default {default}")
    for blocks in settings:
        case.report(f"paged_prefill {blocks}", lambda blocks=blocks: case.paged(blocks))
    others = [(f"8k of a 32k prompt, after {n}", [(8192, n + 8192)]) for n in (0, 8192, 24576)]
    others.append(("256 x 32 tokens after 1024 cached", [(32, 1056)] * 256))
    for label, chunks in others:
        case = PrefillCase(chunks, *heads, dtype)
        case.check()
        print(label)
        case.report("paged_prefill, default", case.paged)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="decode of few rows, two ways")
    parser.add_argument("--sweep", action="store_true", help="search decode settings")
    parser.add_argument("--fp8", action="store_true", help="a KV cache in fp8")
    arguments = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    cache_dtype = FP8 if arguments.fp8 else DTYPE
    if arguments.small:
        small(cache_dtype)
    elif arguments.sweep:
        sweep(cache_dtype)
    else:
        decode(cache_dtype)
        prefill(cache_dtype)


if __name__ == "__main__":
    main()
