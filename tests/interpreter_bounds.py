"""Triton's interpreter with the memory check that a GPU has from compute-sanitizer.

It reads and writes whatever addresses a kernel makes, without a word where they lie outside of the
tensors that were passed. Here that is an IndexError, in every test that runs a kernel on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_Function = Callable[..., Any]


class Bounds:
    """Knows the memory of the launch that runs."""

    def __init__(self) -> None:
        self._starts = self._ends = np.zeros(0, dtype=np.uint64)

    def enter(self, arguments: list[Any]) -> None:
        """Take the memory of a launch's tensors for all that there is."""
        storages = [x.untyped_storage() for x in arguments if isinstance(x, torch.Tensor)]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages})
        self._starts = np.array([start for start, _ in spans], dtype=np.uint64)
        self._ends = np.array([end for _, end in spans], dtype=np.uint64)

    def check(self, pointers: Any, mask: Any) -> None:
        """Raise unless every element that is not masked lies in one of the tensors."""
        addresses = np.atleast_1d(pointers.data).ravel()
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, pointers.data.shape).ravel()]
        if not addresses.size:
            return
        itemsize = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        places = np.searchsorted(self._starts, addresses, side="right") - 1
        is_inside = (places >= 0) & (addresses + itemsize <= self._ends[places])
        if not is_inside.all():
            first = int(addresses[~is_inside][0])
            raise IndexError(f"{int((~is_inside).sum())} elements lie in no tensor: {first:#x}")


def install() -> None:
    """Check every load, store and atomic operation of the interpreter from now on."""
    from triton.runtime import interpreter

    bounds = Bounds()

    def wrap(owner: Any, name: str, make: Callable[[_Function], _Function]) -> None:
        setattr(owner, name, make(getattr(owner, name)))

    def entering(init: _Function) -> _Function:
        def run(self: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            args_host, kwargs_host = init(self, args, kwargs)
            bounds.enter([*args_host, *kwargs_host.values()])
            return args_host, kwargs_host

        return run

    def masked(place: int) -> Callable[[_Function], _Function]:
        def make(access: _Function) -> _Function:
            def run(self: Any, pointers: Any, *rest: Any) -> Any:
                bounds.check(pointers, rest[place] if place >= 0 else None)
                return access(self, pointers, *rest)

            return run

        return make

    wrap(interpreter.GridExecutor, "_init_args_hst", entering)
    builder = interpreter.InterpreterBuilder
    wrap(builder, "create_masked_load", masked(0))
    wrap(builder, "create_masked_store", masked(1))
    wrap(builder, "create_atomic_cas", masked(-1))

    def read_modify_write(access: _Function) -> _Function:
        def run(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            bounds.check(pointers, mask)
            return access(self, operation, pointers, value, mask, *rest)

        return run

    wrap(builder, "create_atomic_rmw", read_modify_write)
