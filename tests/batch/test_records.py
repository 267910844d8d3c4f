"""What a request line may say, what is refused and how, and what results look like."""

import json
from dataclasses import replace

import pytest

from nanovllm.batch.records import (
    BadLine,
    LineParser,
    dump_line,
    error_record,
    line_seed,
    record_key,
)
from nanovllm.batch.results import result_record
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

PARSER = LineParser("model", seed=0, defaults={})
MESSAGES = [{"role": "user", "content": "Hello"}]


def chat(custom_id="a", **body):
    body = {"model": "model", "messages": MESSAGES, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(**body):
    body = {"model": "model", "prompt": "Hello", **body}
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}


def parse(data, number=7, parser=PARSER):
    return parser.parse(data if isinstance(data, bytes) else json.dumps(data).encode(), number)


def test_a_chat_line_gives_messages_and_parameters():
    job = parse(
        chat(
            temperature=0.5,
            max_completion_tokens=9,
            logit_bias={"5": -1},
            top_k=3,
            min_p=0.1,
            repetition_penalty=1.1,
            ignore_eos=True,
            stop_token_ids=[4],
            stop="x",
            logprobs=True,
            top_logprobs=2,
            seed=11,
            user="somebody",
            stream=False,
            chat_template_kwargs={"enable_thinking": False},
            tools=[{"type": "function"}],
        )
    )
    params = job.params
    assert (job.custom_id, job.form, job.messages) == ("a", "chat", MESSAGES)
    assert (params.temperature, params.max_tokens, params.top_k) == (0.5, 9, 3)
    assert (params.logit_bias, params.stop, params.logprobs) == (((5, -1.0),), ("x",), 2)
    assert (params.seed, params.ignore_eos, params.stop_token_ids) == (11, True, (4,))
    assert job.template["chat_template_kwargs"] == {"enable_thinking": False}
    assert job.template["tools"] == [{"type": "function"}]


def test_limits_left_open_are_the_apis_and_ours():
    assert parse(chat()).params.max_tokens is None
    assert parse(completion()).params.max_tokens == 16
    assert parse({"prompt": "x"}).params.max_tokens == 64
    parser = LineParser("model", seed=0, defaults={"max_tokens": 5, "temperature": 0.0})
    assert parse(chat(), parser=parser).params.max_tokens == 5
    assert parse(chat(temperature=None), parser=parser).params.temperature == 0.0
    assert parse(chat(temperature=1), parser=parser).params.temperature == 1.0


def test_text_parts_are_joined_and_pictures_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    job = parse(chat(messages=[{"role": "user", "content": parts}]))
    assert job.messages == [{"role": "user", "content": "ab"}]
    with pytest.raises(BadLine, match=r"messages\[0\].content has a part of type 'image_url'"):
        parse(chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]))


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"{oops", "is not valid JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b'{"prompt": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "\xff"}', "is not valid JSON"),
        (rb'{"prompt": "\ud800"}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply|is not valid JSON"),
        ({"text": "x"}, "'prompt' or 'messages'"),
        ({"prompt": "x", "messages": MESSAGES}, "'prompt' or 'messages'"),
        ({"prompt": "x", "output": 1}, "'output' is where the result goes"),
        ({"prompt": "x", "prompt_logprobs": 1}, "'prompt_logprobs' cannot be asked for"),
        ({"prompt": "x", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "x", "custom_id": 5}, "custom_id must be a string"),
        ({**chat(), "priority": 1}, "unknown field 'priority'"),
        ({**chat(), "url": "/v1/embeddings"}, "url must be"),
        ({**chat(), "method": "GET"}, "method must be 'POST'"),
        ({"method": "POST", "url": "/v1/completions", "body": {}}, "no 'custom_id'"),
        (chat(temprature=0), "unknown field 'temprature' in body. Did you mean 'temperature'?"),
        (chat(prompt="x"), "unknown field 'prompt'"),
        (completion(messages=MESSAGES), "unknown field 'messages'"),
        (chat(stream=True), "stream must be False here, got True"),
        (chat(response_format={"type": "json_object"}), "response_format must be"),
        (chat(tool_choice={"type": "function"}), "tool_choice must be"),
        (chat(n=2, temperature=0), "n must be 1"),
        (chat(n="2"), "n must be an int"),
        (chat(top_logprobs=2), "top_logprobs needs logprobs"),
        (chat(logprobs=2), "logprobs must be true or false"),
        (chat(max_tokens=3, max_completion_tokens=4), "differ"),
        (chat(logit_bias={"x": 1}), "no token id"),
        (chat(messages=[]), "messages must be a list with at least one"),
        (chat(messages=[{"content": "x"}]), r"messages\[0\] must be an object with a 'role'"),
        (chat(messages=[{"role": "user"}]), r"messages\[0\] has no 'content'"),
        (completion(prompt=None), "no 'prompt'"),
        (completion(prompt=["a", "b"]), "one string or one list of token ids"),
        (completion(echo=True), "echo must be False"),
        (completion(best_of=3), "best_of must be 1"),
        (completion(logprobs=99), "logprobs must be from 0 to 20"),
        (chat(max_tokens=0), "max_tokens must be at least 1"),
    ],
    ids=lambda value: None if isinstance(value, str) else "line",
)
def test_a_bad_line_says_what_is_wrong(line, reason):
    with pytest.raises(BadLine, match=reason):
        parse(line)


