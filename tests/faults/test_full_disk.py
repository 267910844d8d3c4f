"""A disk that is full: nothing finished is lost, the job fit to be gone on with."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest
from programs import ROOT

MODEL = ROOT / "tests" / "tiny-qwen3"
ENGINE = ["--device", "cpu", "--num-kvcache-blocks", "64", "--max-num-seqs", "4"]


def run(words, *, max_file_bytes=None, **options):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    # -B: modules that it compiled would be cut at the limit too, and no process could import them.
    return subprocess.run(
        [sys.executable, "-B", "-m", "nanovllm", *map(str, words)],
        cwd=ROOT,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=None if max_file_bytes is None else limit,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


@pytest.fixture
def job(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"{i + 10}+{i}=", "temperature": 0, "row": i} for i in range(40)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["run-batch", "-i", source, "-o", output, "--model", MODEL, *ENGINE], output


@pytest.mark.skipif("COVERAGE_RUN" in os.environ, reason="the limit is one for coverage's file too")
def test_a_job_whose_disk_fills_up_says_so_and_goes_on_when_there_is_room(job):
    """A limit on the size of files fails as a full disk does: in the middle of a line."""
    words, output = job
    done = run(words, max_file_bytes=4000)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "File too large" in last and "Traceback" not in done.stderr
    num_whole = output.read_bytes().count(b"\n")
    assert 5 < num_whole < 40 and output.stat().st_size == 4000
    done = run(words)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(record["row"] for record in records) == list(range(40))
    assert all(record["output"] == str(2 * record["row"] + 10) for record in records)


def test_files_beside_the_output_that_do_not_fit_take_nothing_with_them(job):
    words, output = job
    options = ["--report", "--metrics", "--trace"]
    done = run([*words, *(word for option in options for word in (option, "/dev/full"))])
    assert done.returncode == 2
    for option in options:
        assert f"{option} /dev/full was not written: [Errno 28] No space left" in done.stdout
    assert output.read_bytes().count(b"\n") == 40


def test_an_answer_that_cannot_be_printed_is_an_error():
    with open("/dev/full", "w") as full:
        done = run(["generate", "12+34=", "--model", MODEL, *ENGINE], stdout=full)
    assert done.returncode == 2
    assert done.stderr.strip() == "nanovllm: [Errno 28] No space left on device"


def test_a_reader_that_goes_away_ends_the_program_quietly():
    words = ["generate", "And it came to pass", "--model", MODEL, *ENGINE]
    words += ["--max-tokens", "300", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nanovllm", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) != 0
    assert b"Traceback" not in err and b"Exception ignored" not in err, err
