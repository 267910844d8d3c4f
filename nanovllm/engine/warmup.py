"""What a runner does before the first step: compile kernels at once, and size the largest step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

# Between them decode kernels change their tile sizes: kernels/{decode_plan,split_gemm,sample}.py.
KERNEL_BATCHES = (1, 16, 32, 64, 128, 256)
# Prefill attention has one tile size for short prompts and one for these.
LONG_PROMPT = 128


def run_in_threads(
    jobs: Sequence[Callable[[], None]], device: torch.device, num_threads: int
) -> None:
    """Run jobs that launch kernels for the first time: compilation releases Python's lock."""

    def run(job: Callable[[], None]) -> None:
        with torch.cuda.device(device):
            job()

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, jobs))


def largest_prompts(num_tokens: int, num_seqs: int, max_len: int) -> np.ndarray:
    """Lengths, [num_seqs] int32, of the most prompts and most tokens that one step may have."""
    num_seqs = min(num_seqs, num_tokens)
    lengths = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int32)
    lengths[: num_tokens % num_seqs] += 1
    return np.minimum(lengths, max_len)
