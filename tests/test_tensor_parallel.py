"""Several gloo ranks on the CPU give what one gives; and no rank outlives another."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from oracle import Oracle
from tiny_models import write_tiny_qwen3

from nanovllm import LLM, SamplingParams
from nanovllm.engine.worker import CALL
from nanovllm.utils.processes import ProcessWatch

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
COMMON = list(range(20, 57))
PROMPTS = [[5, 6, 7], [*COMMON, 3], [*COMMON, 4, 5], [8] * 30, [*COMMON, 3], [9]]
# Chunked prefill, prefix hits and (with `optimistic`) preemption, with a step in flight.
TIGHT = {
    "device": "cpu",
    "dtype": "float32",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 6,
    "max_num_batched_tokens": 25,
    "max_num_seqs": 4,
    "enable_overlap": True,
}


@pytest.fixture(scope="module")
def model_of_3(tmp_path_factory):
    """6 query and 3 key/value heads."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    return write_tiny_qwen3(tmp_path_factory.mktemp("three") / "model", **heads)


def sampled_params():
    """A seed, an unset seed, several answers, and greedy beside them."""
    shared = {"max_tokens": 12, "ignore_eos": True}
    return [
        SamplingParams(temperature=0.8, seed=1, **shared),
        SamplingParams(temperature=1.3, **shared),
        SamplingParams(temperature=1.0, n=2, seed=2, **shared),
        SamplingParams(temperature=0, **shared),
        SamplingParams(temperature=2.0, seed=1, **shared),
        SamplingParams(temperature=1.0, seed=-5, **shared),
    ]


def tokens_of(llm, params):
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def check_greedy(oracle, llm):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output in outputs:
        oracle.check_greedy(output.prompt_token_ids, output["token_ids"])
        assert len(output["token_ids"]) == 12


def worker_pids(llm):
    return [process.pid for process in llm._engine._executor._group._processes]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids, timeout_s):
    deadline = time.perf_counter() + timeout_s
    while any(map(is_alive, pids)):
        assert time.perf_counter() < deadline, "a worker is still there"
        time.sleep(0.05)


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """After the test no process, no named file and no directory of ours is left."""
    children = set(multiprocessing.active_children())
    directory = tmp_path / "of its own"  # others on the machine come and go in the usual one
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield
    assert set(multiprocessing.active_children()) == children
    assert list(directory.iterdir()) == []
    assert [name for name in os.listdir("/dev/shm") if "nanovllm" in name] == []


@pytest.mark.parametrize(
    ("tp_size", "model"),
    [(3, "model_of_3"), (4, "tiny_model")],
    ids=["3 ranks, one kv head each", "4 ranks, two share a kv head"],
)
def test_ranks_together_give_what_one_gives(request, tp_size, model, optimistic, nothing_left):
    """The vocabulary, 517, divides by neither. Ranks that are given a preempted sequence again
    must get its prompt and all that it has drawn.
    """
    model_dir = request.getfixturevalue(model)
    oracle = Oracle(model_dir)
    with LLM(model_dir, **TIGHT) as one:
        check_greedy(oracle, one)
        expected = tokens_of(one, sampled_params())
    with LLM(model_dir, tensor_parallel_size=tp_size, **TIGHT) as llm:
        check_greedy(oracle, llm)
        assert tokens_of(llm, sampled_params()) == expected
        check_greedy(oracle, llm)
        assert llm.metrics.num_cached_tokens > 0 and llm.metrics.num_preemptions > 0
        pids = worker_pids(llm)
        assert len(pids) == tp_size - 1
    wait_until_gone(pids, 5)


