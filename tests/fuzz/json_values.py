"""What hypothesis puts in place of a JSON file's values."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import strategies as st

# Examples of each kind; NANOVLLM_FUZZ=3000 for a night.
NUM_EXAMPLES = int(os.environ.get("NANOVLLM_FUZZ", "40"))

# At every edge that a check has, and at those that it might have forgotten.
NUMBERS = st.sampled_from(
    [
        0,
        -1,
        1,
        2,
        3,
        7,
        16,
        63,
        64,
        65,
        517,
        1 << 16,
        1 << 24,
        (1 << 24) + 1,
        1 << 31,
        (1 << 31) - 1,
    ]
    + [1 << 53, 1 << 63, (1 << 64) + 1, 10**40, -(10**40), 0.0, -0.0, 0.5, 1.5, 64.0, 1e-8, 1e38]
    + [1e39, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")]
)
TEXTS = st.sampled_from(
    ["", " ", "64", "yes", "null", "auto", "\0", "\ud800", "a" * 5000, "../x", "/etc/passwd", "🙂"]
    + [
        "yarn",
        "linear",
        "default",
        "llama3",
        "dynamic",
        "fp8",
        "int8",
        "awq",
        "bfloat16",
        "float64",
    ]
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.one_of(
    SCALARS,
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "", "type", "rope_type", "factor", "quant_method"]), inner
            )
        ),
        max_leaves=5,
    ),
    st.sampled_from([49, 200, 800, 900, 930]).map(lambda depth: _nested(depth)),
)


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def mutated(draw: st.DrawFn, base: dict[str, Any], extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """`base` with one to three keys dropped or given another value; `extra` keys may join it."""
    changed = dict(base)
    names = [*base, *extra]
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        value = changed.get(name)
        if isinstance(value, dict) and value and draw(st.booleans()):
            changed[name] = draw(mutated(value))
        elif draw(st.integers(0, 5)) == 0:
            changed.pop(name, None)
        else:
            changed[name] = draw(VALUES)
    return changed


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."
