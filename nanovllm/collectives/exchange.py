"""Sum or gather a small tensor over the GPUs of one host in one kernel that writes to the others.

Every rank writes its values into each other rank's inbox, raises a flag there, waits for the flags
of the others and then works from its own memory. One way over the link is all that it waits for;
a library's ring or tree takes several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import tl, triton

FLAG_WIDTH = 16  # a cache line for each flag: programs must not wait for each other's

_BLOCK = 4096  # elements that a program handles at once
# Looks at a flag between two looks at `stop`: tens of milliseconds. It is host memory, and reading
# it takes so long that ranks which wait for each other while they read would go on doing so.
_SPINS = tl.constexpr(1 << 16)


@dataclass(frozen=True, slots=True)
class Inboxes:
    """One rank's inbox and where those of the others are; written by kernels of all ranks.

    Messages alternate between two halves: when a rank writes one half again, its last message has
    been answered by all, so their kernels that read this half before have ended.
    """

    data: torch.Tensor  # [2, num_ranks, slot_bytes] uint8, this rank's
    # [num_ranks, num_programs, FLAG_WIDTH] int64, this rank's; first: the last message from each
    flags: torch.Tensor
    epochs: torch.Tensor  # [num_programs] int64, messages so far
    offsets: torch.Tensor  # [num_ranks] int64, bytes from this rank's inbox to each one's
    stop: torch.Tensor  # [1] int32, pinned host memory; not 0: wait for nobody any more
    rank: int

    @property
    def slot_bytes(self) -> int:
        return self.data.shape[2]


def exchange(x: torch.Tensor, out: torch.Tensor, inboxes: Inboxes, *, is_sum: bool) -> None:
    """Write the sum of all ranks' `x`, or all of them in rank order, into `out`.

    Every rank calls this with the same sizes, in the same order, on one stream. Sums are taken in
    float32 in rank order, so that they are the same bits everywhere.

    Args:
        x: contiguous, `slot_bytes` at most
        out: like x (may be x), or [num_ranks, *x.shape] where not `is_sum`
    """
    _, num_ranks, slot_bytes = inboxes.data.shape
    itemsize = x.element_size()
    assert x.is_contiguous() and x.numel() * itemsize <= slot_bytes
    # No programmatic dependent launch: that this kernel has begun must mean the last one has ended.
    _exchange_kernel[(len(inboxes.epochs),)](
        x, out, inboxes.data.view(-1).view(x.dtype), inboxes.flags, inboxes.epochs, inboxes.offsets,
        inboxes.stop, x.numel(), slot_bytes // itemsize, RANK=inboxes.rank, NUM_RANKS=num_ranks,
        ITEMSIZE=itemsize, IS_SUM=is_sum, BLOCK=_BLOCK, FLAG_WIDTH=FLAG_WIDTH, num_warps=16,
    )  # fmt: skip


def exchange_reference(parts: list[torch.Tensor], *, is_sum: bool) -> torch.Tensor:
    """Plain torch form of what `exchange` writes, given every rank's x."""
    if not is_sum:
        return torch.stack(parts)
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


@triton.jit
def _exchange_kernel(
    x, out, inbox, flags, epochs, offsets, stop, numel, slot_size, RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr, ITEMSIZE: tl.constexpr, IS_SUM: tl.constexpr, BLOCK: tl.constexpr,
    FLAG_WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = tl.load(epochs + program) + 1
    half = inbox + (epoch % 2) * NUM_RANKS * slot_size
    lanes = tl.arange(0, BLOCK)
    # Programs without a share need no flags: one that has ended tells all about its kernel.
    if program * BLOCK < numel:
        for start in range(program * BLOCK, numel, num_programs * BLOCK):
            place = start + lanes
            mask = place < numel
            values = tl.load(x + place, mask=mask)
            for step in tl.static_range(1, NUM_RANKS):
                shift = tl.multiple_of(tl.load(offsets + (RANK + step) % NUM_RANKS) // ITEMSIZE, 16)
                tl.store(half + shift + RANK * slot_size + place, values, mask=mask)
        tl.debug_barrier()  # the flag speaks for all threads' values
        for step in tl.static_range(1, NUM_RANKS):
            shift = tl.load(offsets + (RANK + step) % NUM_RANKS) // 8
            flag = flags + shift + (RANK * num_programs + program) * FLAG_WIDTH
            tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
        for step in tl.static_range(1, NUM_RANKS):
            index = (RANK + step) % NUM_RANKS * num_programs + program
            _wait(flags + index * FLAG_WIDTH, epoch, stop)
        tl.debug_barrier()
        for start in range(program * BLOCK, numel, num_programs * BLOCK):
            place = start + lanes
            mask = place < numel
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(NUM_RANKS):
                if rank == RANK:
                    values = tl.load(x + place, mask=mask)
                else:
                    # Past the first-level cache, which does not see what others write.
                    source = half + rank * slot_size + place
                    values = tl.load(source, mask=mask, cache_modifier=".cg")
                if IS_SUM:
                    total += values.to(tl.float32)
                else:
                    tl.store(out + rank * numel + place, values, mask=mask)
            if IS_SUM:
                tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
    tl.store(epochs + program, epoch)


@triton.jit
def _wait(flag, epoch, stop):
    """Wait until `flag` has come to `epoch`, or the host says stop."""
    # Plain looks: atomics of all waiting programs would hold up the one that raises the flag.
    is_waiting = tl.load(flag, volatile=True) < epoch
    spins = 0
    while is_waiting:
        spins += 1
        is_waiting = tl.load(flag, volatile=True) < epoch
        if spins % _SPINS == 0:
            is_waiting = is_waiting & (tl.load(stop, volatile=True) == 0)
    # What the other rank wrote before it raised the flag is seen from here on.
    tl.atomic_add(flag, 0, sem="acquire", scope="sys")
