"""Fixtures: tiny models on disk, engines that are closed, and transformers as the oracle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: tiny models run faster on one thread a process than on all cores, which
# spawned processes, that inherit it, would fight over.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A hundred processes are started: none but the first shall compile the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch

# Before anything imports triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import interpreter_bounds
import interpreter_rounding
import interpreter_speed
import pytest
from oracle import Oracle
from tiny_models import write_tiny_qwen3

from nanovllm import LLM, SamplingParams
from nanovllm.engine.admission import LengthPredictor
from nanovllm.kernels._triton import HAS_TRITON

if HAS_TRITON and not torch.cuda.is_available():
    interpreter_bounds.install()
    interpreter_rounding.install()
    interpreter_speed.install()

DEMO_MODEL = Path(__file__).parent / "tiny-qwen3"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return DEMO_MODEL


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in float32: 2 layers, head_dim not hidden/heads, vocabulary 517."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Build engines that are closed when the test ends."""
    engines: list[LLM] = []

    def make(model: Path | str, **options: Any) -> LLM:
        engines.append(LLM(model, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def tiny_llm(make_llm: Callable[..., LLM], tiny_model: Path) -> Callable[..., LLM]:
    """`tiny_llm(**options)`: the tiny model in float32 on the CPU, with a small cache."""

    def make(**options: Any) -> LLM:
        defaults = {
            "device": "cpu",
            "dtype": "float32",
            "kvcache_block_size": 16,
            "num_kvcache_blocks": 256,
        }
        return make_llm(tiny_model, **{**defaults, **options})

    return make


@pytest.fixture
def optimistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit as if no sequence grew, so that a small cache preempts.

    Without it nothing is preempted: a limit under `ignore_eos` is a length that is known ahead.
    """
    name = "predicted_num_tokens"
    monkeypatch.setattr(LengthPredictor, name, lambda self, seq: len(seq.token_ids) + 1)


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """One small engine for the tests of a file; see `nothing_is_left_behind`."""
    with LLM(tiny_model, device="cpu", dtype="float32", num_kvcache_blocks=128) as engine:
        yield engine


@pytest.fixture
def nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    """After the test the engine is idle, holds no block, and still answers."""
    yield
    assert llm.is_finished()
    scheduler = llm._engine.scheduler
    assert scheduler.num_running == 0 and scheduler.blocks.num_free_blocks == 128
    scheduler.check_invariants()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert llm.generate([[5, 6]], params, use_tqdm=False)[0].finished
