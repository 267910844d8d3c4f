"""The files of a job: no two may be one, and each must be writable before hours are spent."""

from __future__ import annotations

import os
import stat
from itertools import combinations
from pathlib import Path

STDIN = "-"


def check_paths(source: str, written: dict[str, Path | None]) -> None:
    """ValueError where files coincide, by whatever names, or one of `written` cannot be written.

    Opens and changes nothing. `written` has what each file is for, and its path.
    """
    files: dict[str, Path | None] = {n: path for n, path in written.items() if path is not None}
    paths: dict[str, Path | int] = {"the input": 0 if source == STDIN else Path(source)}
    paths.update({name: path for name, path in files.items() if path is not None})
    for (first, one), (second, other) in combinations(paths.items(), 2):
        if _are_same(one, other):
            where = other if isinstance(other, Path) else one
            raise ValueError(
                f"{first} and {second} are the same file, {where}: one would destroy the other."
            )
    for name, path in files.items():
        if path is not None:
            _check_writable(name, path)


def _are_same(one: Path | int, other: Path | int) -> bool:
    """Links of both kinds are seen through. Devices and pipes hold nothing that could be lost."""
    try:
        first, second = os.stat(one), os.stat(other)
    except OSError:  # one is not there yet, or there is no standard input
        if isinstance(one, int) or isinstance(other, int):
            return False
        return Path(os.path.realpath(one)) == Path(os.path.realpath(other))
    return os.path.samestat(first, second) and stat.S_ISREG(first.st_mode)


def _check_writable(name: str, path: Path) -> None:
    real = Path(os.path.realpath(path))
    if real.is_dir():
        raise ValueError(f"{name} is a directory: {path}.")
    if not real.parent.is_dir():
        raise ValueError(f"{name} cannot be written: {real.parent} is no directory.")
    if not os.access(real if real.exists() else real.parent, os.W_OK):
        raise ValueError(f"{name} cannot be written: no permission to write {path}.")
