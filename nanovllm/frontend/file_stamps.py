"""Whether the files that weights come from are still those of the start."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from nanovllm.config import Config
from nanovllm.lora.adapter import WEIGHTS_NAME
from nanovllm.lora.settings import CONFIG_NAME
from nanovllm.utils.loader import name_list, weight_files

Stamps = dict[str, tuple[int, int]]  # path -> bytes, and time of the last change in ns


def file_stamps(config: Config, model_dir: Path) -> Stamps:
    """What identifies the files that weights are read from, cheaply; nothing where they are drawn.

    Other files of the directory may come and go: trainers save optimisers and adapters there.
    """
    if config.load_format == "dummy":
        return {}
    paths = []
    with suppress(ValueError):  # what is missing is for the loader to say
        paths += weight_files(model_dir)
    if config.lora is not None:
        paths += [Path(config.lora) / name for name in (CONFIG_NAME, WEIGHTS_NAME)]
    stamps = {}
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):  # as above
            status = path.stat()
            stamps[str(path)] = (status.st_size, status.st_mtime_ns)
    return stamps


def check_unchanged(before: Stamps, config: Config, model_dir: Path) -> None:
    """RuntimeError where a file is new or another one than `before`.

    Other weights would be taken for those whose digests name prefixes and a job's results.
    """
    now = file_stamps(config, model_dir)
    changed = [path for path, stamp in now.items() if before.get(path) != stamp]
    if changed:
        raise RuntimeError(
            f"{name_list(changed)} changed since this LLM read it. Put back what was there, with "
            "its times (`mv`, `cp -p`), or close this LLM and build a new one. Weights that "
            "training changed go in by load_weights, after sleep(1) and wake_up()."
        )
