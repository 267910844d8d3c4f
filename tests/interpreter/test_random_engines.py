"""Engines with odd sizes, every kernel in the interpreter, against plain torch.

`NANOVLLM_ENGINES=FIRST:LAST pytest -m nightly tests/interpreter` runs a range of numbers.
"""

from __future__ import annotations

import os

import pytest
import torch
from interpreter.engines import (
    answers_of_kernels,
    answers_of_torch,
    compare,
    draw_case,
    write_model,
)

from nanovllm.kernels._triton import HAS_TRITON

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter's checks"),
]
_NUM_NIGHTLY = 60


def check(number, directory) -> None:
    case = draw_case(number)
    model_dir = write_model(case, directory)
    ours = answers_of_kernels(case, model_dir)
    worst, count = compare(case, ours, answers_of_torch(case, model_dir))
    print(f"engine {number}: {count} log-probabilities, at most {worst:.2g} apart; {case}")


@pytest.mark.parametrize("number", [32])
def test_an_engine_of_kernels_answers_as_one_of_torch(tmp_path, number):
    check(number, tmp_path)


_first, _, _last = os.environ.get("NANOVLLM_ENGINES", f"0:{_NUM_NIGHTLY}").partition(":")


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(int(_first), int(_last or int(_first) + 1)))
def test_many_engines_of_kernels_answer_as_those_of_torch(tmp_path, number):
    check(number, tmp_path)
