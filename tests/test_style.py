"""What keeps the code readable: types, formatting, and a docstring on everything public."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanovllm"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.read_text(encoding="utf-8").strip()]
# What users import: the modules of the top level, and the faces of the packages.
PUBLIC = [p for p in FILES if p.parent == PACKAGE or p.name == "__init__.py"]


def run(tool, *arguments):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install -e '.[test]'")
    done = subprocess.run(
        [sys.executable, "-m", tool, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_mypy_strict_finds_nothing():
    """With .mypy_cache from a run before it takes 2 s, without it half a minute."""
    run("mypy", "nanovllm")


def test_ruff_finds_nothing():
    run("ruff", "check", ".")
    run("ruff", "format", "--check", ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def public(body):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_public_has_a_docstring(path):
    nodes = public(ast.parse(path.read_text(encoding="utf-8")).body)
    for node in list(nodes):
        if isinstance(node, ast.ClassDef):
            nodes += public(node.body)
    bare = [f"{node.name} (line {node.lineno})" for node in nodes if not ast.get_docstring(node)]
    assert not bare, f"{path.relative_to(ROOT)}: {', '.join(bare)}"


def test_what_is_exported_has_a_docstring():
    module = __import__("nanovllm")
    assert [name for name in module.__all__ if not getattr(module, name).__doc__] == []


def test_names_of_tests_are_the_same_in_each_process(request):
    """An object's address in a parameter's name would keep pytest-xdist from sharing out tests."""
    assert [item.nodeid for item in request.session.items if " at 0x" in item.nodeid] == []
