"""Prompts and parameters that cannot run are refused at the door, and leave nothing behind."""

from __future__ import annotations

import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.frontend.prompts import read_prompt
from nanovllm.frontend.start_up import check_ranks

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
GOOD = [5, 6, 7]


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(
        tiny_model,
        device="cpu",
        dtype="float32",
        kvcache_block_size=16,
        num_kvcache_blocks=64,
        max_model_len=64,
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm, tiny_oracle):
    """After every test: no request, no block in use, and the next answer is right."""
    yield
    assert llm.is_finished() and llm.step() == []
    assert not llm._engine.scheduler.has_unfinished()
    assert llm._engine.scheduler.blocks.num_free_blocks == 64
    (output,) = llm.generate([GOOD], GREEDY, use_tqdm=False)
    tiny_oracle.check_greedy(GOOD, output["token_ids"])
    assert len(output["token_ids"]) == 4


def run(llm, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


# ---- all the forms of a prompt


@pytest.mark.parametrize(
    "prompts",
    [
        GOOD,
        [GOOD],
        (5, 6, 7),
        [(5, 6, 7)],
        ([5, 6, 7],),
        np.array(GOOD),
        np.array(GOOD, dtype=np.uint8),
        np.array([GOOD]),
        [np.array(GOOD)],
        [np.int64(5), np.int32(6), 7],
        torch.tensor(GOOD),
        torch.tensor(GOOD, dtype=torch.int32),
        torch.tensor([GOOD]),
        [torch.tensor(GOOD)],
        list(torch.tensor(GOOD)),
        list(np.array(GOOD)),
        range(5, 8),
        {"prompt_token_ids": GOOD},
        [{"prompt_token_ids": GOOD}],
        {"prompt_token_ids": np.array(GOOD)},
        {"prompt_token_ids": torch.tensor(GOOD), "prompt": "a text for show"},
        {"prompt_token_ids": (5, 6, 7), "prompt": None},
    ],
    ids=repr,
)
def test_ids_in_any_form_are_one_prompt(llm, tiny_oracle, prompts):
    (output,) = run(llm, prompts)
    assert output.prompt_token_ids == GOOD
    assert all(type(token_id) is int for token_id in output.prompt_token_ids)
    tiny_oracle.check_greedy(GOOD, output["token_ids"])


def test_ids_that_are_numpys_integers_are_read_at_once():
    """Each had its dtype spelt out first, which took thirty times as long as the number."""

    def seconds(work):
        starts = time.process_time()
        work()
        return time.process_time() - starts

    ids = list(np.arange(100_000))
    least = min(seconds(lambda: list(map(int, ids))) for _ in range(5))
    assert min(seconds(lambda: read_prompt(ids)) for _ in range(5)) < 12 * least


@pytest.mark.parametrize(
    "prompts", ["hello", ["hello"], ("hello",), {"prompt": "hello"}, np.array("hello")], ids=repr
)
def test_text_in_any_form_is_one_prompt(llm, prompts):
    (output,) = run(llm, prompts)
    assert output.prompt == "hello"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("hello")


@pytest.mark.parametrize("form", [list, tuple, iter, lambda prompts: (p for p in prompts)])
def test_prompts_of_several_forms_in_any_iterable(llm, form):
    prompts = ["hello", GOOD, {"prompt": "one"}, np.array([8, 9]), torch.tensor([3])]
    outputs = run(llm, form(prompts))
    assert [output.prompt for output in outputs] == ["hello", None, "one", None, None]
    assert outputs[1].prompt_token_ids == GOOD
    assert [output.prompt_token_ids for output in outputs[3:]] == [[8, 9], [3]]


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_the_rows_of_an_array_are_prompts(llm, array):
    outputs = run(llm, array([[5, 6], [7, 8]]))
    assert [output.prompt_token_ids for output in outputs] == [[5, 6], [7, 8]]


def test_an_array_of_texts_is_a_list_of_texts(llm):
    assert [output.prompt for output in run(llm, np.array(["hello", "one"]))] == ["hello", "one"]


@pytest.mark.parametrize("prompt", [np.array("hello"), np.str_("hello")])
def test_a_text_of_numpys_is_one_prompt(llm, prompt):
    """It was taken for a list of its characters."""
    assert [output.prompt for output in run(llm, prompt)] == ["hello"]


@pytest.mark.parametrize("prompts", [[], (), iter(())])
def test_no_prompts_give_no_outputs(llm, prompts):
    assert run(llm, prompts) == []


# ---- what is refused as a whole


@pytest.mark.parametrize("prompts", [None, 5, 5.0, True, object(), b"abc", bytearray(b"abc")])
def test_what_is_no_prompt_at_all(llm, prompts):
    with pytest.raises(TypeError, match="prompts must be a string, a list of token ids"):
        run(llm, prompts)


@pytest.mark.parametrize("prompts", [np.array(5), torch.tensor(5)], ids=repr)
def test_a_single_number_in_an_array_is_no_prompt(llm, prompts):
    with pytest.raises(TypeError, match="prompts must be"):
        run(llm, prompts)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "is empty: it has no token"),
        ([], "is empty: it has no token"),
        ((), "is empty: it has no token"),
        (np.array([], dtype=np.int64), "is empty: it has no token"),
        (torch.tensor([], dtype=torch.int64), "is empty"),
        ({"prompt": ""}, "is empty: it has no token"),
        ({"prompt_token_ids": []}, "is empty: it has no token"),
        ({"prompt": "text", "prompt_token_ids": []}, "is empty: it has no token"),
        ({"prompt": None}, "is empty"),
        ({}, "is a dict, which may have the keys 'prompt' and 'prompt_token_ids'"),
        ({"text": "x"}, r"must have one of them, got \['text'\]"),
        ({"prompt": "x", "image": 1}, r"got \['image', 'prompt'\]"),
        ({"prompt": 5}, "has 'prompt' of type int; it must be a string"),
        ({"prompt": ["x"]}, "has 'prompt' of type list; it must be a string"),
        ({"prompt_token_ids": "abc"}, "must be a string, token ids or a dict.*got str"),
        ({"prompt_token_ids": 5}, "got int"),
        (None, "must be a string, token ids or a dict.*got NoneType"),
        (5, "must be a string, token ids or a dict.*got int 5. The ids of a prompt are one list"),
        (2.5, "got float 2.5"),
        (b"abc", "got bytes"),
        ({5, 6}, "got set"),
        ([5, 6.0], "has 6.0 among its token ids, which must be integers"),
        ([5, "6"], "has '6' among its token ids"),
        (["a", "b"], "has 'a' among its token ids.*Texts stand in one flat list"),
        ([{"role": "user", "content": "x"}], "among its token ids.*Pass conversations to chat"),
        ({"role": "user", "content": "x"}, "got .*Pass conversations to chat"),
        ({"input_ids": GOOD}, r"got \['input_ids'\]. Pass its input_ids"),
        ([5, None], "has None among its token ids"),
        ([5, True], "has True among its token ids"),
        ([5, [6]], r"has \[6\] among its token ids"),
        (np.array([1.0, 2.0]), "has 1.0 among its token ids"),
        (np.array([True, False]), "has True among its token ids"),
        (torch.tensor([1.5]), "has 1.5 among its token ids"),
        (torch.tensor([[5, 6]]), r"has \[5, 6\] among its token ids"),
        ([5, float("nan")], "has nan among its token ids"),
        ([torch.tensor([1, 2, 3])], r"has tensor\(\[1, 2, 3\]\) among its token ids"),
        ([np.array([1, 2])], r"has array\(\[1, 2\]\) among its token ids"),
        ([1, torch.tensor(1.5)], r"has tensor\(1.5.*\) among its token ids"),
        ([1, torch.empty((), device="meta")], "among its token ids"),
        (torch.empty(3, device="meta"), "cannot be read as a list of numbers"),
        (torch.eye(3).to_sparse(), "cannot be read as a list of numbers"),
        ({"prompt_token_ids": torch.empty(3, device="meta")}, "cannot be read as a list"),
        ([5, -1], r"has token id -1; ids must be in \[0, 517\)"),
        ([5, 517], r"has token id 517; ids must be in \[0, 517\)"),
        ([2**70], "has token id 1180591620717411303424; ids must be"),
        ([5] * 64, "has 64 tokens; with one to generate that exceeds max_model_len = 64"),
        ([5] * 5000, "has 5000 tokens; with one .* Shorten it or raise max_model_len"),
        ("word " * 200, "tokens; with one to generate that exceeds max_model_len = 64"),
        ("\ud800 lone surrogate", "cannot be encoded"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_prompt_is_named_by_its_index_and_the_others_can_run(
    llm, tiny_oracle, prompt, reason
):
    with pytest.raises(ValueError, match=f"prompt 1 .*{reason}"):
        run(llm, [GOOD, prompt, GOOD])
    assert not llm._engine.scheduler.has_unfinished()
    first, bad, last = run(llm, [GOOD, prompt, GOOD], return_errors=True)
    for output in (first, last):
        assert output.error is None
        tiny_oracle.check_greedy(GOOD, output["token_ids"])
    assert bad.outputs == [] and bad.finished
    assert bad.error.startswith("prompt 1 ")
    with pytest.raises(ValueError, match="Look at output.error first"):
        bad["text"]


def test_the_longest_prompt_that_fits_runs(llm):
    (output,) = run(llm, [[5] * 63])
    assert len(output["token_ids"]) == 1
    assert output.outputs[0].finish_reason == "length"


def test_all_bad_prompts_are_listed_with_their_own_reasons(llm):
    with pytest.raises(ValueError) as caught:
        run(llm, [GOOD, [], "ok", [5] * 99, None, GOOD, [999]])
    lines = str(caught.value).splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1", "3", "4", "6"]
    assert "empty" in lines[0] and "99 tokens" in lines[1] and "999" in lines[3]
    assert lines[-1] == "Nothing was started. return_errors=True runs the others."


def test_a_long_list_of_bad_prompts_is_cut(llm):
    with pytest.raises(ValueError, match=r"prompt 19 is empty.*\n\.\.\. and 30 more"):
        run(llm, [[]] * 50)


def test_errors_in_one_of_a_thousand_lose_nothing(llm):
    prompts = [[5 + i % 7] for i in range(1000)]
    prompts[600] = []
    with pytest.raises(ValueError, match="prompt 600 is empty"):
        run(llm, prompts, SamplingParams(max_tokens=1))
    outputs = run(llm, prompts, SamplingParams(max_tokens=1), return_errors=True)
    assert len(outputs) == 1000
    assert [i for i, output in enumerate(outputs) if output.error] == [600]
    assert [output.prompt_token_ids for output in outputs[:3]] == [[5], [6], [7]]


def test_a_prompt_larger_than_the_cache_is_refused_and_a_small_one_runs(tiny_llm, tiny_oracle):
    llm = tiny_llm(num_kvcache_blocks=2, max_model_len=100)
    with pytest.raises(ValueError, match="prompt 0 has 40 tokens, more than the whole KV cache ho"):
        run(llm, [[5] * 40, GOOD])
    large, small = run(llm, [[5] * 40, GOOD], return_errors=True)
    assert "(32)" in large.error
    tiny_oracle.check_greedy(GOOD, small["token_ids"])


def test_a_sequence_that_outgrows_the_cache_ends_by_length(tiny_llm, tiny_oracle):
    llm = tiny_llm(num_kvcache_blocks=2, max_model_len=100)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    first, second = run(llm, [GOOD, [9, 9]], params)
    for prompt, output in ((GOOD, first), ([9, 9], second)):
        assert output.outputs[0].finish_reason == "length"
        assert len(prompt) + len(output["token_ids"]) == 33
        tiny_oracle.check_greedy(prompt, output["token_ids"])


def test_a_sequence_that_reaches_the_context_ends_by_length_and_the_others_go_on(
    tiny_llm, tiny_oracle
):
    llm = tiny_llm(max_model_len=16)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    long, short = list(range(5, 17)), [8]
    outputs = run(llm, [long, short], params)
    for prompt, output in zip((long, short), outputs, strict=True):
        assert len(prompt) + len(output["token_ids"]) == 16
        assert output.outputs[0].finish_reason == "length"
        tiny_oracle.check_greedy(prompt, output["token_ids"])


# ---- parameters


@pytest.mark.parametrize("num", [0, 1, 2, 4])
def test_a_list_of_parameters_of_another_length_is_refused(llm, num):
    with pytest.raises(ValueError, match=f"sampling_params has {num} entries for 3 prompts"):
        run(llm, [GOOD] * 3, [GREEDY] * num)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (5, "sampling_params must be a SamplingParams or one for each prompt, got int"),
        (0, "sampling_params must be .*got int"),
        (False, "sampling_params must be .*got bool"),
        ("x", "sampling_params must be a SamplingParams or one for each prompt, got str"),
        ({"temperature": 0}, "sampling_params must be a SamplingParams or .*, got dict"),
        ([None], r"sampling_params\[0\] must be a SamplingParams, got NoneType"),
        ([{"temperature": 0}], r"sampling_params\[0\] must be a SamplingParams, got dict"),
        (SamplingParams, "sampling_params must be .*got type"),
    ],
)
def test_parameters_of_a_wrong_type_are_refused(llm, params, match):
    with pytest.raises(TypeError, match=match):
        run(llm, [GOOD], params)


