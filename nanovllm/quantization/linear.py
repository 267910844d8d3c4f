"""Linear layers with fp8 weights, in the places of those that a model was built with."""

import torch
from torch import nn

from nanovllm.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from nanovllm.quantization.formats import BLOCK, FP8, Fp8Format
from nanovllm.quantization.kernels.fp8_gemm import fp8_linear, fp8_linear_shares
from nanovllm.quantization.kernels.quantize import QuantTensor, quantize, quantize_blocks
from nanovllm.utils.finite import extremes
from nanovllm.utils.loader import copy_weight
from nanovllm.utils.parallel import ParallelContext


class Fp8Linear(nn.Module):
    """Owns this rank's fp8 part of a weight, and its scales; takes tensors and QuantTensors.

    Made from a linear layer, whose unwritten weight it frees, and split over ranks as that one.
    """

    def __init__(
        self, linear: ReplicatedLinear, weight_format: Fp8Format, parallel: ParallelContext
    ) -> None:
        super().__init__()
        self.shards = linear.shards
        self._format = weight_format
        self._parallel = parallel
        self._dtype = linear.weight.dtype
        self._is_row_parallel = isinstance(linear, RowParallelLinear)
        if isinstance(linear, QKVParallelLinear):
            self.num_heads, self.num_kv_heads = linear.num_heads, linear.num_kv_heads
        device = linear.weight.device
        weight = torch.empty(linear.weight.shape, dtype=FP8, device=device)
        scale = torch.empty(self._scale_shape(weight.shape), dtype=torch.float32, device=device)
        self.weight = linear.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias
        parameter = nn.Parameter(scale, requires_grad=False)
        self._scale_name = weight_format.scale_name or "weight_scale"
        linear.register_parameter(self._scale_name, parameter)
        if weight_format.scale_name is None:
            # No parameter here: parameters are what a checkpoint must have.
            self.register_buffer("weight_scale", scale, persistent=False)
        else:
            self.register_parameter(self._scale_name, parameter)
        # The method, as a module among our own would be a second owner of the weights.
        self._local_part = linear.local_part

    def _scale_shape(self, shape: torch.Size) -> tuple[int, int]:
        if self._format.group_size is None:
            return shape[0], 1
        return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)

    @property
    def _quantized_weight(self) -> QuantTensor:
        return QuantTensor(self.weight, getattr(self, self._scale_name))

    def forward(self, x: torch.Tensor | QuantTensor) -> torch.Tensor:
        """[n, in_features] -> [n, out_features], summed over the ranks if rows are split.

        Each rank scales the activations that it holds: split over ranks, rows have a scale a rank.
        """
        if isinstance(x, torch.Tensor):
            x = quantize(x, self._format.group_size)
        # The bias is whole on every rank, and must enter the sum once.
        is_first = not self._is_row_parallel or self._parallel.tp_rank == 0
        out = fp8_linear(
            x,
            self._quantized_weight,
            self.bias if is_first else None,
            group_size=self._format.group_size,
            dtype=self._dtype,
        )
        return self._parallel.all_reduce(out) if self._is_row_parallel else out

    def partials(self, x: torch.Tensor | QuantTensor) -> torch.Tensor:
        """As `forward`, or shares [num_splits, n, out_features], for the norm to sum."""
        if self.bias is not None or self._parallel.tp_size > 1:
            result: torch.Tensor = self(x)
            return result
        if isinstance(x, torch.Tensor):
            x = quantize(x, self._format.group_size)
        return fp8_linear_shares(
            x, self._quantized_weight, group_size=self._format.group_size, dtype=self._dtype
        )

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None = None) -> None:
        """Copy this rank's part of the full tensor in place; a weight that is not fp8 becomes so.

        name: "weight", "bias" or what the checkpoint calls the scales
        """
        if name == "weight" and tensor.dtype is not FP8:
            self._quantize_into(tensor, shard)
            return
        if name == "weight" and self._format.scale_name is None:
            raise ValueError(
                f"the checkpoint's dtype {tensor.dtype} needs scales, and config.json has no "
                "quantization_config that tells which."
            )
        target, part = self._local_part(name, tensor, shard)
        copy_weight(target, part)
        if name == self._format.scale_name:
            check_scales(tensor)

    def _quantize_into(self, tensor: torch.Tensor, shard: str | None) -> None:
        target, part = self._local_part("weight", tensor, shard)
        copy_weight(target, part.to("meta"))  # which checks, no more
        if tensor.is_meta:
            return
        # The scale of a row is the same on all ranks, though each has but a part of the row.
        is_split_row = self._is_row_parallel and self._format.group_size is None
        weight = (tensor if is_split_row else part).to(target.device)
        quantized = self._quantized(weight)
        # Rounding takes NaN and infinities for numbers. Zero times one of them is NaN, and 0 times
        # all others: so the scales show what the weight was to whoever looks through the model.
        broken = (extremes(weight).to(self._dtype) * 0).sum()
        data = quantized.data
        if is_split_row:
            data = self._local_part("weight", data, shard)[1]
        full_scale = torch.empty(self._scale_shape(tensor.shape), device="meta")
        scale_target, _ = self._local_part(self._scale_name, full_scale, shard)
        target.copy_(data)
        scale_target.copy_(quantized.scale + broken)

    def _quantized(self, weight: torch.Tensor) -> QuantTensor:
        weight = weight.contiguous()
        return (
            quantize(weight, None) if self._format.group_size is None else quantize_blocks(weight)
        )

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Draw the weights in place, as `models.weights.fill_with_noise` does."""
        noise = torch.empty(self.weight.shape, dtype=self._dtype, device=self.weight.device)
        quantized = self._quantized(noise.normal_(std=0.02, generator=generator))
        self.weight.copy_(quantized.data)
        self._quantized_weight.scale.copy_(quantized.scale)
        if self.bias is not None:
            self.bias.normal_(std=0.02, generator=generator)


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
