"""Write new keys and values into the paged KV cache, in torch; CUDA does so in a fused kernel."""

import torch


def store_kv(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slots: torch.Tensor, kv_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write new keys and values into the paged cache, in place; slot -1 is skipped.

    On CUDA it waits for the device, to count the slots.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], rows may be strided
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous
        slots: [num_tokens] int64, `block_id * block_size + offset`
        kv_scale: [2, num_kv_heads] float32, by which K and V are divided for an fp8 cache; what is
            then beyond its range saturates
    """
    rows = (slots >= 0).nonzero().squeeze(1)
    slots = slots[rows].long()
    for index, (new, cache) in enumerate(((key, k_cache), (value, v_cache))):
        new = new[rows]
        if kv_scale is not None:
            new = (new.float() / kv_scale[index, :, None]).clamp(-448, 448)  # fp8's range
        words = as_words(new.to(cache.dtype))
        as_words(cache).view(-1, *words.shape[1:]).index_copy_(0, slots, words)


def as_words(x: torch.Tensor) -> torch.Tensor:
    """View an fp8 tensor as int16, by pairs of its last dim; others as they are.

    Torch indexes no fp8, on some devices, and Triton transposes no single bytes.
    """
    return x.view(torch.int16) if x.dtype.itemsize == 1 else x
