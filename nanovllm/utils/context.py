"""What a forward pass is told about the step it belongs to; passed down, never global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Where this step's tokens live in the paged KV cache and who attends to what.

    A decode step has one query token per sequence; its tensors are static under a CUDA graph, where
    padding rows have `seq_lens` 0 and slot -1. A prefill step packs chunks of prompts one after
    another.
    """

    kv_cache: torch.Tensor  # [2, num_layers, num_blocks, block_size, num_kv_heads, head_dim]
    is_decode: bool
    # [num_tokens] int64, block_id * block_size + offset; -1 is not stored
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32, last dim contiguous
    seq_lens: torch.Tensor  # [num_seqs] int32, KV entries attended, this step's included
    # [num_layers, 2, num_kv_heads] float32, what K and V in an fp8 cache are multiplied by
    kv_scales: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None  # [num_seqs + 1] int32, prefill only
    cu_seqlens_k: torch.Tensor | None = None  # [num_seqs + 1] int32, prefill only
    max_seqlen_q: int = 1
    max_seqlen_k: int = 0
    # Some chunk attends to K and V that another step or another row wrote: read the paged cache.
    has_cached_prefix: bool = False
    host_seqlens: tuple[tuple[int, int], ...] = ()  # per chunk (num_query_tokens, seq_len)
    attn_metadata: Any = None  # what the attention backend's `prepare` returned
