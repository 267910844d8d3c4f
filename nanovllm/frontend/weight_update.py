"""New weights on their way to the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nanovllm.engine.executor import LocalExecutor

_PART_BYTES = 32 * 2**20  # the channel keeps room for several of the largest message

NamedTensor = tuple[str, torch.Tensor]


def weight_list(weights: Any) -> list[NamedTensor]:
    """All pairs, so that a wrong one is found before any weight is changed."""
    if isinstance(weights, Mapping):
        raise TypeError("weights must be (name, tensor) pairs, got a dict. Pass its items().")
    if isinstance(weights, str) or not isinstance(weights, Iterable):
        raise TypeError(
            f"weights must be (name, tensor) pairs, got {weights!r:.200}. Those of a "
            "file are safetensors.torch.load_file(path).items()."
        )
    pairs = []
    for index, pair in enumerate(weights):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"weights must be (name, tensor) pairs, got {pair!r} at {index}.")
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"weights must be (name, tensor) pairs, got ({type(name).__name__}, "
                f"{type(tensor).__name__}) at {index}."
            )
        if hasattr(tensor, "full_tensor"):  # of torch.distributed: FSDP's, for one
            raise ValueError(f"{name} is a DTensor, spread over ranks. Pass its full_tensor().")
        if tensor.is_meta or tensor.layout is not torch.strided:
            kind = "on the meta device, without data" if tensor.is_meta else str(tensor.layout)
            raise ValueError(f"{name} is {kind}. Pass it as a dense tensor with data.")
        pairs.append((name, tensor.detach()))
    return pairs


def replace_weights(executor: LocalExecutor, weights: list[NamedTensor], tp_size: int) -> None:
    """Check all weights, then replace them on every rank, part by part."""
    if tp_size > 1:
        _check_sendable(weights)
    executor.call_rank_0("check_weights", weights)
    for part in [weights] if tp_size == 1 else weight_parts(weights):
        executor.call_each("load_weights", part)
    executor.call("calibrate")


def _check_sendable(weights: list[NamedTensor]) -> None:
    """Raise a ValueError for tensors that cannot be pickled for the ranks: torch's float8."""
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
            raise ValueError(
                f"{name} is {tensor.dtype}, which cannot be sent to the ranks. With "
                "tensor_parallel_size above 1 pass it as bfloat16: it is quantised again."
            )


def weight_parts(weights: list[NamedTensor]) -> Iterator[list[NamedTensor]]:
    """Parts of limited size for the channel to the workers, on the host."""
    part: list[NamedTensor] = []
    num_bytes = 0
    for name, tensor in weights:
        if part and num_bytes + tensor.nbytes > _PART_BYTES:
            yield part
            part, num_bytes = [], 0
        # Contiguous and its own: pickling a view would send all that it is a view of.
        part.append((name, tensor.cpu().clone(memory_format=torch.contiguous_format)))
        num_bytes += tensor.nbytes
    if part:
        yield part
