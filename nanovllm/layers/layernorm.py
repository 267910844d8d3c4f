"""RMSNorm, alone or with the residual addition before it."""

from typing import overload

import torch
from torch import nn

from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.layers.placement import Placement
from nanovllm.utils.loader import copy_weight


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    shards: tuple[str | None, ...] = (None,)

    def __init__(self, hidden_size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = place.parameter(hidden_size)
        self.weight.fill_(1.0)

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    @overload
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Norm x [n, hidden_size]; with a residual, norm `x + residual` and return that sum too.

        With a residual x may also be what `RowParallelLinear.partials` gives.

        The residual may be overwritten: use the one that is returned.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None = None) -> None:
        """Copy the whole weight in place."""
        copy_weight(self.weight, tensor)
