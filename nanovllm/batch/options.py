"""What a job reads and writes, checked when it is written down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import check_bool, check_float, check_int
from nanovllm.utils.paths import absolute_path


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What a job reads and writes. `input` may be "-", and gzip or zstd compressed.

    Paths become absolute, so that the job does not depend on the current directory.
    """

    input: str
    output: Path
    sampling: Mapping[str, Any] = field(default_factory=dict)  # for what lines leave open
    shard: tuple[int, int] = (0, 1)  # lines whose number, counted from 0, is i modulo n
    fsync_interval_s: float = 5.0
    overwrite: bool = False  # start anew
    force_resume: bool = False  # go on with an output file of another model or other parameters
    retry_failed: bool = False  # run lines again whose last result is an error; they may be mended
    window: int | None = None  # requests read ahead of results
    show_progress: bool = True
    metrics: Path | None = None
    report: Path | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"shard": _shard(self.shard)}
        if self.input != "-":
            checked["input"] = absolute_path("input", self.input)
        if isinstance(self.output, (str, os.PathLike)) and os.fspath(self.output) == "-":
            raise ValueError("output must be a file, which a job can be gone on with, not '-'.")
        checked["output"] = Path(absolute_path("output", self.output))
        for name in ("metrics", "report", "trace"):
            if getattr(self, name) is not None:
                checked[name] = Path(absolute_path(name, getattr(self, name)))
        for name in ("overwrite", "force_resume", "retry_failed", "show_progress"):
            checked[name] = check_bool(name, getattr(self, name))
        if not isinstance(self.sampling, Mapping):
            raise TypeError(
                f"sampling must be a dict of SamplingParams' options, got {self.sampling!r:.80}."
            )
        advice = "It is a number of seconds; 0: each result at once."
        checked["fsync_interval_s"] = check_float(
            "fsync_interval_s", self.fsync_interval_s, minimum=0.0, advice=advice
        )
        if self.window is not None:
            checked["window"] = check_int("window", self.window, minimum=1)
        for name in ("force_resume", "retry_failed"):
            if self.overwrite and getattr(self, name):
                raise ValueError(
                    f"overwrite=True starts anew and {name}=True goes on with what is there. "
                    "Leave one of them out."
                )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _shard(value: Any) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"shard must be (i, n), lines i modulo n, got {value!r:.200}.")
    num_shards = check_int("shard[1]", value[1], minimum=1)
    which = check_int("shard[0]", value[0], minimum=0)
    if which >= num_shards:
        raise ValueError(f"shard must be (i, n) with i from 0 to n-1, got {value}.")
    return which, num_shards
