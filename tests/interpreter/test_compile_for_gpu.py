"""Kernels compile for a GPU with the Triton that is here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.kernels._triton import HAS_TRITON

SCRIPT = Path(__file__).parent / "compile_for_gpu.py"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own tests compile them")
def test_kernels_compile_for_a_gpu_without_one(tmp_path):
    """Triton 3.9 took no tuple of dtypes by a name: decode over an fp8 cache did not compile."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(SCRIPT.parents[2])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    names = ["128-bfloat16-fp8", "odd-fp8"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *names], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(": compiles\n") == len(names)
