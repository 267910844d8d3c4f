"""Add a LoRA adapter to a checkpoint's weights while they are read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from nanovllm.lora.adapter import LowRankUpdate, load_adapter
from nanovllm.utils.checks import errors_named
from nanovllm.utils.loader import check_castable, check_shape, name_list

logger = logging.getLogger(__name__)


def merged(
    weights: Iterable[tuple[str, torch.Tensor]], directory: str | Path, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs of `weights`, those that the adapter changes as float32 on `device`.

    weights: (checkpoint name, full tensor), before anything is fused, sharded or quantised: so it
        works for every architecture, rank and dtype
    Raises a ValueError at the end if an update was for a weight that never came.
    """
    adapter = load_adapter(directory)
    left = dict(adapter.updates)
    for name, tensor in weights:
        update = left.pop(name, None)
        yield name, tensor if update is None else _merge(name, tensor, update, device)
    if left:
        raise ValueError(f"the adapter {directory} changes {name_list(left)}: no such weight.")
    logger.info("Merged %d low-rank updates from %s", len(adapter.updates), directory)


@torch.no_grad()
def _merge(
    name: str, weight: torch.Tensor, update: LowRankUpdate, device: torch.device
) -> torch.Tensor:
    with errors_named(name):
        check_castable(weight)
        check_shape(weight, (update.b.shape[0], update.a.shape[1]))
    # In float32 whatever is stored, so that the sum is rounded once, to the model's own dtype.
    a, b = (half.to(device).float() for half in (update.a, update.b))
    return torch.addmm(weight.to(device).float(), b, a, alpha=update.scale)