def test_each_prompt_has_its_own_parameters(llm):
    params = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 1, 2))
    outputs = run(llm, [GOOD] * 3, params)
    assert [len(output["token_ids"]) for output in outputs] == [3, 1, 2]
    assert len(run(llm, [GOOD], None)[0]["token_ids"]) >= 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop_token_ids": [517]}, r"has stop_token_ids with id 517; ids must be in \[0, 517\)"),
        ({"allowed_token_ids": [600]}, "has allowed_token_ids with id 600"),
        ({"logit_bias": {1000: 1.0}}, "has logit_bias with id 1000"),
    ],
)
def test_ids_in_parameters_must_be_of_the_vocabulary(llm, options, reason):
    with pytest.raises(ValueError, match=f"prompt 1 {reason}"):
        run(llm, [GOOD, GOOD], [GREEDY, GREEDY.clone(**options)])


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1},
        {"allowed_token_ids": [68], "bad_words": ["a"]},
    ],
)
def test_rules_that_bar_every_token_are_refused(llm, options):
    if "bad_words" in options:
        word = options["bad_words"][0]
        options = {
            **options,
            "allowed_token_ids": llm.get_tokenizer().encode(word, add_special_tokens=False),
        }
        assert len(options["allowed_token_ids"]) == 1
    with pytest.raises(ValueError, match="prompt 1 allows only tokens that are barred as well"):
        run(llm, [GOOD, GOOD], [GREEDY, GREEDY.clone(**options)])


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"allowed_token_ids": "a", "bad_words": ["aa"]}, "a"),
        ({"allowed_token_ids": "ab", "bad_words": ["aa", "ab", "bbb"]}, "a"),
        ({"allowed_token_ids": "ab", "bad_words": ["bbb", "ba"]}, "bb"),
        ({"allowed_token_ids": "ab", "bad_words": ["bbb", "aa"]}, None),
        ({"allowed_token_ids": "ab", "bad_words": ["b", "ba"]}, None),
        ({"allowed_token_ids": "ab", "bad_words": ["ba", "bb"], "stop_token_ids": "b"}, None),
        ({"stop_token_ids": range(517), "min_tokens": 1}, ""),
        ({"allowed_token_ids": "ab", "bad_words": ["aa"], "stop_token_ids": "b"}, None),
        (
            {
                "allowed_token_ids": "ab",
                "bad_words": ["aa"],
                "stop_token_ids": "b",
                "min_tokens": 2,
            },
            "a",
        ),
        ({"allowed_token_ids": "a", "bad_words": ["aa"], "max_tokens": 1}, None),
        ({"bad_words": ["aa", "b", "bc"]}, None),
    ],
)
def test_rules_that_bar_every_token_after_some_output_are_refused(llm, options, output):
    """Token 0 was drawn there, whatever was allowed."""
    ids = {
        name: [67 + "abc".index(char) for char in value]
        for name, value in options.items()
        if isinstance(value, str)
    }
    assert llm.get_tokenizer().encode("abc", add_special_tokens=False) == [67, 68, 69]
    params = GREEDY.clone(**{**options, **ids})
    if output is not None:
        shown = [67 + "abc".index(char) for char in output]
        with pytest.raises(ValueError, match=re.escape(f"after the output {shown}:")):
            run(llm, [GOOD], params)
    else:
        (found,) = run(llm, [GOOD], params)
        assert set(found["token_ids"]) <= set(ids.get("allowed_token_ids", range(517)))


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_processor_that_bars_every_token_is_named(llm, value):
    def bars_all(_, logits):
        return logits.fill_(value)

    with pytest.raises(ValueError, match="bars_all.*left no token to draw"):
        run(llm, [GOOD], GREEDY.clone(logits_processors=[bars_all]))


