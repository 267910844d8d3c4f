"""An exception at any place, from any part: the next call is right, and requests of others live."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.layers.sampler import draw

PACKAGE = str(Path(nanovllm.__file__).parent)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(9, 50)), [8] * 20, list(range(9, 45)), [3]]
MIXED = [
    GREEDY.clone(max_tokens=9),
    SamplingParams(temperature=0.8, n=2, max_tokens=12, top_p=0.9, logprobs=1, stop=["a"]),
    GREEDY.clone(max_tokens=30),
    SamplingParams(temperature=1, repetition_penalty=1.2, max_tokens=12, min_p=0.1),
    GREEDY.clone(max_tokens=20, prompt_logprobs=1),
]
TIGHT = {
    "device": "cpu",
    "dtype": "float32",
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 10,
    "max_num_batched_tokens": 25,
    "max_num_seqs": 4,
}


class Boom(BaseException):
    """Nobody catches it by accident."""


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "overlapped"])
def engine(request, tiny_model):
    with LLM(tiny_model, enable_overlap=request.param, **TIGHT) as llm:
        llm.expected = tokens(llm)
        yield llm


def tokens(llm):
    return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def run_to_the_end(llm):
    outputs = {}
    for _ in range(400):
        if llm.is_finished():
            return outputs
        for output in llm.step():
            assert output.request_id not in outputs, "returned once"
            outputs[output.request_id] = output
    raise AssertionError("no end")


def check_right(llm):
    assert run_to_the_end(llm) == {}, "nothing of the call that failed is left"
    assert tokens(llm) == llm.expected
    scheduler = llm._engine.scheduler
    scheduler.check_invariants()
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks


# ---- parts of the model, and what users hand in


def module_kinds(llm):
    model = llm._engine._executor._runner._model
    return {type(module): module for module in model.modules() if type(module).forward}


def test_any_layer_may_raise(engine, monkeypatch):
    kinds = [k for k in module_kinds(engine) if k.forward is not nn.Module.forward]
    assert len(kinds) >= 7, "attention, linears, norms, embedding, head and the rest"
    for kind in kinds:
        for call in (4,):
            left, real = [call], kind.forward

            def failing(self, *args, real=real, left=left, **kwargs):
                left[0] -= 1
                if not left[0]:
                    raise Boom
                return real(self, *args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(kind, "forward", failing)
                try:
                    engine.generate(PROMPTS, MIXED, use_tqdm=False)
                except Boom:
                    pass
                else:
                    assert left[0] > 0, "an exception was swallowed"
            check_right(engine)


@pytest.mark.parametrize("call", [1, 3, 9])
def test_the_sampler_may_raise(engine, monkeypatch, call):
    left = [call]

    def failing(*args):
        left[0] -= 1
        if not left[0]:
            raise Boom
        draw(*args)

    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.engine.model_runner.draw", failing)
        with pytest.raises(Boom):
            engine.generate(PROMPTS, MIXED, use_tqdm=False)
    check_right(engine)


PROCESSORS = {
    "raises": lambda ids, logits: 1 / 0,
    "raises later": lambda ids, logits: logits if len(ids) < 4 else 1 / 0,
    "gives nothing": lambda ids, logits: None,
    "gives another shape": lambda ids, logits: logits[:5],
    "gives a list": lambda ids, logits: [1.0] * len(logits),
    "bars everything": lambda ids, logits: torch.full_like(logits, -torch.inf),
    "gives NaN": lambda ids, logits: logits * torch.nan,
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_logits_processor_may_do_anything(engine, name):
    params = [GREEDY] * 4 + [GREEDY.clone(logits_processors=[PROCESSORS[name]])]
    try:
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    except Exception as error:
        assert str(error), "it says what was wrong"
    else:  # no harm to the others at least
        assert [output["token_ids"] for output in outputs[:4]] == engine.expected[:4]
    check_right(engine)


class BadTokenizer:
    """The real one, of which a method raises from some call on, for some of the time."""

    def __init__(self, real, name, call, is_lasting):
        self._real, self._name, self._left, self._is_lasting = real, name, call, is_lasting

    def __getattr__(self, name):
        if name == self._name:
            self._left -= 1
            if self._left == 0 or (self._left < 0 and self._is_lasting):
                raise Boom(name) if not self._is_lasting else ValueError(name)
        return getattr(self._real, name)

    def __call__(self, *args, **kwargs):
        self.__getattr__("__call__")
        return self._real(*args, **kwargs)

    def __len__(self):
        return len(self._real)


@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(("name", "call"), [("__call__", 1), ("decode", 1), ("decode", 6)])
def test_the_tokenizer_may_raise(engine, monkeypatch, name, call, is_lasting):
    """An abort that could not be made into text once left every later request open."""
    mine = engine.add_request([4, 5, 6], GREEDY.clone(max_tokens=40))
    prompts = ["a few words", *PROMPTS[1:]]
    bad = BadTokenizer(engine.get_tokenizer(), name, call, is_lasting)
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine.builder, "tokenizer", bad)
        patch.setattr(engine._engine.processor, "_tokenizer", bad)
        with pytest.raises((Boom, ValueError)):
            engine.generate(prompts, MIXED, use_tqdm=False)
    assert run_to_the_end(engine).keys() == {mine}
    check_right(engine)


def test_an_observer_may_raise_and_loses_no_output(engine):
    mine = engine.add_request([4, 5, 6], GREEDY.clone(max_tokens=2))
    left = [3]

    def sink(sample):
        left[0] -= 1
        if not left[0]:
            raise Boom

    engine.observe_steps(sink)
    with pytest.raises(Boom):
        engine.generate(PROMPTS, MIXED, use_tqdm=False)
    engine.observe_steps(None)
    assert run_to_the_end(engine).keys() == {mine}
    check_right(engine)


def test_memory_that_runs_out_in_a_step_names_what_to_lower(engine, monkeypatch):
    with monkeypatch.context() as patch:

        def failing(*args, **kwargs):
            held = torch.zeros(1000)  # what the frame of the fault would keep alive
            raise torch.OutOfMemoryError(f"CUDA out of memory: tried {held.nbytes}")

        patch.setattr(engine._engine._executor._runner, "_prefill", failing)
        with pytest.raises(
            MemoryError, match="gpu_memory_utilization.*max_num_batched_tokens"
        ) as e:
            engine.generate(PROMPTS, MIXED, use_tqdm=False)
        frames, error = [], e.value.__cause__
        traceback = error.__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        assert not any("held" in frame.f_locals for frame in frames), "tensors stay with the error"
    check_right(engine)


def test_memory_that_runs_out_at_the_start_names_what_to_lower(tiny_model, monkeypatch):
    def failing(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory: tried 3 GiB")

    monkeypatch.setattr("nanovllm.frontend.llm_engine.make_executor", failing)
    with pytest.raises(MemoryError, match="max_num_seqs=4 and max_num_batched_tokens=25. Lower"):
        LLM(tiny_model, **TIGHT)


# ---- any line at all, as a signal's handler that raises may strike


def interrupted(llm, line):
    """Run a mixed batch and raise at its n-th line of ours; where, or None if it ended before."""
    left, where = [line], [None]

    def on_line(frame, event, arg):
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                name = frame.f_code.co_filename.removeprefix(PACKAGE)
                where[0] = f"{name}:{frame.f_lineno}"
                raise Boom
        return on_line

    def on_call(frame, event, arg):
        name = frame.f_code.co_filename
        # The lock's three lines around a step are where Python looks for no signals.
        is_ours = name.startswith(PACKAGE) and not name.endswith("exclusive.py")
        return on_line if is_ours and left[0] > 0 else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        llm.generate(PROMPTS, MIXED, use_tqdm=False)
    except Boom:
        pass
    finally:
        sys.settrace(before)
    return where[0]


def strike(llm, draw, times):
    for _ in range(times):
        mine = llm.add_request([4, 5, 6], GREEDY) if draw.random() < 0.5 else None
        where = interrupted(llm, draw.randrange(1, 33_000))
        outputs = run_to_the_end(llm)
        assert outputs.keys() == ({mine} if mine else set()), where
        assert tokens(llm) == llm.expected, where
        for output in outputs.values():
            assert len(output["token_ids"]) == 10, where
        llm._engine.scheduler.check_invariants()
    blocks = llm._engine.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks


def test_an_exception_at_any_line_leaves_a_right_engine(engine):
    strike(engine, random.Random(7), 12)


@pytest.mark.nightly
def test_exceptions_at_hundreds_of_lines_leave_a_right_engine(engine):
    strike(engine, random.Random(8), 600)


def test_a_recovery_that_fails_closes_the_engine(tiny_model, monkeypatch):
    with LLM(tiny_model, **TIGHT) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine, "_make_scheduler", lambda: 1 / 0)
            patch.setattr(llm._engine._executor, "execute", lambda output: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        with pytest.raises(RuntimeError, match="The engine is closed. Build a new LLM."):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
