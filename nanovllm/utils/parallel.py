"""Tensor-parallel identity and collectives, as a value that layers are given.

No default process group of torch.distributed is used or made: an outer job keeps its own, and two
engines live in one process.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from nanovllm.utils.device import on_device
from nanovllm.utils.environment import environment

logger = logging.getLogger(__name__)

_TIMEOUT = timedelta(minutes=10)
_ABORT_TIMEOUT_S = 10.0
# Needs Triton, and is above this module: loaded by name where ranks have GPUs.
_PEER_MEMORY = "nanovllm.collectives.peer_memory"
_NCCL_VARIABLES = {
    # By default NCCL's watchdog ends this process when another rank has died; we want to say so
    # first.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # By default a thread asks the store each second whether it is to dump traces. Once the store's
    # file is gone it retries for five minutes, and for so long the group's destructor waits for it.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This rank's place among `tp_size` ranks that hold one slice of every layer each."""

    tp_rank: int
    tp_size: int
    group: Any  # a bare ProcessGroup, or None when tp_size is 1
    peers: Any = None  # a PeerMemory for small messages, where GPUs reach each other's memory
    is_nccl: bool = False

    @classmethod
    def single(cls) -> ParallelContext:
        return cls(0, 1, None)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum contiguous `x` over the ranks, in place, and return it."""
        if self.tp_size == 1:
            return x
        if self.peers is not None and self.peers.takes(x):
            self.peers.all_reduce(x)
        else:
            self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors of one shape along `dim`, in rank order."""
        if self.tp_size == 1:
            return x
        x = x.contiguous()
        if self.peers is not None and self.peers.takes(x):
            parts = list(self.peers.all_gather(x))
        else:
            parts = [torch.empty_like(x) for _ in range(self.tp_size)]
            self.group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=dim)

    def min_int(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""
        if self.tp_size == 1:
            return value
        gathered = self.all_gather(torch.tensor([value], dtype=torch.int64, device=device))
        return int(gathered.min().item())

    def abort(self) -> None:
        """Let collectives end that wait for a rank that is gone; what they give means nothing.

        From any thread. None can be called afterwards. May wait until captured graphs that hold
        collectives are gone. (Gloo notices by itself.)
        """
        if self.peers is not None:
            self.peers.release()
        if self.is_nccl:
            with suppress(RuntimeError):
                self.group.abort()

    def close(self) -> None:
        """Give back what collectives hold on the device, without waiting for other ranks.

        Every graph that was captured with them must be gone.
        """
        if not self.is_nccl:
            return
        if self.peers is not None:
            self.peers.close()
        # Not its destructor, which would abort too, with a warning: here the wait has an end.
        thread = Thread(target=self.abort, name="nanovllm-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_TIMEOUT_S)
        if thread.is_alive():
            logger.warning("NCCL has not let go of its communicator: some GPU memory is kept")


def join_group(
    store_path: str, tp_rank: int, tp_size: int, device: torch.device, *, use_peers: bool = True
) -> ParallelContext:
    """Meet the other ranks at a file that only this user can read, and return this rank's context.

    A file, not a TCP store: no port is opened for the rendezvous. Gloo's own connections are bound
    to loopback.
    """
    store = FileStore(store_path, tp_size)
    if device.type == "cuda":
        with on_device(device):
            return _join_on_gpus(store, store_path, tp_rank, tp_size, device, use_peers=use_peers)
    gloo = dist.ProcessGroupGloo
    gloo_options = gloo._Options()  # type: ignore[attr-defined]  # no public way to bind loopback
    gloo_options._devices = [gloo.create_device(hostname="127.0.0.1")]
    gloo_options._timeout = _TIMEOUT
    return ParallelContext(tp_rank, tp_size, gloo(store, tp_rank, tp_size, gloo_options))


def _join_on_gpus(
    store: FileStore,
    store_path: str,
    tp_rank: int,
    tp_size: int,
    device: torch.device,
    *,
    use_peers: bool,
) -> ParallelContext:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    with environment(_NCCL_VARIABLES):
        group = dist.ProcessGroupNCCL(store, tp_rank, tp_size, options)
    parallel = ParallelContext(tp_rank, tp_size, group, is_nccl=True)
    peers = None
    if use_peers:
        peers = import_module(_PEER_MEMORY).make_peer_memory(
            f"{store_path}-peers", tp_rank, tp_size, device
        )
    # The first collective makes the communicator, which a graph's capture could not; and either
    # all ranks have peer memory or none uses it.
    if parallel.min_int(int(peers is not None), device) == 0:
        if peers is not None and tp_rank == 0:
            logger.warning("Another rank has no shared memory: all collectives go through NCCL")
        return parallel
    return ParallelContext(tp_rank, tp_size, group, peers, is_nccl=True)
