"""Throughput of whole `generate` calls on nano-vllm's workload: random prompts, random lengths.

python bench.py --model DIR                  # 256 requests of 100-1024 tokens in and out
python bench.py --size 0.6B                  # random weights from a config alone, no files
python bench.py --size 8B --engine-options max_num_seqs=256,enforce_eager=True
python bench.py --size 30B-A3B               # mixtures of experts: 61 GB of weights
python bench.py --size 8B --fp8-blocks       # as Qwen3-8B-FP8 is
python bench.py --size 0.6B --profile /tmp/p # torch.profiler trace and a table of kernels
python bench.py --size 8B --engine-options tensor_parallel_size=2   # --profile too, of rank 0
python bench.py --size 8B --num-seqs 512 --data-parallel 2          # an engine on each of two GPUs
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

_IMPORT_STARTED = time.time()

# hidden, layers, q heads, intermediate, tied: Qwen3 as published; 8 kv heads of 128 each,
# unless SPARSE says otherwise
SIZES = {
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
    "14B": (5120, 40, 40, 17408, False),
    "32B": (5120, 64, 64, 25600, False),
    "30B-A3B": (2048, 48, 32, 6144, False),
}
# What config.json says beyond that: sparse models
SPARSE = {
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}  # fmt: skip


def process_age_s() -> float:
    """Seconds since this process was started, interpreter start-up included where /proc tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return time.time() - _IMPORT_STARTED


def workload(args: argparse.Namespace, seed: int) -> tuple[list[list[int]], list[Any]]:
    """Prompts of random ids and as many SamplingParams."""
    from nanovllm import SamplingParams

    rng = Random(seed)
    low_in, low_out = min(100, args.input_len), min(100, args.output_len)
    prompts = [
        [rng.randint(0, args.max_token_id) for _ in range(rng.randint(low_in, args.input_len))]
        for _ in range(args.num_seqs)
    ]
    params = [
        SamplingParams(
            temperature=args.temperature,
            ignore_eos=True,
            max_tokens=rng.randint(low_out, args.output_len),
        )
        for _ in range(args.num_seqs)
    ]
    return prompts, params


def vocab_size(llm: Any) -> int:
    """Of the model of an LLM or a DataParallelLLM."""
    owner = llm._files if hasattr(llm, "_files") else llm._engine
    return int(owner.model_config.vocab_size)


# What Qwen's -FP8 releases say of their weights
FP8_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip


def write_config(size: str, directory: Path, *, has_fp8_blocks: bool = False) -> Path:
    """A Qwen3 config.json of published size, for load_format="dummy"."""
    hidden, layers, heads, intermediate, tied = SIZES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": hidden, "eos_token_id": 151645,
        "intermediate_size": intermediate, "max_position_embeddings": 40960,
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16", "vocab_size": 151936,
    }  # fmt: skip
    config |= SPARSE.get(size, {})
    if has_fp8_blocks:
        config["quantization_config"] = FP8_BLOCKS
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def run(llm: Any, prompts: list[list[int]], params: list[Any], label: str) -> float:
    """Time one `generate` call and print its figures; return output tokens per second."""
    before = dict(llm.metrics.as_dict())
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    num_in = sum(map(len, prompts))
    num_out = sum(output.num_output_tokens for output in outputs)
    after = llm.metrics.as_dict()
    phases = {name: after[name] - before[name] for name in after}
    print(
        f"{label}: {num_in} tokens in, {num_out} out, {seconds:.2f} s, "
        f"{num_out / seconds:,.0f} tok/s"
    )
    print("  " + ", ".join(f"{name} {value:.4g}" for name, value in phases.items() if value))
    return num_out / seconds


