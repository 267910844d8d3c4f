"""What the caller of `LLM(...)` asked for, checked before any work starts."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from nanovllm.utils.checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    unknown_name_error,
)
from nanovllm.utils.paths import absolute_path, path_text

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
QUANTIZATIONS = ("fp8",)
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")

_DTYPE_ALIASES = {"float": "float32", "half": "float16"}
_DEVICE_PATTERN = re.compile(r"auto|cpu|cuda(:\d+)?")

# What to do about options of vLLM and nano-vllm that go by another name here, or have no use.
_ADVICE = {
    "block_size": "Did you mean 'kvcache_block_size'?",
    "num_gpu_blocks_override": "Did you mean 'num_kvcache_blocks'?",
    "async_scheduling": "Did you mean 'enable_overlap'?",
    "tp_size": "Did you mean 'tensor_parallel_size'?",
    "data_parallel_size": "Several engines are a class: nanovllm.data_parallel.DataParallelLLM.",
    "pipeline_parallel_size": "Models are split within layers only: 'tensor_parallel_size'.",
    "distributed_executor_backend": "Ranks are processes of this machine: leave it out.",
    "disable_custom_all_reduce": "Did you mean enable_custom_all_reduce=False?",
    "kv_cache_memory_bytes": "See 'num_kvcache_blocks', and 'cpu_kvcache_space_gib' on a CPU.",
    "max_logprobs": "A request may ask for any number of them: leave it out.",
    "enable_sleep_mode": "Every engine can sleep() and wake_up(): leave it out.",
    "disable_log_stats": "Steps are not logged; see 'metrics': leave it out.",
    "generation_config": "Pass SamplingParams: the model's defaults are used where none are given.",
    "swap_space": "Preempted requests are computed again, never swapped out: leave it out.",
    "enable_chunked_prefill": "Prompts are always split where needed: leave it out.",
    "enable_lora": "Pass lora=DIR: one adapter, merged into the weights while they load.",
    "skip_tokenizer_init": "A model may lack a tokenizer, and prompts be ids: leave it out.",
    "tokenizer_mode": "Tokenizers are the fast ones of tokenizer.json: leave it out.",
    "max_lora_rank": "Pass lora=DIR alone: an adapter may have any rank.",
    "revision": "Download that revision and pass its directory as the model.",
}


@dataclass(frozen=True, slots=True)
class Config:
    """What the caller asked for, in checked and plain values. Never written after construction.

    "auto" and None mean: found out when the engine starts, and passed on from there.
    """

    model: str  # a directory or a hub id
    tokenizer: str | None = None  # None: the model's
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    max_model_len: int | None = None  # None: the model's, as far as the KV cache holds it
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    kvcache_block_size: int = 64
    num_kvcache_blocks: int | None = None  # None: as many as fit the memory
    enable_prefix_caching: bool = True
    enable_overlap: bool | None = None  # None: on CUDA only
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"  # the model's; "fp8" is "fp8_e4m3"
    quantization: str | None = None  # of the weights; None: as the checkpoint has them
    attention_backend: str = "auto"  # names are the registry's, in attention/backend.py
    seed: int = 0
    trust_remote_code: bool = False
    cpu_kvcache_space_gib: float = 4.0
    load_format: str = "auto"
    enable_request_reordering: bool = True
    enable_custom_all_reduce: bool = True  # tensor parallel: small messages past NCCL
    logprobs_mode: str = "raw_logprobs"
    lora: str | None = None  # a directory of PEFT's, merged into the weights for good

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "model": _model_path("model", self.model),
            "kvcache_block_size": _block_size(self.kvcache_block_size),
            "device": _device(self.device),
            "dtype": _dtype(self.dtype),
        }
        for name, (minimum, maximum, advice) in _INTS.items():
            checked[name] = check_int(
                name, getattr(self, name), minimum=minimum, maximum=maximum, advice=advice
            )
        for name, (maximum_float, advice) in _POSITIVE_FLOATS.items():
            checked[name] = check_float(
                name, getattr(self, name), above=0.0, maximum=maximum_float, advice=advice
            )
        for name in _SWITCHES:
            checked[name] = check_bool(name, getattr(self, name))
        for name, check in _OPTIONAL.items():
            if getattr(self, name) is not None:
                checked[name] = check(name, getattr(self, name))
        check_choice(
            "load_format",
            self.load_format,
            LOAD_FORMATS,
            advice="'auto' reads safetensors, 'dummy' draws random weights.",
        )
        check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        check_choice(
            "kv_cache_dtype",
            self.kv_cache_dtype,
            KV_CACHE_DTYPES,
            advice="'auto' is the model's dtype; 'fp8' halves the memory of a bfloat16 cache.",
        )
        if self.kv_cache_dtype == "fp8_e4m3":
            checked["kv_cache_dtype"] = "fp8"
        if not isinstance(self.attention_backend, str):
            raise TypeError(
                "attention_backend must be the name of a backend, such as 'auto' or 'sdpa', "
                f"got {self.attention_backend!r}."
            )
        if self.lora is not None and self.load_format == "dummy":
            raise ValueError(
                "lora needs the weights that it was trained on, but load_format='dummy' draws "
                "random ones. Leave one of them out."
            )
        if self.trust_remote_code:
            raise ValueError(
                "trust_remote_code=True is refused: code from a checkpoint is never run. "
                "Leave the option out; supported architectures are built in."
            )
        if ":" in checked["device"] and checked["tensor_parallel_size"] > 1:
            raise ValueError(
                f"device={checked['device']!r} names one GPU, but tensor_parallel_size is "
                f"{self.tensor_parallel_size}. Pass device='cuda' and choose the GPUs with "
                "CUDA_VISIBLE_DEVICES."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: dict[str, Any]) -> "Config":
        """Build a Config from the keyword arguments of `LLM`; an unknown one is a TypeError."""
        allowed = [field.name for field in fields(cls) if field.name != "model"]
        for name in options:
            if name == "model":
                raise TypeError("LLM got 'model' twice. Pass it once, as the first argument.")
            if name not in allowed:
                raise unknown_name_error("LLM has no option", name, allowed, _ADVICE)
        return cls(model, **options)  # type: ignore[arg-type]  # a path becomes a str in __post_init__


def _model_path(name: str, value: Any) -> str:
    """A directory becomes absolute: ranks and a later `wake_up` read it from anywhere."""
    path = path_text(name, value, "a directory or a hub id, such as 'Qwen/Qwen3-0.6B'")
    local = os.path.expanduser(path)
    return absolute_path(name, local) if os.path.isdir(local) else path


def _directory(name: str, value: Any) -> str:
    kind = "a directory with adapter_config.json"
    return absolute_path(name, os.path.expanduser(path_text(name, value, kind)), kind)


def _block_size(value: Any) -> int:
    advice = "It is the number of tokens in a block of the KV cache; 64 is the default."
    block_size = check_int("kvcache_block_size", value, minimum=16, maximum=1024, advice=advice)
    if block_size % 16 != 0:
        raise ValueError(
            f"kvcache_block_size must be a multiple of 16, got {block_size}. "
            f"The nearest below is {block_size // 16 * 16}."
        )
    return block_size


def _device(value: Any) -> str:
    device = str(value) if _is_torch_value(value) else value
    allowed = "device must be 'auto', 'cpu', 'cuda' or 'cuda:N'"
    if not isinstance(device, str):
        raise TypeError(f"{allowed}, got {value!r} of type {type(value).__name__}.")
    if not _DEVICE_PATTERN.fullmatch(device):
        raise ValueError(f"{allowed}, got {device!r}. 'auto' takes CUDA where there is a GPU.")
    return device


def _dtype(value: Any) -> str:
    # By its name, so that this file does not import torch.
    dtype = str(value).removeprefix("torch.") if _is_torch_value(value) else value
    if isinstance(dtype, str):
        dtype = _DTYPE_ALIASES.get(dtype, dtype)
    return check_choice(
        "dtype", dtype, DTYPES, advice="'auto' takes the checkpoint's, where the device has it."
    )


def _is_torch_value(value: Any) -> bool:
    return type(value).__module__ == "torch"


# Below the functions that they name. Each int: minimum, maximum, advice.
_INTS: dict[str, tuple[int, int | None, str]] = {
    "max_num_batched_tokens": (
        1,
        2**31 - 1,
        "It bounds a step; longer prompts take several steps.",
    ),
    # A GPU launches 65,535 rows at most, and decode attention's plan holds all in registers.
    "max_num_seqs": (1, 2**15, "It bounds how many sequences run in one step."),
    "tensor_parallel_size": (1, None, "It is the number of devices that share the model."),
    "seed": (-(2**63), 2**64 - 1, "Any 64-bit integer will do."),
}
_POSITIVE_FLOATS = {
    "gpu_memory_utilization": (1.0, "It is the fraction of the device's memory we may use."),
    "cpu_kvcache_space_gib": (1e9, "It is the size of the KV cache on a CPU, in GiB."),
}
_SWITCHES = (
    "enforce_eager",
    "enable_prefix_caching",
    "trust_remote_code",
    "enable_request_reordering",
    "enable_custom_all_reduce",
)
_OPTIONAL: dict[str, Callable[[str, Any], Any]] = {
    "tokenizer": _model_path,
    "lora": _directory,
    "enable_overlap": check_bool,
    "max_model_len": partial(
        check_int, minimum=2, advice="It counts prompt and answer together; None: the model's."
    ),
    "num_kvcache_blocks": partial(
        check_int, minimum=1, advice="None takes as many as the memory holds."
    ),
    "quantization": partial(
        check_choice,
        choices=QUANTIZATIONS,
        advice="None leaves the weights as the checkpoint has them.",
    ),
}
