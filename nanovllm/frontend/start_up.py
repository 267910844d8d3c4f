"""What is checked before an engine starts, and what memory errors say, then and in a step."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.frontend.file_stamps import Stamps, file_stamps
from nanovllm.lora.adapter import adapter_digest, check_adapter
from nanovllm.models.model_config import ModelConfig, load_model_config
from nanovllm.models.size_check import check_sizes
from nanovllm.quantization.formats import with_quantization
from nanovllm.utils.tokenizer import find_model, load_tokenizer, stop_token_ids

_MAX_TABLE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What an engine reads before it touches a device, checked against the options."""

    directory: Path  # absolute
    model_config: ModelConfig
    tokenizer: Any | None
    eos_ids: list[int]
    max_len: int  # as far as options and model go; the KV cache may hold less
    root_hash: int  # what the prefix cache's hashes begin with
    stamps: Stamps  # of the files that weights are read from


def read_model(config: Config) -> ModelFiles:
    """Read all but the weights; a ValueError says what does not fit the options, or each other."""
    directory = find_model(config.model)
    stamps = file_stamps(config, directory)
    model = load_model_config(directory)
    tokenizer = load_tokenizer(
        directory if config.tokenizer is None else find_model(config.tokenizer, "tokenizer")
    )
    eos_ids = stop_token_ids(directory, tokenizer, model.eos_token_ids, model.vocab_size)
    max_len = config.max_model_len or model.max_context_len
    if max_len > model.max_context_len:
        raise ValueError(
            f"max_model_len = {max_len} exceeds the {model.max_context_len} positions "
            f"of {config.model}. Lower it."
        )
    check_positions(config, model, max_len, directory)
    if config.load_format == "auto":
        check_sizes(model, directory)
    root_hash = prefix_root(config, model, directory)
    return ModelFiles(directory, model, tokenizer, eos_ids, max_len, root_hash, stamps)


def checked_on(device: torch.device, config: Config, model: ModelConfig) -> ModelConfig:
    """Raise a ValueError where the model cannot run so on `device`; return it with its format.

    On "cpu" only what holds for every device is checked, and no device is touched.
    """
    check_ranks(model, config.tensor_parallel_size, device)
    check_kv_cache(config, model.head_dim, device)
    return with_quantization(model, config, device)


def check_ranks(model: ModelConfig, tp_size: int, device: torch.device) -> None:
    """Raise a ValueError with both numbers where `tp_size` ranks cannot share the model."""
    sizes = {
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
    }
    if model.moe is None or model.moe.dense_layers:  # else it is stated, but no layer's
        sizes["intermediate_size"] = model.intermediate_size
    if model.moe is not None:
        sizes["moe_intermediate_size"] = model.moe.intermediate_size
    for name, size in sizes.items():
        # Fewer KV heads than ranks are copied, each to as many ranks.
        larger, smaller = (
            (max(size, tp_size), min(size, tp_size))
            if name == "num_key_value_heads"
            else (size, tp_size)
        )
        if larger % smaller:
            raise ValueError(
                f"{name} = {size} cannot be split over tensor_parallel_size = {tp_size}; "
                "choose a size that divides it."
            )
    if device.type == "cuda" and tp_size > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size = {tp_size} needs as many GPUs, and torch sees "
            f"{torch.cuda.device_count()}. Lower it, or show more with CUDA_VISIBLE_DEVICES."
        )


def check_positions(config: Config, model: ModelConfig, max_len: int, model_dir: Path) -> None:
    """Raise a ValueError where nobody asked for so long a context that its tables fill the memory.

    A digit too many in config.json is met here, and not when memory is used up.
    """
    rows = (config.max_num_seqs + 1) * max_len // config.kvcache_block_size
    num_bytes = 4 * (max_len * model.head_dim + rows)  # of the rotary table and of the block tables
    if config.max_model_len is None and num_bytes > _MAX_TABLE_BYTES:
        raise ValueError(
            f"{model_dir}/config.json: max_position_embeddings (or the factor of its rope scaling) "
            f"allows {max_len} positions, whose tables for max_num_seqs = {config.max_num_seqs} "
            f"alone take {num_bytes / 2**30:.3g} GiB. Lower max_num_seqs, or pass max_model_len."
        )


def prefix_root(config: Config, model: ModelConfig, model_dir: Path) -> int:
    """Check the adapter, if there is one, against the model; return what the prefix cache's hashes
    begin with, so that KV of other weights could never be taken for this engine's.
    """
    if config.lora is None:
        return 0
    check_adapter(config.lora, model_dir, is_tied=model.tie_word_embeddings)
    return int(adapter_digest(config.lora)[:16], 16)


def check_kv_cache(config: Config, head_dim: int, device: torch.device) -> None:
    """Raise a ValueError where a KV cache in fp8 is asked for and cannot be had."""
    if config.kv_cache_dtype != "fp8":
        return
    if config.attention_backend == "flash_attn":
        raise ValueError(
            "attention_backend='flash_attn' cannot read kv_cache_dtype='fp8'. "
            "Pass attention_backend='auto', or leave kv_cache_dtype out."
        )
    if device.type == "cuda" and config.attention_backend != "sdpa":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ValueError(
                "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or later, this one has "
                f"{capability[0]}.{capability[1]}. Leave it out, or pass attention_backend='sdpa'."
            )
        if head_dim == 16:  # whose pairs are too few for the tensor cores' smallest tile
            raise ValueError(
                "kv_cache_dtype='fp8' needs a head_dim of 32 or more, this model has 16. "
                "Leave it out, or pass attention_backend='sdpa'."
            )


@contextmanager
def memory_errors_named(config: Config) -> Iterator[None]:
    """Turn what an allocator raises into a MemoryError that names the options to lower."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        words = str(error).lower()
        is_memory = isinstance(error, MemoryError | OverflowError | torch.OutOfMemoryError)
        if not is_memory and "can't allocate" not in words and "overflow" not in words:
            raise
        traceback.clear_frames(error.__traceback__)  # which keep half a model for the error's life
        raise MemoryError(
            f"There is not enough memory to start with max_num_seqs={config.max_num_seqs} and "
            f"max_num_batched_tokens={config.max_num_batched_tokens}. Lower them, or "
            f"max_model_len ({type(error).__name__}: {words.splitlines()[0] if words else ''})."
        ) from error


@contextmanager
def step_memory_errors_named(tp_size: int) -> Iterator[None]:
    """Turn what an allocator raises in a step into a MemoryError, and free what the step held."""
    try:
        yield
    except RuntimeError as error:
        words = str(error).lower()
        phrases = ("out of memory", "can't allocate", "alloc_failed")
        if not any(phrase in words for phrase in phrases):
            raise
        # The frames of the fault keep their tensors for as long as somebody keeps the error.
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        state = "The engine can go on, but may run out again"
        if tp_size > 1:  # the others wait in a collective for the rank that failed
            state = "Its ranks are out of step: close this LLM"
        raise MemoryError(
            f"A step ran out of memory ({words.splitlines()[0]}). {state}: lower "
            "gpu_memory_utilization, max_num_batched_tokens or max_num_seqs in a new LLM, or free "
            "what other programs took since this one started."
        ) from error
