"""What a runner does before the first step: compile kernels at once, and size the largest step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nanovllm.utils.device import on_device

# Between them decode kernels change their tile sizes: kernels/{decode_plan,split_gemm,sample}.py,
# fused/tiles.py and quantization/kernels/fp8_gemm.py.
KERNEL_BATCHES = (1, 16, 32, 64, 96, 128, 256)
# Prefill attention has one tile size for short prompts and one for these.
LONG_PROMPT = 128


def run_in_threads(
    jobs: Sequence[Callable[[], None]], device: torch.device, num_threads: int
) -> None:
    """Run jobs that launch our kernels for the first time: compilation releases Python's lock.

    What they compute means nothing: products of matrices are zero.
    """

    def run(job: Callable[[], None]) -> None:
        with on_device(device), _WithoutProducts():
            job()

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run, jobs))


class _WithoutProducts(TorchFunctionMode):
    """No thread gets a cuBLAS handle of its own, with 32 MiB that no engine could give back."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func not in (F.linear, torch.matmul, torch._scaled_mm):
            return func(*args, **options)
        if options.get("out") is not None:
            return options["out"].zero_()
        width = args[1].shape[0 if func is F.linear else 1]
        dtype = options.get("out_dtype", args[0].dtype)
        return args[0].new_zeros((*args[0].shape[:-1], width), dtype=dtype)


def largest_prompts(num_tokens: int, num_seqs: int, max_len: int) -> np.ndarray:
    """Lengths, [num_seqs] int32, of the most prompts and most tokens that one step may have."""
    num_seqs = min(num_seqs, num_tokens)
    lengths = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int32)
    lengths[: num_tokens % num_seqs] += 1
    return np.minimum(lengths, max_len)
