"""Read the JSON files of a model: an object with one meaning, or an error that names the file."""

import json
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20  # several times the index of the largest model
_MAX_DEPTH = 50  # what is nested hundreds deep cannot even be shown in an error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; whatever is wrong with it is a ValueError."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, more than {MAX_JSON_BYTES}")
        text = path.read_text(encoding="utf-8-sig")
        values = json.loads(text, object_pairs_hook=unambiguous)
        _check_depth(values)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}.")
    return values


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook`; a key with two values is a ValueError, as either may be meant."""
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if values[key] != value:
                raise ValueError(f"the key {key[:80]!r} comes twice in an object, and differs")
    return values


def _check_depth(values: Any) -> None:
    level = [values]
    for _ in range(_MAX_DEPTH):
        inner = [item for item in level if isinstance(item, dict | list)]
        if not inner:
            return
        level = [
            item
            for container in inner
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
