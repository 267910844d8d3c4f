"""Paths that users give: checked, and made independent of the current directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any


def path_text(name: str, value: Any, kind: str = "a path") -> str:
    """Return `value` as a str, or raise what says that it must be `kind`; nothing need exist."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be {kind}, got {value!r} of type {type(value).__name__}.")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a path of text, got {path!r}. Decode it with os.fsdecode.")
    if not path.strip():
        raise ValueError(f"{name} must be {kind}, got {path!r}.")
    return path


def absolute_path(name: str, value: Any, kind: str = "a path") -> str:
    """As `path_text`, absolute from the current directory as it is now; links are kept.

    `~` is expanded, as a shell leaves it to programs in `--option=~/file` and in quotes.
    ValueError also where no file could have that path: too long, or with a NUL byte.
    """
    path = path_text(name, value, kind)
    try:
        # Not abspath: it strikes out `link/..`, which is not where the link stands.
        path = str(Path(os.path.expanduser(path)).absolute())
        os.lstat(path)
    except (OSError, ValueError) as error:  # that nothing is there yet is no fault
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            reason = getattr(error, "strerror", error)
            raise ValueError(f"{name} must be {kind}, got {path!r:.200}: {reason}.") from error
    return path
