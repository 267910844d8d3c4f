"""Cost per step of each sampling feature beyond greedy and temperature, on a GPU.

python -m tests.gpu.bench_sampling [--batch 256] [--vocab 151936]

Every row asks for the feature; what is timed is all that runs behind the captured step. The median
of CUDA events around one step, with the L2 cache as the step itself leaves it. "host" is the time
the launches take, which overlap hides as long as it stays below the step's own time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nanovllm.engine.row_params import num_logprobs, param_cells, row_features, row_rules
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Column, PrefillWork, SchedulerOutput
from nanovllm.kernels.sample import sample
from nanovllm.sampling.redraw import Redrawer
from nanovllm.sampling_params import SamplingParams
from tests.gpu.needs_gpu import need_gpus

WIDTH = int(Column.BLOCK_TABLE) + 16
PROMPT_LEN, OUTPUT_LEN, HIDDEN = 512, 256, 1024


class Head:
    """A language-model head of one rank."""

    def __init__(self, vocab: int) -> None:
        self.weight = torch.randn(vocab, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.t()

    def gather_logits(self, local_logits: torch.Tensor) -> torch.Tensor:
        return local_logits


def features(vocab: int) -> dict[str, SamplingParams]:
    rng = np.random.default_rng(0)
    ids = rng.permutation(vocab)
    return {
        "top_k=50": SamplingParams(top_k=50),
        "top_p=0.9": SamplingParams(top_p=0.9),
        "min_p=0.05": SamplingParams(min_p=0.05),
        "top_k=50 top_p=0.9": SamplingParams(top_k=50, top_p=0.9),
        "top_k=50 top_p=0.9 min_p=0.05": SamplingParams(top_k=50, top_p=0.9, min_p=0.05),
        "repetition_penalty": SamplingParams(repetition_penalty=1.1),
        "all three penalties": SamplingParams(
            repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
        ),
        "min_tokens (2 ids)": SamplingParams(min_tokens=9999, max_tokens=None),
        "logit_bias (300 ids)": SamplingParams(logit_bias={int(i): 1.0 for i in ids[:300]}),
        "allowed ids (1000)": SamplingParams(allowed_token_ids=ids[:1000].tolist()),
        "bad words (20 runs of 3)": SamplingParams(bad_words=["x"]),
        "logprobs=0": SamplingParams(logprobs=0),
        "logprobs=5": SamplingParams(logprobs=5),
        "logprobs=20": SamplingParams(logprobs=20),
        "penalties top_k top_p logprobs=1": SamplingParams(
            repetition_penalty=1.1, top_k=50, top_p=0.9, logprobs=1
        ),
    }


def measure(step: Callable[[], Any], num_steps: int = 30) -> tuple[float, float]:
    """Median microseconds of the device and of the host."""
    device, host = [], []
    for i in range(num_steps + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # launches queue up behind it, so that gaps do not count
        began = time.perf_counter()
        start.record()
        step()
        end.record()
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        if i >= 5:
            device.append(start.elapsed_time(end) * 1e3)
            host.append(took * 1e6)
    return statistics.median(device), statistics.median(host)


def make_step(params: SamplingParams, batch: int, vocab: int, head: Head) -> Callable[[], Any]:
    rng = np.random.default_rng(1)
    seqs = []
    for row in range(batch):
        tokens = rng.integers(0, vocab, PROMPT_LEN + OUTPUT_LEN).tolist()
        seq = Sequence(row, str(row), tokens[:PROMPT_LEN], params, 10**6, (row, row))
        seq.token_ids = tokens
        seq.row, seq.barred_until_min_len = row, (1, 2)
        if params.bad_words:
            seq.bad_word_ids = tuple(tuple(rng.integers(0, vocab, 3).tolist()) for _ in range(20))
        seqs.append(seq)
    host_rows = np.zeros((batch + 1, WIDTH), dtype=np.int32)
    for row, seq in enumerate(seqs):
        for column, value in param_cells(seq).items():
            host_rows[row, column] = value
        host_rows[row, Column.SEQ_LEN] = len(seq.token_ids) + 1
    rules = [run for seq in seqs for run in row_rules(seq)]
    empty = np.zeros(0, dtype=np.int32)

    def record(is_prefill: bool) -> SchedulerOutput:
        return SchedulerOutput(
            1,
            0 if is_prefill else batch,
            row_features(params),
            num_logprobs(params.logprobs),
            np.zeros((0, 2), dtype=np.int32),
            np.zeros((0, 2), dtype=np.int32),
            np.concatenate([*rules, empty]).astype(np.int32) if is_prefill else empty,
            PrefillWork(*[empty] * 8) if is_prefill else None,
        )

    redrawer = Redrawer(head, batch, vocab, torch.device("cuda"))
    sampled = np.arange(batch, dtype=np.int32)
    bits = np.full(batch, row_features(params), dtype=np.int32)
    rows = torch.from_numpy(host_rows).cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    # About as peaked as a language model's: a few likely tokens and a long tail.
    logits = torch.randn(batch, vocab, generator=generator, device="cuda") * 2.0
    logits[:, ::1511] += 8.0
    logits = logits.to(torch.bfloat16)
    token_ids = torch.zeros(batch, dtype=torch.int32, device="cuda")
    redrawer.begin_step(record(is_prefill=True), sampled, bits)
    steady = record(is_prefill=False)

    def step() -> None:
        plan = redrawer.begin_step(steady, sampled, bits)
        redrawer.redraw(plan, steady, logits, rows, token_ids)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151_936)
    args = parser.parse_args()
    need_gpus()
    head = Head(args.vocab)
    print(f"{torch.cuda.get_device_name()}, batch {args.batch}, vocabulary {args.vocab}")
    print(f"{'feature':36s} {'device us':>10s} {'host us':>10s}")
    with torch.inference_mode():
        logits = torch.randn(args.batch, args.vocab, device="cuda").to(torch.bfloat16)
        ones = torch.ones(args.batch, device="cuda")
        zeros = torch.zeros(args.batch, device="cuda", dtype=torch.int32)
        plain = measure(lambda: sample(logits, ones, zeros, zeros, zeros))
        print(f"{'(temperature, in the captured step)':36s} {plain[0]:10.0f} {plain[1]:10.0f}")
        full_sort = measure(lambda: logits.float().sort(dim=1))
        print(f"{'(torch.sort alone, not used)':36s} {full_sort[0]:10.0f} {full_sort[1]:10.0f}")
        for name, params in features(args.vocab).items():
            device, host = measure(make_step(params, args.batch, args.vocab, head))
            print(f"{name:36s} {device:10.0f} {host:10.0f}", flush=True)
        hidden = torch.randn(30_000, HIDDEN, device="cuda", dtype=torch.bfloat16)
        places = torch.arange(30_000, dtype=torch.int32, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        redrawer = Redrawer(head, args.batch, args.vocab, torch.device("cuda"))
        device, host = measure(lambda: redrawer.prompt_logprobs(hidden, places, places, 1), 3)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"{'prompt_logprobs=1, 30,000 tokens':36s} {device:10.0f} {host:10.0f}")
        print(f"its peak memory above the hidden states: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
