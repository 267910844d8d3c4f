"""Chat templates with anything in them: a text, or an error that names the prompt, soon.

A template's loops have no limit, as README says; what is here would be fast if it were right.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fuzz.test_model_files import fuzzed
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "tiny-qwen3"
GREEDY = SamplingParams(temperature=0, max_tokens=1)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, device="cpu", num_kvcache_blocks=64) as engine:
        yield engine


def render(llm, template):
    """The error's text, or None where there is a prompt."""
    started = time.process_time()
    error = None
    try:
        llm.chat(HELLO, GREEDY, chat_template=template, use_tqdm=False)
    except ValueError as caught:
        error = str(caught)
        assert error.startswith("prompt 0 " if "{" in template else "chat_template must be"), error
    assert time.process_time() - started < 5, template[:100]
    return error


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ nothing }}", "is empty: it has no token"),
        ("{{ nothing.more }}", "UndefinedError: 'nothing' is undefined"),
        ("{{ messages[0].nothing.more }}", "UndefinedError: 'dict object' has no attribute 'noth"),
        ("{{ nothing() }}", "UndefinedError: 'nothing' is undefined"),
        ("{{ messages[0].__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ raise_exception('no system prompt') }}", "TemplateError: no system prompt"),
        ("{{ messages[ }}", "TemplateSyntaxError: unexpected '}'"),
        ("{{ messages|nofilter }}", "TemplateAssertionError: No filter named 'nofilter'"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
        ("{% if true %}" * 120 + "x" + "{% endif %}" * 120, "IndentationError: too many levels"),
        ("{% for a in [1] %}" * 40 + "x" + "{% endfor %}" * 40, "SyntaxError: too many statically"),
        ("{% break %}", "SyntaxError: 'break' outside loop"),
        ("{{ range(10**9)|list }}", "OverflowError: Range too big"),
        ("{{ 'a' * 10**15 }}", "MemoryError"),
        ("{{ '%1000000000000000d' % 5 }}", "MemoryError"),
        ("{{ 'a'|center(10**15) }}", "MemoryError"),
        ("{{ 10**5000 }}", "ValueError: Exceeds the limit"),
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate str"),
        ("{{ '\\ud800' }}", "cannot be encoded: character 0 is one half of a surrogate"),
        ("{{ strftime_now(5) }}", "TypeError: strftime"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment"),
        ("{{ 'a' * 10**7 }}", "has 10000000 characters, more than max_model_len"),
        ("{% for i in range(99999) %}xy{% endfor %}", "characters, more than max_model_len"),
    ],
    ids=lambda value: value[:24],
)
def test_hostile_templates_are_named_soon(llm, template, words):
    error = render(llm, template)
    assert error is not None and words in error


PIECES = st.sampled_from(
    [
        *(
            "{{ ",
            " }}",
            "{% ",
            " %}",
            "{# ",
            " #}",
            "{%- ",
            " -%}",
            "\n",
            "<|im_end|>",
            "ü🙂",
            "\0",
        ),
        *("messages", "messages[0]", ".content", ".role", "['content']", "nothing", "loop.index"),
        *("for m in messages", "endfor", "if m", "else", "elif", "endif", "set x = 1", "break"),
        *("macro f(a)", "endmacro", "f(1)", "call f()", "endcall", "filter upper", "endfilter"),
        *("|", "tojson", "length", "list", "join", "trim", "attr('x')", "map('upper')", "batch(2)"),
        *("(", ")", "[", "]", "'", '"', "+", "*", "~", "==", " in ", " is ", "defined", ",", ":"),
        *(
            "0",
            "1",
            "-1",
            "1e999",
            "none",
            "true",
            "namespace(a=1)",
            "range(9)",
            "raise_exception(",
        ),
        *("generation", "endgeneration", "block a", "endblock", "extends 'a'", "import 'os' as o"),
    ]
)


@fuzzed(st.lists(PIECES, max_size=14).map("".join))
def test_any_template_gives_a_prompt_or_an_error_that_names_it(llm, mutation):
    render(llm, mutation)
    render(llm, "{{ messages[0].content }}" + mutation)
    assert render(llm, "{{ messages[0].content }}") is None
