"""The README's Python blocks run as they stand there, on the demo model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
# The others need a cluster or more than one GPU; their names are tested where those modules are.
RUNNABLE = [block for block in BLOCKS if "tests/tiny-qwen3" in block]


def test_most_blocks_are_runnable():
    assert len(RUNNABLE) >= 5


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: block.split("\n")[-2][:40])
def test_block_runs(block):
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
