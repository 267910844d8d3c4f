"""Compile all kernels that an engine launches for a Hopper GPU, without one; run nothing.

    PYTHONPATH=.:tests python tests/interpreter/compile_for_gpu.py [PART OF A NAME ...]

Says for each model what did not compile, or needs more shared memory or a larger grid than there
is. Of any Triton that PYTHONPATH has first; ptxas is not run. All take about ten minutes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import nanovllm.fused
import nanovllm.quantization.model
import nanovllm.sampling.redraw
from nanovllm import LLM
from nanovllm.attention import backend
from nanovllm.engine import model_runner, warmup
from nanovllm.kernels.paged_attention import _UNPACK_E4M3

SHARED_MEMORY_BYTES = 232_448
MAX_GRID = (2**31 - 1, 65_535, 65_535)
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
_ARCHITECTURES |= {"qwen3_moe": "Qwen3MoeForCausalLM"}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


class Hopper:
    """A driver of Triton's that knows a device and cannot launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def models() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> what config.json says beside sizes that all share, and options."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for head_dim in (16, 32, 64, 128, 256):
        for dtype in ("bfloat16", "float16", "float32"):
            for cache in ("auto", "fp8"):
                options = {"dtype": dtype, "kv_cache_dtype": cache, "kvcache_block_size": 48}
                found[f"{head_dim}-{dtype}-{cache}"] = (sizes("llama", head_dim=head_dim), options)
    del found["16-bfloat16-fp8"], found["16-float16-fp8"], found["16-float32-fp8"]  # are refused
    small = sizes("qwen3", 1024, 16, 8, 128, 3072)
    large = sizes("qwen3", 4096, 32, 8, 128, 12288)
    moe = sizes("qwen3_moe", 2048, 32, 4, 128, 768)
    return found | {
        "small": (small, {}),
        "small-fp8-cache": (small, {"kv_cache_dtype": "fp8"}),
        "small-float16": (small, {"dtype": "float16"}),
        "large": (large, {}),
        "large-fp8": (large, {"quantization": "fp8"}),
        "large-blocks": (large | {"quantization_config": _BLOCKS}, {}),
        "wide-group": (sizes("llama", 568, 71, 1, 64, 512), {}),
        "odd": (sizes("llama", 1000, 8, 8, 64, 1234), {}),
        "odd-fp8": (sizes("llama", 1000, 8, 8, 64, 1234), {"quantization": "fp8"}),
        "moe": (moe, {}),
        "moe-float32": (moe, {"dtype": "float32"}),
        "moe-fp8": (moe, {"quantization": "fp8"}),
        "moe-blocks": (moe | {"quantization_config": _BLOCKS}, {}),
    }


def sizes(
    kind: str, hidden_size: int = 256, num_heads: int = 8, num_kv_heads: int = 1,
    head_dim: int = 64, inner: int = 512,
) -> dict[str, Any]:  # fmt: skip
    experts = {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": inner,
        "norm_topk_prob": True,
    }  # fmt: skip
    return {
        "architectures": [_ARCHITECTURES[kind]], "model_type": kind, "hidden_size": hidden_size,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim, "intermediate_size": inner, "num_hidden_layers": 1,
        "vocab_size": 1000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": 2,
    } | (experts if kind == "qwen3_moe" else {})  # fmt: skip


def compile_only(problems: dict[str, None]) -> None:
    """From now on launches compile; what they would have written is zeros."""
    driver.set_active(Hopper())
    add_stages, run = CUDABackend.add_stages, JITFunction.run

    def without_ptxas(self: Any, stages: dict[str, Any], *others: Any) -> None:
        add_stages(self, stages, *others)
        stages["cubin"] = lambda source, metadata: b""

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = self.fn.__name__
        on_gpus = {"FAST_LOG": True, "UNPACK": _UNPACK_E4M3}  # off in the interpreter only
        options |= {key: value for key, value in on_gpus.items() if key in options}
        if any(size > limit for size, limit in zip(grid, MAX_GRID, strict=False)):
            problems[f"{name}: grid {grid}"] = None
        try:
            metadata = run(self, *args, grid=grid, warmup=True, **options).metadata
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            problems[f"{name}: {type(error).__name__}: {cause!s:.300}"] = None
            return
        if metadata.shared > SHARED_MEMORY_BYTES:
            problems[f"{name}: {metadata.shared} bytes of shared memory"] = None

    CUDABackend.add_stages, JITFunction.run = without_ptxas, compiled
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    torch.Tensor.new_empty = torch.Tensor.new_zeros
    for name, module in list(sys.modules.items()):
        if name.startswith("nanovllm."):
            for asked, answer in (("use_triton", True), ("_has_library", False)):
                if hasattr(module, asked):
                    setattr(module, asked, lambda *_, answer=answer: answer)
            if hasattr(module, "pdl_options"):
                module.pdl_options = lambda x: {"PDL": True, "launch_pdl": True}
    backend._obstacle = lambda *_: None
    threads = warmup.run_in_threads
    model_runner.run_in_threads = lambda jobs, device, num_threads: threads(jobs, device, 1)


def main(wanted: list[str]) -> int:
    assert os.environ.get("TRITON_INTERPRET") != "1", "compile, do not interpret"
    problems: dict[str, None] = {}  # in order
    compile_only(problems)
    num_bad = 0
    for name, (config, options) in models().items():
        if wanted and not any(part in name for part in wanted):
            continue
        problems.clear()
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            common = {"load_format": "dummy", "device": "cpu", "attention_backend": "triton"}
            common |= {"num_kvcache_blocks": 8, "max_num_seqs": 300, "dtype": "bfloat16"}
            with LLM(directory, **{**common, **options}) as llm:
                runner = llm._engine._executor._runner
                model = runner._model.model
                if all(map(nanovllm.fused.fits, model.layers)):
                    weight = model.norm.weight
                    is_bfloat16 = weight.dtype is torch.bfloat16
                    model.run = nanovllm.fused.FusedLayers(weight.device, has_five=is_bfloat16)
                runner._compile_kernels()
        num_bad += bool(problems)
        print(f"{name}: {'; '.join(problems) or 'compiles'}", flush=True)
    print(f"Triton {triton.__version__}: {num_bad} with problems")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