@pytest.mark.parametrize("value", [0, -1, -100])
def test_no_request_for_no_tokens(value):
    with pytest.raises(ValueError, match=f"max_tokens must be at least 1, got {value}"):
        SamplingParams(max_tokens=value)


# ---- the step-level API


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "is empty"),
        ([], "is empty"),
        ([600], "token id 600"),
        ([5] * 64, "64 tokens"),
        (None, "N"),
    ],
)
def test_add_request_refuses_what_generate_refuses(llm, prompt, reason):
    with pytest.raises(ValueError, match=reason):
        llm.add_request(prompt, GREEDY)
    assert llm.is_finished()


def test_add_request_checks_its_parameters(llm):
    for params in (5, 0, [], {"temperature": 0}, "x"):
        with pytest.raises((TypeError, ValueError), match="sampling_params.* (must be|0 entries)"):
            llm.add_request(GOOD, params)
    with pytest.raises(TypeError, match="request_id must be a string"):
        llm.add_request(GOOD, GREEDY, request_id=7)


def test_a_request_id_in_use_is_refused_and_the_first_goes_on(llm, tiny_oracle):
    llm.add_request(GOOD, GREEDY, request_id="a")
    with pytest.raises(ValueError, match="request_id 'a' is in use. Choose another"):
        llm.add_request(GOOD, GREEDY, request_id="a")
    outputs = []
    while not llm.is_finished():
        outputs += llm.step()
    assert [output.request_id for output in outputs] == ["a"]
    llm.add_request(GOOD, GREEDY, request_id="a")  # free again
    assert [o.outputs[0].finish_reason for o in llm.abort("a")] == ["abort"]


