"""A fault of one rank, or of all alike, in what they do between steps: the engine can go on."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from programs import OPTIONS, out_of_memory
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine.worker import CALL
from nanovllm.frontend.start_up import step_memory_errors_named
from nanovllm.utils.remote_error import RemoteError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 20]


def tokens(llm):
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def call_worker(llm, name, *args):
    """Call a method of the worker's ModelRunner alone."""
    group = llm._engine._executor._group
    group.send(CALL, pickle.dumps((name, args)))
    group.collect()


class Broken:
    """A method of the runners of some ranks raises, for a `with` block."""

    def __init__(self, llm, rank, name):
        self.llm, self.rank, self.name = llm, rank, name

    def __enter__(self):
        if self.rank != 1:
            setattr(self.llm._engine._executor._runner, self.name, out_of_memory)
        if self.rank != 0:
            call_worker(self.llm, "__setattr__", self.name, out_of_memory)

    def __exit__(self, *exc_info):
        if self.rank != 1:
            delattr(self.llm._engine._executor._runner, self.name)
        if self.rank != 0:
            call_worker(self.llm, "__delattr__", self.name)


def test_ranks_go_on_after_a_fault_of_one_or_all_between_steps(tmp_path, tiny_model):
    """A checkpoint that was away for a moment once ended an engine of several ranks."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    weights = load_file(directory / "model.safetensors")
    with LLM(directory, tensor_parallel_size=2, **OPTIONS) as llm:
        expected = tokens(llm)
        pids = [process.pid for process in llm._engine._executor._group._processes]

        # All ranks fail alike.
        llm.sleep(2)
        (directory / "model.safetensors").rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(ValueError, match="no weights in"):
                llm.wake_up()
            with pytest.raises(RuntimeError, match="The engine sleeps"):
                tokens(llm)
        (tmp_path / "away").rename(directory / "model.safetensors")
        llm.wake_up()
        assert tokens(llm) == expected

        # One rank, or both: the first one's error, and all sleep again.
        for rank in (0, 1, "both"):
            for level, name in ((1, "wake_up"), (2, "_load_weights")):
                llm.sleep(level)
                with Broken(llm, rank, name):
                    with pytest.raises(MemoryError, match="no memory for 0 arguments") as caught:
                        llm.wake_up()
                    notes = "".join(getattr(caught.value, "__notes__", []))
                    assert ("worker 1 failed" in notes) == (rank == 1)
                    runner = llm._engine._executor._runner
                    assert runner._kv_cache.numel() == 0
                    freed = all(p.untyped_storage().size() == 0 for p in runner._model.parameters())
                    assert freed == (level == 2)
                llm.wake_up()
                assert tokens(llm) == expected

        # Weights, and sleep itself.
        for rank in (0, 1):
            no_memory = pytest.raises(MemoryError, match="no memory for 1 arguments")
            with Broken(llm, rank, "load_weights"), no_memory:
                llm.load_weights(weights.items())
            llm.load_weights(weights.items())
            no_memory = pytest.raises(MemoryError, match="no memory for 1 arguments")
            with Broken(llm, rank, "sleep"), no_memory:
                llm.sleep(1)
            with pytest.raises(RuntimeError, match="The engine sleeps"):
                tokens(llm)
            llm.wake_up()
            assert tokens(llm) == expected
        assert [p.pid for p in llm._engine._executor._group._processes] == pids

        # What ranks do together cannot be gone on with if one fails: told at once, by its error.
        llm.sleep(1)
        call_worker(llm, "__setattr__", "make_ready", out_of_memory)
        with pytest.raises(MemoryError, match="no memory for 0 arguments"):
            llm.wake_up()
        with pytest.raises(RuntimeError, match="worker 1 ended"):
            llm.wake_up()


@pytest.mark.parametrize(("tp_size", "state"), [(1, "can go on"), (2, "close this LLM")])
def test_memory_that_a_step_lacks_is_said_to_end_an_engine_of_several_ranks_alone(tp_size, state):
    """The advice was once to go on, whoever had run out."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")
    sent = RemoteError.of(error).rebuilt("Worker 1")
    named = pytest.raises(MemoryError, match=f"tried to allocate 2 gib..*{state}.*: lower")
    with named, step_memory_errors_named(tp_size):
        raise sent


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a"), ValueError),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), ValueError),
        (FileNotFoundError(2, "b"), OSError),
        (ModuleNotFoundError("c"), ImportError),
        (KeyError("d"), RuntimeError),
        (SystemExit(3), RuntimeError),
    ],
)
def test_an_error_of_another_process_keeps_kind_and_words(error, kind):
    sent = pickle.loads(pickle.dumps(RemoteError.of(error)))
    rebuilt = sent.rebuilt("Worker 1")
    assert type(rebuilt) is kind
    text = "\n".join([str(rebuilt), *getattr(rebuilt, "__notes__", [])])
    assert str(error) in text and "Worker 1 failed" in text
