"""The scales of a KV cache in fp8: how large K and V are, by layer and head.

e4m3 is floating point, so a scale decides only what saturates above and what drowns below: any
within a few powers of two is as good as another. So one prompt tells enough, and room is left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.engine.kv_cache import KVCacheShape
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.context import ForwardContext

_NUM_TOKENS = 256
_SEED = 0
_E4M3_MAX = 448.0
_HEADROOM = 2.0  # and up to twice as much by rounding; what is larger still saturates
_SMALLEST = 1e-6  # a head that is all zeros gets a scale too


def calibrate(
    scales: torch.Tensor,  # [num_layers, 2, num_kv_heads] float32, in place
    shape: KVCacheShape,
    model: DecoderForCausalLM,
    backend: AttentionBackend,
    max_model_len: int,
) -> None:
    """Set the scales from the K and V of one prompt of random tokens, the same in every engine.

    It is run with a cache in the model's dtype. Scales are powers of two: multiplying by them
    rounds nothing, and sums in another order (more ranks, another device) seldom change them.
    All ranks call it together, as the model has collectives.
    """
    device, dtype = scales.device, model.model.norm.weight.dtype  # norms are never quantised
    num_blocks = -(-_NUM_TOKENS // shape.block_size)
    cache = replace(shape, dtype=dtype).allocate(num_blocks, device)
    random = np.random.RandomState(_SEED)  # its stream is frozen, also between versions
    token_ids = random.randint(model.config.vocab_size, size=_NUM_TOKENS)
    places = torch.arange(_NUM_TOKENS, device=device)
    edges = torch.tensor([0, _NUM_TOKENS], dtype=torch.int32, device=device)
    ctx = ForwardContext(
        kv_cache=cache,
        is_decode=False,
        slot_mapping=places,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        seq_lens=edges[1:].clone(),  # not at an odd address, for which kernels are compiled anew
        cu_seqlens_q=edges,
        cu_seqlens_k=edges,
        max_seqlen_q=_NUM_TOKENS,
        max_seqlen_k=_NUM_TOKENS,
        host_seqlens=((_NUM_TOKENS, _NUM_TOKENS),),
    )
    ctx = replace(ctx, attn_metadata=backend.prepare(ctx))
    positions = (places % max_model_len).int()
    model(torch.from_numpy(token_ids).to(device, torch.int32), positions, ctx)
    stored = cache.flatten(2, 3)[:, :, :_NUM_TOKENS]  # [2, num_layers, num_tokens, heads, head_dim]
    largest = stored.abs().amax(dim=(2, 4)).transpose(0, 1).float().cpu().numpy()
    _, exponents = np.frexp(np.maximum(largest, _SMALLEST) * (_HEADROOM / _E4M3_MAX))
    scales.copy_(torch.from_numpy(np.ldexp(np.float32(1.0), exponents)))
