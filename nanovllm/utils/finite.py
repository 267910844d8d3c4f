"""Refuse weights that are no numbers, or none that the model's dtype can hold, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

NamedTensor = tuple[str, torch.Tensor]

_DTYPES = (torch.bfloat16, torch.float32)  # that hold more than others; which a user may pass


class HasTensors(Protocol):
    """What is looked at of an nn.Module."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def named_buffers(self) -> Iterator[NamedTensor]: ...


def check_finite(weights: Iterable[NamedTensor], dtype: torch.dtype) -> None:
    """Raise a ValueError for the first tensor with a NaN, or with infinities once cast to `dtype`.

    One reduction a tensor on its own device. A device is waited for once, at the end, and all
    tensors are held until then.
    """
    weights = list(weights)
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for _, tensor in weights:
        is_finite = extremes(tensor).to(dtype).isfinite().all()
        flags.setdefault(tensor.device, []).append(is_finite)
    read: Mapping[torch.device, Iterator[bool]] = {
        device: iter(torch.stack(found).tolist()) for device, found in flags.items()
    }
    for name, tensor in weights:
        if not next(read[tensor.device]):
            raise ValueError(f"{name}: {_reason(tensor, dtype)}")


def check_loaded(model: HasTensors, checkpoint: Iterable[NamedTensor]) -> None:
    """As `check_finite`, for a model of one dtype that was just filled from `checkpoint`.

    Looks at the parameters, which the device reads in a hundredth of the time that loading took,
    and only to name a culprit at the checkpoint again, tensor by tensor.
    """
    tensors: list[NamedTensor] = [*model.named_parameters(), *model.named_buffers()]
    dtype = tensors[0][1].dtype  # the embedding's
    try:
        check_finite(tensors, torch.float32)
    except ValueError:
        for pair in checkpoint:
            check_finite([pair], dtype)
        raise


def extremes(tensor: torch.Tensor) -> torch.Tensor:
    """The least and the largest value of a tensor of floats, [2] on its device; NaN if any is."""
    if tensor.numel() == 0:
        return torch.zeros(2, device=tensor.device)
    if tensor.dtype.itemsize > 1:
        # Not a sum, which overflows, and not isfinite: that writes as many flags, 8 times slower.
        return torch.stack(tensor.aminmax())
    # torch cannot order float8. In e4m3 only NaN has all bits below the sign, infinity has none.
    is_nan = (tensor.view(torch.uint8) & 0x7F).amax() == 0x7F
    return torch.where(is_nan, torch.nan, 0.0).expand(2)


def _reason(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()
    num_broken = int((~wide.isfinite()).sum())
    if num_broken:
        return (
            f"{num_broken} of its {tensor.numel()} values are NaN or infinite. Is the file "
            "damaged, or did its training diverge?"
        )
    reached = extremes(tensor)
    holding = [str(d).removeprefix("torch.") for d in _DTYPES if reached.to(d).isfinite().all()]
    advice = f"pass dtype={' or '.join(map(repr, holding))}" if holding else "no dtype holds them"
    limit = f"{torch.finfo(dtype).max:.6g}"
    name = str(dtype).removeprefix("torch.")
    return f"its values reach {float(reached.abs().max()):.6g}, beyond {name}'s {limit}; {advice}."
