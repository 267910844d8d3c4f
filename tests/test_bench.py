"""`bench.py`: what it prints, and what it says of arguments that cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import bench
from nanovllm.quantization.model import quantized_class

MODEL = str(Path(__file__).parent / "tiny-qwen3")
SIZES = ["--num-seqs", "4", "--input-len", "9", "--output-len", "3", "--runs", "1"]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
    bench.main()


def test_prompts_are_of_the_models_vocabulary(monkeypatch, capsys):
    """The demo model's has 4,096 ids, and prompts of 10,000 were drawn for it."""
    options = "device=cpu,dtype=float32,cpu_kvcache_space_gib=0.05"
    run(monkeypatch, "--model", MODEL, *SIZES, "--engine-options", options)
    out = capsys.readouterr().out
    assert "start-up:" in out and "run 1: 36 tokens in, 12 out" in out


def test_dummy_weights_may_be_those_of_an_fp8_release(monkeypatch, capsys):
    monkeypatch.setitem(bench.SIZES, "0.6B", (256, 1, 8, 256, True))
    options = "device=cpu,dtype=float32,cpu_kvcache_space_gib=0.05,max_model_len=64"
    small = ["--size", "0.6B", "--fp8-blocks", *SIZES, "--engine-options", options]
    kinds = []
    load = quantized_class
    monkeypatch.setattr(
        "nanovllm.quantization.model.quantized_class",
        lambda model_class: kinds.append(model_class.__name__) or load(model_class),
    )
    run(monkeypatch, *small)
    assert kinds == ["Qwen3ForCausalLM"]
    assert "run 1: 36 tokens in, 12 out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", MODEL, "--fp8-blocks"], "--fp8-blocks is for --size"),
        ([], "pass one of --model and --size"),
        (["--model", MODEL, "--engine-options", "enforce_eager"], "got 'enforce_eager'"),
        (["--model", MODEL, "--profile", "p"], "torch sees no GPU"),
        (["--model", MODEL, "--num-seqs", "0"], "--num-seqs must be at least 1, got 0"),
        (["--model", MODEL, "--output-len", "-1"], "--output-len must be at least 1, got -1"),
    ],
)
def test_arguments_that_cannot_be_are_refused(monkeypatch, capsys, arguments, reason):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments)
    assert reason in capsys.readouterr().err