def test_generate_gets_out_of_the_way_of_a_users_numbers(llm, tiny_oracle):
    """Its own ids count up; a pending request that was given such a number is not touched."""
    next_number = int(llm.add_request(GOOD, GREEDY)) + 2
    llm.add_request(GOOD, GREEDY, request_id=str(next_number))
    outputs = run(llm, [[8, 9], [9, 8], [7, 8]])
    assert [output.prompt_token_ids for output in outputs] == [[8, 9], [9, 8], [7, 8]]
    later = []
    while not llm.is_finished():
        later += llm.step()
    assert sorted(output.request_id for output in later) == sorted(
        [str(next_number - 2), str(next_number)]
    )


# ---- chat


@pytest.mark.parametrize(
    "messages",
    [None, 5, "hello", ["hello"], [["hello"]], [None], [{"role": "user"}, "x"], {"role": "user"}],
    ids=repr,
)
def test_messages_that_are_none(llm, messages):
    with pytest.raises((TypeError, ValueError), match="messages must be|has message"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_a_conversation_that_is_too_long_names_its_index(llm):
    short, long = ([{"role": "user", "content": "x" * n}] for n in (1, 500))
    with pytest.raises(ValueError, match="prompt 1 has .* tokens; with one to generate"):
        llm.chat([short, long], GREEDY, use_tqdm=False)


def test_template_options_must_be_a_dict(llm):
    with pytest.raises(TypeError, match="chat_template_kwargs must be a dict .* got 5 of type int"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, chat_template_kwargs=5)


# ---- options of the engine


@pytest.mark.parametrize("model", ["~nosuchuser/x", "x" * 5000, "/" + "x" * 5000, "a/\0"])
def test_a_path_that_the_system_refuses_is_no_directory(model):
    with pytest.raises(ValueError, match="is no directory") as caught:
        LLM(model)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [2**45, 2**62, 2**70])
