"""The experts of a sparse layer with fp8 weights, in the place of those it was built with."""

import torch
from torch import nn

from nanovllm.kernels._triton import use_triton
from nanovllm.moe.grouped_gemm import (
    Scales,
    config_for,
    down_reference,
    down_triton,
    gate_up_reference,
    gate_up_triton,
)
from nanovllm.moe.layer import Experts, expert_part
from nanovllm.moe.plan import Plan, make_plan
from nanovllm.quantization.formats import FP8, Fp8Format
from nanovllm.quantization.kernels.fp8_gemm import dequantize, dequantize_weight
from nanovllm.quantization.kernels.quantize import QuantTensor, quantize
from nanovllm.quantization.weights import Fp8Weights
from nanovllm.utils.parallel import ParallelContext


class Fp8Experts(Fp8Weights):
    """Owns the fp8 weights of all experts, stacked, and their scales; split over ranks as Experts.

    The layer's router stays as it is, so activations come in the model's dtype and are quantised
    here: once for all the experts of a token, and each pair's again before the down projection.
    """

    def __init__(
        self, experts: Experts, weight_format: Fp8Format, parallel: ParallelContext
    ) -> None:
        super().__init__(weight_format, parallel, experts.down_proj.dtype)
        self._num_experts = len(experts.down_proj)
        self.gate_up_proj, self.gate_up_proj_scale = self._like(experts.gate_up_proj)
        self.down_proj, self.down_proj_scale = self._like(experts.down_proj)
        self._weight_names = experts.tensor_names()

    def _like(self, plain: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter]:
        scale_shape = (len(plain), *self.scale_shape(*plain.shape[1:]))
        weight = torch.empty(plain.shape, dtype=FP8, device=plain.device)
        scale = torch.empty(scale_shape, dtype=torch.float32, device=plain.device)
        return nn.Parameter(weight, False), nn.Parameter(scale, False)

    def tensor_names(self) -> list[str]:
        """What a checkpoint calls the tensors of this module, below the module's own name."""
        names = self._weight_names
        if self._format.scale_name is None:
            return names
        scale_names = [f"{name.removesuffix('weight')}{self._scale_name}" for name in names]
        return names + scale_names

    def local_part(
        self, name: str, tensor: torch.Tensor, shard: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        expert, part, last = name.split(".")
        stacked = "down_proj" if part == "down_proj" else "gate_up_proj"
        if last == "weight":
            return expert_part(self.get_parameter(stacked), name, tensor, self._parallel)
        scales = self.get_parameter(f"{stacked}_scale")
        if part == "down_proj" and self._format.group_size is None:
            return scales[int(expert)], tensor  # of whole rows, which every rank needs
        return expert_part(scales, name, tensor, self._parallel)

    def has_parts_of_rows(self, name: str) -> bool:
        return ".down_proj." in name

    def matrices(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        gate_up = zip(self.gate_up_proj, self.gate_up_proj_scale, strict=True)
        return [*gate_up, *zip(self.down_proj, self.down_proj_scale, strict=True)]

    def forward(
        self, x: torch.Tensor, pair_weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        """As that of Experts, rounded as `Fp8Linear` rounds."""
        group_size = self._format.group_size
        rows = quantize(x, group_size, is_gathered=True)
        if not use_triton(x):
            plan = make_plan(expert_ids, self._num_experts, expert_ids.numel())
            return self._forward_reference(rows, plan, pair_weights, x.dtype)
        config = config_for(expert_ids.numel(), self._num_experts, FP8)
        plan = make_plan(expert_ids, self._num_experts, config.block_m)
        scales = Scales(rows.scale, self.gate_up_proj_scale, group_size, x.dtype)
        activated = gate_up_triton(rows.data, self.gate_up_proj, plan, config.gate_up, scales)
        rows = quantize(activated, group_size, is_gathered=True)
        scales = Scales(rows.scale, self.down_proj_scale, group_size, x.dtype)
        return down_triton(rows.data, self.down_proj, plan, pair_weights, config.down, scales)

    def _forward_reference(
        self, rows: QuantTensor, plan: Plan, pair_weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Plain torch form of `forward`: products in float32."""
        group_size = self._format.group_size

        def wide(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            pairs = map(QuantTensor, weights, scales)
            return torch.stack([dequantize_weight(pair, group_size) for pair in pairs])

        gate_up = wide(self.gate_up_proj, self.gate_up_proj_scale)
        activated = gate_up_reference(dequantize(rows, group_size), gate_up, plan).to(dtype)
        rows = quantize(activated, group_size)
        down = wide(self.down_proj, self.down_proj_scale)
        return down_reference(dequantize(rows, group_size), down, plan, pair_weights).to(dtype)
