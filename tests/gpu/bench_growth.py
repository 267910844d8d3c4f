"""How speed changes as work grows, on a GPU: tables for the README; a script, not a test.

    python -m tests.gpu.bench_growth requests seqs models prefix unlimited long

Every figure is the second run of its workload on a warm engine, random weights, bfloat16.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import bench
from nanovllm import LLM, SamplingParams
from tests.gpu.needs_gpu import need_gpus

MAX_TOKEN_ID = 10_000


@contextmanager
def engine(size: str, **options: Any) -> Iterator[LLM]:
    with tempfile.TemporaryDirectory() as directory:
        model = bench.write_config(size, Path(directory))
        with LLM(str(model), load_format="dummy", **options) as llm:
            yield llm


def timed(llm: LLM, prompts: list[list[int]], params: Any) -> tuple[float, dict[str, float], list]:
    """Seconds of one `generate` call on a cold prefix cache, what the engine counted, outputs."""
    llm.reset_prefix_cache()
    before = llm.metrics.as_dict()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    counted = {name: value - before[name] for name, value in llm.metrics.as_dict().items()}
    return seconds, counted, outputs


def nano_workload(num_seqs: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    args = argparse.Namespace(
        num_seqs=num_seqs, input_len=1024, output_len=1024, max_token_id=MAX_TOKEN_ID,
        temperature=0.6,
    )  # fmt: skip
    return bench.workload(args, seed)


def row(label: str, num_seqs: int, seconds: float, counted: dict[str, float]) -> None:
    steps = counted["num_decode_steps"]
    host = counted["schedule_s"] + counted["launch_s"] + counted["update_s"]
    print(
        f"| {label} | {num_seqs} | {counted['num_output_tokens'] / seconds:,.0f} tok/s | "
        f"{seconds:.2f} s | {steps:.0f} decode steps of {counted['num_decode_rows'] / steps:.0f} | "
        f"{counted['num_preemptions']:.0f} preempted | host {1e3 * host / steps:.2f} ms a step |",
        flush=True,
    )


def run_requests() -> None:
    print("0.6B, number of requests, max_num_seqs 512")
    with engine("0.6B") as llm:
        timed(llm, *nano_workload(512, 0))
        for num_seqs in (16, 64, 256, 1024, 4096):
            prompts, params = nano_workload(num_seqs, 1)
            if num_seqs <= 1024:
                timed(llm, prompts, params)
            seconds, counted, _ = timed(llm, prompts, params)
            row("requests", num_seqs, seconds, counted)


def run_seqs() -> None:
    print("0.6B, 1,024 requests, max_num_seqs")
    for max_num_seqs in (1024, 512, 256, 128, 64):
        with engine("0.6B", max_num_seqs=max_num_seqs) as llm:
            timed(llm, *nano_workload(2 * max_num_seqs, 2))
            seconds, counted, _ = timed(llm, *nano_workload(1024, 1))
            row("max_num_seqs", max_num_seqs, seconds, counted)


def run_models(sizes: tuple[str, ...] = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")) -> None:
    print("256 requests, max_num_seqs 512, by model")
    for size in sizes:
        with engine(size) as llm:
            # Captures the graphs that the run needs; short, as big models are slow.
            prompts, _ = nano_workload(256, 0)
            short = [SamplingParams(max_tokens=2 + i // 2, ignore_eos=True) for i in range(256)]
            timed(llm, prompts, short)
            seconds, counted, _ = timed(llm, *nano_workload(256, 1))
            row(size, 256, seconds, counted)


def run_prefix() -> None:
    print("0.6B, 1,000 questions of 20-80 tokens after one system prompt of 1,000; 64 tokens out")
    rng = Random(0)
    system = [rng.randrange(MAX_TOKEN_ID) for _ in range(1000)]
    prompts = [
        system + [rng.randrange(MAX_TOKEN_ID) for _ in range(rng.randint(20, 80))]
        for _ in range(1000)
    ]
    params = SamplingParams(max_tokens=64, temperature=0.6, ignore_eos=True)
    for enabled in (False, True):
        with engine("0.6B", enable_prefix_caching=enabled) as llm:
            timed(llm, prompts, params)
            seconds, counted, _ = timed(llm, prompts, params)
            print(
                f"| prefix caching {'on' if enabled else 'off'} | {seconds:.2f} s | "
                f"{counted['num_computed_prompt_tokens']:,.0f} prompt tokens computed of "
                f"{sum(map(len, prompts)):,} | "
                f"{counted['num_output_tokens'] / seconds:,.0f} tok/s |",
                flush=True,
            )


def run_unlimited() -> None:
    """Limits of 32k that say nothing; answers end by a stop id, about 500 tokens in the mean."""
    print("0.6B, 1,024 requests, max_tokens 32,000, mean answer 500, against limits known exactly")
    prompts, _ = nano_workload(1024, 1)
    stop = Random(1).sample(range(MAX_TOKEN_ID, 151_000), 151_936 // 500)
    with engine("0.6B", max_model_len=34_000) as llm:
        params = SamplingParams(
            max_tokens=32_000, temperature=1.0, ignore_eos=True, stop_token_ids=stop, seed=7
        )
        for _ in range(2):
            seconds, counted, outputs = timed(llm, prompts, params)
        row("limit 32,000", 1024, seconds, counted)
        lens = [len(output["token_ids"]) for output in outputs]
        known = [SamplingParams(max_tokens=n, temperature=1.0, ignore_eos=True) for n in lens]
        seconds, counted, _ = timed(llm, prompts, known)
        row("the same lengths as limits", 1024, seconds, counted)
        print(f"  mean answer {sum(lens) / len(lens):.0f}, longest {max(lens)}")


def run_long() -> None:
    print("0.6B, one long prompt and one token out, by the size of chunks")
    rng = Random(0)
    prompt = [rng.randrange(MAX_TOKEN_ID) for _ in range(32_000)]
    for budget in (4096, 16_384, 32_768):
        options = {"max_num_batched_tokens": budget, "max_model_len": 33_000}
        with engine("0.6B", **options) as llm:
            for length in (4_000, 8_000, 16_000, 32_000):
                for _ in range(2):
                    seconds, _, _ = timed(llm, [prompt[:length]], SamplingParams(max_tokens=1))
                # 2 flops a weight of the layers, and 2 * 2 * q_size a pair of tokens and layer
                flops = 2 * 440e6 * length + 28 * 4 * 2048 * length**2 / 2
                print(
                    f"| chunks of {budget:,} | {length:,} tokens | {1e3 * seconds:.0f} ms | "
                    f"{flops / seconds / 1e12:.0f} TFLOP/s |",
                    flush=True,
                )
    # One long row among short ones: the step must cost what its bytes cost.
    with engine("0.6B", max_model_len=33_000) as llm:
        shorts = [[rng.randrange(MAX_TOKEN_ID) for _ in range(800)] for _ in range(63)]
        out = SamplingParams(max_tokens=200, ignore_eos=True)
        for label, prompts in (
            ("63 x 800", shorts),
            ("63 x 800 and 30,000", [prompt[:30000], *shorts]),
        ):
            first = SamplingParams(max_tokens=1, ignore_eos=True)
            for _ in range(2):
                prefill_s, _, _ = timed(llm, prompts, first)
                seconds, _, _ = timed(llm, prompts, out)
            step_us = (seconds - prefill_s) / 199 * 1e6
            num_tokens = sum(map(len, prompts)) + 100 * len(prompts)
            print(
                f"| {label} | {step_us:.0f} us a decode step | "
                f"{num_tokens * 114_688 / 1e6:.0f} MB of KV |"
            )


def main() -> None:
    parts = {
        "requests": run_requests, "seqs": run_seqs, "models": run_models, "prefix": run_prefix,
        "unlimited": run_unlimited, "long": run_long,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(parts)}")
    tables = parser.parse_args().tables
    for name in tables:
        if name not in parts:
            parser.error(f"there is no table {name!r}; there are {', '.join(parts)}")
    need_gpus()
    for name in tables or parts:
        started = time.perf_counter()
        try:
            parts[name]()
        except Exception as error:  # one table must not cost the others
            print(f"{name}: {type(error).__name__}: {error}")
        print(f"[{name}: {time.perf_counter() - started:.0f} s]\n", flush=True)


if __name__ == "__main__":
    main()
