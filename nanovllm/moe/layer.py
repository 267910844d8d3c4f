"""The feed-forward layer of a sparse model: a router, and experts that share out the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nanovllm.kernels._triton import use_triton
from nanovllm.kernels.split_gemm import split_gemm
from nanovllm.layers.linear import ReplicatedLinear, divide, narrow_part
from nanovllm.layers.placement import Placement
from nanovllm.moe.grouped_gemm import config_for, down, gate_up
from nanovllm.moe.plan import make_plan
from nanovllm.moe.routing import route
from nanovllm.utils.loader import copy_weight
from nanovllm.utils.parallel import ParallelContext


class Experts(nn.Module):
    """The weights of all experts, stacked; each rank has a slice of every expert's inner size."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        size: int,
        place: Placement,
    ) -> None:
        super().__init__()
        local_size = divide(size, place.parallel.tp_size, "moe_intermediate_size")
        self.gate_up_proj = place.parameter(num_experts, 2 * local_size, hidden_size)  # gate first
        self.down_proj = place.parameter(num_experts, hidden_size, local_size)
        self._parallel = place.parallel

    def tensor_names(self) -> list[str]:
        """What a checkpoint calls the tensors of this module, below the module's own name."""
        return [
            f"{expert}.{part}.weight"
            for expert in range(len(self.down_proj))
            for part in ("gate_proj", "up_proj", "down_proj")
        ]

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None = None) -> None:
        """Copy this rank's part of one expert's full tensor in place; see `tensor_names`."""
        stacked = self.down_proj if ".down_proj." in name else self.gate_up_proj
        copy_weight(*expert_part(stacked, name, tensor, self._parallel))

    def forward(
        self, x: torch.Tensor, pair_weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the rank's share of each choice, [top_k, num_tokens, hidden_size], weighted.

        x: [num_tokens, hidden_size]; pair_weights, float32, expert_ids, int32: [num_tokens, top_k]
        """
        num_experts = len(self.down_proj)
        config = config_for(expert_ids.numel(), num_experts, x.dtype)
        # Plain torch takes all rows of an expert at once.
        block_m = config.block_m if use_triton(x) else expert_ids.numel()
        plan = make_plan(expert_ids, num_experts, block_m)
        activated = gate_up(x, self.gate_up_proj, plan, config.gate_up)
        return down(activated, self.down_proj, plan, pair_weights, config.down)


def expert_part(
    stacked: torch.Tensor, name: str, tensor: torch.Tensor, parallel: ParallelContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views: what of `stacked` one expert's full tensor fills, and with which part of it.

    stacked: weights of all experts, gate before up, or their scales; name: of `tensor_names`
    """
    expert, part, _ = name.split(".")
    target = stacked[int(expert)]
    if part != "down_proj":
        target = target.chunk(2)[part == "up_proj"]
    split_dim = 1 if part == "down_proj" else 0
    return target, narrow_part(tensor, split_dim, parallel.tp_rank, parallel.tp_size, target.shape)


def one_by_one(
    weights: Iterable[tuple[str, torch.Tensor]], num_experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Take stacked experts apart, as transformers 5 has them in memory; pass on all others.

    A checkpoint has a tensor for each expert and projection. `experts.gate_up_proj` is
    [num_experts, 2 * size, hidden_size], gate first, and `experts.down_proj` [num_experts,
    hidden_size, size].
    """
    for name, tensor in weights:
        prefix, _, part = name.rpartition(".")
        if not prefix.endswith(".experts") or part not in ("gate_up_proj", "down_proj"):
            yield name, tensor
        elif (
            tensor.dim() != 3
            or len(tensor) != num_experts
            or (part == "gate_up_proj" and tensor.shape[1] % 2)
        ):
            raise ValueError(
                f"{name} must be [{num_experts} experts, rows, columns], with as many rows of gate "
                f"as of up; got {tuple(tensor.shape)}."
            )
        else:
            for expert, matrix in enumerate(tensor):
                if part == "down_proj":
                    yield f"{prefix}.{expert}.{part}.weight", matrix
                else:
                    gate, up = matrix.chunk(2)
                    yield f"{prefix}.{expert}.gate_proj.weight", gate
                    yield f"{prefix}.{expert}.up_proj.weight", up


class SparseMLP(nn.Module):
    """A weighted sum over each token's `top_k` experts. The router is whole on every rank."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        size: int,
        place: Placement,
        *,
        top_k: int,
        is_normalized: bool,
    ) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(hidden_size, num_experts, place)
        # nanovllm.quantization has them in fp8
        self.experts: nn.Module = Experts(num_experts, hidden_size, size, place)
        self._top_k, self._is_normalized = top_k, is_normalized
        self._parallel = place.parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same, or on one rank shares for RMSNorm to sum."""
        logits = split_gemm(x, self.gate.weight)
        routes = route(logits, self._top_k, is_normalized=self._is_normalized, dtype=x.dtype)
        shares: torch.Tensor = self.experts(x, *routes)
        if self._parallel.tp_size == 1:
            return shares
        return self._parallel.all_reduce(shares.sum(dim=0))
