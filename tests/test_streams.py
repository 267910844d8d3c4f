"""Results as they come: streams of text, stop rules and the progress bar."""

from __future__ import annotations

import itertools
import logging

import pytest

from nanovllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def spelled(llm, text: str, **fields) -> SamplingParams:
    """Parameters under which the model has no choice but to write `text`, then eos."""
    ids = [*llm.get_tokenizer().encode(text, add_special_tokens=False), 2]

    def force(output, logits):
        logits[:] = float("-inf")
        logits[ids[len(output)]] = 0.0
        return logits

    return SamplingParams(temperature=0, max_tokens=len(ids), logits_processors=[force], **fields)


# ---- one request's text


TEXTS = ["hello world", "日本語のテキスト", "👩‍👩‍👧 family 🎉🎉", "naïve é" * 3, "a\n\n  b\tc"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_and_never_half_a_character(llm, text):
    params = spelled(llm, text)
    pieces = list(llm.stream([5, 6], params))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 1
    (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert output["text"] == text


@pytest.mark.parametrize("seed", range(2))
def test_pieces_of_random_tokens_are_the_final_text(llm, seed):
    """Random bytes leave half characters: those are in the final text, as decode gives them."""
    params = SamplingParams(temperature=1.5, seed=seed, max_tokens=40)
    (output,) = llm.generate(["hello"], params, use_tqdm=False)
    assert "".join(llm.stream("hello", params)) == output["text"]
    decoded = llm.get_tokenizer().decode(output["token_ids"], skip_special_tokens=True)
    assert output["text"] == decoded


@pytest.mark.parametrize("enable_overlap", [False, True])
def test_a_stream_among_others_gives_what_a_batch_gives(tiny_llm, enable_overlap):
    """With overlap a token comes a step late, and one too many is on its way at a stop string."""
    llm = tiny_llm(enable_overlap=enable_overlap)
    params = SamplingParams(
        temperature=1.2, seed=3, max_tokens=60, ignore_eos=True, stop=["e", "a"]
    )
    expected = [o["text"] for o in llm.generate(["hello", "one two"], params, use_tqdm=False)]
    other = llm.add_request([5, 6, 7], GREEDY.clone(max_tokens=90))
    for prompt, text in zip(["hello", "one two"], expected, strict=True):
        assert "".join(llm.stream(prompt, params)) == text
    llm.abort(other)


# (fields, final text, stop_reason) of an answer that would be "one two END three<|im_end|>"
STOPS = [
    ({"stop": "END"}, "one two ", "END"),
    ({"stop": ["three", "END", "two"]}, "one ", "two"),  # the earliest in the text, not in the list
    ({"stop": ["o E", "END"]}, "one tw", "o E"),
    ({"stop": "END", "include_stop_str_in_output": True}, "one two END", "END"),
    ({"stop": "wo END th"}, "one t", "wo END th"),  # begins and ends inside tokens
    ({"stop": "never"}, "one two END three", None),
    ({"stop": "o END", "min_tokens": 200}, None, None),
    ({}, "one two END three", None),
    ({"stop": "<|im_end|>"}, "one two END three", "<|im_end|>"),
    (
        {"stop": "<|im_end|>", "include_stop_str_in_output": True},
        "one two END three<|im_end|>",
        "<|im_end|>",
    ),
    ({"stop": "ee<|im_end|>"}, "one two END thr", "ee<|im_end|>"),
    ({"stop": "three", "skip_special_tokens": False}, "one two END ", "three"),
    ({"skip_special_tokens": False}, "one two END three", None),  # eos ended it: as stop strings
    (
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
        "one two END three<|im_end|>",
        None,
    ),
    (
        {"skip_special_tokens": False, "ignore_eos": True},  # ended by length: eos is no end
        "one two END three<|im_end|>",
        None,
    ),
]


@pytest.mark.parametrize(("fields", "text", "stop_reason"), STOPS, ids=str)
def test_stop_rules_in_batches_and_streams(llm, fields, text, stop_reason):
    if "min_tokens" in fields:
        with pytest.raises(ValueError, match="min_tokens must be at most"):
            spelled(llm, "one two END three", **fields)
        return
    params = spelled(llm, "one two END three", **fields)
    (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
    completion = output.outputs[0]
    reason = "length" if params.ignore_eos else "stop"
    assert (completion.text, completion.finish_reason) == (text, reason)
    assert completion.stop_reason == stop_reason
    decoded = llm.get_tokenizer().decode(completion.token_ids)
    assert "one two END three<|im_end|>".startswith(decoded), "no token but those drawn"
    assert "".join(llm.stream([5, 6], params)) == text


def test_a_special_stop_string_in_the_middle_is_found_though_it_is_not_shown(llm):
    params = spelled(llm, "one<|im_start|>two<|im_start|>", stop=["<|im_start|>two"])
    (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert (output["text"], output.outputs[0].stop_reason) == ("one", "<|im_start|>two")
    params = spelled(
        llm, "one<|im_start|>two<|endoftext|>x", stop=["<|endoftext|>"], ignore_eos=True
    )
    pieces = list(llm.stream([5, 6], params))
    assert "".join(pieces) == "onetwo"


def test_a_stop_token_id_and_eos_say_what_they_were(llm):
    o = llm.get_tokenizer().encode("one two", add_special_tokens=False)[-1]
    params = spelled(llm, "one two", stop_token_ids=[o])
    (output,) = llm.generate([[5, 6]], params, use_tqdm=False)
    assert output.outputs[0].stop_reason == o and output["token_ids"][-1] == o
    assert output["text"] != "one two" and "one two".startswith(output["text"])
    assert "".join(llm.stream([5, 6], params)) == output["text"]
    (output,) = llm.generate([[5, 6]], spelled(llm, "one two"), use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    assert output["token_ids"][-1] == 2 and output["text"] == "one two"
    (output,) = llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_closing_a_stream_aborts_its_request(llm):
    stream = llm.stream([5, 6], GREEDY.clone(max_tokens=300))
    next(stream)
    assert llm._engine.scheduler.num_running == 1
    stream.close()
    assert llm._engine.scheduler.num_running == 0
    never_started = llm.stream([5, 6], GREEDY)
    never_started.close()


def test_a_stream_and_other_requests_do_not_take_each_others_outputs(llm):
    request_id = llm.add_request([7, 8], GREEDY.clone(max_tokens=3))
    stream = llm.stream([5, 6], GREEDY)
    pieces = list(itertools.islice(stream, 1))
    (inside,) = llm.generate([[9, 9]], GREEDY, use_tqdm=False)
    pieces += list(stream)
    assert "".join(pieces) == llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0]["text"]
    assert inside["text"] == llm.generate([[9, 9]], GREEDY, use_tqdm=False)[0]["text"]
    assert [output.request_id for output in llm.step()] == [request_id]


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (SamplingParams(n=2), "one answer a prompt, got n=2"),
        (SamplingParams(detokenize=False), "stream gives text, but detokenize is False"),
        ("x", "must be a SamplingParams"),
    ],
)
def test_what_cannot_be_streamed_is_refused_at_the_call(llm, params, match):
    with pytest.raises((TypeError, ValueError), match=match):
        llm.stream("hello", params)


def test_a_bad_prompt_of_a_stream_is_refused_at_the_call(llm):
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        llm.stream("")


# ---- progress


class Bar:
    """What is called in tqdm's place."""

    def __init__(self, log, **options):
        self.log, self.options = log, options
        log.append(self)
        self.count, self.is_closed, self.figures = 0, False, []

    def update(self, count):
        self.count += count

    def set_postfix(self, figures):
        self.figures.append(dict(figures))

    def close(self):
        self.is_closed = True


def test_tokenising_many_prompts_shows_how_far_it_is(llm):
    log = []
    prompts = ["hello world"] * 50_000 + [""]
    with pytest.raises(ValueError, match="prompt 50000 is empty"):
        llm.generate(prompts, GREEDY, use_tqdm=lambda **options: Bar(log, **options))
    (bar,) = log
    counts = [figures["tokenized"] for figures in bar.figures if "tokenized" in figures]
    assert bar.options["total"] == 50_001 and bar.is_closed and bar.count == 0
    assert len(counts) > 50 and counts == sorted(counts) and counts[-1] == 50_001


def test_figures_of_the_progress(llm):
    log = []
    params = SamplingParams(n=2, seed=1, max_tokens=4)
    llm.generate([[5]] * 6, params, use_tqdm=lambda **options: Bar(log, **options))
    llm.score([[5]] * 4, [[6]] * 4, use_tqdm=lambda **options: Bar(log, **options))
    llm.chat(
        [[{"role": "user", "content": "hello"}]] * 3,
        GREEDY,
        use_tqdm=lambda **options: Bar(log, **options),
    )
    assert [(bar.options["total"], bar.count) for bar in log] == [(6, 6), (4, 4), (3, 3)]
    assert {"in_tok_s", "out_tok_s"} <= log[0].figures[-1].keys()
    assert any({"run", "wait", "kv"} <= figures.keys() for figures in log[0].figures)


def test_no_bar_prints_nothing_and_a_real_one_goes_to_stderr(llm, capsys, caplog):
    with caplog.at_level(logging.WARNING):
        llm.generate([[5], [6]], GREEDY, use_tqdm=False)
        llm.score([[5]], [[6]], use_tqdm=False)
        list(llm.stream([5], GREEDY))
        list(llm.generate_iter([[5]], GREEDY))
    assert capsys.readouterr() == ("", "") and caplog.records == []
    llm.generate([[5], [6]], GREEDY)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err


@pytest.mark.parametrize("point", ["__init__", "update", "set_postfix", "close"])
def test_a_bar_that_cannot_be_written_costs_nothing_but_itself(llm, point, monkeypatch, caplog):
    """stderr was a pipe whose reader had gone, and the answers were lost."""

    def gone(*args, **kwargs):
        raise BrokenPipeError(32, "Broken pipe")

    expected = [output["text"] for output in llm.generate([[5], [6]], GREEDY, use_tqdm=False)]
    monkeypatch.setattr(Bar, point, gone)
    outputs = llm.generate([[5], [6]], GREEDY, lambda **options: Bar([], **options))
    assert [output["text"] for output in outputs] == expected
    assert "progress bar" in caplog.text
