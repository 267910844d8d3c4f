"""The README's Python blocks run as they stand there; what it names is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from nanovllm.config import Config

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
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


def test_every_engine_option_is_named_with_its_default():
    section = TEXT.split("### Engine options")[1].split("### Models")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.M))
    for item in fields(Config):
        if item.name not in ("model", "trust_remote_code"):
            assert f"`{item.name}`" in section
        if item.name in table and item.default is not None:
            assert ast.literal_eval(table[item.name]) == item.default


def test_the_files_that_it_names_are_there():
    """Code is read along them: one that was renamed loses the reader."""
    places = [ROOT, ROOT / "nanovllm", ROOT / "tests", ROOT / "tests" / "gpu"]
    names = re.findall(r"`((?:[\w-]+/)*[\w-]+(?:\.py|\.sh|\.md|/))`", TEXT)
    assert len(names) > 50
    lost = [name for name in names if not any((place / name).exists() for place in places)]
    assert not lost


def test_links_lead_to_headings():
    headings = re.findall(r"^#+ (.+)$", TEXT, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#([^)]+)\)", TEXT))
    assert links and links <= anchors
