"""Forks, deaths, signals and scripts of every kind around an engine's processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from programs import OPTIONS, shared_memory, start, wait_until_gone

from nanovllm import LLM, SamplingParams
from nanovllm.data_parallel import DataParallelLLM
from nanovllm.engine.worker import WorkerGroup

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 20, [9]]

HEAD = f"""
import multiprocessing, os, random, signal, sys, threading, time
import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.data_parallel import DataParallelLLM
OPTIONS = {OPTIONS!r}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = {PROMPTS!r}
def tokens(llm):
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
def in_fork(work):
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(0)  # as a program ends: with all that is registered for its exit
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
"""


def finish(process, timeout_s=120):
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err[-3000:]
    return out.splitlines(), err


@pytest.fixture(scope="module")
def expected(tiny_model):
    with LLM(tiny_model, **OPTIONS) as llm:
        return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


# ---- forks


def test_a_fork_after_the_import_may_build_an_engine(tmp_path, tiny_model, expected):
    text = (
        HEAD
        + """
def child():
    with LLM(sys.argv[1], **OPTIONS) as llm:
        print(tokens(llm), flush=True)
print(in_fork(child))
"""
    )
    out, _ = finish(start(tmp_path, text, tiny_model))
    assert out == [str(expected), "0"]


def test_a_fork_of_an_engines_process_is_refused_and_harms_nothing(tmp_path, tiny_model, expected):
    """At its exit it once told the workers of the original to stop."""
    text = (
        HEAD
        + """
if __name__ == "__main__":
    engines = [
        LLM(sys.argv[1], **OPTIONS),
        LLM(sys.argv[1], tensor_parallel_size=2, **OPTIONS),
        DataParallelLLM(sys.argv[1], data_parallel_size=1, **OPTIONS),
    ]
    def child():
        for llm in engines:
            try:
                tokens(llm)
            except RuntimeError as error:
                print(error, flush=True)
        engines[0].close()
        engines.clear()
    print(in_fork(child), flush=True)
    print(in_fork(lambda: None), flush=True)  # nothing but an exit
    for llm in engines:
        print(tokens(llm), flush=True)
        llm.close()
"""
    )
    out, err = finish(start(tmp_path, text, tiny_model))
    for line, what in zip(out[:3], ["LLM", "LLM", "DataParallelLLM"], strict=True):
        assert line.startswith(f"This {what} was made in process") and "'spawn'" in line
    assert out[3:] == ["0", "0"] + [str(expected)] * 3, err
    # Only multiprocessing's own exit complains, of children that a raw fork took along.
    assert "nanovllm/" not in err, err
    assert list((tmp_path / "tmp").iterdir()) == []


# ---- threads


@pytest.mark.parametrize(
    ("build", "work"),
    [
        ("LLM(sys.argv[1], **OPTIONS)", "tokens(llm)"),
        ("LLM(sys.argv[1], **OPTIONS)", "list(llm.stream([5], GREEDY))"),
        ("DataParallelLLM(sys.argv[1], data_parallel_size=1, **OPTIONS)", "tokens(llm)"),
    ],
)
def test_a_daemon_thread_that_still_generates_ends_with_the_program(
    tmp_path, tiny_model, build, work
):
    """Struck by the interpreter's end inside torch, it once ended the program with SIGABRT."""
    text = (
        HEAD
        + f"""
def work():
    while True:
        {work}
if __name__ == "__main__":
    llm = {build}
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
    print("done")
"""
    )
    assert finish(start(tmp_path, text, tiny_model)) == (["done"], "")


# ---- scripts that start themselves


def test_a_data_parallel_script_without_a_main_guard_is_told_the_cure(tmp_path, tiny_model):
    text = HEAD + "DataParallelLLM(sys.argv[1], data_parallel_size=2, **OPTIONS)\n"
    process = start(tmp_path, text, tiny_model)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Put the script's code under `if __name__ == '__main__':`." in err
    wait_until_gone(process.pid, 30)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_a_daemonic_process_is_told_that_it_may_start_none(tiny_model, monkeypatch, kind):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(
        RuntimeError, match="starts processes, which a daemonic process.*daemon=False"
    ):
        if kind == "tensor":
            LLM(tiny_model, tensor_parallel_size=2, **OPTIONS)
        else:
            DataParallelLLM(tiny_model, data_parallel_size=1, **OPTIONS)


