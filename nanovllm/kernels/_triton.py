"""Triton, or stand-ins that let kernel modules import where it is not installed.

Kernel files write `from nanovllm.kernels._triton import tl, triton, use_triton`. Without Triton
their decorated functions stay plain Python functions that nobody calls.
"""

from functools import cache
from typing import Any

import torch

HAS_TRITON: bool

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _StandIn:
        """Answers every attribute, call and decorator, so that a module's top level runs."""

        def __getattr__(self, name: str) -> Any:
            # Dunder look-ups (copy, pickle, inspect) must fail as they do for any object.
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            # `@triton.jit` keeps the function; `@triton.jit(...)` and the like return a decorator.
            return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self

    triton: Any = _StandIn()  # type: ignore[no-redef]  # same name, two branches
    tl: Any = _StandIn()  # type: ignore[no-redef]  # same name, two branches


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether a public kernel function should launch Triton for `tensor`.

    Only for CUDA tensors: the interpreter is for tests, which call `<name>_triton` themselves.
    """
    return HAS_TRITON and tensor.is_cuda


@cache
def _has_pdl(device: torch.device) -> bool:
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return is_hopper and hasattr(tl.extra.cuda, "gdc_wait")


def pdl_options(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options, and the flag `PDL`, of a kernel that may start before the one before it ends.

    Programmatic dependent launch (Hopper and later): such a kernel lets its successor start at
    once, and until `gdc_wait` has seen the end of all kernels before it writes nothing and reads
    nothing but weights and what was written before the last ordinary kernel was launched. So memory
    is as on a plain stream, and only start-up costs overlap.
    """
    return {"PDL": True, "launch_pdl": True} if _has_pdl(tensor.device) else {"PDL": False}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait for the end of those before: see `pdl_options`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(lines):
    """Ask for the cache lines at these addresses; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


__all__ = ["HAS_TRITON", "pdl_options", "pdl_wait", "prefetch_l2", "tl", "triton", "use_triton"]
