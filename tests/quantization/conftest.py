"""The right rounding to fp8 where kernels run in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm.kernels._triton import HAS_TRITON, tl


@pytest.fixture(autouse=True)
def interpreter_rounds_to_fp8(monkeypatch):
    """Its own cast loses the carry of a mantissa that rounds up: 124.3 becomes 64, not 128."""
    if not HAS_TRITON or torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(values, input_dtype, output_dtype, rounding_mode):
        if output_dtype != tl.float8e4nv or input_dtype != tl.float32:
            return plain(values, input_dtype, output_dtype, rounding_mode)
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
        rounded = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
