"""Where and for whom layers are built."""

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.utils.parallel import ParallelContext


@dataclass(frozen=True, slots=True)
class Placement:
    """Handed down from a model to each of its layers."""

    parallel: ParallelContext
    device: torch.device
    dtype: torch.dtype

    def parameter(self, *shape: int) -> nn.Parameter:
        """Make an unwritten parameter of that shape, without a gradient."""
        data = torch.empty(shape, device=self.device, dtype=self.dtype)
        return nn.Parameter(data, requires_grad=False)
