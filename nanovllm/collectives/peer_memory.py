"""Memory on every GPU of a tensor-parallel group that the other ranks write into directly.

The memory comes from torch's symmetric memory (`torch.distributed._symmetric_memory`), the kernel
is ours: torch's one-shot all-reduce would spin for ever on a rank that has died. Multicast is
switched off for the allocation; plain loads and stores over NVLink are all that is used.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import torch
from torch._C import _distributed_c10d as c10d

from nanovllm.collectives.exchange import FLAG_WIDTH, Inboxes, exchange
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.utils.environment import environment

logger = logging.getLogger(__name__)

_TOTAL_SLOT_BYTES = 16 * 2**20  # of one half, over all ranks
_NUM_PROGRAMS = 64
_TIMEOUT = timedelta(seconds=60)


class RenumberedStore(c10d.Store):
    """Counts the exchanges that go through it from 0, whatever number their keys bear.

    torch numbers the rendezvous of a whole process, "name/number/rank". A second engine's rank 0
    would call by another number than its workers, which are new processes, and wait in vain.
    """

    def __init__(self, inner: c10d.Store) -> None:
        super().__init__()
        inner.set_timeout(_TIMEOUT)
        self._inner = inner
        self._numbers: dict[str, str] = {}

    def _renumbered(self, key: str) -> str:
        name, number, *rest = key.split("/")
        number = self._numbers.setdefault(number, str(len(self._numbers)))
        return "/".join([name, number, *rest])

    def set(self, key: str, value: str) -> None:
        self._inner.set(self._renumbered(key), value)

    def get(self, key: str) -> bytes:
        return self._inner.get(self._renumbered(key))

    def add(self, key: str, value: int) -> int:
        return self._inner.add(self._renumbered(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check([self._renumbered(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta = _TIMEOUT) -> None:
        self._inner.wait([self._renumbered(key) for key in keys], _TIMEOUT)


def slot_bytes_for(size: int) -> int:
    """Bytes of one rank's message: whole cache lines, so that all that follows is aligned."""
    return _TOTAL_SLOT_BYTES // size // 128 * 128


class PeerMemory:
    """Owns this rank's inbox and the mappings of the others'. All ranks build it together."""

    def __init__(
        self, store_path: str, rank: int, size: int, device: torch.device,
        num_programs: int = _NUM_PROGRAMS,
    ) -> None:  # fmt: skip
        # A store of its own: its time-out is short, and its keys are nobody else's.
        self._store = RenumberedStore(c10d.FileStore(store_path, size))
        # The name is known to this process's registry alone; no backend, no default group.
        self._name = Path(store_path).parent.name + "-" + Path(store_path).name
        self._group = c10d.ProcessGroup(self._store, rank, size)
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        slot_bytes = slot_bytes_for(size)
        data_bytes, flag_bytes = 2 * size * slot_bytes, 8 * size * num_programs * FLAG_WIDTH
        with torch.cuda.device(device), environment({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}):
            c10d._register_process_group(self._name, self._group)  # type: ignore[arg-type]  # str
            shape = (data_bytes + flag_bytes,)
            buffer = c10d._SymmetricMemory.empty_strided_p2p(shape, (1,), torch.uint8, device)
            buffer.zero_()
            torch.cuda.synchronize(device)  # before any other rank may write here
            self._memory = c10d._SymmetricMemory.rendezvous(buffer, self._name)
            views = [self._memory.get_buffer(r, shape, torch.uint8) for r in range(size)]
            addresses = [view.data_ptr() for view in views]
            offsets = [address - addresses[rank] for address in addresses]
            self._buffer = buffer
            self._inboxes = Inboxes(
                data=buffer[:data_bytes].view(2, size, slot_bytes),
                flags=buffer[data_bytes:].view(torch.int64).view(size, num_programs, FLAG_WIDTH),
                epochs=torch.zeros(num_programs, dtype=torch.int64, device=device),
                offsets=torch.tensor(offsets, dtype=torch.int64, device=device),
                stop=self._stop,
                rank=rank,
            )
        self.max_bytes = slot_bytes

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `x` is small enough, and lies as the kernel wants it."""
        # Not an empty one: ranks would not wait for each other, as the next message counts on.
        return 0 < x.numel() * x.element_size() <= self.max_bytes and x.is_contiguous()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place, and return it."""
        exchange(x, x, self._inboxes, is_sum=True)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors of one shape, [num_ranks, *x.shape]."""
        num_ranks = self._inboxes.data.shape[1]
        out = torch.empty((num_ranks, *x.shape), dtype=x.dtype, device=x.device)
        exchange(x, out, self._inboxes, is_sum=False)
        return out

    def release(self) -> None:
        """Let kernels that wait for another rank end, now and for good. From any thread."""
        self._stop.fill_(1)

    def close(self) -> None:
        """Unmap the others' memory and free ours, once. Waits for the device."""
        if hasattr(self, "_memory"):
            del self._memory, self._inboxes, self._buffer
            c10d._unregister_process_group(self._name)  # type: ignore[arg-type]  # a str is one


def make_peer_memory(
    store_path: str, rank: int, size: int, device: torch.device
) -> PeerMemory | None:
    """Build it on every rank, or say why not and return None, here alone."""
    reason: object = "GPUs cannot write to each other's memory"
    others = [torch.device("cuda", index) for index in range(size) if index != device.index]
    if HAS_TRITON and all(torch.cuda.can_device_access_peer(device, other) for other in others):
        try:
            return PeerMemory(store_path, rank, size, device)
        except (RuntimeError, AttributeError, TypeError) as error:  # torch calls it unstable
            reason = error
    logger.log(
        logging.WARNING if rank == 0 else logging.INFO,
        "All collectives go through NCCL, which is slower for small messages: %s",
        reason,
    )
    return None
