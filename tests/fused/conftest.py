"""What Triton's interpreter gets wrong is put right here too."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def bfloat16_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds to bfloat16 toward zero, and multiplies its bits as integers."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def to_nearest(data, from_dtype, to_dtype, rounding):
        if to_dtype.name != "bf16" or from_dtype.name != "fp32":
            return convert(data, from_dtype, to_dtype, rounding)
        cast = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return cast.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    def widened(handle):
        if handle.dtype.scalar.name != "bf16":
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def dot_of_values(self, a, b, *others):
        return dot(self, widened(a), widened(b), *others)

    monkeypatch.setattr(interpreter, "_convert_float", to_nearest)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_values)