# ---- deaths


def test_a_worker_that_dies_before_it_meets_rank_0_ends_the_start(tiny_model, monkeypatch):
    """Rank 0 once waited ten minutes for it at the meeting place."""
    real = WorkerGroup.join
    killed = []

    def join(group):
        process = group._processes[0]
        process.kill()
        process.join()
        Path(group._store_path).unlink(missing_ok=True)  # where it may have been already
        killed.append(process)
        return real(group)

    monkeypatch.setattr(WorkerGroup, "join", join)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="worker 1 ended with exit code -9") as caught:
        LLM(tiny_model, tensor_parallel_size=4, **OPTIONS)
    assert killed and time.monotonic() - started < 100
    assert multiprocessing.active_children() == [], "nor are the others left"
    del caught  # whose traceback would keep what was not closed, and its processes


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["_prefill", "_decode_step"])
def test_a_worker_killed_in_the_middle_of_a_step_ends_the_call(tiny_model, moment):
    with LLM(tiny_model, tensor_parallel_size=2, **OPTIONS) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        runner, group = llm._engine._executor._runner, llm._engine._executor._group
        real = getattr(runner, moment)

        def killing(*args, **kwargs):
            os.kill(group._processes[0].pid, signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(runner, moment, killing)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="worker 1 ended with exit code -9"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert time.monotonic() - started < 30


def test_a_rank_in_the_middle_of_a_collective_ends_quietly_when_rank_0_is_killed(
    tmp_path, tiny_model
):
    """It once told of its broken pipe, and left the directory in which ranks meet behind."""
    text = (
        HEAD
        + """
from nanovllm.engine import worker
worker.end_with_parent = lambda directory: None  # in ranks too: its thread comes too late
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=2, **OPTIONS)
    tokens(llm)
    def die(num_rows):
        time.sleep(0.2)  # the other waits for this rank's share
        os.kill(os.getpid(), signal.SIGKILL)
    llm._engine._executor._runner._decode_step = die
    tokens(llm)
"""
    )
    process = start(tmp_path, text, tiny_model)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (-signal.SIGKILL, "")
    wait_until_gone(process.pid, 10)
    assert list((tmp_path / "tmp").iterdir()) == []


_ENDLESS = (
    HEAD
    + """
if __name__ == "__main__":
    kind = sys.argv[2]
    size = {"tensor": {"tensor_parallel_size": 2}, "data": {"data_parallel_size": 2}}[kind]
    if kind == "data" and len(sys.argv) > 3:
        size["tensor_parallel_size"] = 2
    llm = (LLM if kind == "tensor" else DataParallelLLM)(sys.argv[1], **size, **OPTIONS)
    print("up", flush=True)
    while True:
        tokens(llm)
"""
)


@pytest.mark.nightly
@pytest.mark.parametrize("words", [["tensor"], ["data"], ["data", "tensor"]], ids=str)
@pytest.mark.parametrize("is_up", [False, True], ids=["in start-up", "at work"])
def test_kills_of_the_main_process_at_random_moments_leave_nothing(
    tmp_path, tiny_model, words, is_up
):
    draw = random.Random(str(words))
    before = shared_memory()
    for number in range(12):
        directory = tmp_path / str(number)
        directory.mkdir()
        process = start(directory, _ENDLESS, tiny_model, *words)
        if is_up:
            assert process.stdout.readline() == "up\n", process.stderr.read()
        time.sleep(draw.uniform(0, 0.5 if is_up else 6))
        process.kill()
        process.wait()
        wait_until_gone(process.pid, 60)
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert "Traceback" not in err or not is_up, err
        left = [path for path in (directory / "tmp").iterdir() if "nanovllm" in path.name]
        assert left == [] and shared_memory() <= before


# ---- signals

_STRUCK = (
    HEAD
    + """
kind, times, seed = sys.argv[2], int(sys.argv[3]), sys.argv[4]
LONG = GREEDY.clone(max_tokens=40)
def use(llm, how):
    if how == "generate":
        llm.generate(PROMPTS * 3, LONG, use_tqdm=False)
    elif how == "iterate":
        for _ in llm.generate_iter(PROMPTS * 3, LONG):
            pass
    elif how == "stream":
        for _ in llm.stream("hello", LONG):
            pass
    elif how == "steps":
        for prompt in PROMPTS:
            llm.add_request(prompt, LONG)
        while not llm.is_finished():
            llm.step()
    else:
        llm.score([[5, 6, 7]], [[8, 9]], use_tqdm=False)
def main():
    draw = random.Random(seed)
    if kind == "data":
        llm = DataParallelLLM(sys.argv[1], data_parallel_size=1, **OPTIONS)
        hows = ["generate", "iterate"]
    else:
        size = 2 if kind == "tensor" else 1
        llm = LLM(sys.argv[1], tensor_parallel_size=size, enable_overlap=True, **OPTIONS)
        hows = ["generate", "iterate", "stream", "steps", "score"]
    expected = tokens(llm)
    started = time.monotonic()
    use(llm, "generate")
    length, struck = time.monotonic() - started, 0
    for number in range(times):
        how = draw.choice(hows)
        timer = threading.Timer(draw.uniform(0, length), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            use(llm, how)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            struck += 1
        timer.join()
        if kind != "data":
            llm.abort(list(llm._engine.processor.requests))
            while not llm.is_finished():
                llm.step()
        assert tokens(llm) == expected, (number, how)
    print("struck", struck, flush=True)
    if kind != "data":
        scheduler = llm._engine.scheduler
        scheduler.check_invariants()
        assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    llm.close()
if __name__ == "__main__":
    main()
"""
)


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("one", 30),
        ("data", 10),
        pytest.param("one", 500, marks=pytest.mark.nightly),
        pytest.param("tensor", 200, marks=pytest.mark.nightly),
        pytest.param("data", 200, marks=pytest.mark.nightly),
    ],
)
def test_after_ctrl_c_at_random_moments_the_next_call_is_right(tmp_path, tiny_model, kind, times):
    process = start(tmp_path, _STRUCK, tiny_model, kind, times, seed := 3)
    out, err = finish(process, timeout_s=60 + 10 * times)
    assert out[0].startswith("struck") and int(out[0].split()[1]) > times // 3, (out, seed)
    assert err == ""


