"""Linear layers with fp8 weights, in the places of those that a model was built with."""

import torch
from torch import nn

from nanovllm.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from nanovllm.quantization.formats import FP8, Fp8Format
from nanovllm.quantization.kernels.fp8_gemm import fp8_linear, fp8_linear_shares
from nanovllm.quantization.kernels.quantize import QuantTensor, quantize
from nanovllm.quantization.weights import Fp8Weights
from nanovllm.utils.parallel import ParallelContext


class Fp8Linear(Fp8Weights):
    """Owns this rank's fp8 part of a weight, and its scales; takes tensors and QuantTensors.

    Made from a linear layer, whose unwritten weight it frees, and split over ranks as that one.
    """

    def __init__(
        self, linear: ReplicatedLinear, weight_format: Fp8Format, parallel: ParallelContext
    ) -> None:
        super().__init__(weight_format, parallel, linear.weight.dtype)
        self.shards = linear.shards
        self._is_row_parallel = isinstance(linear, RowParallelLinear)
        if isinstance(linear, QKVParallelLinear):
            self.num_heads, self.num_kv_heads = linear.num_heads, linear.num_kv_heads
        device = linear.weight.device
        weight = torch.empty(linear.weight.shape, dtype=FP8, device=device)
        scale = torch.empty(self.scale_shape(*weight.shape), dtype=torch.float32, device=device)
        self.weight = linear.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias
        parameter = nn.Parameter(scale, requires_grad=False)
        linear.register_parameter(self._scale_name, parameter)
        if weight_format.scale_name is None:
            # No parameter here: parameters are what a checkpoint must have.
            self.register_buffer("weight_scale", scale, persistent=False)
        else:
            self.register_parameter(self._scale_name, parameter)
        # The method, as a module among our own would be a second owner of the weights.
        self._local_part = linear.local_part

    def local_part(
        self, name: str, tensor: torch.Tensor, shard: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._local_part(name, tensor, shard)

    def has_parts_of_rows(self, name: str) -> bool:
        return self._is_row_parallel

    def matrices(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self._quantized_weight]

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

    def fill_with_noise(self, generator: torch.Generator) -> None:
        super().fill_with_noise(generator)
        if self.bias is not None:
            self.bias.normal_(std=0.02, generator=generator)
