"""Whole jobs on the demo model: what comes out, what a second run does, what stops one."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from batch_jobs import ENGINE, MODEL, command, environment, requests, results
from lora_adapters import write_adapter

from nanovllm import LLM, SamplingParams
from nanovllm.batch import BatchOptions, RefusedOutput, run_batch
from nanovllm.batch.records import line_seed


def run(source, output, *, engine=None, **options):
    options = BatchOptions(str(source), output, show_progress=False, **options)
    return run_batch(MODEL, options, **{**ENGINE, **(engine or {})})


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(requests(24), encoding="utf-8")
    return path


def test_every_line_has_its_answer_and_bad_ones_their_reason(tmp_path, source):
    summary = run(source, tmp_path / "out.jsonl", metrics=tmp_path / "m.json")
    found = results(tmp_path / "out.jsonl")
    assert (summary.num_ok, summary.num_failed, summary.exit_code) == (24, 2, 1)
    errors = {key: value for key, value in found.items() if isinstance(key, tuple)}
    assert len(errors) == 2 and len(found) == 26
    assert "custom_id 'größe-0' was on an earlier line" in errors["error", 14]
    assert "not valid JSON" in errors["error", 10]
    assert found["größe-0"] == "10" and found["größe-3"] == "16"
    metrics = json.loads((tmp_path / "m.json").read_text())
    assert metrics["num_ok"] == 24 and metrics["engine"]["num_finished_requests"] == 24


def test_a_line_is_answered_as_the_library_would(tmp_path, source):
    run(source, tmp_path / "out.jsonl")
    found = results(tmp_path / "out.jsonl")
    with LLM(MODEL, **ENGINE) as llm:
        params = SamplingParams(temperature=0.9, max_tokens=5, seed=line_seed(0, "größe-1"))
        (output,) = llm.generate("And the LORD said", params, use_tqdm=False)
    assert found["größe-1"] == output["text"]


def test_a_second_run_does_nothing(tmp_path, source):
    run(source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run(source, tmp_path / "out.jsonl")
    assert (again.num_ok, again.num_done_before, again.num_failed_before) == (0, 26, 2)
    assert again.exit_code == 1, "failures of the first run are still failures of the job"
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_half_a_job_is_gone_on_with_under_other_speed_options(tmp_path, source):
    run(source, tmp_path / "whole.jsonl")
    run(source, tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines[3:14]) + lines[20][:9])
    summary = run(source, tmp_path / "out.jsonl", engine={"max_num_seqs": 2}, window=2)
    assert summary.num_done_before == 11
    assert results(tmp_path / "out.jsonl") == results(tmp_path / "whole.jsonl")


@pytest.mark.parametrize(
    "change, difference",
    [
        ({"engine": {"seed": 1}}, "engine.seed: 0 then, 1 now"),
        ({"sampling": {"top_p": 0.5}}, "sampling.top_p: None then, 0.5 now"),
        ({"shard": (0, 2)}, "shard: '0/1' then, '0/2' now"),
    ],
    ids=["engine", "sampling", "shard"],
)
def test_other_parameters_are_refused_unless_told(tmp_path, source, change, difference):
    run(source, tmp_path / "out.jsonl")
    with pytest.raises(RefusedOutput, match=difference):
        run(source, tmp_path / "out.jsonl", **change)
    assert run(source, tmp_path / "out.jsonl", force_resume=True, **change).num_ok == 0
    assert run(source, tmp_path / "out.jsonl", overwrite=True, **change).num_ok > 0


def test_another_model_or_another_input_is_refused(tmp_path, source):
    run(source, tmp_path / "out.jsonl")
    copy = tmp_path / "model"
    copy.mkdir()
    for path in MODEL.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    options = BatchOptions(str(source), tmp_path / "out.jsonl", show_progress=False)
    assert run_batch(copy, options, **ENGINE).num_ok == 0, "the same files elsewhere are the same"
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(RefusedOutput, match="made by another job .model"):
        run_batch(copy, options, **ENGINE)
    source.write_text(requests(24).replace("LORD", "Lord", 1), encoding="utf-8")
    with pytest.raises(RefusedOutput, match="input: 'begins with"):
        run(source, tmp_path / "out.jsonl")


def test_a_job_may_stand_in_the_models_directory(tmp_path, source):
    """Its .job.json and --metrics were taken for a change of the model."""
    model = shutil.copytree(MODEL, tmp_path / "model")
    files = {"metrics": model / "metrics.json", "trace": model / "trace.json"}
    options = BatchOptions(str(source), model / "out.jsonl", show_progress=False, **files)
    assert run_batch(model, options, **ENGINE).num_ok == 24
    assert run_batch(model, options, **ENGINE).num_ok == 0
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(RefusedOutput, match="made by another job .model"):
        run_batch(model, options, **ENGINE)


def test_a_job_is_gone_on_with_under_its_own_adapter_only(tmp_path, source):
    short = {"max_model_len": 64}  # under a random adapter answers do not end
    lora, elsewhere = (write_adapter(tmp_path / name, MODEL, seed=3) for name in "ab")
    run(source, tmp_path / "out.jsonl", engine={**short, "lora": lora})
    assert run(source, tmp_path / "out.jsonl", engine={**short, "lora": elsewhere}).num_ok == 0
    for other in (None, write_adapter(tmp_path / "c", MODEL, seed=4)):
        with pytest.raises(RefusedOutput, match="made by another job .lora: '.*' then"):
            run(source, tmp_path / "out.jsonl", engine={**short, "lora": other})


def test_shards_answer_each_line_once(tmp_path, source):
    run(source, tmp_path / "whole.jsonl")
    merged = b""
    for i in range(3):
        run(source, tmp_path / f"{i}.jsonl", shard=(i, 3))
        merged += (tmp_path / f"{i}.jsonl").read_bytes()
    (tmp_path / "merged.jsonl").write_bytes(merged)
    assert results(tmp_path / "merged.jsonl") == results(tmp_path / "whole.jsonl")


def run_piped(data, output):
    """Run a job whose standard input is a pipe with `data` in it."""
    reading, writing = os.pipe()
    real = os.dup(0)
    os.dup2(reading, 0)
    try:
        os.write(writing, data)
        os.close(writing)
        return run("-", output)
    finally:
        os.dup2(real, 0)
        os.close(real)
        os.close(reading)


def test_compressed_input_from_a_pipe_resumes_by_custom_id(tmp_path):
    lines = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"1{i}+4=", "temperature": 0},
        }
        for i in range(8)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    half = text[: len(text) // 2].rpartition(b"\n")[0]
    first, second = (run_piped(data, tmp_path / "o") for data in (half, gzip.compress(text)))
    assert (first.num_ok, second.num_ok, second.num_done_before) == (3, 5, 3)
    assert results(tmp_path / "o") == {f"c{i}": str(14 + i) for i in range(8)}


def test_a_pipe_of_lines_without_ids_cannot_be_gone_on_with(tmp_path):
    line = json.dumps({"prompt": "1+1=", "row": 0}).encode()
    assert run_piped(line, tmp_path / "o").num_ok == 1
    with pytest.raises(RefusedOutput, match="by custom_id only"):
        run_piped(line, tmp_path / "o")


def test_only_bad_lines_still_make_a_job(tmp_path):
    (tmp_path / "in.jsonl").write_text("{\n" * 300)
    summary = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (summary.num_ok, summary.num_failed, summary.exit_code) == (0, 300, 1)
    (tmp_path / "empty.jsonl").write_text("")
    assert run(tmp_path / "empty.jsonl", tmp_path / "none.jsonl").exit_code == 0


def test_a_line_that_was_cut_and_is_whole_now_is_run(tmp_path):
    line = {"custom_id": "a", "prompt": "12+34=", "temperature": 0, "row": 0}
    text = json.dumps(line).encode()
    counts = [run_piped(text[:size], tmp_path / "o") for size in (30, 30, len(text))]
    assert [(c.num_ok, c.num_failed) for c in counts] == [(0, 1), (0, 0), (1, 0)]
    records = [json.loads(line) for line in (tmp_path / "o").open()]
    assert [record.get("output") for record in records] == [None, "46"]


def test_a_cut_archive_is_done_as_far_as_it_goes_and_told(tmp_path):
    text = "".join(json.dumps({"prompt": f"1{i}+4=", "row": i}) + "\n" for i in range(200))
    (tmp_path / "in.gz").write_bytes(gzip.compress(text.encode(), compresslevel=1)[:-30])
    summary = run(tmp_path / "in.gz", tmp_path / "out.jsonl")
    assert summary.exit_code == 2 and "cannot be read after line" in summary.input_failure
    assert summary.num_ok == len(results(tmp_path / "out.jsonl")) > 0


def test_a_chat_without_a_template_is_the_lines_fault(tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": "1+1="}], "chat_template": "{{ oops("},
        {"messages": [{"role": "user", "content": "11+1="}], "temperature": 0},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    summary = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (summary.num_ok, summary.num_failed) == (1, 1)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert "chat template refused" in records[0]["error"]["message"]
    assert records[1]["output"] == "12"


def start_long_job(tmp_path):
    """A job that runs for minutes, once its first results are there."""
    lines = [{"prompt": "And the LORD", "row": i, "temperature": 1} for i in range(4000)]
    lines = [{**line, "max_tokens": 30, "ignore_eos": True} for line in lines]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    output = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        command(tmp_path / "in.jsonl", output),
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    while process.poll() is None and not (output.exists() and output.stat().st_size):
        time.sleep(0.01)
    return process, output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_the_first_signal_lets_what_runs_finish(tmp_path, number):
    process, output = start_long_job(tmp_path)
    before = len(output.read_bytes().splitlines())
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Finishing what runs" in err and b"the same command goes on" in out
    assert before < len(results(output)) < 4000


def test_the_second_signal_stops_at_once(tmp_path):
    process, output = start_long_job(tmp_path)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    # Killed, to the shell 130 too: on a slow machine the job may have ended before, and the signal
    # then meets an interpreter that is on its way out.
    assert process.returncode in (130, -signal.SIGINT)
    assert len(results(output)) < 4000


def test_standard_output_is_no_file_to_go_on_with(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="output must be a file"):
        run(source, Path("-"))
    assert not Path("-").exists()


def api_line(custom_id, **fields):
    body = {"prompt": "12+34=", "temperature": 0, "max_tokens": 3, **fields}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line)


def test_failed_lines_are_tried_again_and_the_last_result_counts(tmp_path):
    """A mended line stayed failed until its result was taken out of the output by hand."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        api_line("a"),
        "{broken",
        api_line("b", temperature=-1),
        api_line("a"),
        '{"prompt": "1+1=", "max_tokens": 0}',
        '{"prompt": "2+2=", "max_tokens": 3}',
        api_line("c", nonsense=1),
    ]

    def attempt(**options):
        source.write_text("\n".join(lines) + "\n")
        done = run(source, output, **options)
        counts = (done.num_ok, done.num_failed, done.num_done_before, done.num_failed_before)
        assert sum(counts[:3]) == len(lines)
        return (*counts, done.exit_code)

    assert attempt() == (2, 5, 0, 0, 1)
    lines[1], lines[2], lines[4] = api_line("x"), api_line("b"), '{"prompt": "1+1=", "n": 1}'
    with pytest.raises(RefusedOutput, match="input: .* then, .* now.*mended, pass --retry-failed"):
        attempt()
    before = output.read_bytes()
    assert attempt(retry_failed=True) == (3, 2, 2, 0, 1)
    assert output.read_bytes().startswith(before)
    written = [json.loads(line) for line in output.read_bytes()[len(before) :].splitlines()]
    assert {record.get("custom_id") for record in written} == {"x", "b", "a", "c", None}
    assert attempt() == (0, 0, 7, 2, 1), "errors that were mended count no more"
    assert attempt(retry_failed=True) == (0, 2, 5, 0, 1)
    lines[3], lines[6] = api_line("d"), api_line("c")
    assert attempt(retry_failed=True) == (2, 0, 5, 0, 0)
    assert attempt() == (0, 0, 7, 0, 0)
    lines[5] = '{"prompt": "2+3=", "max_tokens": 3}'
    with pytest.raises(RefusedOutput, match="Line 6 of the input was changed since"):
        attempt(retry_failed=True)