def test_two_engines_at_once_inside_a_program_that_has_its_own_process_group(
    tiny_model, tiny_oracle, tmp_path, nothing_left
):
    dist.init_process_group("gloo", f"file://{tmp_path}/outer", rank=0, world_size=1)
    try:
        with (
            LLM(tiny_model, tensor_parallel_size=2, **TIGHT) as first,
            LLM(tiny_model, tensor_parallel_size=2, **{**TIGHT, "num_kvcache_blocks": 64}) as other,
        ):
            outputs = {first: [], other: []}
            for llm in outputs:
                for prompt in PROMPTS:
                    llm.add_request(prompt, GREEDY)
            while not (first.is_finished() and other.is_finished()):
                for llm, done in outputs.items():
                    done += llm.step()
            for done in outputs.values():
                assert len(done) == len(PROMPTS)
                for output in done:
                    tiny_oracle.check_greedy(output.prompt_token_ids, output["token_ids"])
            first.close()
            check_greedy(tiny_oracle, other)
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_heads_that_do_not_divide_are_refused_with_both_numbers(demo_model, nothing_left):
    with pytest.raises((ValueError, RuntimeError), match="2.*tensor_parallel_size = 3") as caught:
        LLM(demo_model, device="cpu", tensor_parallel_size=3)
    assert "num_key_value_heads" in str(caught.value)


def test_a_killed_worker_ends_the_call_and_a_new_engine_works(
    tiny_model, tiny_oracle, nothing_left
):
    llm = LLM(tiny_model, tensor_parallel_size=2, **TIGHT)
    (pid,) = worker_pids(llm)
    os.kill(pid, signal.SIGINT)  # Ctrl-C is rank 0's business
    check_greedy(tiny_oracle, llm)
    llm.add_request([5, 6, 7], GREEDY)
    launched = llm._engine.launched(llm._engine.scheduler.schedule())
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid], 5)
    watch = llm._engine._executor._group._watch
    watch._thread.join(5)
    with pytest.raises(RuntimeError, match="worker 1 ended with exit code -9"):
        launched.future.wait()  # ready, but of what the dead rank gave nobody knows
    group = llm._engine._executor._group
    group._watch, launched.future._handle = None, SimpleNamespace(is_ready_within=lambda s: False)
    with pytest.raises(RuntimeError, match="worker 1 ended with exit code -9"):
        launched.future.wait()  # as on a GPU: not for ever, whoever sees the end first
    group._watch = watch
    for _ in range(2):
        started = time.perf_counter()
        with pytest.raises(RuntimeError, match="worker 1 ended with exit code -9"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert time.perf_counter() - started < 30
    llm.close()
    with LLM(tiny_model, tensor_parallel_size=2, **TIGHT) as llm:
        check_greedy(tiny_oracle, llm)
        (pid,) = worker_pids(llm)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        started = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
        with pytest.raises(RuntimeError, match="worker 1 ended with exit code -9"):
            while True:
                llm.generate(PROMPTS, params, use_tqdm=False)
        assert time.perf_counter() - started < 30


def test_a_fault_on_rank_0_alone_makes_the_engine_refuse_to_go_on(
    tiny_model, monkeypatch, nothing_left
):
    """Its next step once met the workers' last one in a collective: wrong tokens, or an abort."""
    llm = LLM(tiny_model, tensor_parallel_size=2, **TIGHT)
    runner = llm._engine._executor._runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_decode_step", lambda num_rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match="out of step. Close this LLM and build a new one."):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    started = time.perf_counter()
    llm.close()
    assert time.perf_counter() - started < 5


def test_an_exception_in_a_worker_shows_its_traceback(tiny_model, nothing_left):
    with LLM(tiny_model, tensor_parallel_size=2, **TIGHT) as llm:
        group = llm._engine._executor._group
        group.send(CALL, pickle.dumps(("no_such_method", ())))
        with pytest.raises(RuntimeError) as caught:
            group.collect()
        message = str(caught.value)
        assert "Tensor-parallel worker 1 failed:" in message
        assert "Traceback" in message and "no attribute 'no_such_method'" in message
        with pytest.raises(RuntimeError, match="worker 1"):
            llm.generate([[5]], GREEDY, use_tqdm=False)


_SCRIPT = """
import sys, time
from nanovllm import LLM
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=3, device="cpu", dtype="float32",
              num_kvcache_blocks=8)
    print(*[p.pid for p in llm._engine._executor._group._processes], flush=True)
    {then}
"""


def run_script(tmp_path, text, *arguments, **options):
    path = tmp_path / "script.py"
    path.write_text(text)
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path / "tmp"),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        },
        **options,
    )


