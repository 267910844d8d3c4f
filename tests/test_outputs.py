"""Outputs read as vLLM's by attribute and as nano-vllm's by key."""

import pickle

import pytest

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput


def make_output(text="46", token_ids=(7, 9), **fields):
    completion = CompletionOutput(0, text, list(token_ids), finish_reason="stop", stop_reason=2)
    return RequestOutput("0", "12+34=", [1, 2, 3], [completion], finished=True, **fields)


def test_attributes_are_vllms():
    output = make_output(num_cached_tokens=2)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("0", "12+34=", [1, 2, 3])
    assert (output.finished, output.num_cached_tokens, output.num_output_tokens) == (True, 2, 2)
    completion = output.outputs[0]
    assert (completion.index, completion.text, completion.token_ids) == (0, "46", [7, 9])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 2)
    assert (completion.cumulative_logprob, completion.logprobs) == (None, None)
    assert completion.finished()


def test_keys_are_nano_vllms():
    output = make_output()
    assert output["text"] == "46"
    assert output["token_ids"] == [7, 9]
    assert dict(output) == {"text": "46", "token_ids": [7, 9]}
    assert "text" in output
    assert "logprobs" not in output


@pytest.mark.parametrize("key", ["txt", 0, None])
def test_unknown_key_lists_the_keys(key):
    with pytest.raises(KeyError, match="Keys: text, token_ids"):
        make_output()[key]


def test_a_failed_request_never_reads_as_empty_text():
    output = RequestOutput("5", "x", [1], [], finished=True, error="The prompt has 17 tokens.")
    with pytest.raises(ValueError, match=r"Request 5 has no text: The prompt has 17 tokens\."):
        output["text"]


def test_outputs_are_equal_by_value():
    assert make_output() == make_output()
    assert make_output() != make_output(text="47")
    assert pickle.loads(pickle.dumps(make_output())) == make_output()
    assert Logprob(-0.5, 1, "a") == Logprob(-0.5, rank=1, decoded_token="a")


def test_repr_is_whole_for_short_outputs():
    assert repr(make_output()) == (
        "RequestOutput(request_id='0', prompt='12+34=', prompt_token_ids=[1, 2, 3], "
        "outputs=[CompletionOutput(index=0, text='46', token_ids=[7, 9], finish_reason='stop', "
        "stop_reason=2)], finished=True, num_cached_tokens=0)"
    )


def test_repr_cuts_long_texts_and_lists():
    output = make_output(text="a" * 10_000, token_ids=range(5000), error="late")
    assert len(repr(output)) < 500
    assert "(10000 characters)" in repr(output)
    assert "0, 1, 2, 3, 4, 5, 6, 7, ...] (5000 tokens)" in repr(output)
    assert repr(output).endswith("error='late')")