def test_a_retry_that_was_interrupted_says_how_it_goes_on(tmp_path):
    """It advised to put back the line that had just been mended, or to start anew."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(api_line(name, temperature=-1) for name in "abc") + "\n")
    assert run(source, output).num_failed == 3
    before = output.read_bytes()
    source.write_text("\n".join(api_line(name) for name in "abc") + "\n")
    assert run(source, output, retry_failed=True).num_ok == 3
    first = output.read_bytes()[len(before) :].splitlines(keepends=True)[0]
    output.write_bytes(before + first + b'{"id": "torn')
    with pytest.raises(RefusedOutput, match="gave an error for it. Pass --retry-failed to run it"):
        run(source, output)
    done = run(source, output, retry_failed=True)
    assert (done.num_ok, done.num_done_before, done.exit_code) == (2, 1, 0)
    assert run(source, output).exit_code == 0


def test_a_mended_line_without_an_id_counts_once_where_a_job_is_forced_on(tmp_path):
    """It counted as failed before, too, and the exit code was 1 with all results there."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "1+1=", "max_tokens": 0}\n')
    assert run(source, output).exit_code == 1
    source.write_text('{"prompt": "1+1=", "max_tokens": 2}\n')
    done = run(source, output, force_resume=True)
    assert (done.num_ok, done.num_done_before, done.num_failed_before) == (1, 0, 0)
    assert done.exit_code == 0


