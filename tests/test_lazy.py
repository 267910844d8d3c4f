"""Many requests from an iterable that may be endless, slow, broken, or wait for answers."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from nanovllm import SamplingParams
from nanovllm.lazy import _MAX_CHUNK

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def test_each_prompt_gives_its_output_with_its_index(llm):
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    expected = [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    found = dict(llm.generate_iter(iter(prompts), GREEDY, window=10))
    assert [found[i]["token_ids"] for i in range(60)] == expected


@pytest.mark.parametrize("window", [1, 3, 16])
def test_an_endless_iterable_is_read_a_window_ahead(llm, window):
    read, most = itertools.count(), 0
    last_read = -1

    def endless():
        nonlocal last_read
        for last_read in read:
            yield [5 + last_read % 400]

    results = llm.generate_iter(endless(), GREEDY.clone(max_tokens=2), window=window)
    for num_done, _ in enumerate(itertools.islice(results, 40), 1):
        most = max(most, last_read + 1 - num_done)
    results.close()
    assert most <= window + max(1, window // 4)


def test_the_default_window_is_bounded_too(tiny_llm):
    llm = tiny_llm(max_num_seqs=4)
    num_read = 0

    def endless():
        nonlocal num_read
        while True:
            num_read += 1
            yield [5]

    results = llm.generate_iter(endless(), GREEDY.clone(max_tokens=1))
    next(results)
    results.close()
    assert num_read <= 16 + _MAX_CHUNK


def test_a_slow_iterable_is_not_waited_for(llm):
    """The first result comes though the second prompt will not before it is taken."""
    taken = threading.Event()

    def slow():
        time.sleep(0.06)
        yield [5]
        assert taken.wait(30)
        yield [6]

    results = llm.generate_iter(slow(), GREEDY)
    assert next(results)[0] == 0
    taken.set()
    assert [index for index, _ in results] == [1]


def test_an_iterable_may_wait_for_the_previous_answer(llm):
    answers = [threading.Event() for _ in range(5)]

    def conversation():
        for turn in range(5):
            yield [5 + turn]
            assert answers[turn].wait(20)

    for index, _ in llm.generate_iter(conversation(), GREEDY):
        answers[index].set()
    assert all(answer.is_set() for answer in answers)


def test_closing_does_not_wait_for_an_iterable_that_blocks(llm):
    blocked = threading.Event()

    def blocking():
        yield [5]
        blocked.wait(30)

    results = llm.generate_iter(blocking(), GREEDY)
    assert next(results)[0] == 0
    started = time.monotonic()
    results.close()
    assert time.monotonic() - started < 5 and not blocked.is_set()
    blocked.set()
    time.sleep(0.1)
    assert not [t for t in threading.enumerate() if t.name.startswith("nanovllm-read")]


def test_a_drain_ends_an_iterable_that_blocks(llm):
    drain, release = threading.Event(), threading.Event()

    def blocking():
        yield [5]
        release.wait(30)

    results = llm.generate_iter(blocking(), GREEDY, drain=drain)
    assert next(results)[0] == 0
    drain.set()
    started = time.monotonic()
    assert list(results) == [] and time.monotonic() - started < 5
    release.set()


def test_a_bad_item_is_its_own_error(llm):
    prompts = [[5], "", [6], [99999], [7]]
    found = dict(llm.generate_iter(iter(prompts), GREEDY))
    assert [found[i].error is None for i in range(5)] == [True, False, True, False, True]
    assert found[1].error.startswith("prompt 1 is empty")
    assert "token id 99999" in found[3].error and found[3].outputs == []


def test_what_the_iterable_raises_comes_after_what_it_gave(llm):
    def broken():
        yield [5]
        yield [6]
        raise OSError("disk on fire")

    done = []
    with pytest.raises(OSError, match="disk on fire"):
        for index, _ in llm.generate_iter(broken(), GREEDY):
            done.append(index)
    assert sorted(done) == [0, 1]


def test_parameters_of_each_prompt(llm):
    params = [GREEDY.clone(max_tokens=n) for n in (1, 4, 2)]
    found = dict(llm.generate_iter([[5], [6], [7]], iter(params)))
    assert [len(found[i]["token_ids"]) for i in range(3)] == [1, 4, 2]
    endless = (GREEDY.clone(max_tokens=n) for n in itertools.count(1))
    assert len(dict(llm.generate_iter([[5], [6]], endless))) == 2


def test_fewer_parameters_than_prompts_are_an_error(llm):
    done = []
    with pytest.raises(ValueError, match="sampling_params has 2 entries, but there is a prompt 2"):
        for index, _ in llm.generate_iter([[5], [6], [7]], [GREEDY, GREEDY]):
            done.append(index)
    assert sorted(done) == [0, 1]
    with pytest.raises(TypeError, match=r"sampling_params\[1\] must be a SamplingParams, got int"):
        list(llm.generate_iter([[5], [6]], [GREEDY, 5]))


@pytest.mark.parametrize(
    ("prompts", "params", "window", "match"),
    [
        ("hello", GREEDY, None, "must be an iterable of prompts, got str"),
        (5, GREEDY, None, "must be an iterable of prompts, got int"),
        ({"prompt": "hello"}, GREEDY, None, "must be an iterable of prompts, got dict"),
        ([[5]], 5, None, "must be a SamplingParams or an iterable"),
        ([[5]], {"n": 1}, None, "must be a SamplingParams or an iterable.*got dict"),
        ([[5]], GREEDY, -1, "window must be at least 1, got -1"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(llm, prompts, params, window, match):
    with pytest.raises((TypeError, ValueError), match=match):
        llm.generate_iter(prompts, params, window=window)


def test_closing_the_generator_aborts_and_frees(llm):
    results = llm.generate_iter(([5 + i] for i in range(50)), GREEDY.clone(max_tokens=100))
    results.close()  # not started
    params = (GREEDY.clone(max_tokens=1 if i == 0 else 100) for i in range(50))
    results = llm.generate_iter(([5 + i] for i in range(50)), params)
    assert next(results)[0] == 0
    assert llm._engine.scheduler.num_running > 0
    results.close()
    assert llm._engine.scheduler.num_running == 0


def test_an_exception_in_the_users_loop_frees_too(llm):
    def use():
        for _ in llm.generate_iter([[5], [6]], [GREEDY.clone(max_tokens=1), GREEDY]):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()


def test_two_generators_at_once_get_their_own(llm):
    first = llm.generate_iter([[5], [6], [7]], GREEDY)
    second = llm.generate_iter([[8], [9], [10]], GREEDY)
    pairs = list(zip(first, second, strict=True))
    assert sorted(index for (index, _), _ in pairs) == [0, 1, 2]
    texts = {i: o["token_ids"] for _, (i, o) in pairs}
    expected = llm.generate([[8], [9], [10]], GREEDY, use_tqdm=False)
    assert [texts[i] for i in range(3)] == [o["token_ids"] for o in expected]


def test_a_generator_whose_requests_were_taken_says_so(llm):
    results = llm.generate_iter([[5], [6]], [GREEDY.clone(max_tokens=1), GREEDY])
    next(results)
    while not llm.is_finished():
        llm.step()
    with pytest.raises(RuntimeError, match=r"step\(\) or abort\(\) was called"):
        next(results)


def test_taken_requests_are_told_though_another_answer_waits_to_be_fetched(llm):
    """It stepped for ever: the answer that nobody fetched counted as one to come."""
    llm.add_request([7], GREEDY.clone(max_tokens=1))
    results = llm.generate_iter([[5], [6]], [GREEDY.clone(max_tokens=2), GREEDY])
    assert next(results)[0] == 0
    llm.abort(list(llm._engine.processor.requests))
    with pytest.raises(RuntimeError, match=r"step\(\) or abort\(\) was called"):
        next(results)
    assert [len(output["token_ids"]) for output in llm.step()] == [1]


def test_several_answers_a_prompt_come_together(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=5)
    found = dict(llm.generate_iter([[5], [6]], params))
    assert [len(found[i].outputs) for i in range(2)] == [3, 3]
