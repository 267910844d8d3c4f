"""Nothing stays behind, however often engines are made and calls are answered."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from programs import ROOT


@pytest.mark.parametrize(
    "words",
    [
        "--engines 12 --calls 300",
        pytest.param("--engines 200 --calls 10000", marks=pytest.mark.nightly),
        pytest.param(
            "--engines 12 --calls 300 --tensor-parallel-size 2", marks=pytest.mark.nightly
        ),
    ],
)
def test_engines_and_calls_leave_the_process_as_it_was(words):
    done = subprocess.run(
        [sys.executable, "tests/faults/cycles.py", *words.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    print(done.stdout)