def test_keys_that_are_nearly_parameters_are_asked_about_once(tmp_path, caplog):
    """They were copied as data without a word, and the line ran with the default."""
    keys = ["temprature", "topp", "max_token", "max_new_tokens", "Top-K", "step", "tool", "id", "N"]
    lines = [{"prompt": "1+1=", "max_tokens": 2, **dict.fromkeys(keys, 1)} for _ in range(2)]
    lines[1]["seeds"] = 3
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    summary = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert summary.exit_code == 0
    meant = {"temprature": "temperature", "topp": "top_p", "max_token": "max_tokens"}
    meant |= {"max_new_tokens": "max_tokens", "Top-K": "top_k"}
    expected = [
        f"Line 1: key {key!r} is copied as data; did you mean {name!r}?"
        for key, name in meant.items()
    ]
    expected.append("Line 2: key 'seeds' is copied as data; did you mean 'seed'?")
    assert sorted(summary.notes) == sorted(expected)
    for note in expected:
        assert caplog.text.count(note) == 1 and note in summary.text()
    (record, _) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert record["temprature"] == 1


def test_a_job_with_nothing_left_to_do_keeps_its_report(tmp_path, source):
    """It was replaced by one without a step in it."""
    report = tmp_path / "report.html"
    run(source, tmp_path / "out.jsonl", report=report)
    before = report.read_bytes()
    summary = run(source, tmp_path / "out.jsonl", report=report)
    assert report.read_bytes() == before
    assert f"Nothing was left to do: {report} is that of an earlier run." in summary.notes