def test_signals_to_all_processes_are_for_the_main_one_alone(tmp_path, tiny_model):
    """A batch system sends SIGTERM to every process: workers died of it while rank 0 went on."""
    text = (
        HEAD
        + """
if __name__ == "__main__":
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: heard.append(number))
    is_up = threading.Event()
    def storm():
        while not is_up.wait(0.02):
            os.killpg(0, signal.SIGTERM)
            os.killpg(0, signal.SIGINT)
    threading.Thread(target=storm).start()
    llm = LLM(sys.argv[1], tensor_parallel_size=2, **OPTIONS)
    is_up.set()
    expected = tokens(llm)
    os.killpg(0, signal.SIGTERM)
    os.killpg(0, signal.SIGINT)
    time.sleep(0.5)
    print(tokens(llm) == expected, len(heard) > 10, flush=True)
    sys.exit(0)  # without close: nobody waits for the deaf
"""
    )
    process = start(tmp_path, text, tiny_model)
    assert finish(process)[0] == ["True True"]
    wait_until_gone(process.pid, 10)


@pytest.mark.slow
def test_sigterm_ends_everything(tmp_path, tiny_model):
    process = start(tmp_path, _ENDLESS, tiny_model, "tensor")
    assert process.stdout.readline() == "up\n", process.stderr.read()
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
    wait_until_gone(process.pid, 10)
    process.stdout.close(), process.stderr.close()
    assert list((tmp_path / "tmp").iterdir()) == []


# ---- threads


def test_two_engines_in_two_threads_do_not_disturb_each_other(tiny_model, expected):
    results: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        with LLM(tiny_model, enable_overlap=bool(number), **OPTIONS) as llm:
            for _ in range(3):
                outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
                results.setdefault(number, []).extend(output["token_ids"] for output in outputs)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == {0: expected * 3, 1: expected * 3}
