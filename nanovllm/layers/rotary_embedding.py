"""Rotary position embedding: the table of cosines and sines, scaled as checkpoints declare."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeType = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a checkpoint stretches its rotary frequencies. Fields another type uses are None."""

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int | None = None  # llama3, yarn
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn, as all below
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: follows from factor and mscale
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def rope_table(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    max_positions: int,
    *,
    device: torch.device,
) -> torch.Tensor:
    """Return the table [max_positions, head_dim] float32: first half cosines, second half sines.

    YaRN's attention factor is multiplied in.
    """
    inv_freq, attention_factor = inverse_frequencies(head_dim, theta, scaling)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inv_freq.to(device))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(attention_factor)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[torch.Tensor, float]:
    """Return the angle a position, [head_dim / 2] float32 on the CPU, and the attention factor.

    The order of operations is the one of transformers, so that the float32 values are the same.
    """
    wavelengths = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return 1.0 / wavelengths, 1.0
    if scaling.rope_type == "linear":
        return 1.0 / wavelengths / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(1.0 / wavelengths, scaling), 1.0
    return _yarn(wavelengths, head_dim, theta, scaling), _yarn_attention_factor(scaling)


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between interpolated."""
    old_context_len = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert old_context_len is not None, "read_rope fills it in"
    assert low is not None, "read_rope requires it"
    assert high is not None, "read_rope requires it"
    wavelen = 2 * math.pi / inv_freq
    is_slow = wavelen > old_context_len / low
    is_medium = ~is_slow & ~(wavelen < old_context_len / high)
    smooth = (old_context_len / wavelen - low) / (high - low)
    smoothed = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    scaled = torch.where(is_slow, inv_freq / scaling.factor, inv_freq)
    return torch.where(is_medium, smoothed, scaled)


def _yarn(
    wavelengths: torch.Tensor, head_dim: int, theta: float, scaling: RopeScaling
) -> torch.Tensor:
    """Blend kept and divided frequencies by how often each turns within the original context."""
    context_len = scaling.original_max_position_embeddings
    assert context_len is not None, "read_rope fills it in"

    def dim_of(num_rotations: float) -> float:
        ratio = context_len / (num_rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp is a step then, not a division by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
