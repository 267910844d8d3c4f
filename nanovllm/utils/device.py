"""Which device and dtype to run on, and how much of the device's memory is left."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

logger = logging.getLogger(__name__)


def resolve_device(name: str, tp_rank: int = 0) -> torch.device:
    """Turn the option `device` into a device; rank r of a tensor-parallel group takes GPU r."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not has_cuda:
        raise ValueError(
            f"device={name!r} needs a CUDA GPU, and torch {torch.__version__} sees none. "
            "Pass device='cpu', or install a CUDA build of torch."
        )
    index = int(name.partition(":")[2] or tp_rank)
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"GPU {index} does not exist: torch sees {torch.cuda.device_count()} GPU(s). "
            "Lower tensor_parallel_size, or choose another device."
        )
    return torch.device("cuda", index)


def resolve_dtype(
    name: str, checkpoint_dtype: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """Turn the option `dtype` into a dtype.

    "auto" is the checkpoint's; where it names none, bfloat16 on CUDA and float32 on the CPU.
    """
    fallback = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = (checkpoint_dtype or fallback) if name == "auto" else getattr(torch, name)
    if dtype is torch.bfloat16 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise ValueError(
                f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic (compute "
                f"capability {capability[0]}.{capability[1]}, 8.0 is needed). Pass dtype='float16'."
            )
    return dtype


def device_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a CUDA device, whoever uses the rest."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes, total_bytes


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one of this thread, which is the user's, for a `with` block.

    Kernels of Triton and streams go by it, whatever device their tensors are on.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
