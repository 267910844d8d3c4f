"""The gated activation of the feed-forward block."""

import torch
from torch import nn

from nanovllm.kernels.silu_and_mul import silu_and_mul


class SiluAndMul(nn.Module):
    """silu(gate) * up on the output of the merged gate and up projection."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:  # [n, 2 * size] -> [n, size]
        return silu_and_mul(gate_up)
