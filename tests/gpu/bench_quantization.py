"""Check and time fp8 layers at Qwen3-8B's shapes on a GPU, and measure what 8 bits cost the text.

    python -m tests.gpu.bench_quantization             # kernels; about a minute on an H200
    python -m tests.gpu.bench_quantization --accuracy  # on any machine's CPU: sums, agreement, KL

Times are of one call inside a CUDA graph over several sets of buffers, larger than the L2 cache.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from nanovllm.kernels.rms_norm import add_rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.quantization.kernels import fp8_gemm
from nanovllm.quantization.kernels.fp8_gemm import (
    dequantize,
    dequantize_weight,
    fp8_linear,
    fp8_linear_shares,
    fp8_linear_triton,
    share_tile_for,
)
from nanovllm.quantization.kernels.quantize import QuantTensor, quantize, quantize_blocks
from nanovllm.quantization.kernels.rms_norm import rms_norm_quantized
from nanovllm.quantization.kernels.silu_and_mul import silu_and_mul_quantized
from tests.gpu.bench_kernels import BANDWIDTH, BF16, graph_us, num_copies
from tests.gpu.needs_gpu import need_gpus

BF16_FLOPS, FP8_FLOPS = 790e12, 1580e12  # a second, of an H200 that holds its clock
LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
}
BATCHES = (16, 64, 128, 256, 4096)
CHECKED = ((2560, 1024), LAYERS["qkv"], LAYERS["down"])
ODD_BATCHES = (1, 2, 3, 7, 15, 17, 33, 100, 255, 257, 1000)


def compile_all() -> None:
    """Call everything once, in threads: a kernel takes a second of one core to compile."""

    def first_calls(rows: int, columns: int, num_rows: int, group_size: int | None) -> None:
        a = quantize(torch.zeros(num_rows, columns, **BF16), group_size)
        weight = torch.zeros(rows, columns, **BF16)
        b = quantize(weight, None) if group_size is None else quantize_blocks(weight)
        for function in (ours, shares):
            function(a, b, group_size=group_size)

    sizes = dict.fromkeys([*LAYERS.values(), *CHECKED])
    with ThreadPoolExecutor(16) as pool:
        jobs = itertools.product(sizes, (16, 64, 128, 256, 1000, 4096), (None, 128))
        list(pool.map(lambda job: first_calls(*job[0], *job[1:]), jobs))
    torch.cuda.synchronize()


def check() -> None:
    """Products of every path against float64, at sizes of batch that a kernel may dislike."""
    worst: dict[tuple[str, int], tuple[float, float]] = {}
    for (rows, columns), num_rows in itertools.product(CHECKED, (*BATCHES[:4], *ODD_BATCHES)):
        x, weight = torch.randn(num_rows, columns, **BF16), torch.randn(rows, columns, **BF16)
        for name, group_size, function in (
            ("exact, rounded", None, rounded),
            ("_scaled_mm", None, scaled_mm),
            ("_scaled_mm fast", None, partial(scaled_mm, is_fast=True)),
            ("triton channel", None, ours),
            ("shares channel", None, shares),
            ("triton block", 128, partial(ours, group_size=128)),
            ("shares block", 128, partial(shares, group_size=128)),
            ("_scaled_mm block", 128, library_block),
        ):
            if function is library_block and not has_library_block(weight):
                continue
            a = quantize(x, group_size)
            b = quantize(weight, None) if group_size is None else quantize_blocks(weight)
            out = function(a, b)
            out = out.sum(0).bfloat16() if out.dim() == 3 else out
            wide = dequantize(a, group_size).double() @ dequantize_weight(b, group_size).double().T
            error = (out.double() - wide) / wide.std()
            largest, rms = worst.get((name, columns), (0.0, 0.0))
            worst[name, columns] = (
                max(largest, float(error.abs().max())),
                max(rms, float(error.square().mean().sqrt())),
            )
    print("errors, of the results' deviation:")
    for (name, columns), (largest, rms) in sorted(worst.items(), key=lambda item: item[0][::-1]):
        share = rms / worst["exact, rounded", columns][1]
        print(f"  K={columns:<6} {name:<16} largest {largest:.4f}, rms {rms:.5f} ({share:.2f} x)")
    used = [largest for (name, _), (largest, _) in worst.items() if "fast" not in name]
    assert max(used) < 0.05, worst


def timed(name: str, calls: Sequence[Callable[[], object]], num_bytes: float, s: float) -> float:
    """Print the time of a call and what share of it the memory or the tensor cores need."""
    us = graph_us(calls)
    bound = max(num_bytes / BANDWIDTH, s) * 1e6
    print(f"  {name:<22} {us:8.2f} us {bound / us:6.1%}", flush=True)
    return us


def rounded(a: QuantTensor, b: QuantTensor) -> torch.Tensor:
    """The exact product in bfloat16: the least error that a path can have."""
    return (dequantize(a, None).double() @ dequantize(b, None).double().T).bfloat16()


def ours(a: QuantTensor, b: QuantTensor, *, group_size: int | None = None) -> torch.Tensor:
    return fp8_linear_triton(a, b, None, group_size=group_size, dtype=torch.bfloat16)


def shares(a: QuantTensor, b: QuantTensor, *, group_size: int | None = None) -> torch.Tensor:
    return fp8_linear_shares(a, b, group_size=group_size, dtype=torch.bfloat16)


def as_layers(
    layer: str, a: QuantTensor, b: QuantTensor, *, group_size: int | None = None
) -> torch.Tensor:
    """What the engine does: shares where a norm follows."""
    if layer in ("o", "down"):
        return shares(a, b, group_size=group_size)
    return fp8_linear(a, b, None, group_size=group_size, dtype=torch.bfloat16)


def scaled_mm(a: QuantTensor, b: QuantTensor, *, is_fast: bool = False) -> torch.Tensor:
    return torch._scaled_mm(
        a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale.view(1, -1),
        out_dtype=torch.bfloat16, use_fast_accum=is_fast,
    )  # fmt: skip


def has_library_block(weight: torch.Tensor) -> bool:
    return fp8_gemm._has_library(QuantTensor(weight, weight), 128, torch.bfloat16)


def library_block(a: QuantTensor, b: QuantTensor) -> torch.Tensor:
    return fp8_gemm._by_library(a, b, None, 128, torch.bfloat16)


def bench_products(num_rows: int) -> dict[str, float]:
    totals: dict[str, float] = {}
    for layer, (rows, columns) in LAYERS.items():
        print(f"{layer}, {num_rows} rows")
        copies = num_copies(rows * columns)
        xs = [torch.randn(num_rows, columns, **BF16) for _ in range(copies)]
        weights = [torch.randn(rows, columns, **BF16) for _ in range(copies)]
        flops = 2 * num_rows * rows * columns
        moved = 2 * num_rows * (rows + columns)
        variants: dict[str, tuple[list[Callable[[], object]], float, float]] = {
            "bf16": (
                [partial(F.linear, x, w) for x, w in zip(xs, weights, strict=True)],
                2 * rows * columns + moved,
                flops / BF16_FLOPS,
            )
        }
        fp8_bound = (rows * columns + moved, flops / FP8_FLOPS)
        channel = [(quantize(x, None), quantize(w, None)) for x, w in zip(xs, weights, strict=True)]
        block = [(quantize(x, 128), quantize_blocks(w)) for x, w in zip(xs, weights, strict=True)]
        for is_fast in (False, True):
            name = "fp8 _scaled_mm" + (" fast" if is_fast else "")
            calls = [partial(scaled_mm, a, b, is_fast=is_fast) for a, b in channel]
            variants[name] = (calls, *fp8_bound)
        for name, pairs, function in (
            ("fp8 triton channel", channel, ours),
            ("fp8 engine channel", channel, partial(as_layers, layer)),
            ("fp8 triton block", block, partial(ours, group_size=128)),
            ("fp8 engine block", block, partial(as_layers, layer, group_size=128)),
        ):
            variants[name] = ([partial(function, a, b) for a, b in pairs], *fp8_bound)
        if has_library_block(weights[0]):
            block_calls = [partial(library_block, a, b) for a, b in block]
            variants["fp8 _scaled_mm block"] = (block_calls, *fp8_bound)
        for name, (calls, num_bytes, seconds) in variants.items():
            totals[name] = totals.get(name, 0.0) + timed(name, calls, num_bytes, seconds)
        del xs, weights, channel, block, variants
    return totals


def bench_fused(num_rows: int) -> dict[str, float]:
    """What goes before the products: two norms, the activation, and the attention output."""
    hidden, size = 4096, 12288
    print(f"norm, activation, attention output; {num_rows} rows")
    copies = num_copies(4 * num_rows * size)
    norms = [(torch.randn(2, num_rows, hidden, **BF16)) for _ in range(copies)]
    weight = torch.rand(hidden, **BF16)
    gate_ups = [torch.randn(num_rows, 2 * size, **BF16) for _ in range(copies)]
    outs = [pair[0] for pair in norms]
    tile = share_tile_for(num_rows, hidden, size)
    num_shares = 1 if tile is None else tile.num_splits
    more = [torch.randn(num_shares, num_rows, hidden, device="cuda") for _ in range(copies)]
    norm_bytes, silu_bytes = 2 * num_rows * hidden, 2 * num_rows * size
    times: dict[str, list[float]] = {}
    for name, norm, silu, quant, out_bytes in (
        (
            "bf16",
            lambda x, r: add_rms_norm(x, r, weight, 1e-6),
            silu_and_mul,
            None,
            2,
        ),
        (
            "fp8 channel",
            lambda x, r: rms_norm_quantized(x, r, weight, 1e-6, None),
            partial(silu_and_mul_quantized, group_size=None),
            partial(quantize, group_size=None),
            1,
        ),
        (
            "fp8 block",
            lambda x, r: rms_norm_quantized(x, r, weight, 1e-6, 128),
            partial(silu_and_mul_quantized, group_size=128),
            partial(quantize, group_size=128),
            1,
        ),
    ):
        share = out_bytes / 2
        norm_calls: list[Callable[[], object]] = [partial(norm, x, r) for x, r in norms]
        times[name] = [
            2 * timed(f"{name} add+norm", norm_calls, (3 + share) * norm_bytes, 0),
            timed(f"{name} silu*up", [partial(silu, g) for g in gate_ups],
                  (2 + share) * silu_bytes, 0),
        ]  # fmt: skip
        if quant is not None:
            calls = [partial(quant, x) for x in outs]
            times[name].append(timed(f"{name} quantize o", calls, 1.5 * norm_bytes, 0))
        if quant is not None and num_shares > 1:
            norm_calls = [partial(norm, x, pair[1]) for x, pair in zip(more, norms, strict=True)]
            num_bytes = (2 + share + 2 * num_shares) * norm_bytes
            us = 2 * timed(f"{name} +{num_shares} shares", norm_calls, num_bytes, 0)
            times[name.replace("fp8", "engine")] = [us, *times[name][1:]]
        else:
            times[name.replace("fp8", "engine")] = times[name]
    return {name: sum(parts) for name, parts in times.items()}


def bench() -> None:
    for num_rows in BATCHES:
        products, fused = bench_products(num_rows), bench_fused(num_rows)
        print(f"SUM of a layer without attention, {num_rows} rows:")
        for name, us in products.items():
            kind = "block" if "block" in name else "channel"
            prefix = "engine" if "engine" in name else "fp8"
            kind = name if name == "bf16" else f"{prefix} {kind}"
            print(f"  {name:<22} {us:8.1f} + {fused[kind]:6.1f} = {us + fused[kind]:8.1f} us")


# ---- what it costs the text


def accuracy() -> None:
    """Sums of the demo model, and logits of its texts against bfloat16 and float32, on the CPU."""
    import sys

    tests = Path(__file__).parent.parent
    sys.path[:0] = [str(tests), str(tests / "quantization")]
    import model_harness
    from fp8_checkpoints import write_quantized
    from number_checks import divergence
    from transformers import AutoTokenizer

    from nanovllm import LLM, SamplingParams
    from nanovllm.models.model_config import load_model_config
    from nanovllm.utils.loader import load_model

    demo = tests / "tiny-qwen3"
    keys = json.loads((demo / "arithmetic_pairs.json").read_text())
    (held_out,) = [pairs for name, pairs in keys.items() if name != "train"]
    sums = [(f"{a}{sign}{b}=", str({"+": a + b, "-": a - b}[sign])) for a, sign, b in held_out]
    tokenizer = AutoTokenizer.from_pretrained(demo)
    beginnings = ("In the beginning", "And it came to pass", "And the LORD said", "Blessed are")
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = {
            kind: write_quantized(demo, Path(directory) / kind, kind)
            for kind in ("channel", "block")
        }
        runs: dict[str, tuple[Path, dict[str, Any]]] = {
            "float32": (demo, {"dtype": "float32"}),
            "bfloat16": (demo, {"dtype": "bfloat16"}),
            "fp8 online": (demo, {"dtype": "bfloat16", "quantization": "fp8"}),
            "fp8 channel": (checkpoints["channel"], {"dtype": "bfloat16"}),
            "fp8 block": (checkpoints["block"], {"dtype": "bfloat16"}),
        }
        texts: dict[str, list[list[int]]] = {}
        logits: dict[str, torch.Tensor] = {}
        for name, (model_dir, options) in runs.items():
            with LLM(model_dir, device="cpu", max_num_seqs=256, **options) as llm:
                greedy = SamplingParams(temperature=0, max_tokens=12)
                outputs = llm.generate([sum_[0] for sum_ in sums], greedy, use_tqdm=False)
                right = sum(o["text"] == a for o, (_, a) in zip(outputs, sums, strict=True))
                greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
                outputs = llm.generate(list(beginnings), greedy, use_tqdm=False)
                texts[name] = [output["token_ids"] for output in outputs]
            config = load_model_config(model_dir)
            if "quantization" in options:
                config = replace(config, quantization="fp8")
            model = model_harness.build(config, dtype=getattr(torch, options["dtype"]))
            load_model(model, model_dir)
            # All are asked about the same texts: those of float32.
            prompts = [tokenizer(text)["input_ids"] for text in beginnings]
            sequences = [p + t for p, t in zip(prompts, texts["float32"], strict=True)]
            rows = [model_harness.prefill_logits(model, torch.tensor(ids)) for ids in sequences]
            logits[name] = torch.cat(rows).double().log_softmax(-1)
            line = f"{name:<12} sums {right}/400"
            for other in ("float32", "bfloat16"):
                if other in logits and other != name:
                    line += f"; to {other}: {divergence(logits[other], logits[name])}"
            print(line, flush=True)
    requantized()


def requantized() -> None:
    """What the other choice for block scales, a scale a channel, would have added."""
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    block = quantize_blocks(weight)
    kept = dequantize_weight(block, 128)
    channel = quantize(kept, None)
    for name, value in (("blocks kept", kept), ("blocks to channels", dequantize(channel, None))):
        error = (value - weight).norm() / weight.norm()
        print(f"{name}: relative error of normal weights {error:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accuracy", action="store_true", help="on the CPU, no GPU needed")
    if parser.parse_args().accuracy:
        accuracy()
        return
    need_gpus()
    compile_all()
    check()
    bench()


if __name__ == "__main__":
    main()
