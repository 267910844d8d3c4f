"""Tensor-parallel identity and collectives, as a value that layers are given.

No default process group of torch.distributed is used or made: an outer job keeps its own, and two
engines live in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This rank's place among `tp_size` ranks that hold one slice of every layer each."""

    tp_rank: int
    tp_size: int
    group: Any  # a bare ProcessGroup, or None when tp_size is 1

    @classmethod
    def single(cls) -> ParallelContext:
        return cls(0, 1, None)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place, and return it."""
        if self.tp_size > 1:
            self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors of one shape along `dim`, in rank order."""
        if self.tp_size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        self.group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=dim)

    def min_int(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        if self.tp_size == 1:
            return value
        gathered = self.all_gather(torch.tensor([value], dtype=torch.int64, device=device))
        return int(gathered.min().item())


def join_group(
    store_path: str, tp_rank: int, tp_size: int, device: torch.device
) -> ParallelContext:
    """Meet the other ranks at a file that only this user can read, and return this rank's context.

    A file, not a TCP store: no port is opened for the rendezvous. The collectives' own connections
    are bound to loopback.
    """
    store = FileStore(store_path, tp_size)
    group: Any
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        group = dist.ProcessGroupNCCL(store, tp_rank, tp_size, options)
    else:
        gloo = dist.ProcessGroupGloo
        gloo_options = gloo._Options()  # type: ignore[attr-defined]  # no public way to bind loopback
        gloo_options._devices = [gloo.create_device(hostname="127.0.0.1")]
        gloo_options._timeout = _TIMEOUT
        group = gloo(store, tp_rank, tp_size, gloo_options)
    return ParallelContext(tp_rank, tp_size, group)