def test_a_bad_line_keeps_the_id_that_it_names():
    with pytest.raises(BadLine) as caught:
        parse(chat("mine", temprature=0))
    record = error_record(caught.value, 7)
    assert record["custom_id"] == "mine" and record["response"] is None
    assert record["error"]["line"] == 7 and "temprature" in record["error"]["message"]
    assert record_key(record) == "mine"


def test_seeds_derive_from_the_engine_and_the_line_and_nothing_else():
    assert parse({"prompt": "x"}, 3).params.seed == line_seed(0, 3)
    assert parse({"prompt": "y", "custom_id": "3"}, 9).params.seed == line_seed(0, "3")
    assert parse({"prompt": "x", "seed": 5}, 3).params.seed == 5
    seeds = {line_seed(0, 3), line_seed(0, "3"), line_seed(0, 4), line_seed(1, 3)}
    assert len(seeds) == 4
    assert line_seed(0, 3) == 43346542729358146, "resumed jobs of older versions rely on it"


ANSWER = CompletionOutput(
    index=0,
    text="hé",
    token_ids=[8, 9],
    finish_reason="stop",
    stop_reason="x",
    logprobs=[
        {8: Logprob(-0.5, 2, "h"), 3: Logprob(-0.1, 1, "H")},
        {9: Logprob(-0.2, 1, "é"), 4: Logprob(-0.3, 2, "e")},
    ],
)
OUTPUT = RequestOutput("0", "Hello", [1, 2, 3], [ANSWER], True, num_cached_tokens=2)
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def test_a_chat_result_is_what_the_api_writes():
    record = result_record(parse(chat(logprobs=True, top_logprobs=1)), OUTPUT)
    assert list(record) == ["id", "custom_id", "response", "error"]
    assert record["custom_id"] == "a" and record["error"] is None
    assert record["response"]["status_code"] == 200
    body = record["response"]["body"]
    assert body["object"] == "chat.completion" and body["usage"] == USAGE
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hé"}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "x")
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("h", -0.5, [104])
    assert first["top_logprobs"] == [{"token": "H", "logprob": -0.1, "bytes": [72]}]


def test_a_logprob_that_json_has_no_number_for_is_a_very_small_one():
    """Of a token that filters left out, in processed log-probabilities."""
    positions = [{8: Logprob(-0.5, 1, "h"), 3: Logprob(float("-inf"), 2, "H")}, ANSWER.logprobs[1]]
    output = replace(OUTPUT, outputs=[replace(ANSWER, logprobs=positions)])
    for line in (chat(logprobs=True, top_logprobs=2), completion(logprobs=2)):
        record = json.loads(dump_line(result_record(parse(line), output)))
        assert "-9999.0" in json.dumps(record)


def test_a_completion_result_is_what_the_api_writes():
    record = result_record(parse(completion(logprobs=1)), OUTPUT)
    body = record["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "hé"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["h", "é"],
        "token_logprobs": [-0.5, -0.2],
        "top_logprobs": [{"H": -0.1}, {"é": -0.2}],
        "text_offset": [0, 1],
    }


def test_a_plain_result_copies_the_line():
    job = parse({"prompt": "Hello", "größe": [1], "temperature": 0.5})
    record = result_record(job, OUTPUT)
    assert record == {
        "prompt": "Hello",
        "größe": [1],
        "temperature": 0.5,
        "output": "hé",
        "finish_reason": "stop",
        "usage": USAGE,
        "input_line": 7,
        "input_digest": job.digest,
    }
    assert record_key(record) == 7
    assert "größe".encode() in dump_line(record), "non-ASCII is written as it is"


def test_a_refused_prompt_is_an_error_with_its_line():
    refused = RequestOutput("", None, [], [], True, error="prompt 0 has 40 tokens; too many.")
    record = result_record(parse(chat()), refused)
    assert record["error"] == {
        "code": "invalid_request",
        "message": "the prompt has 40 tokens; too many.",
        "line": 7,
    }
    plain = result_record(parse({"prompt": "x", "k": 1}), refused)
    assert plain["k"] == 1 and plain["output"] is None and plain["error"]["line"] == 7


def test_a_line_is_one_line_to_every_reader():
    record = {"output": "a\u2028b\u2029c\x85d\x0b\x0c\x1c\r\ne"}
    line = dump_line(record).decode()
    assert line.splitlines() == [line.removesuffix("\n")] and json.loads(line) == record
