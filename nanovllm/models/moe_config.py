"""Read from config.json which layers are mixtures of experts, and of how many."""

from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import check_bool, check_int

_SPARSE = ("Qwen3MoeForCausalLM",)
_COUNTS = ("num_experts", "num_local_experts")  # as published, as transformers 5 writes it
_MAX_EXPERTS = 4096  # far above every model; a router looks at all of a token's logits at once


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of a sparse model; the same in every layer that has them."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts sum up to 1
    dense_layers: tuple[int, ...]  # those that have one MLP instead


def read_moe(d: dict[str, Any], architecture: str, num_layers: int) -> MoeConfig | None:
    """Return what the file says about experts, or None for a dense model."""
    counts = {
        key: check_int(key, d[key], minimum=1, maximum=_MAX_EXPERTS)
        for key in _COUNTS
        if d.get(key) is not None
    }
    if not counts:
        if architecture in _SPARSE:
            raise ValueError("num_experts is missing; the model cannot be built without it.")
        return None
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"num_experts = {d['num_experts']!r} and num_local_experts = "
            f"{d['num_local_experts']!r} differ; remove one of them."
        )
    num_experts = next(iter(counts.values()))
    norm = d.get("norm_topk_prob")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=_required_size(d, "num_experts_per_tok", maximum=num_experts),
        intermediate_size=_required_size(d, "moe_intermediate_size", maximum=2**24),
        norm_topk_prob=False if norm is None else check_bool("norm_topk_prob", norm),
        dense_layers=_read_dense_layers(d, num_layers),
    )


def _required_size(d: dict[str, Any], key: str, *, maximum: int) -> int:
    if d.get(key) is None:
        raise ValueError(f"{key} is missing; the model cannot be built without it.")
    return check_int(key, d[key], minimum=1, maximum=maximum)


def _read_dense_layers(d: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    step = d.get("decoder_sparse_step")
    step = 1 if step is None else check_int("decoder_sparse_step", step, minimum=1)
    listed = d.get("mlp_only_layers")
    if listed is None:
        listed = []
    if not isinstance(listed, list):
        raise TypeError(f"mlp_only_layers must be a list of layer numbers, got {listed!r}.")
    last = num_layers - 1
    dense = {check_int("mlp_only_layers", item, minimum=0, maximum=last) for item in listed}
    return tuple(i for i in range(num_layers) if i in dense or (i + 1) % step != 0)
