"""Several engines behave as one: the same outputs, whoever dies."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.batch import BatchOptions, run_batch
from nanovllm.config import Config
from nanovllm.data_parallel import DataParallelLLM, engine_process
from nanovllm.data_parallel.placement import engine_environments

MODEL = Path(__file__).parent / "tiny-qwen3"
ENGINE = {"device": "cpu", "dtype": "float32", "cpu_kvcache_space_gib": 0.05, "max_num_seqs": 8}
PROMPTS = [f"{i % 90 + 10}+{i % 9}=" for i in range(60)] + ["And the LORD", "Call me"] * 10
PARAMS = [SamplingParams(temperature=0.9, max_tokens=12, n=1 + (i % 5 == 0)) for i in range(80)]


def texts(outputs):
    return [[answer.text for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected():
    with LLM(MODEL, **ENGINE) as llm:
        return texts(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def two_engines():
    with DataParallelLLM(MODEL, data_parallel_size=2, **ENGINE) as llm:
        yield llm


def test_two_engines_answer_as_one_in_the_order_of_the_prompts(two_engines, expected):
    samples = []
    two_engines.observe_steps(samples.append)
    assert texts(two_engines.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert {sample.engine for sample in samples} == {0, 1}, "both took part"
    assert two_engines.metrics.num_finished_requests == 80


def test_a_bad_prompt_starts_nothing_or_is_an_error_of_its_own(two_engines):
    params = SamplingParams(temperature=0, max_tokens=8)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        two_engines.generate(["12+34=", ""], params, use_tqdm=False)
    good, bad = two_engines.generate(["12+34=", ""], params, use_tqdm=False, return_errors=True)
    assert good["text"] == "46" and "is empty" in bad.error
    processor = SamplingParams(logits_processors=[max])
    with pytest.raises(
        ValueError, match="Leave them out or use an LLM with tensor_parallel_size=1"
    ):
        two_engines.generate("12+34=", processor, use_tqdm=False)
    for call in (two_engines.generate, two_engines.chat, two_engines.generate_iter):
        with pytest.raises(TypeError, match="has no option 'lora_request'. Pass lora=DIR to LLM"):
            call([], lora_request=None)
    with pytest.raises(TypeError, match="A DataParallelLLM cannot be copied or pickled"):
        pickle.dumps(two_engines)


def test_chats_are_laid_out_as_in_one_engine(two_engines):
    chats = [[{"role": "user", "content": sum_}] for sum_ in ("12+34=", "71-26=")]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    assert texts(two_engines.chat(chats, params, use_tqdm=False)) == [["46"], ["45"]]
    begun = [*chats[0], {"role": "assistant", "content": "4"}]
    layout = {"add_generation_prompt": False, "continue_final_message": True}
    assert texts(two_engines.chat(begun, params, use_tqdm=False, **layout)) == [["6"]]
    with pytest.raises(ValueError, match="prompt 1 has message 0 without a 'role'"):
        two_engines.chat([chats[0], [{"content": "x"}]], params, use_tqdm=False)
    with pytest.raises(TypeError, match="continue_last_message"):
        two_engines.chat(begun, params, continue_last_message=True)


def test_parameters_are_paired_as_in_one_engine(two_engines):
    """An empty list meant the default, and prompts beyond the parameters were dropped."""
    params = SamplingParams(temperature=0, max_tokens=8)
    with pytest.raises(ValueError, match="0 entries for 1 prompts"):
        two_engines.generate(["1+1="], [], use_tqdm=False)
    with pytest.raises(ValueError, match="sampling_params"):
        list(two_engines.generate_iter(["1+1=", "2+2="], [params]))


def test_an_endless_input_is_read_a_window_ahead(two_engines):
    num_read = 0

    def endless():
        nonlocal num_read
        while True:
            num_read += 1
            yield "12+34="

    results = two_engines.generate_iter(
        endless(), SamplingParams(temperature=0, max_tokens=8), window=100
    )
    seen = [next(results) for _ in range(50)]
    results.close()
    assert all(output["text"] == "46" for _, output in seen)
    assert num_read < 50 + 100 + 4 * 128
    again = two_engines.generate(["11+1="], SamplingParams(temperature=0), use_tqdm=False)
    assert again[0]["text"] == "12", "what was open is gone"


def test_an_iterable_may_wait_for_answers_and_closing_does_not_wait_for_it(two_engines):
    answered, never = threading.Event(), threading.Event()

    def conversation():
        yield "12+34="
        assert answered.wait(20)
        yield "11+1="
        never.wait(30)

    results = two_engines.generate_iter(conversation(), SamplingParams(temperature=0, max_tokens=8))
    assert next(results)[1]["text"] == "46"
    answered.set()
    assert next(results)[1]["text"] == "12"
    started = time.monotonic()
    results.close()
    assert time.monotonic() - started < 5
    never.set()


def test_one_run_at_a_time_and_the_first_is_right(two_engines):
    # Seeded: other seeds depend on how many requests the tests before have made.
    params = [one.clone(seed=i) for i, one in enumerate(PARAMS)]
    expected = texts(two_engines.generate(PROMPTS, params, use_tqdm=False))
    results = two_engines.generate_iter(PROMPTS, params)
    first = next(results)
    with pytest.raises(RuntimeError, match="One generate at a time: finish or close the last"):
        two_engines.generate(PROMPTS, PARAMS, use_tqdm=False)
    outputs = dict([first, *results])
    assert texts(outputs[i] for i in range(80)) == expected


def test_draining_finishes_what_runs_and_drops_the_rest(two_engines):
    drain = threading.Event()
    params = SamplingParams(temperature=1, max_tokens=100, ignore_eos=True)
    prompts = ["And the LORD"] * 200
    found = []
    for index, output in two_engines.generate_iter(prompts, params, drain=drain):
        found.append(index)
        assert len(output.outputs[0].token_ids) == 100
        drain.set()
    assert 1 <= len(found) < 100 and len(set(found)) == len(found)


def test_a_dead_engines_requests_go_to_the_other(expected, monkeypatch):
    with DataParallelLLM(MODEL, data_parallel_size=2, **ENGINE) as llm:
        found, victim = {}, llm.worker_pids[1]
        for index, output in llm.generate_iter(PROMPTS, PARAMS):
            if not found:
                os.kill(victim, signal.SIGKILL)
            assert index not in found
            found[index] = output
        assert texts(found[i] for i in range(80)) == expected
        (fault,) = llm.faults
        assert fault.startswith("Engine 1 was killed by signal 9.")
        # What so many engines die under is given up, or it would end them all, again and again.
        monkeypatch.setattr("nanovllm.data_parallel.job._MAX_DEATHS", 1)
        params, (pid,) = SamplingParams(max_tokens=None, ignore_eos=True), llm.worker_pids
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False, return_errors=True)
        reason = "was given up: 1 engines died while they had it."
        assert [output.error for output in outputs] == [f"prompt {i} {reason}" for i in range(3)]
        with pytest.raises(RuntimeError, match="All engines have died"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    # It was told after all prompts had been read, and chats laid out.
    for call in (llm.generate, llm.generate_iter, llm.chat):
        with pytest.raises(RuntimeError, match="This DataParallelLLM is closed. Build a new"):
            call(iter(PROMPTS))


def test_a_job_on_two_engines_is_the_job_on_one_and_can_be_gone_on_with(tmp_path):
    lines = [json.dumps({"prompt": p, "temperature": 0.9, "row": i}) for i, p in enumerate(PROMPTS)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))

    def answers(size, name):
        options = BatchOptions(
            str(tmp_path / "in.jsonl"),
            tmp_path / name,
            show_progress=False,
            report=tmp_path / "report.html",
        )
        summary = run_batch(MODEL, options, data_parallel_size=size, **ENGINE)
        records = map(json.loads, (tmp_path / name).read_text().splitlines())
        return summary, {record["row"]: record["output"] for record in records}

    first, one = answers(1, "one.jsonl")
    cut = (tmp_path / "one.jsonl").read_bytes().splitlines(keepends=True)[:30]
    (tmp_path / "one.jsonl").write_bytes(b"".join(cut))
    second, two = answers(2, "one.jsonl")
    assert (first.num_ok, second.num_ok, second.num_done_before) == (80, 50, 30)
    assert one == two
    assert "2 engines together" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_model_len": 10**6}, ValueError, "max_model_len = 1000000 exceeds the"),
        ({"max_num_seq": 3}, TypeError, "Did you mean 'max_num_seqs'"),
        ({"lora": "/no/such"}, ValueError, "lora '/no/such' is not a directory"),
        ({"tokenizer": "/no/such"}, ValueError, "'/no/such' is no directory"),
        ({"tensor_parallel_size": 3}, ValueError, "num_key_value_heads = 2 cannot be split"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "flash_attn"}, ValueError, "cannot read"),
        ({"max_model_len": 1.5}, TypeError, "max_model_len must be an int"),
    ],
    ids=str,
)
def test_what_is_wrong_for_every_engine_is_told_before_any_starts(
    monkeypatch, options, error, match
):
    """It was once the RuntimeError of a process that had died of it."""
    monkeypatch.setattr("nanovllm.data_parallel.EngineProcess", None)
    with pytest.raises(error, match=match) as of_many:
        DataParallelLLM(MODEL, data_parallel_size=2, **{**ENGINE, **options})
    with pytest.raises(error) as of_one:
        LLM(MODEL, **{**ENGINE, **options})
    assert str(of_many.value) == str(of_one.value)


def test_an_engine_that_does_not_start_says_why():
    """As LLM would have said it; what tells which engine it was stands below."""
    options = {**ENGINE, "num_kvcache_blocks": 2**45}
    with pytest.raises(ValueError, match=r"^A KV cache of 35184372088832 blocks") as caught:
        DataParallelLLM(MODEL, data_parallel_size=1, **options)
    (note,) = caught.value.__notes__
    assert note.startswith("Engine 0 failed:\nTraceback") and "init_kv_cache" in note


def test_engines_that_are_closed_in_the_middle_of_a_call_have_not_died():
    llm = DataParallelLLM(MODEL, data_parallel_size=1, **ENGINE)
    results = llm.generate_iter(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
    next(results)
    llm.close()
    with pytest.raises(RuntimeError, match="This DataParallelLLM is closed"):
        list(results)
    assert llm.faults == []


def test_an_engines_oserror_is_told_and_not_taken_for_the_end_of_its_parent(monkeypatch):
    """It was swallowed: the engine "ended with exit code 0"."""

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, stub in (("LLM", full), ("leave_signals_to_parent", int), ("end_with_parent", int)):
        monkeypatch.setattr(engine_process, name, stub)
    ours, theirs = Pipe()
    with pytest.raises(SystemExit):
        engine_process._run_engine(0, Config("m"), theirs)
    kind, error = ours.recv()
    assert kind == "failed" and "No space left" in error.message
    ours.close()
    with pytest.raises(SystemExit):
        engine_process._run_engine(0, Config("m"), theirs)


def test_answers_that_the_default_cut_are_told(two_engines, caplog):
    """One engine warned, several did not."""
    two_engines.generate(["a"] * 3, SamplingParams(ignore_eos=True), use_tqdm=False)
    assert "3 answer(s) were cut at max_tokens=64" in caplog.text


def test_the_numbers_of_a_call_are_checked(two_engines):
    for window, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match=f"window must be .*got {window}"):
            two_engines.generate_iter(["a"], window=window)
    with pytest.raises(TypeError, match="return_errors must be True or False, got 'no'"):
        two_engines.generate(["a"], return_errors="no")
    with pytest.raises(TypeError, match="sink must be a function or None, got 3"):
        two_engines.observe_steps(3)


def test_cores_are_shared_out_on_a_cpu(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = Config.from_options("m", {"device": "cpu"})
    assert engine_environments(config, 2) == [{"OMP_NUM_THREADS": "4"}] * 2
    for size in (17, 10**9):  # which started processes until the machine stood still
        with pytest.raises(ValueError, match=f"needs {size} processes, and there are 8 cores"):
            engine_environments(config, size)
    # macOS has no such function.
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert engine_environments(config, 2) == [{"OMP_NUM_THREADS": "3"}] * 2


def test_each_engine_has_gpus_of_its_own(monkeypatch):
    """The list is made before torch is imported in the engine, from what is visible here."""
    placement = "nanovllm.data_parallel.placement"
    monkeypatch.setattr(f"{placement}.resolve_device", lambda name: torch.device("cuda"))
    config = Config.from_options("m", {"tensor_parallel_size": 2})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,GPU-abc,0")
    assert engine_environments(config, 2) == [
        {"CUDA_VISIBLE_DEVICES": "3,1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-abc,0"},
    ]
    with pytest.raises(ValueError, match="needs 6 GPUs, and 4 are visible"):
        engine_environments(config, 3)


def start_job(tmp_path):
    """A long job on two engines, in a process group of its own, once results are there."""
    line = {"prompt": "And the LORD", "temperature": 1, "max_tokens": 30, "ignore_eos": True}
    (tmp_path / "in.jsonl").write_text((json.dumps(line) + "\n") * 4000)
    output = tmp_path / "out.jsonl"
    words = ["run-batch", "-i", tmp_path / "in.jsonl", "-o", output, "--model", MODEL]
    words += ["--data-parallel-size", "2"]
    for name, value in ENGINE.items():
        words += ["--" + name.replace("_", "-"), value]
    process = subprocess.Popen(
        [sys.executable, "-m", "nanovllm", *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(MODEL.parents[1])},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not (output.exists() and output.stat().st_size):
        time.sleep(0.01)
    return process, output


def test_ctrl_c_reaches_all_processes_and_only_the_parent_heeds_it(tmp_path):
    """Starting multiprocessing's resource tracker had unblocked it in the first engine."""
    process, output = start_job(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and "other engines" not in err
    assert 0 < len(output.read_text().splitlines()) < 4000


def test_engines_end_with_their_parent(tmp_path):
    process, _ = start_job(tmp_path)
    process.kill()
    process.communicate(timeout=60)  # until the last process that holds its stderr is gone
    deadline = time.monotonic() + 30
    while alive := [text for text in group_states(process.pid) if ") Z " not in text]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def group_states(group):
    """The /proc/PID/stat lines of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if text.rpartition(")")[2].split()[2] == str(group):
            found.append(text)
    return found