_CTRL_C = """
import sys
from nanovllm import LLM, SamplingParams
if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64}
    llm = LLM(sys.argv[1], tensor_parallel_size=2, **options)
    print("up", flush=True)
    try:
        while True:
            llm.generate([[5, 6]] * 8, params, use_tqdm=False)
    except KeyboardInterrupt:
        llm.close()
    with LLM(sys.argv[1], tensor_parallel_size=2, **options) as llm:
        print(len(llm.generate([[5]], params, use_tqdm=False)[0]["token_ids"]))
"""


def test_ctrl_c_ends_the_call_and_a_new_engine_works(tmp_path, tiny_model):
    process = run_script(tmp_path, _CTRL_C, tiny_model, start_new_session=True)
    assert process.stdout.readline() == "up\n"
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the worker gets it too
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "140\n", "")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_watch_tells_of_an_end_once_and_only_until_it_is_stopped():
    calls = []
    for is_stopped in (True, False):
        sentinel, process = multiprocessing.Pipe(duplex=False)
        watch = ProcessWatch([SimpleNamespace(sentinel=sentinel)], lambda: calls.append(1))
        assert not watch.has_fired
        if is_stopped:
            watch.stop()
        process.close()
        watch._thread.join(5)
        assert watch.has_fired == (not is_stopped) and len(calls) == (not is_stopped)
        watch.stop()
        sentinel.close()


def test_workers_end_when_rank_0_is_killed(tmp_path, model_of_3):
    """Also where a fork of it lives on, which holds its ends of all pipes open."""
    then = "import os; print(os.fork(), flush=True); time.sleep(100)"
    process = run_script(tmp_path, _SCRIPT.format(then=then), model_of_3)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2, process.stderr.read()
    fork = max(int(process.stdout.readline()) for _ in range(2))  # the fork itself says 0
    process.kill()
    process.wait()
    try:
        wait_until_gone(pids, 5)
        assert is_alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
    process.stdout.close(), process.stderr.close()
    assert list((tmp_path / "tmp").iterdir()) == [], "nothing to survive a kill"


def test_a_script_without_a_main_guard_is_told_the_cure(tmp_path, tiny_model):
    text = (
        "import sys\nfrom nanovllm import LLM\n"
        "LLM(sys.argv[1], tensor_parallel_size=2, device='cpu', num_kvcache_blocks=8)\n"
    )
    _, err = run_script(tmp_path, text, tiny_model).communicate(timeout=90)
    assert "Put the script's code under `if __name__ == '__main__':`." in err
    assert "ended with exit code 1" in err.splitlines()[-2] + err.splitlines()[-1]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_program_that_ends_without_close_leaves_nothing(tmp_path, model_of_3):
    """Its engine is closed before the interpreter ends: NCCL's threads would meet one that is gone.

    Also where finalizers run after multiprocessing's exit, which waits for daemons for ever.
    """
    first = "import weakref\nclass Thing:\n    pass\nweakref.finalize(thing := Thing(), int)\n"
    then = """
    from nanovllm.utils.parallel import ParallelContext
    def say(self, close=ParallelContext.close):
        if self.tp_size > 1:
            print("closed", sys.is_finalizing())
        close(self)
    ParallelContext.close = say
    sys.exit(0)
    """
    process = run_script(tmp_path, first + _SCRIPT.format(then=then), model_of_3)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "")
    pids, last = out.splitlines()
    assert last == "closed False"
    wait_until_gone([int(word) for word in pids.split()], 5)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_is_to_run_at_exit_runs_in_its_process_while_its_object_lives():
    text = """
import os
from nanovllm.utils.owner import AtExit
class Thing:
    def __init__(self, name):
        self.name, self.at_exit = name, AtExit(self.close)
    def close(self):
        print(self.name, flush=True)
kept, freed, cancelled = Thing("kept"), Thing("freed"), Thing("cancelled")
cancelled.at_exit.cancel()
del freed
if os.fork():
    os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert (done.stdout, done.stderr) == ("kept\n", "")
