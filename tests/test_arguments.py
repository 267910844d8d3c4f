"""Arguments of methods of an LLM: of a wrong type or value they are named, and nothing happens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.batch import BatchOptions, run_batch
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
    "weights in a dict": (
        lambda llm: llm.load_weights({"model.norm.weight": torch.ones(2)}),
        TypeError,
        r"\(name, tensor\) pairs, got a dict. Pass its items\(\)",
    ),
    "weights in a file": (
        lambda llm: llm.load_weights("m/model.safetensors"),
        TypeError,
        r"got 'm/model.safetensors'. Those of a file are safetensors.torch.load_file",
    ),
    "a template's name": (
        lambda llm: llm.chat(CHAT, chat_template="chat.jinja"),
        ValueError,
        "chat_template must be the text of a Jinja template.*got 'chat.jinja'",
    ),
    "of the parameters": (
        lambda llm: llm.generate([[5]], temperature=0),
        TypeError,
        r"generate has no option 'temperature'. Pass it in sampling_params, as SamplingParams",
    ),
    "of vLLM's generate": (
        lambda llm: llm.generate([[5]], lora_request=None),
        TypeError,
        "generate has no option 'lora_request'. Pass lora=DIR to LLM",
    ),
    "a misspelt one": (
        lambda llm: llm.generate([[5]], use_tqmd=False),
        TypeError,
        "generate has no option 'use_tqmd'. Did you mean 'use_tqdm'.*Options: prompts, sampling",
    ),
    "of the template": (
        lambda llm: llm.chat(CHAT, enable_thinking=False),
        TypeError,
        "chat has no option 'enable_thinking'. Pass chat_template_kwargs={'enable_thinking'",
    ),
    "none of generate_iter": (
        lambda llm: llm.generate_iter([[5]], use_tqdm=False),
        TypeError,
        "generate_iter has no option 'use_tqdm'. Leave it out. Options: prompts",
    ),
    "none of stream": (
        lambda llm: llm.stream([5], n=2),
        TypeError,
        "stream has no option 'n'. Pas",
    ),
    "none of score": (lambda llm: llm.score([5], [6], k=2), TypeError, "score has no option 'k'"),
    "none of add": (lambda llm: llm.add_request([5], id="a"), TypeError, "add_request has no opti"),
    "contexts": (lambda llm: llm.score(None, [[5]]), TypeError, "^contexts must be a string, a"),
    "continuations": (lambda llm: llm.score([5], 6), TypeError, "^continuations must be .*got int"),
    "parameters in a dict": (
        lambda llm: llm.generate([[5]], {"temperature": 0}),
        TypeError,
        r"got dict. SamplingParams\(\*\*options\) makes one",
    ),
    "parameters of iter in a dict": (
        lambda llm: llm.generate_iter([[5]], {"temperature": 0}),
        TypeError,
        r"got dict. SamplingParams\(\*\*options\) makes one",
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


class Table:
    """What pandas, polars and pyarrow have in common, and pandas' iteration."""

    columns = ("question", "answer")

    def __iter__(self):
        return iter(self.columns)


TAKES_PROMPTS = {
    "generate": lambda llm, table: llm.generate(table),
    "generate_iter": lambda llm, table: llm.generate_iter(table),
    "score": lambda llm, table: llm.score(table, [[5], [6]]),
    "continuations": lambda llm, table: llm.score([5], table),
}


@pytest.mark.parametrize("name", TAKES_PROMPTS)
def test_a_table_is_no_list_of_its_columns_names(llm, name):
    """A DataFrame's names were answered as if they were the prompts, without a word."""
    expected = r"must be a list or one column, got a Table .*table\['question'\]"
    with pytest.raises(TypeError, match=expected):
        TAKES_PROMPTS[name](llm, Table())


def test_an_array_of_conversations_is_a_list_of_them(llm):
    conversations = np.empty(2, dtype=object)
    conversations[:] = [CHAT, CHAT]
    assert len(llm.chat(conversations, GREEDY, use_tqdm=False)) == 2


def test_an_engine_that_cannot_run_reads_no_prompts(demo_model):
    """A closed engine tokenised a million prompts first, and generate_iter lost those it read."""
    numbers = iter(range(5, 9))
    prompts = ([number] for number in numbers)
    calls = [llm_call(prompts) for llm_call in (_generate, _generate_iter, _score)]
    llm = LLM(demo_model, device="cpu", num_kvcache_blocks=4)
    llm.sleep()
    for call in calls:
        with pytest.raises(RuntimeError, match="The engine sleeps. Call wake_up first"):
            call(llm)
    llm.close()
    for call in (*calls, lambda llm: llm.chat(CHAT), lambda llm: llm.stream([5])):
        with pytest.raises(RuntimeError, match="The engine is closed"):
            call(llm)
    assert next(numbers) == 5


def _generate(prompts):
    return lambda llm: llm.generate(prompts)


def _generate_iter(prompts):
    return lambda llm: llm.generate_iter(prompts)


def _score(prompts):
    return lambda llm: llm.score(prompts, [[5]])


def test_a_path_in_the_place_of_a_jobs_options_is_told(demo_model):
    """It was "'str' object has no attribute 'sampling'"."""
    with pytest.raises(
        TypeError, match="options must be a BatchOptions, .* got 'in.jsonl' of type"
    ):
        run_batch(demo_model, "in.jsonl")
