"""On a machine without a GPU a benchmark says what it lacks, in place of a traceback."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

NAMES = sorted(path.stem for path in (Path(__file__).parent / "gpu").glob("bench_*.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_in_one_line_that_it_needs_a_gpu(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as caught:
        import_module(f"tests.gpu.{name}").main()
    assert caught.value.code == 2
    num_gpus = "2 CUDA GPUs" if name == "bench_all_reduce" else "1 CUDA GPU"
    assert capsys.readouterr() == ("", f"needs {num_gpus}, torch sees 0\n")
