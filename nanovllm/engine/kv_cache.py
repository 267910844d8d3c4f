"""How many KV blocks the device can hold, by arithmetic and one measured warm-up step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

_GIB = 2**30
SAMPLING_WORKSPACE_BYTES = 256 * 2**20  # what redrawing takes beside its token counts


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """One rank's KV cache: `[2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]`."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        num_elements = self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return 2 * num_elements * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Unwritten memory: nothing reads a position that was not stored first."""
        dims = (self.block_size, self.num_kv_heads, self.head_dim)
        size = (2, self.num_layers, num_blocks, *dims)
        try:
            return torch.empty(size, dtype=self.dtype, device=device)
        except (RuntimeError, TypeError, MemoryError) as error:  # none left, or beyond 64 bits
            raise ValueError(
                f"A KV cache of {num_blocks} blocks, {num_blocks * self.block_bytes / _GIB:.4g} "
                "GiB, cannot be allocated. Lower num_kvcache_blocks, or leave it out."
            ) from error


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What was measured on a CUDA device around the warm-up, in bytes."""

    total: int
    free: int  # now, with the weights loaded and the warm-up's memory given back
    free_at_start: int  # before this engine took anything
    weights: int
    activations: int  # peak of the largest step above the weights


def sampling_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """The most device memory that redrawing takes, once a row asks for it: int32 counts first."""
    return 4 * max_num_seqs * vocab_size + SAMPLING_WORKSPACE_BYTES


def num_blocks_on_cuda(memory: MemoryUse, utilization: float, shape: KVCacheShape) -> int:
    """Blocks that fit into `utilization` of the device, less what this engine uses itself.

    Capped by what is free, since others may share the device. Raises ValueError with the whole sum
    if not one block fits.
    """
    own_use = max(0, memory.free_at_start - memory.free)
    budget = int(memory.total * utilization) - own_use - memory.activations
    # A little is left beside the peak for fragments and kernels' own memory.
    available = memory.free - memory.activations - _GIB // 4
    cache_bytes = min(budget, available)
    num_blocks = cache_bytes // shape.block_bytes
    parts = (
        f"total {memory.total / _GIB:.2f} GiB, free {memory.free / _GIB:.2f} GiB, "
        f"weights {memory.weights / _GIB:.2f} GiB, "
        f"activations {memory.activations / _GIB:.2f} GiB, "
        f"KV cache {max(0, cache_bytes) / _GIB:.2f} GiB"
    )
    if num_blocks < 1:
        raise ValueError(
            f"No room for the KV cache with gpu_memory_utilization={utilization}: {parts}. "
            "Raise it if memory is free, or lower max_num_batched_tokens or max_num_seqs, or free "
            "memory that other processes hold."
        )
    logger.info("GPU memory: %s, %d tokens", parts, num_blocks * shape.block_size)
    return num_blocks


def num_blocks_on_cpu(space_gib: float, shape: KVCacheShape, num_useful_blocks: int) -> int:
    """Blocks that fit into the budget for the CPU, and no more than could ever be used at once."""
    num_blocks = min(int(space_gib * _GIB) // shape.block_bytes, num_useful_blocks)
    if num_blocks < 1:
        raise ValueError(
            f"cpu_kvcache_space_gib={space_gib} holds no block of {shape.block_bytes} bytes "
            f"({shape.block_size} tokens). Raise it, or lower kvcache_block_size."
        )
    return num_blocks
