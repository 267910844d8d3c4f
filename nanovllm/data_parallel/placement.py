"""Which GPUs, or how many cores, each of several engines gets."""

from __future__ import annotations

import os

import torch

from nanovllm.config import Config
from nanovllm.utils.device import resolve_device

_MAX_CPU_PROCESSES = 16  # that may share fewer cores


def engine_environments(config: Config, size: int) -> list[dict[str, str]]:
    """The environment variables of each engine: its GPUs, or its share of the CPU's cores."""
    per_engine = config.tensor_parallel_size
    if resolve_device(config.device).type != "cuda":
        num_cores = _num_cores()
        if size * per_engine > max(num_cores, _MAX_CPU_PROCESSES):  # each takes memory, too
            raise ValueError(
                f"data_parallel_size={size} times tensor_parallel_size={per_engine} needs "
                f"{size * per_engine} processes, and there are {num_cores} cores. Lower one."
            )
        threads = str(max(1, num_cores // size))
        named = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": threads}
        return [named] * size
    if ":" in config.device:
        raise ValueError(
            f"device={config.device!r} names one GPU. Pass device='cuda' and choose the GPUs with "
            "CUDA_VISIBLE_DEVICES."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (
        [str(number) for number in range(torch.cuda.device_count())]
        if visible is None
        else [name.strip() for name in visible.split(",") if name.strip()]
    )
    if size * per_engine > len(names):
        raise ValueError(
            f"data_parallel_size={size} times tensor_parallel_size={per_engine} needs "
            f"{size * per_engine} GPUs, and {len(names)} are visible. Lower one of them."
        )
    groups = [names[i * per_engine : (i + 1) * per_engine] for i in range(size)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def _num_cores() -> int:
    """Cores that this process may use; on macOS, which cannot say, those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
