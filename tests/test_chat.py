"""`LLM.chat` against `tokenizer.apply_chat_template`, and what it says about bad conversations."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
# Like Qwen3's: a switch for thinking, tools, and an error for what it does not know.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'robot' %}{{ raise_exception('Unknown role robot.') }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
USER = {"role": "user", "content": "hello"}
ONE = [USER]
LONG = [{"role": "system", "content": "one two"}, USER, {"role": "assistant", "content": "three "}]


def get_weather(city: str) -> str:
    """
    Tell the weather.

    Args:
        city: where
    """
    return city


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model, device="cpu", dtype="float32", num_kvcache_blocks=128) as engine:
        engine.get_tokenizer().chat_template = TEMPLATE
        yield engine


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"tools": [get_weather]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"chat_template": "{% for m in messages %}{{ m.content }}|{% endfor %}"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_the_prompt_is_what_the_template_makes(llm, options):
    expected_options = {"add_generation_prompt": True, **options}
    extra = expected_options.pop("chat_template_kwargs", {})
    apply = llm.get_tokenizer().apply_chat_template
    outputs = llm.chat([ONE, LONG], GREEDY, use_tqdm=False, **options)
    for conversation, output in zip([ONE, LONG], outputs, strict=True):
        text = apply(conversation, tokenize=False, **expected_options, **extra)
        ids = apply(conversation, tokenize=True, return_dict=False, **expected_options, **extra)
        assert output.prompt == text
        assert output.prompt_token_ids == ids
    if extra.get("enable_thinking") is False:
        assert outputs[0].prompt.endswith("</think>\n\n")


def test_a_tokenizer_that_adds_bos_adds_no_second_one(tiny_llm):
    llm = tiny_llm()
    tokenizer = llm.get_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    template = "<|endoftext|>{% for m in messages %}{{ m.content }}{% endfor %}"
    (output,) = llm.chat(ONE, GREEDY, use_tqdm=False, chat_template=template)
    assert output.prompt_token_ids.count(0) == 1 and output.prompt_token_ids[0] == 0
    (plain,) = llm.generate(["hello"], GREEDY, use_tqdm=False)
    assert plain.prompt_token_ids == output.prompt_token_ids


@pytest.mark.parametrize(
    ("conversation", "match"),
    [
        ([USER, "x"], r"prompt 1 has message 1 of type str; it must be a dict"),
        ([USER, {"content": "x"}], "prompt 1 has message 1 without a 'role'"),
        ([{"role": 5, "content": "x"}], "prompt 1 has message 0 without a 'role'"),
        ([{"role": "user"}], "prompt 1 has message 0 without 'content'"),
        ([], "prompt 1 must be a list of messages"),
        (USER, "prompt 1 must be a list of messages"),
        ([{"role": "robot", "content": "x"}], r"prompt 1 cannot be laid out .*Unknown role robot"),
        ([{"role": "user", "content": None}], "prompt 1 has message 0 without 'content'"),
        ([{"role": "assistant", "content": None}], "1 cannot be laid out .*('content'|None)"),
        ([{"role": "user", "content": "x" * 9000}], "prompt 1 has 9.* tokens"),
    ],
)
def test_a_bad_conversation_is_named_and_nothing_runs_unless_asked_for(llm, conversation, match):
    before = llm.metrics.num_requests
    with pytest.raises(ValueError, match=match):
        llm.chat([ONE, conversation, ONE], GREEDY, use_tqdm=False)
    assert llm.metrics.num_requests == before
    outputs = llm.chat([ONE, conversation, ONE], GREEDY, use_tqdm=False, return_errors=True)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[0]["token_ids"] == outputs[2]["token_ids"]


def test_parts_of_a_content_are_joined_whatever_the_template_makes_of_them(llm):
    """Qwen3's own template leaves out a content that is no string, without a word."""
    silent = "{% for m in messages %}{{ m.content if m.content is string else '' }}!{% endfor %}"
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    (output,) = llm.chat(
        [{"role": "user", "content": parts}], GREEDY, use_tqdm=False, chat_template=silent
    )
    assert output.prompt == "hello!" and parts[0]["text"] == "hel"
    for content, match in (
        ([parts[0], {"type": "image_url"}], "0 whose 'content' has a part of type 'image_url'"),
        (["hello"], "0 whose 'content' has a part of type 'str'"),
        (5, "0 with 'content' of type int; it must be a string"),
    ):
        with pytest.raises(ValueError, match=f"prompt 0 has message {match}"):
            llm.chat([{"role": "user", "content": content}], GREEDY, chat_template=silent)


def test_a_tools_result_may_be_data(llm):
    """Llama 3.1's own template writes it as JSON."""
    template = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    messages = [
        {"role": "tool", "content": {"sum": 46}},
        {"role": "ipython", "content": [1, 2]},
        {"role": "tool", "content": [{"type": "text", "text": "joined"}]},
    ]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    assert output.prompt == '{"sum": 46}[1, 2]"joined"'


def test_all_bad_conversations_are_listed(llm):
    with pytest.raises(ValueError) as caught:
        llm.chat([["x"], ONE, [{"role": "robot", "content": "y"}]], GREEDY, use_tqdm=False)
    message = str(caught.value)
    assert "prompt 0 has message 0" in message and "prompt 2 cannot be laid out" in message
    assert "prompt 1" not in message


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"continue_final_message": True}, ValueError, "Pass add_generation_prompt=False"),
        ({"chat_template_kwargs": {"tools": []}}, TypeError, "must not hold 'tools'"),
        ({"chat_template_kwargs": {"tokenize": True}}, TypeError, "must not hold 'tokenize'"),
        (
            {"chat_template": "{% for %}"},
            ValueError,
            "prompt 0 cannot be laid out .*TemplateSyntax",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_right(llm, options, error, match):
    with pytest.raises(error, match=match):
        llm.chat(ONE, GREEDY, use_tqdm=False, **options)


def test_no_conversations_give_no_answers(llm):
    assert llm.chat([], GREEDY, use_tqdm=False) == []


def test_the_demo_model_answers_sums(make_llm, demo_model):
    llm = make_llm(demo_model, device="cpu", num_kvcache_blocks=32)
    sums = [[{"role": "user", "content": f"{a}+{b}="}] for a, b in [(12, 34), (40, 41)]]
    outputs = llm.chat(sums, SamplingParams(temperature=0), use_tqdm=False)
    assert [output["text"] for output in outputs] == ["46", "81"]
    begun = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "4"}]
    (output,) = llm.chat(
        begun,
        SamplingParams(temperature=0),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert output["text"] == "6"
