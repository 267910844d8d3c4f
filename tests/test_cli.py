"""The command line as a person meets it."""

import io
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from nanovllm import __version__
from nanovllm.__main__ import _ENGINE_HELP, _say, main
from nanovllm.config import Config

MODEL = str(Path(__file__).parent / "tiny-qwen3")
ENGINE = ["--model", MODEL, "--device", "cpu", "--dtype", "float32"]
ENGINE += ["--cpu-kvcache-space-gib", "0.05", "--max-num-seqs", "8"]


def test_generate_prints_the_answer(capsys):
    assert main(["generate", "12+34=", *ENGINE, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "46\n"
    assert main(["generate", "--chat", "12+34=", *ENGINE, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "46\n"
    many = ["--n", "2", "--max-tokens", "3", "--ignore-eos"]
    assert main(["generate", "And the", *ENGINE, *many]) == 0
    assert capsys.readouterr().out.count("---") == 1


def test_bench_prints_a_rate(capsys):
    sizes = ["--num-prompts", "4", "--input-len", "5", "--output-len", "3", "--quiet"]
    assert main(["bench", *ENGINE, *sizes]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 requests, 20 tokens in, 12 out in") and "tokens out/s" in out


def test_bench_counts_the_tokens_that_came(capsys):
    """Those beyond the context were counted, too, and a number below 1 gave a negative rate."""
    sizes = ["--num-prompts", "2", "--input-len", "5", "--output-len", "30", "--quiet"]
    assert main(["bench", *ENGINE, *sizes, "--max-model-len", "16"]) == 0
    assert capsys.readouterr().out.startswith("2 requests, 10 tokens in, 22 out in")
    assert main(["bench", *ENGINE, "--num-prompts", "-1"]) == 2
    assert "--num-prompts must be at least 1, got -1" in capsys.readouterr().err


def test_models_lists_architectures(capsys):
    assert main(["models"]) == 0
    names = capsys.readouterr().out.split()
    assert "Qwen3ForCausalLM" in names and "Qwen3MoeForCausalLM" in names


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"nanovllm {__version__}\n"


def test_run_batch_sums_up_and_its_exit_code_tells(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "12+34="}\n{"prompt": 5}\n')
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    files += ["--report", str(tmp_path / "r.html"), "--trace", str(tmp_path / "t.json")]
    assert main(["run-batch", *files, *ENGINE, "--temperature", "0"]) == 1
    captured = capsys.readouterr()
    assert "requests ok" in captured.out and "time by phase" in captured.out
    assert "--retry-failed runs them again" in captured.out
    assert "2 of 2 | 100%" in captured.err
    assert (tmp_path / "r.html").stat().st_size > 5000
    assert (tmp_path / "t.json").stat().st_size > 500
    assert main(["run-batch", *files, *ENGINE]) == 2, "without --temperature it is another job"
    assert "sampling.temperature: 0.0 then, None now" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["run-batch", "-i", "none.jsonl", "-o", "o", *ENGINE], "none.jsonl does not exist"),
        (["run-batch", "-i", "-", "-o", "o", *ENGINE, "--top-p", "3"], "top_p must be"),
        (["generate", "x", "--model", "/nowhere"], "is no directory"),
        (["generate", "x", *ENGINE, "--kvcache-block-size", "5"], "kvcache_block_size"),
    ],
    ids=["input", "sampling", "model", "engine"],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("nanovllm: ") and reason in err and "Traceback" not in err
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_a_shard_must_be_one_of_its_number(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run-batch", "-i", "-", "-o", "o", "--model", "m", "--shard", "3/3"])
    assert "must be I/N with I from 0 to N-1, got '3/3'" in capsys.readouterr().err


def test_every_engine_option_is_there_and_explained(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["run-batch", "--help"])
    text = capsys.readouterr().out
    for item in fields(Config):
        if item.name not in ("model", "trust_remote_code"):
            assert "--" + item.name.replace("_", "-") in text
            assert item.name in _ENGINE_HELP, f"explain {item.name} in __main__._ENGINE_HELP"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate", "x", "--model", "m", "--temprature", "0"], "Did you mean --temperature?"),
        (["generate", "x", "--model", "m", "--max_tokens=5"], "Did you mean --max-tokens?"),
        (["generate", "In", "the", "--model", "m"], "the. A text of several words needs quotes."),
        (["models", "--model", "m"], "unrecognized arguments: --model m. `nanovllm models --help`"),
        (["generate", "x", "--top-k", "x"], "--top-k: invalid int value: 'x'."),
        (["run_batch"], "invalid choice: 'run_batch' (choose from 'run-batch', "),
    ],
)
def test_a_wrong_command_line_is_met_with_one_line(capsys, arguments, reason):
    """What was wrong stood below 25 lines of options, and a misspelt one was not recognised."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanovllm") and "--help` lists what is allowed." in line
    assert reason.replace("'", "") in line.replace("'", "")  # Python 3.12 quotes no choices


def test_python_m_nanovllm_works():
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm", "--help"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(name in done.stdout for name in ("run-batch", "generate", "bench", "models"))


def test_a_text_that_the_terminal_cannot_show_is_printed_as_escapes(monkeypatch):
    """It was an error, and the answer was lost."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="iso-8859-1"))
    _say("größe 大", end="")
    assert written.getvalue() == "größe \\u5927".encode("iso-8859-1")
