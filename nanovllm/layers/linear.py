"""Linear layers and their tensor-parallel shards."""

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.kernels.split_gemm import split_gemm
from nanovllm.layers.placement import Placement
from nanovllm.utils.loader import check_shape, copy_weight


def divide(total: int, tp_size: int, what: str) -> int:
    """Return `total / tp_size`; a ValueError names both when it is not whole."""
    if total % tp_size:
        raise ValueError(
            f"{what} = {total} cannot be split over tensor_parallel_size = {tp_size}; "
            "choose a size that divides it."
        )
    return total // tp_size


class ReplicatedLinear(nn.Module):
    """Every rank owns the whole weight [out_features, in_features]; base of the sharded ones."""

    # Names that `load_weight` wants as `shard`, one call each; None stands for the whole.
    shards: tuple[str | None, ...] = (None,)

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = place.parameter(out_features, in_features)
        self.bias = place.parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [n, in_features] -> [n, out_features]
        return F.linear(x, self.weight, self.bias)

    def load_weight(self, name: str, tensor: torch.Tensor, shard: str | None = None) -> None:
        """Copy this rank's part of the full tensor in place; `name` is "weight" or "bias"."""
        copy_weight(*self.local_part(name, tensor, shard))

    def local_part(
        self, name: str, tensor: torch.Tensor, shard: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views: what of parameter `name` the full tensor fills, and with which part."""
        return self.get_parameter(name), tensor


class MergedColumnParallelLinear(ReplicatedLinear):
    """Column-parallel projections of one input in one matrix; each loads as a named shard."""

    def __init__(
        self,
        in_features: int,
        out_features: dict[str, int],
        place: Placement,
        *,
        bias: bool = False,
    ) -> None:
        parallel = place.parallel
        sizes = {s: divide(full, parallel.tp_size, s) for s, full in out_features.items()}
        super().__init__(in_features, sum(sizes.values()), place, bias=bias)
        self.shards = tuple(sizes)
        self._sizes = sizes
        # Which slice of the full tensor is this rank's, in units of the shard's local size.
        self._part = dict.fromkeys(sizes, (parallel.tp_rank, parallel.tp_size))

    def local_part(
        self, name: str, tensor: torch.Tensor, shard: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if shard not in self._sizes:
            raise ValueError(f"shard must be one of {', '.join(self._sizes)}, got {shard!r}.")
        offset = 0
        for other, size in self._sizes.items():
            if other == shard:
                break
            offset += size
        parameter = self.get_parameter(name)
        unit = sum(self._sizes.values()) // len(parameter)  # scales may be of so many rows each
        target = parameter.narrow(0, offset // unit, size // unit)
        return target, narrow_part(tensor, 0, *self._part[shard], target.shape)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The q, k and v projections in one, split over ranks by heads; few kv heads are replicated."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        place: Placement,
        *,
        bias: bool = False,
    ) -> None:
        tp_rank, tp_size = place.parallel.tp_rank, place.parallel.tp_size
        local_heads = divide(num_heads, tp_size, "num_attention_heads")
        # Fewer kv heads than ranks are copied, each to as many ranks.
        num_copies = max(1, tp_size // num_kv_heads)
        local_kv_heads = divide(num_kv_heads * num_copies, tp_size, "num_key_value_heads")
        kv_size = local_kv_heads * head_dim * tp_size
        sizes = {"q": num_heads * head_dim, "k": kv_size, "v": kv_size}
        super().__init__(hidden_size, sizes, place, bias=bias)
        self.num_heads, self.num_kv_heads = local_heads, local_kv_heads  # of this rank
        # Ranks that share a kv head are neighbours: so are the q heads that belong to it.
        kv_part = (tp_rank // num_copies, tp_size // num_copies)
        self._part = {"q": (tp_rank, tp_size), "k": kv_part, "v": kv_part}


class RowParallelLinear(ReplicatedLinear):
    """Each rank owns `in_features / tp_size` columns of the weight; ranks sum their results."""

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool = False
    ) -> None:
        size = divide(in_features, place.parallel.tp_size, "in_features")
        super().__init__(size, out_features, place, bias=bias)
        self._parallel = place.parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [n, in_features / tp_size]
        # The bias is whole on every rank, and must enter the sum once.
        bias = self.bias if self._parallel.tp_rank == 0 else None
        return self._parallel.all_reduce(F.linear(x, self.weight, bias))

    def partials(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`, or float32 shares [num_splits, n, out_features], for RMSNorm to sum."""
        if self.bias is None and self._parallel.tp_size == 1:
            return split_gemm(x, self.weight)
        result: torch.Tensor = self(x)
        return result

    def local_part(
        self, name: str, tensor: torch.Tensor, shard: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        target = self.get_parameter(name)
        if name not in ("bias", "weight_scale"):  # which every rank needs whole
            part = (self._parallel.tp_rank, self._parallel.tp_size)
            tensor = narrow_part(tensor, 1, *part, target.shape)
        return target, tensor


def narrow_part(
    tensor: torch.Tensor, dim: int, part: int, num_parts: int, local_shape: torch.Size
) -> torch.Tensor:
    """Return part `part` of `num_parts` along `dim`, after checking the full shape."""
    expected = list(local_shape)
    expected[dim] *= num_parts
    check_shape(tensor, tuple(expected))
    return tensor.narrow(dim, part * local_shape[dim], local_shape[dim])
