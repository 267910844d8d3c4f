"""Read checkpoints: every tensor of a directory's safetensors files, exactly once, or an error."""

import logging
import re
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.utils.finite import HasTensors, check_loaded
from nanovllm.utils.json_file import read_json_object

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
# A plain cast keeps their meaning; other dtypes are copied where the parameter has them too.
_CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_LISTED = 10
# What lies beside a model and is none: Mistral's own form of the same weights, PEFT's adapters.
_OTHERS = ("consolidated", "adapter_model")
_CPU = torch.device("cpu")
_MERGE = "nanovllm.lora.merge"  # few need it: loaded by name where there is an adapter


class LoadableModel(HasTensors, Protocol):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...


def load_model(
    model: LoadableModel,
    model_dir: str | Path,
    *,
    lora: str | None = None,
    device: torch.device = _CPU,
) -> None:
    """Fill `model` in place from the safetensors files in `model_dir`; logs how long it took.

    A ValueError says what does not fit, or which weights are NaN or infinite in the model's dtype.
    lora: the directory of an adapter to merge on the way, computed on `device`
    """
    start_s = time.perf_counter()
    num_bytes = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_bytes
        for name, tensor in iterate_safetensors(model_dir):
            num_bytes += tensor.nbytes
            yield name, tensor

    def weights() -> Iterable[tuple[str, torch.Tensor]]:
        return counted() if lora is None else import_module(_MERGE).merged(counted(), lora, device)

    try:
        model.load_weights(weights())
        check_loaded(model, weights())
    except ValueError as error:
        raise ValueError(f"cannot load the checkpoint in {model_dir}: {error}") from error
    elapsed_s = time.perf_counter() - start_s
    logger.info(
        "Loaded %.2f GB of weights in %.2f s from %s", num_bytes / 1e9, elapsed_s, model_dir
    )


