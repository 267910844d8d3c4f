"""What Triton's interpreter gets wrong, put right for all kernel tests."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def casts_to_fp8_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's cast drops the carry of a mantissa that rounds up: 15.9 becomes 8."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def exact(data, from_dtype, to_dtype, rounding):
        if to_dtype.name != "fp8e4nv" or from_dtype.name != "fp32":
            return convert(data, from_dtype, to_dtype, rounding)
        cast = torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
        return cast.view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", exact)
