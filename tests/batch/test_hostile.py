"""Jobs that somebody means ill: bad lines of every kind, files that coincide, edited inputs."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batch_jobs import ENGINE, MODEL, command, environment

from nanovllm.__main__ import main
from nanovllm.batch import BatchOptions, RefusedOutput, run_batch
from nanovllm.frontend.request_builder import RequestBuilder

GOOD = {"prompt": "12+34=", "temperature": 0, "max_tokens": 3}
MESSAGES = [{"role": "user", "content": "x"}]


def run(source, output, **options):
    return run_batch(
        MODEL, BatchOptions(str(source), output, show_progress=False, **options), **ENGINE
    )


def write(path, *lines):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def records(path):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def chat(**body):
    return {"messages": MESSAGES, "max_tokens": 2, **body}


def api(**body):
    url = "/v1/chat/completions"
    return {"custom_id": json.dumps(body), "method": "POST", "url": url, "body": chat(**body)}


BODIES = [
    {"chat_template_kwargs": 5},
    {"chat_template_kwargs": [1]},
    {"chat_template": "{{ '\\ud800' }}"},
    {"chat_template": ["x"]},
    {"chat_template": "{{ 1 // 0 }}"},
    {"tools": 5},
    {"add_generation_prompt": "yes"},
    {"chat_template_kwargs": {"tokenize": True}},
]
BAD = [make(**body) for make in (chat, api) for body in BODIES]
BAD += [api(model=["m"]), '{"prompt": "x", "key": 1e999}', "[" * 100_000]


def test_a_bad_line_of_any_kind_is_an_error_of_its_own(tmp_path):
    source = write(tmp_path / "in.jsonl", GOOD, *BAD, GOOD)
    summary = run(source, tmp_path / "out.jsonl")
    assert (summary.num_ok, summary.num_failed, summary.exit_code) == (2, len(BAD), 1)
    found = records(tmp_path / "out.jsonl")
    lines = {record["error"]["line"] for record in found if record.get("error")}
    assert lines == set(range(2, len(BAD) + 2))
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run(source, tmp_path / "out.jsonl").num_failed_before == len(BAD)
    assert (tmp_path / "out.jsonl").read_bytes() == before, "nothing is written twice"


def test_a_line_at_which_the_engines_door_breaks_does_not_take_others_with_it(
    tmp_path, monkeypatch
):
    real = RequestBuilder.build

    def fragile(self, prompts, params, **options):
        if "boom" in prompts:
            raise KeyError("hinge")
        return real(self, prompts, params, **options)

    monkeypatch.setattr(RequestBuilder, "build", fragile)
    source = write(tmp_path / "in.jsonl", GOOD, {**GOOD, "prompt": "boom"}, GOOD)
    summary = run(source, tmp_path / "out.jsonl")
    assert (summary.num_ok, summary.num_failed) == (2, 1)
    (error,) = [r["error"] for r in records(tmp_path / "out.jsonl") if r.get("error")]
    assert error["line"] == 2 and "hinge" in error["message"]


def test_a_result_that_is_no_json_fails_alone(tmp_path, monkeypatch):
    from nanovllm.batch import result_record

    def odd(job, output):
        return {**result_record(job, output), "x": float("nan") if job.line_number == 1 else 1}

    monkeypatch.setattr("nanovllm.batch.result_record", odd)
    summary = run(write(tmp_path / "in.jsonl", GOOD, GOOD), tmp_path / "out.jsonl")
    assert (summary.num_ok, summary.num_failed) == (1, 1)
    assert len(records(tmp_path / "out.jsonl")) == 2


# ---- files that coincide, or cannot be written


@pytest.mark.parametrize("how", [{"overwrite": True}, {"force_resume": True}, {}], ids=str)
@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["same", "symlink", "hardlink"])
def test_the_input_is_never_the_output(tmp_path, how, link):
    source = write(tmp_path / "in.jsonl", GOOD)
    before, output = source.read_bytes(), source
    if link is not None:
        output = tmp_path / "other"
        link(source, output)
    with pytest.raises(ValueError, match="the input and the output are the same file"):
        run(source, output, **how)
    assert source.read_bytes() == before


NAMES = ["in.jsonl", "out.jsonl", "out.jsonl.job.json", "sub/../out.jsonl", "link"]


@pytest.mark.parametrize("option", ["metrics", "report", "trace"])
@pytest.mark.parametrize("name", NAMES)
def test_no_file_beside_the_output_is_another_of_the_job(tmp_path, option, name):
    source = write(tmp_path / "in.jsonl", GOOD)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("out.jsonl")  # which is not there yet
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="are the same file"):
        run(source, tmp_path / "out.jsonl", **{option: tmp_path / name})
    assert sorted(tmp_path.iterdir()) == before and json.loads(source.read_text()) == GOOD
    with pytest.raises(ValueError, match="are the same file"):
        run(source, tmp_path / "out.jsonl", metrics=tmp_path / "x", trace=tmp_path / "x")


@pytest.mark.parametrize("option", ["output", "metrics", "report", "trace"])
@pytest.mark.parametrize("name", ["none/x", "directory"])
def test_a_path_that_cannot_be_written_is_found_before_the_model_is_loaded(
    tmp_path, monkeypatch, option, name
):
    monkeypatch.setattr("nanovllm.batch.open_llm", lambda *_: pytest.fail("loaded"))
    source = write(tmp_path / "in.jsonl", GOOD)
    (tmp_path / "directory").mkdir()
    options = {"output": tmp_path / "out.jsonl", option: tmp_path / name}
    with pytest.raises(ValueError, match="no directory|is a directory|is no file"):
        run(source, **options)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_that_fails_at_the_end_takes_nothing_with_it(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left")

    monkeypatch.setattr("nanovllm.batch.write_report", full)
    monkeypatch.setattr("nanovllm.batch.TraceWriter.add_step", full)
    files = {name: tmp_path / name for name in ("report", "metrics", "trace")}
    summary = run(write(tmp_path / "in.jsonl", GOOD), tmp_path / "out.jsonl", **files)
    assert summary.num_ok == 1 and summary.exit_code == 2
    assert summary.text().count("was not written: No space left") == 2
    assert json.loads(files["metrics"].read_text())["num_ok"] == 1


def test_a_device_is_no_output(tmp_path):
    with pytest.raises(RefusedOutput, match="/dev/null is no file"):
        run(write(tmp_path / "in.jsonl", GOOD), Path("/dev/null"))


# ---- inputs that were changed between runs

WITH_ID = {**GOOD, "custom_id": "a"}
API = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.mark.parametrize("line", [GOOD, WITH_ID, API], ids=["plain", "plain-id", "api"])
def test_an_answered_line_that_was_changed_is_told_by_its_number(tmp_path, monkeypatch, line):
    monkeypatch.setattr("nanovllm.batch.fingerprint._HEAD_BYTES", 10)
    source, output = write(tmp_path / "in.jsonl", GOOD, line), tmp_path / "out.jsonl"
    run(source, output)
    before = output.read_bytes()
    write(source, GOOD, json.dumps(line) + "  ", {**GOOD, "more": 1})
    assert run(source, output).num_ok == 1, "lines may be appended"
    assert len(output.read_bytes()) > len(before)
    before = output.read_bytes()
    write(source, GOOD, json.dumps(line).replace("12+", "99+").replace('"x"', '"y"'), GOOD)
    with pytest.raises(RefusedOutput, match="Line 2 of the input was changed since"):
        run(source, output)
    assert output.read_bytes() == before
    assert run(source, output, force_resume=True).num_ok == 0


def test_lines_may_be_appended_to_a_small_input_and_an_error_may_be_mended(tmp_path):
    source, output = write(tmp_path / "in.jsonl", GOOD, {"prompt": ""}), tmp_path / "out.jsonl"
    assert run(source, output).num_failed == 1
    write(source, GOOD, {"prompt": ""}, GOOD)
    assert [run(source, output).num_ok for _ in range(2)] == [1, 0]
    write(source, GOOD, GOOD, GOOD)
    with pytest.raises(RefusedOutput, match="input: 'begins with"):
        run(source, output)
    assert [run(source, output, force_resume=True).num_ok for _ in range(2)] == [1, 0]


def test_a_pipe_may_wait_for_an_answer_before_its_next_line(tmp_path):
    words = command("-", tmp_path / "out.jsonl", "--quiet")
    process = subprocess.Popen(words, env=environment(), stdin=subprocess.PIPE)
    try:
        for number in (1, 2):
            process.stdin.write(json.dumps(chat()).encode() + b"\n")
            process.stdin.flush()
            deadline = time.monotonic() + 40
            while not (tmp_path / "out.jsonl").exists() or (
                len(records(tmp_path / "out.jsonl")) < number
            ):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
        process.stdin.close()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


# ---- the command line


def test_what_nobody_foresaw_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr("nanovllm.batch.open_llm", broken)
    source = write(tmp_path / "in.jsonl", GOOD)
    words = ["run-batch", "-i", str(source), "-o", str(tmp_path / "o"), "--model", str(MODEL)]
    assert main([*words, "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("nanovllm: RuntimeError: out of luck") and err.count("\n") == 1
    for option, value in (("fsync-interval", "nan"), ("fsync-interval", "-1"), ("window", "0")):
        assert main([*words, "--device", "cpu", f"--{option}", value]) == 2
        assert option.replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize("ends", ["2>&1 | true", ">/dev/full 2>/dev/full"])
def test_a_job_is_done_though_nobody_reads_what_it_says(tmp_path, ends):
    """Its exit code said that it was not, and files were not written: it ended in a print."""
    source, output, metrics = (tmp_path / name for name in ("in", "out", "metrics"))
    write(source, GOOD)
    job = shlex.join(command(source, output, metrics=metrics))
    # pipefail: the job's exit code is the line's.
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{job} {ends}"],
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert json.loads(output.read_text())["output"] and json.loads(metrics.read_text())["num_ok"]


def test_a_directory_is_no_input(tmp_path):
    """It was told when the model had been loaded, and not by its name."""
    with pytest.raises(ValueError, match=f"The input {tmp_path} is a directory"):
        run(tmp_path, tmp_path / "out.jsonl")
    with pytest.raises(TypeError, match="sampling must be a dict of SamplingParams' options"):
        run(tmp_path, tmp_path / "out.jsonl", sampling=None)
    assert not list(tmp_path.iterdir())


def test_a_closed_standard_input_is_no_empty_one(tmp_path, monkeypatch):
    """The output became descriptor 0, and was read as the input."""
    monkeypatch.setattr("sys.__stdin__", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        run_batch(MODEL, BatchOptions("-", tmp_path / "out.jsonl"), **ENGINE)
    assert not list(tmp_path.iterdir())


def test_a_closed_standard_error_ends_no_job(tmp_path):
    """Nor what is to be told there the exit code; processes that are started have one again."""
    text = """
import os, subprocess, sys
from nanovllm.__main__ import _complain, _keep_standard_descriptors
from nanovllm.batch.progress import BatchProgress
from nanovllm.batch.stop import DrainOnSignal
_keep_standard_descriptors()
sys.stderr = None  # as Python has it where no library has opened another
_complain("x")
BatchProgress(lambda: None, is_shown=True).close()
stop = DrainOnSignal()
stop._note(2, None)
assert stop.event.is_set()
print(subprocess.run(["ls", "-l", "/proc/self/fd/2"], stdout=-1, check=True).stdout.decode()[-11:])
"""
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", text]
    root = Path(__file__).parents[2]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, cwd=root, check=True)
    assert "/dev/null" in done.stdout
