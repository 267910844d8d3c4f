"""Texts too long for any context: refused before the tokenizer, which takes minutes or panics."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.batch import BatchOptions, run_batch
from nanovllm.utils.tokenizer import encode_texts, load_tokenizer

MODEL = Path(__file__).parents[1] / "tiny-qwen3"
OPTIONS = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=2)
TOO_LONG = r"has \d+ characters, more than max_model_len = 1024 tokens can stand for. Shorten it"


class Panic(BaseException):
    pass


Panic.__name__ = "PanicException"  # as pyo3 calls it; a class of that name is private to it


class Panicking:
    """A tokenizer that panics in Rust at some texts, as Qwen's does at ten million spaces."""

    def __call__(self, texts, add_special_tokens):
        if any("panic" in text for text in texts):
            raise Panic("Regex search error")
        if any("stop" in text for text in texts):
            raise KeyboardInterrupt
        return {"input_ids": [[len(text)] for text in texts]}

    def get_vocab(self):
        return {"a" * 20: 0}


def encode(texts, max_tokens=10):
    return encode_texts(Panicking(), texts, max_tokens=max_tokens, add_special_tokens=False)


def test_a_panic_is_the_fault_of_one_text():
    """It is no Exception, went past every handler, and ended the job."""
    first, second, third = encode(["a", "panic", "bc"])
    assert (first, third) == ([1], [2])
    assert str(second) == "cannot be tokenised (PanicException: Regex search error)"
    with pytest.raises(KeyboardInterrupt):
        encode(["a", "stop"])


def test_what_no_context_holds_is_not_looked_at():
    longest = "x" * (4 * 20 * 10)
    fits, too_long, last = encode([longest, longest + "panic", "x"])
    assert (fits, last) == ([len(longest)], [1])
    assert str(too_long).startswith("has 805 characters, more than max_model_len = 10 tokens can")


def test_every_text_that_fits_is_tokenised(demo_model):
    """The longest token of all, over and over."""
    tokenizer = load_tokenizer(demo_model)
    longest = max(tokenizer.get_vocab(), key=len)
    text = tokenizer.convert_tokens_to_string([longest]) * 100
    (ids,) = encode_texts(tokenizer, [text], max_tokens=100, add_special_tokens=False)
    assert 0 < len(ids) <= 100


@pytest.mark.parametrize("text", [" " * 10**7, "a" * 10**7, "\n" * 10**7, "é😀" * 10**6])
def test_a_prompt_of_megabytes_is_refused_at_once(llm, text):
    started = time.process_time()
    with pytest.raises(ValueError, match=rf"prompt 1 {TOO_LONG}"):
        llm.generate(["hi", text], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=rf"prompt 0 {TOO_LONG}"):
        llm.chat([{"role": "user", "content": text}], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=rf"context 0 with its continuation {TOO_LONG}"):
        llm.score("hi", [text], use_tqdm=False)
    with pytest.raises(ValueError, match=rf"continuation 1 {TOO_LONG}"):
        llm.score([[1], [1, 2]], [[3], text], use_tqdm=False)
    with pytest.raises(ValueError, match=rf"prompt 0 has a bad word that {TOO_LONG}"):
        llm.generate("hi", GREEDY.clone(bad_words=[text]), use_tqdm=False)
    assert time.process_time() - started < 5


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, **OPTIONS) as engine:
        yield engine


def test_a_job_goes_on_after_lines_of_megabytes(tmp_path):
    text = " " * 10**7
    lines = [
        {"prompt": text},
        {"messages": [{"role": "user", "content": text}], "row": 2},
        {"prompt": "1+1=", "max_tokens": 2},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = BatchOptions(str(tmp_path / "in.jsonl"), tmp_path / "out", show_progress=False)
    started = time.process_time()
    summary = run_batch(MODEL, options, **OPTIONS)
    assert time.process_time() - started < 20
    assert (summary.num_ok, summary.num_failed) == (1, 2)
    errors = [json.loads(line).get("error") for line in (tmp_path / "out").open()]
    messages = sorted(error["message"][:60] for error in errors if error)
    assert [m.partition("has ")[0] for m in messages] == [
        "the prompt ",
        "what the chat template wrote ",
    ]
