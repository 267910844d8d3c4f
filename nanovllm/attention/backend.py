"""The attention backend interface and the choice of one."""

import logging
import os
from importlib import import_module
from typing import Any, Protocol

import torch

from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.utils.context import ForwardContext

logger = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Computes attention over the paged KV cache; the layer has stored K and V before."""

    name: str
    is_capturable: bool  # a decode step may be captured in a CUDA graph

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, max_num_seqs: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """Head counts are those of this rank; dtype is the KV cache's."""

    def prepare(self, ctx: ForwardContext) -> Any:
        """Do what all layers share, once a step; the result becomes `ctx.attn_metadata`.

        For a decode step on CUDA: device work of static shapes only, as a graph captures it.
        """

    def forward(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim], rows may be strided
        k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], this step's, rows may be strided
        v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], this step's, rows may be strided
        k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        v_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        ctx: ForwardContext,
        kv_scale: torch.Tensor | None = None,  # [2, num_kv_heads] float32 for a cache in fp8
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], contiguous
        """Attend; rows whose seq_len is 0 give zeros."""


_BACKENDS = {
    "flash_attn": ("nanovllm.attention.flash_attn", "FlashAttnBackend"),
    "triton": ("nanovllm.attention.triton", "TritonBackend"),
    "sdpa": ("nanovllm.attention.sdpa", "SdpaBackend"),
}
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_TRITON_DTYPES = (*_HALF_DTYPES, torch.float32)
_TRITON_HEAD_DIMS = (16, 32, 64, 128, 256)
_FLASH_ATTN_HEAD_DIMS = (64, 128)  # what was tried: wheels may be built for these alone


def get_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int,
    is_fp8: bool = False,
) -> type[AttentionBackend]:  # fmt: skip
    """Import the backend called `name`; "auto" takes the fastest that is installed and fits.

    dtype: the model's; is_fp8: whether the KV cache is in fp8

    Raises ValueError where an explicit choice cannot work, ImportError where it needs a package.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ValueError(
            f"attention_backend must be 'auto' or one of {', '.join(_BACKENDS)}, got {name!r}."
        )
    fit = (device, dtype, head_dim, block_size, is_fp8)
    if name == "auto":
        backend = _fastest(*fit)
    else:
        obstacle = _obstacle(name, *fit)
        if obstacle is not None:
            raise ValueError(
                f"attention_backend={name!r} {obstacle}. "
                "Pass attention_backend='auto', or 'sdpa', which takes everything."
            )
        backend = _load(name)
        if name == "flash_attn" and not flash_attn_fits(dtype, head_dim):
            logger.warning(
                "attention_backend='flash_attn' takes flash-attn for head_dim 64 and 128 in 16 "
                "bits; with head_dim %d, %s prefill is the Triton kernel's",
                head_dim,
                dtype,
            )
    logger.info(
        "Attention backend: %s (%s, %s, head_dim %d, block_size %d)",
        backend.name,
        device.type,
        *fit[1:4],
    )
    return backend


def _fastest(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, is_fp8: bool
) -> type[AttentionBackend]:
    # Not flash_attn: its prefill was slower than ours. The interpreter lets `triton` run on a CPU,
    # but only for who asks for it by name.
    fit = (device, dtype, head_dim, block_size, is_fp8)
    if device.type == "cuda" and not _obstacle("triton", *fit):
        try:
            return _load("triton")
        except ImportError as error:
            logger.info("Attention backend triton is not available: %s", error.__cause__)
    return _load("sdpa")


def flash_attn_fits(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether prefill of this kind of model goes through flash-attn."""
    return dtype in _HALF_DTYPES and head_dim in _FLASH_ATTN_HEAD_DIMS


def _obstacle(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int,
    is_fp8: bool,
) -> str | None:  # fmt: skip
    """Say why the backend cannot work, or None; does not look at what is installed."""
    if name == "sdpa":
        return None
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"needs a CUDA device, got {device.type!r}"
    if head_dim not in _TRITON_HEAD_DIMS:
        return f"takes head_dim {', '.join(map(str, _TRITON_HEAD_DIMS))}, got {head_dim}"
    if is_fp8 and head_dim < 32:  # halves of a head, which the tensor cores take by 16
        return f"takes head_dim 32 or more with a cache in fp8, got {head_dim}"
    if dtype not in _TRITON_DTYPES:
        return f"takes dtype {', '.join(map(str, _TRITON_DTYPES))}, got {dtype}"
    if block_size % 16:
        return f"takes a block_size that is a multiple of 16, got {block_size}"
    return None


def _load(name: str) -> type[AttentionBackend]:
    module, class_name = _BACKENDS[name]
    try:
        if name != "sdpa" and not HAS_TRITON:
            raise ImportError("No module named 'triton'", name="triton")
        backend: type[AttentionBackend] = getattr(import_module(module), class_name)
    except ImportError as error:
        raise ImportError(
            f"attention_backend={name!r} needs {error.name or 'a package that fails to load'} "
            f"({error}). Run `pip install {'flash-attn' if HAS_TRITON else 'triton'}`, or pass "
            "attention_backend='sdpa'."
        ) from error
    return backend
