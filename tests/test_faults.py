"""After a fault, an interrupt or a close, the next call is right and nothing is held."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.executor import LocalExecutor
from nanovllm.engine.model_inputs import Uploader
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_handle import StepHandle
from nanovllm.frontend.output_processor import OutputProcessor
from nanovllm.utils.exclusive import Exclusive

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(9, 50)), [8] * 20, list(range(9, 45)), [3]]

POINTS = {
    "schedule": (Scheduler, "schedule"),
    "execute": (LocalExecutor, "execute"),
    "the rows": (ModelRunner, "_apply_changes"),
    "prefill": (ModelRunner, "_prefill"),
    "decode": (ModelRunner, "_decode_step"),
    "wait": (StepHandle, "wait"),
    "update": (Scheduler, "update"),
    "process": (OutputProcessor, "process"),
}


class Boom(Exception):
    pass


def fail(monkeypatch, point, *, call, after):
    """Make the `call`-th call from now of a method raise, before or after its work."""
    owner, name = POINTS[point]
    real = getattr(owner, name)
    left = [call]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            raise Boom(point)
        result = real(*args, **kwargs)
        if left[0] == 0:
            raise Boom(point)
        return result

    monkeypatch.setattr(owner, name, failing)


def check_answers(oracle, outputs, prompts=PROMPTS, params=GREEDY):
    assert [output.prompt_token_ids for output in outputs] == prompts
    for output in outputs:
        assert len(output["token_ids"]) == params.max_tokens
        oracle.check_greedy(output.prompt_token_ids, output["token_ids"])


def check_idle(llm):
    assert llm.is_finished() and llm.step() == []
    scheduler = llm._engine.scheduler
    scheduler.check_invariants()
    assert not scheduler.has_unfinished()
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks
    assert llm._engine.processor.requests == {}


@pytest.fixture(params=[False, True], ids=["in step", "overlapped"])
def engine(request, tiny_model, optimistic):
    """Small enough to chunk, to share prefixes and to preempt."""
    with LLM(
        tiny_model,
        device="cpu",
        dtype="float32",
        kvcache_block_size=16,
        num_kvcache_blocks=10,
        max_num_batched_tokens=25,
        max_num_seqs=4,
        enable_overlap=request.param,
    ) as llm:
        yield llm


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_after_an_exception_anywhere_the_next_call_is_right(
    engine, tiny_oracle, monkeypatch, point, after
):
    for call in (1, 2) if point == "prefill" else (3, 8):
        with monkeypatch.context() as patch:
            fail(patch, point, call=call, after=after)
            with pytest.raises(Boom):
                # Lengths that differ, so that rows leave and are packed while the fault strikes.
                engine.generate(
                    PROMPTS, [GREEDY.clone(max_tokens=n) for n in (9, 30, 3, 12, 20)], False
                )
        check_idle(engine)
        check_answers(tiny_oracle, engine.generate(PROMPTS, GREEDY, use_tqdm=False))
        check_idle(engine)


def run_to_the_end(engine):
    outputs = {}
    for _ in range(400):
        if engine.is_finished():
            return outputs
        for output in engine.step():
            assert output.request_id not in outputs, "returned once"
            outputs[output.request_id] = output
    raise AssertionError("no end")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", POINTS)
def test_requests_added_for_step_survive_a_fault_in_generate(
    engine, tiny_oracle, monkeypatch, point, after
):
    call = 2 if point == "prefill" else 6
    mine = {engine.add_request([4, 5, 6], GREEDY.clone(max_tokens=n)): n for n in (3, 25)}
    with monkeypatch.context() as patch:
        fail(patch, point, call=call, after=after)
        with pytest.raises(Boom):
            engine.generate(PROMPTS, LONG, use_tqdm=False)
    outputs = run_to_the_end(engine)
    assert {name: len(output["token_ids"]) for name, output in outputs.items()} == mine
    for output in outputs.values():
        assert output.outputs[0].finish_reason == "length"
        tiny_oracle.check_greedy([4, 5, 6], output["token_ids"])
    check_idle(engine)


@pytest.mark.parametrize(
    ("point", "after"),
    [
        *[("wait", False), ("wait", True), ("update", False), ("update", True)],
        *[("process", False), ("forget", False), ("forget", True)],
    ],
)
def test_an_output_that_is_ready_as_the_fault_strikes_is_not_lost(
    engine, tiny_oracle, monkeypatch, point, after
):
    """A fault between the scheduler's update and the text once lost it: `step` span for ever.

    Nor does it come twice, where the fault strikes between taking it and letting go of its request.
    """
    monkeypatch.setitem(POINTS, "forget", (OutputProcessor, "forget"))
    for call in (1, 2):
        mine = engine.add_request([4, 5, 6], GREEDY.clone(max_tokens=call))
        with monkeypatch.context() as patch:
            fail(patch, point, call=call, after=after)
            with pytest.raises(Boom):
                engine.generate([[7, 8]], GREEDY.clone(max_tokens=call + 1), use_tqdm=False)
        outputs = run_to_the_end(engine)
        assert outputs.keys() == {mine}, "this one, and none of the call that failed"
        assert len(outputs[mine]["token_ids"]) == call
        tiny_oracle.check_greedy([4, 5, 6], outputs[mine]["token_ids"])
        check_idle(engine)


def test_answers_of_which_some_have_ended_go_on_after_a_fault(engine, monkeypatch):
    """Those keep how they ended; the others' text, in which to look for stops, is made again."""
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=30, ignore_eos=True)
    (whole,) = engine.generate([[4, 5, 6]], params, use_tqdm=False)
    text = whole.outputs[0].text
    place = next(i for i in range(3, len(text)) if text[i : i + 2].isascii())
    params = params.clone(stop=[text[place : place + 2]])
    (expected,) = engine.generate([[4, 5, 6]], params, use_tqdm=False)
    ends = sorted(len(answer.token_ids) for answer in expected.outputs)
    assert expected.outputs[0].finish_reason == "stop" and ends[0] + 3 < ends[-1]
    for call in (ends[0] + 3, ends[-1] - 1):
        mine = engine.add_request([4, 5, 6], params)
        with monkeypatch.context() as patch:
            fail(patch, "execute", call=call, after=True)
            with pytest.raises(Boom):
                run_to_the_end(engine)
        assert run_to_the_end(engine)[mine].outputs == expected.outputs
        check_idle(engine)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_fault_while_requests_are_added_or_aborted(engine, tiny_oracle, monkeypatch, after):
    monkeypatch.setitem(POINTS, "add", (Scheduler, "add"))
    monkeypatch.setitem(POINTS, "abort", (OutputProcessor, "abort"))
    mine = engine.add_request([4, 5, 6], GREEDY)
    with monkeypatch.context() as patch:
        fail(patch, "add", call=2, after=after)
        with pytest.raises(Boom):
            engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    other = engine.add_request([7, 8], GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        fail(patch, "abort", call=1, after=after)
        with pytest.raises(Boom):
            engine.abort(other)
    outputs = run_to_the_end(engine)
    assert outputs.keys() == {mine}, "what was to end does not go on"
    tiny_oracle.check_greedy([4, 5, 6], outputs[mine]["token_ids"])
    check_idle(engine)


def test_what_needs_an_idle_engine_waits_for_a_step_of_rows_that_have_ended(engine, tiny_oracle):
    engine.abort([engine.add_request(PROMPTS[0], GREEDY), "nobody"])
    request_id = engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(3):
        engine.step()
    with pytest.raises(RuntimeError, match=r"reset_prefix_cache needs an idle engine: 1 request"):
        engine.reset_prefix_cache()
    engine.abort(request_id)
    engine.reset_prefix_cache()
    assert not engine._engine._in_flight
    check_answers(tiny_oracle, engine.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_a_step_that_failed_may_be_tried_again(engine, tiny_oracle, monkeypatch):
    for call in (1, 2, 3, 7):
        ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        with monkeypatch.context() as patch:
            fail(patch, "execute", call=call, after=False)
            with pytest.raises(Boom):
                run_to_the_end(engine)
        outputs = run_to_the_end(engine)
        check_answers(tiny_oracle, [outputs[request_id] for request_id in ids])
        check_idle(engine)


def test_pending_step_level_requests_keep_their_outputs_through_generate(engine, tiny_oracle):
    ids = [engine.add_request([4, 5, 6 + n], GREEDY.clone(max_tokens=n)) for n in (2, 40)]
    check_answers(tiny_oracle, engine.generate(PROMPTS, GREEDY, use_tqdm=False))
    outputs = run_to_the_end(engine)
    assert outputs.keys() == set(ids)
    assert [len(outputs[request_id]["token_ids"]) for request_id in ids] == [2, 40]
    for output in outputs.values():
        tiny_oracle.check_greedy(output.prompt_token_ids, output["token_ids"])
    check_idle(engine)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["upload", "rows"])
def test_a_fault_while_the_number_of_rows_changes(engine, tiny_oracle, monkeypatch, name, after):
    """Once the host believed that the device knew of more rows, which then drew from nothing."""
    owner = (Uploader, "upload") if name == "upload" else (ModelRunner, "_apply_changes")
    monkeypatch.setitem(POINTS, name, owner)
    engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    with monkeypatch.context() as patch:
        fail(patch, name, call=2, after=after)
        with pytest.raises(Boom):
            engine.generate([[5, 6], [7, 8]], GREEDY, use_tqdm=False)
    outputs = engine.generate([[5, 6], [7, 8]], GREEDY, use_tqdm=False)
    check_answers(tiny_oracle, outputs, [[5, 6], [7, 8]])


def test_a_progress_bar_that_raises_is_a_fault_like_any_other(engine, tiny_oracle):
    class Bar:
        def __init__(self, **options):
            pass

        def update(self, count):
            raise Boom

        def close(self):
            pass

    with pytest.raises(Boom):
        engine.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    check_idle(engine)
    check_answers(tiny_oracle, engine.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.mark.parametrize("name", ["update", "set_postfix", "close", None])
def test_a_progress_bar_that_fails_at_the_end_loses_nothing(engine, tiny_oracle, name):
    """Nor does one without `close` and `set_postfix`."""
    num_done = [0]

    class Bar:
        def __init__(self, total, **options):
            self.total = total

        def update(self, count):
            num_done[0] += count
            self.fail("update")

        def fail(self, place):
            if place == name and num_done[0] == self.total:
                raise Boom

    if name is not None:
        Bar.set_postfix = lambda self, figures: self.fail("set_postfix")
        Bar.close = lambda self: self.fail("close")
    check_answers(tiny_oracle, engine.generate(PROMPTS, GREEDY, use_tqdm=Bar))
    assert num_done == [len(PROMPTS)]


@pytest.mark.parametrize("bar", [5, lambda **options: object()])
def test_what_is_no_progress_bar_is_refused_at_the_start(engine, bar):
    with pytest.raises(TypeError, match="use_tqdm must be|no method 'update'"):
        engine.generate(PROMPTS, GREEDY, use_tqdm=bar)
    check_idle(engine)


def hold_steps(engine, monkeypatch):
    """Let each step say that it began, and wait until it may go on: the two events."""
    real = engine._engine._executor.execute
    started, may_go_on = threading.Event(), threading.Event()

    def slow(output):
        started.set()
        assert may_go_on.wait(60)
        return real(output)

    monkeypatch.setattr(engine._engine._executor, "execute", slow)
    return started, may_go_on


def test_threads_that_use_one_engine_at_once_are_refused_and_the_first_is_right(
    engine, tiny_oracle, monkeypatch
):
    started, may_go_on = hold_steps(engine, monkeypatch)
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(engine.generate(PROMPTS, GREEDY, use_tqdm=False)),
        name="the first",
    )
    thread.start()
    assert started.wait(60)
    try:
        for use in (
            lambda: engine.generate([[5]], GREEDY, use_tqdm=False),
            lambda: engine.score([[5]], [[6]], use_tqdm=False),
            lambda: list(engine.generate_iter([[5]], GREEDY)),
            lambda: list(engine.stream([5], GREEDY)),
            lambda: engine.add_request([5], GREEDY),
            engine.give_up_waiting,
            engine.step,
        ):
            with pytest.raises(RuntimeError, match="in use by thread 'the first'.*one LLM for"):
                use()
    finally:
        may_go_on.set()
        thread.join(120)
    check_answers(tiny_oracle, results)
    check_idle(engine)


def test_an_abort_from_another_thread_waits_for_the_step(engine, monkeypatch):
    request_id = engine.add_request([5, 6], GREEDY)
    started, may_go_on = hold_steps(engine, monkeypatch)
    stepping = threading.Thread(target=engine.step)
    aborted = []
    aborting = threading.Thread(target=lambda: aborted.extend(engine.abort(request_id)))
    stepping.start()
    assert started.wait(60)
    aborting.start()
    aborting.join(0.2)
    assert aborting.is_alive()
    may_go_on.set()
    stepping.join(60)
    aborting.join(60)
    assert [output.request_id for output in aborted] == [request_id]
    check_idle(engine)


@pytest.mark.parametrize("name", ["generate", "add_request", "step", "abort"])
def test_a_logits_processor_may_not_use_its_engine(engine, tiny_oracle, name):
    request_ids = []
    inner = {
        "generate": lambda: engine.generate([[5]], GREEDY, use_tqdm=False),
        "add_request": lambda: engine.add_request([5], GREEDY),
        "step": engine.step,
        "abort": lambda: engine.abort(request_ids),
    }[name]

    def processor(_, logits):
        inner()
        return logits

    request_ids.append(engine.add_request([5, 6], GREEDY.clone(logits_processors=[processor])))
    with pytest.raises(RuntimeError, match="in the middle of a step"):
        while not engine.is_finished():
            engine.step()
    engine.abort(request_ids)
    check_idle(engine)
    check_answers(tiny_oracle, engine.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_a_worker_thread_may_generate(engine, tiny_oracle):
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(engine.generate(PROMPTS, GREEDY, use_tqdm=False))
    )
    thread.start()
    thread.join(120)
    check_answers(tiny_oracle, results)
    check_idle(engine)


def test_the_garbage_collector_and_the_signal_handler_are_put_back(engine, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    inside = []
    engine.observe_steps(lambda sample: inside.append(gc.isenabled()))
    engine.generate([[5]], GREEDY, use_tqdm=False)
    engine.observe_steps(None)
    assert len(inside) >= 10 and not any(inside), "the collector is still while the device works"
    assert gc.isenabled() and signal.getsignal(signal.SIGINT) is handler
    with monkeypatch.context() as patch:
        fail(patch, "execute", call=1, after=False)
        with pytest.raises(Boom):
            engine.generate([[5]], GREEDY, use_tqdm=False)
    assert gc.isenabled() and signal.getsignal(signal.SIGINT) is handler


def test_a_program_with_its_own_idea_of_ctrl_c_keeps_it(engine, tiny_oracle):
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        engine.observe_steps(lambda sample: signal.raise_signal(signal.SIGINT))
        check_answers(tiny_oracle, engine.generate(PROMPTS, GREEDY, use_tqdm=False))
    finally:
        engine.observe_steps(None)
        signal.signal(signal.SIGINT, before)
    assert len(heard) > 5
    check_idle(engine)


# ---- engines beside and after one another


def test_two_engines_in_one_process_do_not_meet(tiny_llm, tiny_oracle):
    first = tiny_llm(kvcache_block_size=16, enable_overlap=True)
    second = tiny_llm(kvcache_block_size=64, num_kvcache_blocks=16)
    queue = {first: [], second: []}
    for llm in queue:
        for prompt in PROMPTS:
            llm.add_request(prompt, GREEDY)
    while not (first.is_finished() and second.is_finished()):
        for llm, outputs in queue.items():
            outputs += llm.step()
    for outputs in queue.values():
        check_answers(tiny_oracle, sorted(outputs, key=lambda output: int(output.request_id)))
    first.close()
    check_answers(tiny_oracle, second.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_a_closed_engine_says_so_and_closes_again(tiny_llm):
    llm = tiny_llm()
    llm.add_request([5, 6], GREEDY)
    llm.step()
    llm.close()
    llm.close()
    for call in (
        lambda: llm.generate([[5]], GREEDY, use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False),
        lambda: llm.add_request([5], GREEDY),
        lambda: llm.step(),
    ):
        with pytest.raises(RuntimeError, match="The engine is closed. Build a new LLM."):
            call()


def test_a_with_block_closes_also_when_it_raises(tiny_model):
    with (
        pytest.raises(Boom),
        LLM(tiny_model, device="cpu", num_kvcache_blocks=8) as llm,
    ):
        raise Boom
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[5]], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("how", ["close", "del"])
def test_memory_is_given_back_without_the_garbage_collector(tiny_model, how):
    llm = LLM(tiny_model, device="cpu", dtype="float32", num_kvcache_blocks=8)
    llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    runner = llm._engine._executor._runner
    freed = [weakref.ref(runner._kv_cache), weakref.ref(runner._model.lm_head.weight)]
    del runner
    gc.collect()
    gc.disable()
    try:
        if how == "close":
            llm.close()
        else:
            del llm
        assert [ref() for ref in freed] == [None, None]
    finally:
        gc.enable()


def test_a_new_engine_after_del_is_right(tiny_model, tiny_oracle):
    for _ in range(2):
        llm = LLM(tiny_model, device="cpu", dtype="float32", num_kvcache_blocks=32)
        check_answers(tiny_oracle, llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        del llm


def test_global_settings_of_torch_stay_as_they_are(tiny_llm):
    before = (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
    rng = torch.get_rng_state()
    tiny_llm(dtype="bfloat16").generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False)
    after = (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
    assert after == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert not torch.distributed.is_initialized()


# ---- Ctrl-C, for real

_PROGRAM = """
import signal, sys, threading, time
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", kvcache_block_size=16,
          num_kvcache_blocks=256, enable_overlap=sys.argv[2] == "1")
short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
long = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
expected = [o["token_ids"] for o in llm.generate([[5, 6], [7]], short, use_tqdm=False)]
runner = llm._engine._executor._runner
real = runner.execute
hits = []
def slow(output):  # a step long enough to be struck in its middle
    if output.step_id > 15:
        hits.append(1)
        if len(hits) == 1:
            print("ready", flush=True)
        time.sleep(float(sys.argv[3]))
    return real(output)
runner.execute = slow
try:
    llm.generate([[5, 6], [7, 8], [9]] * 3, long, use_tqdm=False)
    print("not interrupted", flush=True)
except KeyboardInterrupt:
    print("interrupted", llm._engine.is_closed, flush=True)
runner.execute = real
if not llm._engine.is_closed:
    s = llm._engine.scheduler
    s.check_invariants()
    assert s.blocks.num_free_blocks == s.blocks.num_blocks and llm.is_finished()
    outputs = llm.generate([[5, 6], [7]], short, use_tqdm=False)
    print("right", [o["token_ids"] for o in outputs] == expected, len(outputs), flush=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
else:
    try:
        llm.generate([[5]], short, use_tqdm=False)
    except RuntimeError as error:
        print(error, flush=True)
"""


def start_program(tiny_model, overlap, step_s):
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tiny_model), str(int(overlap)), str(step_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


@pytest.mark.parametrize("overlap", [False, True])
def test_one_ctrl_c_ends_the_call_between_steps_and_the_next_is_right(tiny_model, overlap):
    process = start_program(tiny_model, overlap, 0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out.splitlines() == ["interrupted False", "right True 2"], err
    assert process.returncode == 0, err


def test_a_second_ctrl_c_strikes_at_once_and_closes_the_engine(tiny_model):
    process = start_program(tiny_model, True, 20)
    started = time.perf_counter()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out.splitlines() == ["interrupted True", "The engine is closed. Build a new LLM."], err
    assert time.perf_counter() - started < 15


def test_a_fault_at_the_end_of_a_step_does_not_leave_the_engine_in_it():
    exclusive = Exclusive()
    exclusive._in_step = True  # an exception struck before the line that would have reset it
    with (
        exclusive.use(is_step=True),
        pytest.raises(RuntimeError, match="middle of a step"),
        exclusive.use(),
    ):
        pass
    with exclusive.use(), exclusive.use():
        pass


@pytest.mark.parametrize("call", ["generate", "score"])
def test_a_call_whose_requests_an_observer_aborts_ends(engine, call):
    """It stepped for ever, with nothing to do."""
    engine.observe_steps(lambda sample: engine.abort(list(engine._engine.processor.requests)))
    try:
        with pytest.raises(RuntimeError, match=r"step\(\) or abort\(\) was called"):
            if call == "generate":
                engine.generate(PROMPTS, GREEDY, use_tqdm=False)
            else:
                engine.score([[5] * 40] * 40, [[6]] * 40, use_tqdm=False)
    finally:
        engine.observe_steps(None)


def test_a_ctrl_c_while_a_close_waits_is_raised_behind_it(monkeypatch):
    class Lock:
        def acquire(self, timeout):
            raise KeyboardInterrupt

    exclusive = Exclusive()
    monkeypatch.setattr(exclusive, "_lock", Lock())
    closed = []
    with pytest.raises(KeyboardInterrupt), exclusive.after_others():
        closed.append(True)
    assert closed == [True]


def test_a_close_from_another_thread_lets_the_step_end(tiny_llm):
    """It freed the model in the middle of a step, which raised what it liked."""
    llm, closed = tiny_llm(), threading.Event()
    begun = threading.Event()
    llm.observe_steps(lambda sample: begun.set())

    def close():
        begun.wait(10)
        llm.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(RuntimeError, match="The engine is closed"):
        while True:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    thread.join(10)
    assert closed.is_set()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(engine, how):
    """When a copy was dropped it closed the original."""
    with pytest.raises(TypeError, match="An LLM cannot be copied, pickled"):
        how(engine)
    assert engine.generate(PROMPTS, GREEDY, use_tqdm=False)
