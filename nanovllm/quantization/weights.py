"""Bring weights to modules that own them in fp8, whether a checkpoint has them so or not."""

from abc import abstractmethod

import torch
from torch import nn

from nanovllm.quantization.formats import BLOCK, FP8, Fp8Format
from nanovllm.quantization.kernels.quantize import QuantTensor, quantize, quantize_blocks
from nanovllm.utils.finite import extremes
from nanovllm.utils.loader import copy_weight
from nanovllm.utils.parallel import ParallelContext


class Fp8Weights(nn.Module):
    """Base of the modules that own fp8 weights and their scales, or a rank's part of them."""

    def __init__(
        self, weight_format: Fp8Format, parallel: ParallelContext, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._format, self._parallel, self._dtype = weight_format, parallel, dtype
        self._scale_name = weight_format.scale_name or "weight_scale"

    @abstractmethod
    def local_part(
        self, name: str, tensor: torch.Tensor, shard: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views: what of the module the full tensor fills, and with which part."""

    @abstractmethod
    def has_parts_of_rows(self, name: str) -> bool:
        """Whether ranks share out the columns of the weight `name`."""

    @abstractmethod
    def matrices(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's weights, [out_features, in_features], each with its scales."""

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Of the scales of a weight."""
        if self._format.group_size is None:
            return out_features, 1
        return -(-out_features // BLOCK), -(-in_features // BLOCK)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None = None) -> None:
        """Copy this rank's part of the full tensor in place; a weight that is not fp8 becomes so.

        name: "weight", "bias" or what the checkpoint calls the scales; of an expert's after its
            number and projection
        """
        prefix, dot, last = name.rpartition(".")
        if last == "weight" and tensor.dtype is not FP8:
            self._quantize_into(prefix + dot, tensor, shard)
            return
        if last == "weight" and self._format.scale_name is None:
            raise ValueError(
                f"the checkpoint's dtype {tensor.dtype} needs scales, and config.json has no "
                "quantization_config that tells which."
            )
        target, part = self.local_part(name, tensor, shard)
        copy_weight(target, part)
        if last == self._format.scale_name:
            check_scales(tensor)

    def _quantize_into(self, prefix: str, tensor: torch.Tensor, shard: str | None) -> None:
        name, scale_name = f"{prefix}weight", f"{prefix}{self._scale_name}"
        target, part = self.local_part(name, tensor, shard)
        copy_weight(target, part.to("meta"))  # which checks, no more
        if tensor.is_meta:
            return
        # The scale of a row is the same on all ranks, though each has but a part of the row.
        is_split_row = self.has_parts_of_rows(name) and self._format.group_size is None
        weight = (tensor if is_split_row else part).to(target.device)
        quantized = self._quantized(weight)
        # Rounding takes NaN and infinities for numbers. Zero times one of them is NaN, and 0 times
        # all others: so the scales show what the weight was to whoever looks through the model.
        broken = (extremes(weight).to(self._dtype) * 0).sum()
        data = quantized.data
        if is_split_row:
            data = self.local_part(name, data, shard)[1]
        full_scale = torch.empty(self.scale_shape(*tensor.shape), device="meta")
        scale_target, _ = self.local_part(scale_name, full_scale, shard)
        target.copy_(data)
        scale_target.copy_(quantized.scale + broken)

    def _quantized(self, weight: torch.Tensor) -> QuantTensor:
        weight = weight.contiguous()
        return (
            quantize(weight, None) if self._format.group_size is None else quantize_blocks(weight)
        )

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Draw the weights in place, as `models.weights.fill_with_noise` does."""
        for weight, scale in self.matrices():
            noise = torch.empty(weight.shape, dtype=self._dtype, device=weight.device)
            quantized = self._quantized(noise.normal_(std=0.02, generator=generator))
            weight.copy_(quantized.data)
            scale.copy_(quantized.scale)


def check_scales(scales: torch.Tensor) -> None:
    """Raise unless the scales are numbers that a weight can be multiplied by.

    Some may be 0, as rows or blocks without a weight have it.
    """
    if scales.is_meta:
        return
    is_broken = ~(scales.isfinite() & (scales >= 0)) | ~scales.any()
    if num_broken := int(is_broken.sum()):
        raise ValueError(
            f"{num_broken} of {scales.numel()} scales are negative, NaN or infinite, or all are 0. "
            "Is the file damaged?"
        )
