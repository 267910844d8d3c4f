"""Check and time small kernels on a GPU: `python -m tests.gpu.bench_kernels [--sample] [--gemm]`.

Each figure is one kernel inside a CUDA graph that runs it over several sets of buffers, so launch
gaps count as they do in a decode step, and inputs larger than the L2 cache come from memory.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from nanovllm.kernels.noise import make_key
from nanovllm.kernels.qk_norm_rope_store import (
    qk_norm_rope_store_reference,
    qk_norm_rope_store_triton,
)
from nanovllm.kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from nanovllm.kernels.sample import sample_reference, sample_triton
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference, silu_and_mul_triton
from nanovllm.kernels.split_gemm import split_gemm_triton
from tests.gpu.needs_gpu import need_gpus

BANDWIDTH = 4.24e12  # bytes/s, what a plain copy reaches on an H200
ROTATED_BYTES = 200e6  # several times the L2 cache
BATCHES = (1, 16, 64, 128, 256, 512)
# name: hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size
MODELS = {"0.6B": (1024, 16, 8, 128, 3072), "8B": (4096, 32, 8, 128, 12288)}
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def graph_us(
    calls: Sequence[Callable[[], object]],
    replays: int = 20,
    reset: Callable[[], object] | None = None,
) -> float:
    """Return the time of one call in microseconds, the calls captured one after another.

    reset runs once before the capture, after the warm-up.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    stream.synchronize()
    if reset is not None:
        reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / replays / len(calls)


def num_copies(num_bytes: float) -> int:
    return int(min(max(ROTATED_BYTES / num_bytes, 3), 48))


def report(name: str, n: int, num_bytes: float, us: float) -> None:
    share = num_bytes / BANDWIDTH / us * 1e8
    print(f"{name:<28} n={n:<6} {us:9.2f} us {num_bytes / 1e6:10.2f} MB {share:6.1f} %", flush=True)


