"""Triton's interpreter without what it does again and again to the same end.

At each launch, and at each call of a device function in it, it searches all of Triton's language
for names to replace by its own, and for each value it makes a table of NumPy's dtypes: a third of
the time of tests that run kernels. What kernels compute, and how, stays as it is.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


def install() -> None:
    """Let the interpreter remember, from now on."""
    import triton.language
    from triton.runtime import interpreter

    used = ("_patch_attr", "_patch_builtin", "_patch_lang", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in used):
        return  # another version of Triton: tests are only slower

    is_builtin = triton.language.core.is_builtin
    call_kernel, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang
    get_np_dtype = interpreter._get_np_dtype
    patched: set[int] = set()  # namespaces of the functions that the launch has come to
    np_dtypes: dict[str, Any] = {}

    @cache
    def builtins_of(owner: Any) -> list[tuple[str, Any]]:
        return [pair for pair in inspect.getmembers(owner) if is_builtin(pair[1])]

    def patch_builtin(owner: Any, *rest: Any) -> None:
        for name, member in builtins_of(owner):
            if getattr(owner, name) is member:  # else it is replaced already
                interpreter._patch_attr(owner, name, member, *rest)

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()  # the end of each launch puts everything back
        call_kernel(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return None  # a device function's call has no use for it
        patched.add(id(function.__globals__))
        return patch_lang(function)

    def known_np_dtype(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = get_np_dtype(dtype)
        return np_dtypes[dtype.name]

    interpreter._patch_builtin = patch_builtin
    interpreter.GridExecutor.__call__ = run_kernel
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = known_np_dtype
