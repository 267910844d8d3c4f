"""Bring a checkpoint's tensors to the parameters of a model, each exactly once and in place."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.checks import errors_named
from nanovllm.utils.finite import check_finite
from nanovllm.utils.loader import name_list

# Our fused modules: shard name -> what the checkpoint calls that part.
_FUSED = {
    "qkv_proj": {"q": "q_proj", "k": "k_proj", "v": "v_proj"},
    "gate_up_proj": {"gate": "gate_proj", "up": "up_proj"},
}
_IGNORED = "rotary_emb.inv_freq"  # in old exports; follows from the config
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_TIED = {_HEAD, _EMBEDDING}
_UNTIED = (
    f"config.json has tie_word_embeddings = true, but {_HEAD} and {_EMBEDDING} differ. "
    "Set it to false to use both, or remove one of them."
)


@torch.no_grad()
def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    tied_head: VocabParallelEmbedding | None,
    partial: bool,
) -> None:
    """Fill the parameters in place from (checkpoint name, full tensor) pairs.

    Every parameter must come exactly once, and nothing else; `partial` allows some to be left as
    they are. After an error the weights may be half old, half new.
    tied_head: the layer that the names of the head and of the embedding both stand for, if any
    """
    loaders = _loaders(model)
    seen: set[str] = set()
    duplicate: set[str] = set()
    unexpected: set[str] = set()
    for name, tensor in weights:
        if name.endswith(_IGNORED):
            continue
        if name not in loaders:
            unexpected.add(name)
            continue
        if name in seen:
            duplicate.add(name)
            continue
        seen.add(name)
        with errors_named(name):
            if tied_head is None or name not in _TIED or not seen >= _TIED:
                loaders[name](tensor)
            elif not tied_head.holds(tensor):
                # Transformers 4 drops such a head, 5 keeps it: which is meant would be a guess.
                raise ValueError(_UNTIED)
    missing: set[str] = set() if partial else loaders.keys() - seen
    if tied_head is not None:
        missing.discard(_HEAD)
        if _HEAD in seen:  # some exports name the shared table after the head only
            missing.discard(_EMBEDDING)
    _raise_if_any({"missing": missing, "duplicate": duplicate, "unexpected": unexpected})


def check_weights(
    model: nn.Module, weights: list[tuple[str, torch.Tensor]], *, is_tied: bool
) -> None:
    """Raise what `load_weights` with `partial` would raise for these pairs, changing nothing."""
    loaders = _loaders(model)
    weights = [pair for pair in weights if not pair[0].endswith(_IGNORED)]
    names = [name for name, _ in weights]
    duplicate = {name for name, times in Counter(names).items() if times > 1}
    _raise_if_any(
        {"missing": set(), "duplicate": duplicate, "unexpected": set(names) - loaders.keys()}
    )
    for name, tensor in weights:
        with errors_named(name):
            loaders[name](tensor.to("meta"))
    check_finite(weights, next(model.parameters()).dtype)
    tied = [tensor for name, tensor in weights if name in _TIED]
    if is_tied and len(tied) == 2 and not torch.equal(tied[0], tied[1].to(tied[0])):
        raise ValueError(_UNTIED)


def _loaders(model: nn.Module) -> dict[str, Callable[[torch.Tensor], None]]:
    """Return for each name a checkpoint must have what loads its tensor."""
    loaders: dict[str, Callable[[torch.Tensor], None]] = {}
    for path, module in model.named_modules():
        layer: Any = module
        if not hasattr(layer, "load_weight"):
            continue
        parent, _, last = path.rpartition(".")
        prefix = f"{parent}." if parent else ""
        if hasattr(layer, "tensor_names"):  # experts: what they own stands for many tensors
            for name in layer.tensor_names():
                loaders[f"{path}.{name}"] = functools.partial(layer.load_weight, name)
            continue
        for shard in layer.shards:
            part = last if shard is None else _FUSED[last][shard]
            for name, _parameter in module.named_parameters(recurse=False):
                load = functools.partial(layer.load_weight, name, shard=shard)
                loaders[f"{prefix}{part}.{name}"] = load
    return loaders


def _raise_if_any(problems: dict[str, set[str]]) -> None:
    listed = [
        f"{len(names)} {what}: {name_list(names)}" for what, names in problems.items() if names
    ]
    if listed:
        hint = " Is the download complete?" if problems["missing"] else ""
        raise ValueError(f"weights do not match the model; {'; '.join(listed)}.{hint}")


@torch.no_grad()
def fill_with_noise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw all weights in place from a narrow normal distribution; norms become ones."""
    for module in model.modules():
        layer: Any = module
        if hasattr(layer, "fill_with_noise"):  # what nanovllm.quantization has in fp8
            layer.fill_with_noise(generator)
            continue
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)


def free_storage(model: nn.Module) -> None:
    """Give the memory of all parameters back; they keep their shapes."""
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)


@torch.no_grad()
def restore_storage(model: nn.Module) -> bool:
    """Allocate what `free_storage` gave back; whether there was any, to be filled now."""
    was_freed = False
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        if storage.size() == 0:
            storage.resize_(parameter.numel() * parameter.element_size())
            parameter.zero_()  # padding is in no checkpoint
            was_freed = True
    return was_freed
