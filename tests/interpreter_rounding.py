"""Triton's interpreter with fp8 and bfloat16 as a GPU has them.

Its cast to fp8 loses the carry of a mantissa that rounds up, so that 15.9 becomes 8 and not 16. Its
cast to bfloat16 rounds toward zero, and its products take bfloat16's bits for integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def install() -> None:
    """Round float32 as the GPU does, to the nearest and fp8 within its range, from now on."""
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def to_nearest(values: Any, from_dtype: Any, to_dtype: Any, rounding: Any) -> Any:
        if from_dtype.name != "fp32" or to_dtype.name not in ("fp8e4nv", "bf16"):
            return convert(values, from_dtype, to_dtype, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
        if to_dtype.name == "bf16":
            bits = wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        else:
            bits = wide.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return bits.reshape(values.shape)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar.name != "bf16":
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, interpreter.tl.float32)

    def dot_of_values(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    interpreter._convert_float = to_nearest
    interpreter.InterpreterBuilder.create_dot = dot_of_values