def rope_inputs(n: int, shape: tuple[int, ...], num_blocks: int = 512) -> dict[str, Any]:
    _, num_heads, num_kv_heads, head_dim, _ = shape
    angles = torch.rand(4096, head_dim // 2, device="cuda") * 6
    cache = torch.zeros(2, num_blocks, 64, num_kv_heads, head_dim, **BF16)
    return {
        "qkv": torch.randn(n, (num_heads + 2 * num_kv_heads) * head_dim, **BF16),
        "q_weight": torch.rand(head_dim, **BF16) + 0.5,
        "k_weight": torch.rand(head_dim, **BF16) + 0.5,
        "eps": 1e-6,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
        "positions": torch.randint(0, 4096, (n,), device="cuda"),
        "slots": torch.randperm(num_blocks * 64, device="cuda")[:n],
        "k_cache": cache[0],
        "v_cache": cache[1],
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def sample_inputs(n: int, vocab_size: int, temperature: float) -> list[torch.Tensor]:
    rows = torch.zeros(n, 16, dtype=torch.int32, device="cuda")
    rows[:, 0] = torch.tensor([temperature]).view(torch.int32).item()
    rows[:, 1:3] = torch.tensor([make_key(i, 0) for i in range(n)], dtype=torch.int32)
    rows[:, 3] = torch.arange(n)
    logits = torch.randn(n, vocab_size, **BF16) * 2
    return [logits, rows[:, 0].view(torch.float32), rows[:, 1], rows[:, 2], rows[:, 3]]


def check() -> None:
    """Compare every kernel with its reference on this device."""
    for shape in MODELS.values():
        hidden_size, size = shape[0], shape[-1]
        for n in (1, 7, 300):
            x, residual = torch.randn(2, n, hidden_size, **BF16)
            weight = torch.rand(hidden_size, **BF16)
            close(rms_norm_triton(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
            expected = add_rms_norm_reference(x, residual, weight, 1e-6)
            close(*(pair[0] for pair in (add_rms_norm_triton(x, residual, weight, 1e-6), expected)))
            assert torch.equal(residual, expected[1])
            gate_up = torch.randn(n, 2 * size, **BF16)
            close(silu_and_mul_triton(gate_up), silu_and_mul_reference(gate_up))
            inputs = rope_inputs(n, shape)
            inputs["slots"][::3] = -1
            copies = {k: v.clone() if torch.is_tensor(v) else v for k, v in inputs.items()}
            qk_norm_rope_store_triton(**inputs)
            qk_norm_rope_store_reference(**copies)
            for name in ("qkv", "k_cache", "v_cache"):
                # One rounding of a large value, carried by the rotation to a small one.
                close(inputs[name], copies[name], atol=2**-4)
    for temperature in (0.0, 0.6, 1.0):
        inputs = sample_inputs(64, 151_936, temperature)
        values, token_ids = sample_triton(*inputs)
        expected_values, expected_ids = sample_reference(*inputs)
        # What the kernel's exponentials are off by.
        torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=2**-11)
        num_other = (token_ids != expected_ids).sum().item()
        print(f"check: sample at temperature {temperature}: {num_other} of 64 tokens differ")
        assert num_other <= (6 if temperature else 0), "more than rounding"
    print("check: all kernels match their references")


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 2**-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=atol)


def bench_layer_kernels() -> None:
    for model, shape in MODELS.items():
        hidden_size, num_heads, num_kv_heads, head_dim, size = shape
        weight = torch.rand(hidden_size, **BF16)
        for n in (*BATCHES, 8192):
            row = 2.0 * n * hidden_size
            xs = [torch.randn(2, n, hidden_size, **BF16) for _ in range(num_copies(4 * row))]
            us = graph_us([partial(rms_norm_triton, x[0], weight, 1e-6) for x in xs])
            report(f"{model} rms_norm", n, 2 * row, us)
            us = graph_us([partial(add_rms_norm_triton, *x, weight, 1e-6) for x in xs])
            report(f"{model} add_rms_norm", n, 4 * row, us)
            num_bytes = 6.0 * n * size
            xs = [torch.randn(n, 2 * size, **BF16) for _ in range(num_copies(num_bytes))]
            us = graph_us([partial(silu_and_mul_triton, x) for x in xs])
            report(f"{model} silu_and_mul", n, num_bytes, us)
            inputs = rope_inputs(n, shape)
            kv_bytes = 4.0 * n * num_kv_heads * head_dim
            # q read and written; k read, written and stored; v read and stored
            num_bytes = 4.0 * n * num_heads * head_dim + 2.5 * kv_bytes
            qkvs = [torch.randn_like(inputs["qkv"]) for _ in range(num_copies(num_bytes))]
            us = graph_us(
                [partial(qk_norm_rope_store_triton, **inputs | {"qkv": qkv}) for qkv in qkvs]
            )
            report(f"{model} qk_norm_rope_store", n, num_bytes, us)
            for name in ("k_cache", "v_cache"):
                inputs[name] = inputs[name].to(torch.float8_e4m3fn)
            inputs["kv_scale"] = torch.full((2, num_kv_heads), 2.0**-5, device="cuda")
            us = graph_us(
                [partial(qk_norm_rope_store_triton, **inputs | {"qkv": qkv}) for qkv in qkvs]
            )
            report(f"{model} qk_norm_rope_store, fp8", n, num_bytes - kv_bytes / 2, us)


def bench_sample(vocab_size: int = 151_936) -> None:
    for n in BATCHES:
        num_bytes = 2.0 * n * vocab_size
        for temperature in (0.0, 0.6):
            copies = [
                sample_inputs(n, vocab_size, temperature) for _ in range(num_copies(num_bytes))
            ]
            us = graph_us([partial(sample_triton, *inputs) for inputs in copies])
            report(f"sample, temperature {temperature}", n, num_bytes, us)


def bench_gemm() -> None:
    """The narrow projections with the norm behind them, as a chain of layers, and the library's."""
    hidden_size, num_layers = 1024, 28
    weights = {
        size: [torch.randn(hidden_size, size, **BF16) / size**0.5 for _ in range(num_layers)]
        for size in (2048, 3072)
    }
    scale = torch.rand(hidden_size, **BF16)
    for n in (1, 16, 32, 64, 128, 256):
        residual = torch.zeros(n, hidden_size, **BF16)
        total = {"library": 0.0, "split": 0.0}
        for size, layers in weights.items():
            x = torch.randn(n, size, **BF16)
            for name, gemm in (("library", F.linear), ("split", split_gemm_triton)):
                calls = [
                    lambda w=w, g=gemm, x=x, r=residual: add_rms_norm_triton(
                        g(x, w), r, scale, 1e-6
                    )
                    for w in layers
                ]
                us = graph_us(calls)
                report(f"{name} [{hidden_size}, {size}] + norm", n, 2.0 * hidden_size * size, us)
                total[name] += num_layers * us
        print(f"n={n}: a step's o and down projections with norms: {total} us")


def main() -> None:
    parser = argparse.ArgumentParser()
    modes = {
        "sample": bench_sample,
        "gemm": bench_gemm,
    }
    for name, mode in modes.items():
        parser.add_argument(f"--{name}", dest="runs", action="append_const", const=mode)
    arguments = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for run in arguments.runs or ():
        run()
    if arguments.runs:
        return
    check()
    bench_layer_kernels()
    bench_sample()
    bench_gemm()


if __name__ == "__main__":
    main()
