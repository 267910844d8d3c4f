"""Read a PEFT LoRA directory and hold it against the model that it is to change."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from nanovllm.lora.settings import CONFIG_NAME, AdapterSettings, read_settings
from nanovllm.utils.checks import errors_named
from nanovllm.utils.finite import check_finite
from nanovllm.utils.loader import check_castable, name_list, open_safetensors, tensor_shapes

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "adapter_model.safetensors"
_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What is added to one weight [out_features, in_features]: scale * b @ a."""

    a: torch.Tensor  # [r, in_features]
    b: torch.Tensor  # [out_features, r]
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, complete in itself; whether it fits a model is for `check_adapter` to say."""

    settings: AdapterSettings
    updates: Mapping[str, LowRankUpdate]  # checkpoint name of the weight -> its update


def load_adapter(directory: str | Path) -> Adapter:
    """Read adapter_config.json and adapter_model.safetensors; a ValueError says what is wrong.

    Tensors are views of the mapped file. Every one of them is half of an update, each once.
    """
    directory = _directory(directory)
    settings = read_settings(directory)
    path = directory / WEIGHTS_NAME
    halves: dict[str, dict[str, torch.Tensor]] = {}
    foreign = []
    with open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            match = _TENSOR_NAME.fullmatch(name)
            if match is None:
                foreign.append(name)
            else:
                halves.setdefault(match["module"], {})[match["part"]] = file.get_tensor(name)
    if foreign:
        advice = (
            "Embeddings, biases, DoRA and modules_to_save are not supported: merge it with PEFT's "
            "merge_and_unload() and pass the result as the model."
        )
        if all(name.endswith(".base_layer.weight") for name in foreign):
            advice = (
                "They are copies of the base weights, which PEFT adds beside an update of the "
                "head: save it again with save_pretrained(..., save_embedding_layers=False)."
            )
        raise ValueError(
            f"{path} has {len(foreign)} tensors that are no lora_A or lora_B of a linear layer: "
            f"{name_list(foreign)}. {advice}"
        )
    if not halves:
        raise ValueError(f"{path} has no tensors.")
    updates = {}
    for module, parts in halves.items():
        with errors_named(f"{path}: {module}"):
            updates[f"{module}.weight"] = _update(parts, settings.rank(module), settings, module)
    return Adapter(settings, updates)


def _directory(path: str | Path) -> Path:
    directory = Path(path).expanduser()
    if not os.path.isdir(directory):  # False also for what cannot be looked at
        raise ValueError(
            f"lora {str(path)!r:.200} is not a directory. It must be a local one with "
            f"{CONFIG_NAME} and {WEIGHTS_NAME}, as PEFT's save_pretrained writes it."
        )
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (directory / name).is_file():
            found = name_list(entry.name for entry in directory.iterdir()) or "nothing"
            hint = ""
            if (directory / "adapter_model.bin").is_file():
                hint = " Pickle files are not read: save it again with safe_serialization=True."
            raise ValueError(f"lora {str(path)!r} lacks {name}; it has {found}.{hint}")
    return directory


def _update(
    parts: dict[str, torch.Tensor], rank: int, settings: AdapterSettings, module: str
) -> LowRankUpdate:
    for part in ("A", "B"):
        if part not in parts:
            raise ValueError(f"lora_{part} is missing. Is the file complete?")
        check_castable(parts[part])
        if parts[part].dim() != 2:
            raise ValueError(f"lora_{part} must be a matrix, got {tuple(parts[part].shape)}.")
    a, b = parts["A"], parts["B"]
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ValueError(
            f"{CONFIG_NAME} gives it rank {rank}, but lora_A is {tuple(a.shape)} and lora_B "
            f"{tuple(b.shape)}; do the two files belong together?"
        )
    return LowRankUpdate(a, b, settings.scale(module))


def check_adapter(directory: str | Path, model_dir: Path, *, is_tied: bool) -> None:
    """Raise a ValueError unless the adapter can be merged into the model, whose headers it reads.

    is_tied: the head and the embedding are one table, which a LoRA on the head alone would split
    """
    adapter = load_adapter(directory)
    shapes = tensor_shapes(model_dir)
    with errors_named(f"the adapter {directory} does not fit {model_dir}"):
        _check_names(adapter, shapes)
        _check_targets(adapter, shapes)
        if is_tied and "lm_head.weight" in adapter.updates:
            raise ValueError(
                "it changes lm_head, which the model shares with its embedding "
                "(tie_word_embeddings = true); that is not supported."
            )
    with errors_named(Path(directory) / WEIGHTS_NAME):
        for name, update in adapter.updates.items():
            module = name.removesuffix(".weight")
            check_finite(
                [(f"{module}.lora_A", update.a), (f"{module}.lora_B", update.b)], torch.float32
            )
    _warn_of_another_base(adapter.settings.base_model, directory, model_dir)


def _check_names(adapter: Adapter, shapes: dict[str, tuple[int, ...]]) -> None:
    absent = [name for name in adapter.updates if name not in shapes]
    if absent:
        raise ValueError(f"the model has no {name_list(absent)}.")
    for name, update in adapter.updates.items():
        if "embed" in name:
            raise ValueError(f"it changes {name}; a LoRA on an embedding is not supported.")
        change = (update.b.shape[0], update.a.shape[1])
        if change != shapes[name]:
            raise ValueError(f"its update of {name} is {change}, the model's is {shapes[name]}.")


def _check_targets(adapter: Adapter, shapes: dict[str, tuple[int, ...]]) -> None:
    """Whoever was to be trained must exist and have an update, or a part of the file is lost.

    Nobody else has one: it would be of other settings.
    """
    settings, targets = adapter.settings, adapter.settings.target_modules
    modules = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and "embed" not in name
    ]
    numbers = {number for m in modules if (number := settings.layer_number(m)) is not None}
    if absent := set(settings.layers_to_transform) - numbers:
        there = f"layers_pattern = {list(settings.layers_pattern)} finds no layers in the model"
        if numbers:
            there = f"the model's layers are 0 to {max(numbers)}"
        raise ValueError(f"layers_to_transform has {min(absent)}, but {there}.")
    trained = {name.removesuffix(".weight") for name in adapter.updates}
    meant: set[str] = set()
    absent_names = []
    for target in (targets,) if isinstance(targets, str) else targets:
        found = [module for module in modules if settings.is_target(target, module)]
        if not found:
            absent_names.append(target)
        part = {module for module in found if settings.is_trained(target, module)}
        if lost := part - trained:
            raise ValueError(
                f"target_modules has {target!r}, but {name_list(lost)} have no update. "
                "Is the file complete?"
            )
        meant |= part
    if foreign := trained - meant:
        raise ValueError(
            f"it has updates of {name_list(foreign)}, which {CONFIG_NAME} does not name (see its "
            "target_modules, exclude_modules and layers_to_transform); do the two files belong "
            "together?"
        )
    if absent_names:  # lists are written for many models; nothing of this one is lost
        logger.warning(
            "target_modules has %s, and the model has no such module: PEFT left it out as well",
            name_list(map(repr, absent_names)),
        )


def _warn_of_another_base(base: str | None, directory: str | Path, model_dir: Path) -> None:
    # By the last part only, and anywhere in the path: it may be a hub id, a path of another
    # machine, or the hub's cache, which ends in a commit.
    name = (base or "").rstrip("/").rpartition("/")[2]
    if name.lower() not in str(model_dir.resolve()).lower():
        logger.warning(
            "The adapter %s was trained on %.200r; its shapes fit %s, but is it the same model?",
            directory,
            base,
            model_dir,
        )


def adapter_digest(directory: str | Path) -> str:
    """32 hex digits that name the adapter by the whole content of its two files."""
    state = xxhash.xxh3_128()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        with (_directory(directory) / name).open("rb") as file:
            hashlib.file_digest(file, lambda: state)  # in pieces: 4 times as fast as whole
    return state.hexdigest()