def test_more_than_the_memory_holds_names_the_option(tiny_llm, value):
    with pytest.raises(ValueError, match="Lower num_kvcache_blocks"):
        tiny_llm(num_kvcache_blocks=value)


def test_more_rows_than_any_memory_holds_are_refused(tiny_llm):
    with pytest.raises(ValueError, match=r"max_num_seqs must be from 1 to 32768, got 2000000\."):
        tiny_llm(max_num_seqs=2_000_000)


@pytest.mark.parametrize("size", [3, 1000])
def test_a_split_that_cannot_be_is_refused_before_a_worker_starts(tiny_model, monkeypatch, size):
    monkeypatch.setattr("nanovllm.engine.executor.WorkerGroup", None)
    with pytest.raises(ValueError, match=f"cannot be split over tensor_parallel_size = {size}"):
        LLM(tiny_model, device="cpu", tensor_parallel_size=size)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    model = SimpleNamespace(num_heads=8, num_kv_heads=2, intermediate_size=64, moe=None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_ranks(model, 2, torch.device("cuda"))
    check_ranks(model, 8, torch.device("cpu"))
    with pytest.raises(ValueError, match="tensor_parallel_size = 4 needs as many GPUs.*sees 2"):
        check_ranks(model, 4, torch.device("cuda"))


# ---- no tokenizer, or none that can be read


def test_a_model_without_a_tokenizer_runs_ids_and_refuses_text(tmp_path, tiny_model, make_llm):
    shutil.copytree(tiny_model, tmp_path / "model")
    for path in (tmp_path / "model").glob("tokenizer*"):
        path.unlink()
    llm = make_llm(tmp_path / "model", device="cpu", dtype="float32", num_kvcache_blocks=16)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    texts = ["hello", [5, 6]]
    bad, good = llm.generate(texts, params, use_tqdm=False, return_errors=True)
    assert "prompt 0 is text, but the model has no tokenizer; pass token ids." in bad.error
    assert len(good["token_ids"]) == 3 and good["text"] == ""
    with pytest.raises(ValueError, match="asks for stop strings or bad words, but the model has"):
        llm.generate([[5, 6]], params.clone(stop=["x"]), use_tqdm=False)
    with pytest.raises(ValueError, match="has no tokenizer"):
        llm.get_tokenizer()
    with pytest.raises(ValueError, match="has no tokenizer"):
        llm.score(["hello"], ["x"], use_tqdm=False)
    assert llm.score([[5, 6]], [[7]], use_tqdm=False)[0].logprob < 0


def test_a_tokenizer_of_another_kind_is_named_with_the_way_out(tmp_path, tiny_model):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "model" / "tokenizer.model")
    with pytest.raises(ValueError, match=r"has tokenizer.model but no tokenizer.json. Convert it"):
        LLM(tmp_path / "model", device="cpu", num_kvcache_blocks=16)


def test_a_mapping_that_raises_is_a_bad_prompt(llm, nothing_is_left_behind):
    class Broken(dict):
        def get(self, key, default=None):
            raise OSError("gone")

        __getitem__ = get

    good, bad = llm.generate([[5, 6], Broken(prompt="x")], use_tqdm=False, return_errors=True)
    assert good.error is None and "prompt 1 " in bad.error
