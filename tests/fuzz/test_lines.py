"""Request lines of any bytes: a job or a reason, one of each for a line, and no more than that."""

from __future__ import annotations

import json
import sys
import time

import pytest
from fuzz.json_values import NUM_EXAMPLES, VALUES, mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.batch.records import BadLine, Job, LineParser, dump_line, error_record

PARSER = LineParser("model", seed=0, defaults={})
CHAT = {
    "model": "model",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    "temperature": 0.5,
    "max_tokens": 4,
    "logit_bias": {"5": 1.0},
    "stop": ["x"],
    "tools": [{"type": "function"}],
    "chat_template_kwargs": {"enable_thinking": False},
}
LINES = [
    {"prompt": "x", "temperature": 0, "max_tokens": 3, "custom_id": "a", "row": 1},
    {"prompt": [1, 2, 3], "top_p": 0.5, "logit_bias": {"7": 2}, "stop_token_ids": [1]},
    {"messages": [{"role": "user", "content": "x"}], "n": 2, "seed": 5, "bad_words": ["y"]},
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": [1, 2], "logprobs": 2, "best_of": 1, "echo": False, "suffix": ""},
    },
]
EXTRA = ("prompt", "messages", "seed", "min_p", "top_k", "allowed_token_ids", "output", "error")


def outcome(line: bytes) -> Job | BadLine:
    """What the reader does with a line; whatever else is raised would end the job."""
    started = time.process_time()
    try:
        result: Job | BadLine = PARSER.parse(line, 7)
    except BadLine as bad:
        result = bad
        record = dump_line_of(bad)
        assert len(record) < 20_000 + 2 * len(line), "a reason quotes its line, and not twice"
        assert len(str(bad)) < 2_000
    assert time.process_time() - started < 5
    return result


def dump_line_of(bad: BadLine) -> bytes:
    """As the reader writes it."""
    try:
        return dump_line(error_record(bad, 7))
    except ValueError:
        bad.plain = None
        return dump_line(error_record(bad, 7))


def encoded(data: object) -> bytes:
    return json.dumps(data).encode()


@settings(max_examples=5 * NUM_EXAMPLES, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_bad_line(data):
    assert isinstance(outcome(data), BadLine)


@settings(max_examples=5 * NUM_EXAMPLES, deadline=None)
@given(st.sampled_from(LINES).flatmap(lambda line: mutated(line, EXTRA)))
def test_mutated_lines_are_jobs_or_have_reasons(data):
    outcome(encoded(data))


@settings(max_examples=2 * NUM_EXAMPLES, deadline=None)
@given(mutated(CHAT, EXTRA))
def test_mutated_bodies_are_jobs_or_have_reasons(body):
    outcome(encoded({**LINES[3], "body": body}))


@settings(max_examples=2 * NUM_EXAMPLES, deadline=None)
@given(
    st.sampled_from(LINES).map(encoded),
    st.integers(0, 400),
    st.sampled_from([b"", b"\xff", b"\xc3", b"\xe2\x82", b"\0", b"\xef\xbb\xbf", b'"', b"\\ud83d"]),
)
def test_cut_and_spliced_lines_are_jobs_or_have_reasons(line, place, splice):
    place %= len(line)
    outcome(line[:place])
    outcome(line[:place] + splice + line[place:])


GOOD = b'{"prompt": "x", "max_tokens": 2'


@pytest.mark.parametrize(
    "line",
    [
        GOOD + b', "seed": ' + b"9" * 5000 + b"}",
        GOOD + b', "seed": ' + b"9" * 4000 + b"}",
        GOOD + b', "temperature": ' + b"9" * 4000 + b"}",
        GOOD + b', "temperature": 1e400}',
        GOOD + b', "temperature": NaN}',
        GOOD + b', "row": -Infinity}',
        GOOD + b', "logit_bias": {"1_0": 1}}',
        GOOD + b', "logit_bias": {" 5": 1}}',
        GOOD + b', "logit_bias": {"\\u0665": 1}}',
        GOOD + b', "logit_bias": {"5": 1, "05": 2}}',
        GOOD + b', "prompt": "y"}',
        GOOD + b', "max_tokens": 3}',
        b'{"custom_id": "a", "custom_id": "b", "prompt": "x"}',
        b'{"prompt": "x", "logit_bias": {"5": 1, "5": 2}}',
        b'{"custom_id": ' + b"[" * 900 + b"]" * 900 + b', "prompt": "x"}',
        b'{"prompt": "x", "temperature": ' + b"[" * 980 + b"]" * 980 + b"}",
        b"\xef\xbb\xbf\xef\xbb\xbf" + GOOD + b"}",
        (GOOD + b"}").decode().encode("utf-16"),
        GOOD + b"}\r" + GOOD + b"}",
        b'{"prompt": "\xc3"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\nb"}',
        b"[1, 2]",
        b"null",
        b"{}",
    ],
    ids=lambda line: repr(line[:60]),
)
def test_a_line_that_means_nothing_or_two_things_is_refused(line):
    assert isinstance(outcome(line), BadLine)


@pytest.mark.parametrize(
    "line",
    [
        GOOD + b"}\r\n",
        b"  \t" + GOOD + b"}  ",
        b"\xef\xbb\xbf" + GOOD + b"}",
        GOOD + b', "row": ' + b"9" * 4000 + b"}",
        GOOD + b', "row": 1e308}',
        GOOD + b', "row": {"a": [1, {"a": 2}]}}',
        GOOD + b', "logit_bias": {"5": 1, "6": 2}}',
        GOOD + b', "row": "\xe2\x80\xa8\\u0000"}',
    ],
    ids=lambda line: repr(line[:60]),
)
def test_unusual_lines_that_mean_one_thing_are_jobs(line):
    assert isinstance(outcome(line), Job)


BIG = 12 << 20


@pytest.mark.parametrize(
    "line",
    [
        b'{"prompt": "x", "' + b"k" * BIG + b'": 1}',
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "'
        + b"temperature" * (BIG // 11)
        + b'": 1}}',
        b'{"custom_id": "a", "method": "' + b"P" * BIG + b'", "url": "u", "body": {}}',
        b'{"prompt": "x", "temperature": "' + b"1" * BIG + b'"}',
        b'{"prompt": "x", "stop": [1, "' + b"1" * BIG + b'"]}',
        b'{"prompt": "x", "tools": "' + b"1" * BIG + b'"}',
        b'{"k' + b'": 1, "k'.join(b"%d" % i for i in range(200_000)) + b'": 1}',
        b"[" * BIG,
        b"9" * BIG,
        b'"' + b"\xc3" * BIG,
    ],
    ids=lambda line: repr(line[:60]),
)
def test_a_long_line_is_refused_soon_and_in_few_words(line):
    before = resident_bytes()
    outcome(line)
    assert resident_bytes() - before < 40 * BIG


def resident_bytes() -> int:
    if not sys.platform.startswith("linux"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@settings(max_examples=2 * NUM_EXAMPLES, deadline=None)
@given(VALUES)
def test_any_value_as_a_whole_line(value):
    if not isinstance(value, dict):
        assert isinstance(outcome(encoded(value)), BadLine)