def iterate_safetensors(model_dir: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor of the checkpoint; tensors are views of mapped files.

    All file names and headers are checked before the first tensor is yielded. Only .safetensors
    files are opened, never a pickle.
    """
    for path, names in _names_by_file(Path(model_dir)):
        with open_safetensors(path) as file:
            for name in names:
                try:
                    tensor = file.get_tensor(name)
                except SafetensorError as error:  # a dtype that torch does not have
                    raise ValueError(f"{path}: {name}: {error}") from error
                yield name, tensor


def tensor_shapes(model_dir: str | Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the checkpoint, as the files' headers say."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, names in _names_by_file(Path(model_dir)):
        with open_safetensors(path) as file:
            shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in names)
    return shapes


def weight_files(directory: Path) -> list[Path]:
    """The files that tensors are read from, and the index if there is one."""
    index = directory / INDEX_NAME
    if not index.is_file():
        return _find_files(directory, None)
    return [*_find_files(directory, _read_index(index)), index]


def _names_by_file(directory: Path) -> list[tuple[Path, list[str]]]:
    """Which tensors are to be read from which file: each tensor of the checkpoint once."""
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory; a model is a directory with *.safetensors."
        )
    index_path = directory / INDEX_NAME
    weight_map = _read_index(index_path) if index_path.is_file() else None
    paths = _find_files(directory, weight_map)

    names_of_file: dict[Path, list[str]] = {}
    owner: dict[str, Path] = {}
    for path in paths:
        with open_safetensors(path) as file:
            names_of_file[path] = list(file.keys())
        for name in names_of_file[path]:
            if weight_map is not None and name in weight_map:
                continue  # the index says which file has it
            if name in owner:
                raise ValueError(
                    f"tensor {name!r} is in two files of {directory}, {owner[name].name} and "
                    f"{path.name}. Remove the file that does not belong to the model."
                )
            owner[name] = path
    if weight_map is not None:
        _check_index_against_files(index_path, weight_map, names_of_file)
        owner.update({name: directory / file_name for name, file_name in weight_map.items()})

    return [
        (path, [name for name in names if owner[name] == path])
        for path, names in names_of_file.items()
    ]


def open_safetensors(path: Path) -> safe_open:
    """Open a file for reading on the CPU; a ValueError says why it cannot be."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        hint = "is the download complete?"
        if path.is_file() and path.stat().st_size < 4096 and b"git-lfs" in path.read_bytes():
            hint = "it is a Git LFS pointer, run `git lfs pull`."
        raise ValueError(f"{path} is not a readable safetensors file ({error}); {hint}") from error


def copy_weight(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a checkpoint's tensor into (a slice of) a parameter, in place, converting dtype.

    A source on the meta device has no data: it is checked only. That values stay finite is for
    `nanovllm.utils.finite` to say, of all weights at once.
    """
    check_shape(source, tuple(target.shape))
    if source.dtype is not target.dtype:
        check_castable(source)
    if source.is_meta:
        return
    with torch.no_grad():
        target.copy_(source)


def check_castable(tensor: torch.Tensor) -> None:
    """Raise a ValueError unless a plain cast keeps the meaning of the tensor's values."""
    if tensor.dtype not in _CAST_DTYPES:
        raise ValueError(
            f"the checkpoint's dtype {tensor.dtype} is not supported; allowed are "
            f"{', '.join(str(dtype) for dtype in _CAST_DTYPES)}."
        )


def check_shape(tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise a ValueError naming both shapes unless the tensor has the expected one."""
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"the checkpoint's shape {tuple(tensor.shape)} does not fit the model's {expected}; "
            "do config.json and the weights belong together?"
        )


def name_list(names: Iterable[str]) -> str:
    """Format names for an error: sorted, at most ten, then how many more."""
    ordered = sorted(names)
    more = len(ordered) - _MAX_LISTED
    return ", ".join(ordered[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path}: 'weight_map' must be a non-empty object of tensor name to file name."
        )
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _stays_inside(file_name):
            raise ValueError(
                f"{path}: weight_map[{name!r}] must be the name of a .safetensors file inside the "
                f"model's directory, without '..', got {file_name!r}."
            )
    return weight_map


def _stays_inside(file_name: str) -> bool:
    # Names only: symbolic links are not resolved, because Hugging Face's cache is made of them.
    return (
        file_name.endswith(".safetensors")
        and "\0" not in file_name
        and not PurePosixPath(file_name).is_absolute()
        and not PureWindowsPath(file_name).anchor
        and ".." not in PureWindowsPath(file_name).parts
    )


def _find_files(directory: Path, weight_map: dict[str, str] | None) -> list[Path]:
    # Without hidden ones: macOS writes a "._model.safetensors" beside what it copies.
    present = sorted(path for path in directory.glob("[!.]*.safetensors") if path.is_file())
    present = [path for path in present if not path.name.startswith(_OTHERS)] or present
    if weight_map is not None:
        wanted = sorted(set(weight_map.values()))
        missing = [name for name in wanted if not (directory / name).is_file()]
        single = directory / "model.safetensors"
        if single in present and single.name not in wanted:
            raise ValueError(
                f"{directory} has both {single.name} and {INDEX_NAME}, which does not mention it. "
                "Remove the one that does not belong to the model."
            )
    elif present:
        wanted = [path.name for path in present]
        missing = _absent_shards(wanted)
    else:
        raise ValueError(_nothing_found(directory))
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} shard files: {name_list(missing)}. "
            "Incomplete download?"
        )
    return sorted({directory / name for name in wanted})


def _absent_shards(file_names: list[str]) -> list[str]:
    """Shards are called name-00002-of-00005.safetensors, so a gap shows even without an index."""
    for file_name in file_names:
        match = re.fullmatch(r"(.*-)(\d{5})(-of-(\d{5})\.safetensors)", file_name)
        if match:
            siblings = (f"{match[1]}{i:05d}{match[3]}" for i in range(1, int(match[4]) + 1))
            return [sibling for sibling in siblings if sibling not in file_names]
    return []


def _nothing_found(directory: Path) -> str:
    found = [path.name for path in directory.iterdir()]
    message = (
        f"no weights in {directory}: looked for {INDEX_NAME} and *.safetensors, "
        f"found {name_list(found) if found else 'an empty directory'}."
    )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in found):
        message += (
            " Pickle files are not read; convert them once with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(...), "
            "which writes safetensors."
        )
    return message


def _check_index_against_files(
    index_path: Path, weight_map: dict[str, str], names_of_file: dict[Path, list[str]]
) -> None:
    present = {path: set(names) for path, names in names_of_file.items()}
    absent = [
        f"{name} ({file_name})"
        for name, file_name in weight_map.items()
        if name not in present[index_path.parent / file_name]
    ]
    if absent:
        raise ValueError(
            f"{index_path.name} lists {len(absent)} tensors that their files do not have: "
            f"{name_list(absent)}. Incomplete download, or files of two models?"
        )
