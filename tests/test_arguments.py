"""Arguments of methods of an LLM: of a wrong type or value they are named, and nothing happens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.batch import BatchOptions
from nanovllm.config import Config

GREEDY = SamplingParams(temperature=0, max_tokens=2)
CHAT = [{"role": "user", "content": "a"}]
WRONG = {
    "sleep a bool": (lambda llm: llm.sleep(True), TypeError, "level must be an int, got True"),
    "sleep a float": (lambda llm: llm.sleep(1.0), TypeError, "level must be an int, got 1.0"),
    "sleep a text": (lambda llm: llm.sleep("1"), TypeError, "level must be an int, got '1'"),
    "sleep None": (lambda llm: llm.sleep(None), TypeError, "level must be an int, got None"),
    "sleep 0": (lambda llm: llm.sleep(0), ValueError, "level must be from 1 to 2, got 0. 1 frees"),
    "window 0": (lambda llm: llm.generate_iter([[5]], window=0), ValueError, "window must be at"),
    "window a bool": (lambda llm: llm.generate_iter([[5]], window=True), TypeError, "window must"),
    "window a text": (lambda llm: llm.generate_iter([[5]], window=""), TypeError, "window must"),
    "drain": (lambda llm: llm.generate_iter([[5]], drain=True), TypeError, "drain must be a thre"),
    "bar 0": (lambda llm: llm.generate([[5]], GREEDY, use_tqdm=0), TypeError, "use_tqdm must be"),
    "bar None": (lambda llm: llm.generate([[5]], GREEDY, None), TypeError, "use_tqdm .*got None"),
    "bar of score": (lambda llm: llm.score([[5]], [[6]], use_tqdm=1), TypeError, "use_tqdm must"),
    "bar of chat": (lambda llm: llm.chat(CHAT, GREEDY, "no"), TypeError, "use_tqdm .*got 'no'"),
    "errors": (
        lambda llm: llm.generate([[5]], GREEDY, return_errors=1),
        TypeError,
        "return_errors must be True or False, got 1",
    ),
    "prompt of chat": (
        lambda llm: llm.chat(CHAT, add_generation_prompt="no"),
        TypeError,
        "add_generation_prompt must be True or False, got 'no'",
    ),
    "last of chat": (
        lambda llm: llm.chat(CHAT, add_generation_prompt=False, continue_final_message=1),
        TypeError,
        "continue_final_message must be True or False, got 1",
    ),
    "template": (lambda llm: llm.chat(CHAT, chat_template=3), TypeError, "chat_template must be"),
    "tools": (lambda llm: llm.chat(CHAT, tools="f"), TypeError, "tools must be a list .*got 'f'"),
    "abort a number": (lambda llm: llm.abort(0), TypeError, "request_id must be a string .*got 0"),
    "abort numbers": (lambda llm: llm.abort(["a", 0]), TypeError, "a string or several, got 0"),
    "abort None": (lambda llm: llm.abort(None), TypeError, "a string or several, got None"),
    "give up -1": (lambda llm: llm.give_up_waiting(-1), ValueError, "max_num_requests must be at"),
    "give up a bool": (lambda llm: llm.give_up_waiting(True), TypeError, "max_num_requests must"),
    "give up 1.0": (lambda llm: llm.give_up_waiting(1.0), TypeError, "max_num_requests must be an"),
    "sink": (lambda llm: llm.observe_steps("x"), TypeError, "sink must be a function or None"),
    "weights": (lambda llm: llm.load_weights(5), TypeError, r"\(name, tensor\) pairs, got 5"),
    "weights of one": (
        lambda llm: llm.load_weights(torch.ones(2)),
        TypeError,
        r"\(name, tensor\) pairs, got tensor\(1.\) at 0",
    ),
    "id": (lambda llm: llm.add_request([5], GREEDY, 7), TypeError, "request_id must be a string"),
    "parameters": (lambda llm: llm.stream([5], 3), TypeError, "sampling_params must be"),
}


@pytest.fixture(scope="module")
def llm(demo_model):
    options = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16}
    with LLM(demo_model, **options) as llm:
        yield llm


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_and_nothing_happens(llm, name):
    call, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        list(call(llm) or ())
    assert llm.is_finished()
    assert llm.generate([[5]], GREEDY, use_tqdm=False)[0].finished


def test_numpys_truth_values_are_taken(llm, tmp_path):
    """They were refused as "of type bool", though NumPy's integers are taken."""
    yes, no = np.True_, np.False_
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=yes)
    (good, bad) = llm.generate([[5], []], params, use_tqdm=no, return_errors=yes)
    assert len(good["token_ids"]) == 2 and bad.error is not None
    assert Config("m", enable_prefix_caching=no).enable_prefix_caching is False
    assert BatchOptions("i", tmp_path / "o", overwrite=yes).overwrite is True


def test_right_ones_are_taken(llm):
    ids = [llm.add_request([5], GREEDY) for _ in range(3)]
    assert llm.give_up_waiting(0) == []
    assert llm.give_up_waiting(1) == ids[2:]
    assert [output.request_id for output in llm.abort(iter(ids))] == ids[:2]
    llm.observe_steps(None)
    assert [i for i, _ in llm.generate_iter([[5]], GREEDY, window=None, drain=None)] == [0]
