"""What makes results differ: the model's files, engine options, sampling defaults, the input."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanovllm.batch.source import is_regular_file
from nanovllm.config import Config
from nanovllm.lora.adapter import adapter_digest
from nanovllm.utils.loader import weight_files
from nanovllm.utils.tokenizer import find_model

_VERSION = 3
# What a model is read from. Other files of its directory may come and go: a job's own, for one.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_SAMPLE_BYTES, _NUM_SAMPLES = 1 << 16, 64
_HEAD_BYTES = 1 << 20

# Options that change speed and memory, not answers: a job may be gone on with under others.
_NEUTRAL = frozenset(
    (
        "model",
        "tokenizer",
        "max_num_batched_tokens",
        "max_num_seqs",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "enforce_eager",
        "kvcache_block_size",
        "num_kvcache_blocks",
        "enable_prefix_caching",
        "enable_overlap",
        "device",
        "attention_backend",
        "cpu_kvcache_space_gib",
        "enable_request_reordering",
        "lora",  # by its content, below
        "enable_custom_all_reduce",
    )
)


def job_fingerprint(
    config: Config,
    defaults: Mapping[str, Any],
    *,
    source: str,
    shard: tuple[int, int],
    head_bytes: int | None = None,
) -> dict[str, Any]:
    """A JSON object that is equal for two runs of the same job, and says where others differ.

    `head_bytes` is how much of the input an earlier run knew: lines appended since are no change.
    """
    engine = {k: v for k, v in asdict(config).items() if k not in _NEUTRAL}
    job = {
        "version": _VERSION,
        "model": model_digest(find_model(config.model)),
        "engine": engine,
        "sampling": dict(defaults),
        "shard": f"{shard[0]}/{shard[1]}",
    }
    if config.tokenizer is not None:
        job["tokenizer"] = model_digest(find_model(config.tokenizer, "tokenizer"))
    if config.lora is not None:
        job["lora"] = adapter_digest(config.lora)
    if is_regular_file(source):
        num_bytes = min(_HEAD_BYTES, Path(source).stat().st_size)
        if head_bytes is not None:
            num_bytes = min(num_bytes, head_bytes)
        job["input"] = f"begins with {_head_digest(source, num_bytes)} ({num_bytes} bytes)"
    normal: dict[str, Any] = json.loads(json.dumps(job, default=str))
    return normal


def model_digest(directory: Path) -> str:
    """A digest of a model's files: small ones whole, weights by size and 64 samples of 64 KiB."""
    state = hashlib.sha256()
    for pattern in _SMALL_FILES:
        for path in sorted(directory.glob(pattern)):
            state.update(f"{path.name}:{path.stat().st_size}\n".encode())
            state.update(path.read_bytes())
    weights: list[Path] = []
    with suppress(ValueError):  # what is missing is for the loader to say
        weights = sorted(weight_files(directory))
    for path in weights:
        size = path.stat().st_size
        state.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
                state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()[:32]


def known_head_bytes(job_path: Path) -> int | None:
    """How much of the input the run knew that wrote a `.job.json`; None: it cannot be said."""
    try:
        text = json.loads(job_path.read_text(encoding="utf-8"))["input"]
        return int(text.rpartition("(")[2].split()[0])
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _head_digest(path: str, num_bytes: int) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(num_bytes)).hexdigest()[:32]