def profile(llm: Any, args: argparse.Namespace) -> None:
    """Trace a few decode steps; print kernels, busy share and host time per step."""
    import torch

    prompts, params = workload(args, args.seed)
    for prompt, param in zip(prompts, params, strict=True):
        llm.add_request(prompt, param)
    for _ in range(args.profile_after):
        llm.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    num_steps = 10
    with torch.profiler.profile(activities=activities) as trace:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            llm.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    host: list[float] = []
    engine = llm._engine
    sends = timed_sends(engine._executor)
    for _ in range(num_steps):  # without the profiler: time until the step's wait begins
        began = time.perf_counter()
        output = engine.scheduler.schedule()
        if output is not None:
            engine._in_flight.append(engine.launched(output))
        host.append(time.perf_counter() - began)
        while len(engine._in_flight) > 1:
            engine._bring_in(engine._in_flight.popleft())
    directory = Path(args.profile)
    directory.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(directory / "trace.json"))
    kernels = [event for event in trace.events() if event.device_type.name == "CUDA"]
    busy_us = sum(event.self_device_time_total for event in kernels)
    print(
        f"profile: {num_steps} steps, {1e3 * seconds / num_steps:.3f} ms a step, "
        f"{len(kernels) / num_steps:.0f} kernels a step, GPU busy {busy_us / (1e6 * seconds):.1%}, "
        f"host {1e3 * sorted(host)[num_steps // 2]:.3f} ms to schedule and launch"
    )
    if sends:
        shared = [event for event in kernels if is_collective(event.name)]
        shared_us = sum(event.self_device_time_total for event in shared)
        print(
            f"tensor parallel: collectives {shared_us / busy_us:.1%} of the busy time (waiting for "
            f"the other ranks in them), {len(shared) / num_steps:.0f} a step, "
            f"{shared_us / max(1, len(shared)):.1f} us each; the record's way to the workers "
            f"{1e6 * sorted(sends)[len(sends) // 2]:.0f} us"
        )
    print(
        trace.key_averages().table(
            sort_by="self_device_time_total", row_limit=20, max_name_column_width=60
        )
    )
    llm.abort(list(engine.processor.requests))


def timed_sends(executor: Any) -> list[float]:
    """Fills with the seconds that handing each record to the workers takes; empty with none."""
    seconds: list[float] = []
    group = getattr(executor, "_group", None)
    if group is None:
        return seconds
    send = group.send

    def timed(kind: bytes, payload: bytes) -> None:
        began = time.perf_counter()
        send(kind, payload)
        seconds.append(time.perf_counter() - began)

    group.send = timed
    return seconds


def is_collective(kernel: str) -> bool:
    return "nccl" in kernel.lower() or "_exchange_kernel" in kernel


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model directory or hub id")
    parser.add_argument("--size", choices=SIZES, help="Qwen3 of this size with random weights")
    parser.add_argument(
        "--fp8-blocks", action="store_true", help="with --size: weights as in Qwen's -FP8 releases"
    )
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=1024, help="longest prompt")
    parser.add_argument("--output-len", type=int, default=1024, help="longest answer")
    parser.add_argument(
        "--max-token-id", type=int, help="largest of the prompts' (default: 10000, if there is one)"
    )
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; later ones count up")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--engine-options", default="", help="name=value,name=value for LLM")
    parser.add_argument("--data-parallel", type=int, metavar="N", help="N engines, one queue")
    parser.add_argument("--profile", metavar="DIR", help="trace a few decode steps into DIR")
    parser.add_argument("--profile-after", type=int, default=200, help="steps before the trace")
    parser.add_argument("--verbose", action="store_true", help="show the engine's log")
    args = parser.parse_args()
    if (args.model is None) == (args.size is None):
        parser.error("pass one of --model and --size")
    for name in ("num_seqs", "input_len", "output_len", "runs"):
        if (number := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {number}")
    if args.fp8_blocks and args.size is None:
        parser.error("--fp8-blocks is for --size: a checkpoint of --model says itself what it is")
    if args.data_parallel and args.profile:
        parser.error("--profile looks into one engine: leave out --data-parallel")
    if args.profile:
        import torch

        if not torch.cuda.is_available():
            parser.error("--profile traces a GPU's kernels, and torch sees no GPU")
    if args.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")

    from nanovllm import LLM, SamplingParams
    from nanovllm.data_parallel import DataParallelLLM

    items = [item.partition("=") for item in args.engine_options.split(",") if item]
    if wrong := [name for name, equals, _ in items if not equals]:
        parser.error(f"--engine-options takes name=value,name=value, got {wrong[0]!r}")
    options: dict[str, Any] = {name: value for name, _, value in items}
    for name, value in options.items():
        with contextlib.suppress(ValueError, SyntaxError):  # a plain word is a string
            options[name] = ast.literal_eval(value)
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if args.size:
            place = Path(directory)
            model = str(write_config(args.size, place, has_fp8_blocks=args.fp8_blocks))
            options = {"load_format": "dummy", **options}
        if args.data_parallel:
            llm: Any = DataParallelLLM(model, data_parallel_size=args.data_parallel, **options)
        else:
            llm = LLM(model, **options)
    ready_s = process_age_s()
    if args.max_token_id is None:
        args.max_token_id = min(10000, vocab_size(llm) - 1)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    print(f"start-up: {ready_s:.2f} s to the engine, {process_age_s():.2f} s to the first token")
    for number in range(args.runs):
        run(llm, *workload(args, args.seed + number), f"run {number + 1}")
    if args.profile:
        profile(llm, args)
    llm.close()


if __name__ == "__main__":
    main()
