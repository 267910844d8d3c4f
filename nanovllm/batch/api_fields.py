"""The body of an OpenAI request: which fields mean what here, and which are refused, by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.chat import joined_text
from nanovllm.sampling_params import SamplingParams

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
MAX_TOP_LOGPROBS = 20

# Texts are what a result line is made of; Python functions cannot stand in JSON, and no result
# format has a place for the prompt's logprobs.
NOT_IN_A_LINE = frozenset(("detokenize", "logits_processors", "prompt_logprobs"))
SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams)) - NOT_IN_A_LINE
_TEMPLATE_TYPES: dict[str, tuple[type, str]] = {
    "add_generation_prompt": (bool, "true or false"),
    "continue_final_message": (bool, "true or false"),
    "chat_template": (str, "a string"),
    "chat_template_kwargs": (dict, "an object"),
    "tools": (list, "a list"),
}
TEMPLATE_FIELDS = frozenset(_TEMPLATE_TYPES)
_LABELS = ("model", "user", "metadata", "safety_identifier")  # nothing that is generated changes
_CHAT_ONLY = ("messages", "max_completion_tokens", "top_logprobs", "tool_choice", "response_format")

# Fields of the API that have one value which asks for nothing.
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "stream_options": (None,),
    "store": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}),
}


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A body, sorted out."""

    prompt: str | list[int] | None
    messages: list[Any] | None
    sampling: dict[str, Any]
    template: dict[str, Any]


def chat_request(body: Mapping[str, Any]) -> ApiRequest:
    """Sort out the body of a chat completion; ValueError and TypeError name the field."""
    allowed = {*SAMPLING_FIELDS, *TEMPLATE_FIELDS, *_LABELS, *_CHAT_ONLY, *_ONLY_VALUES}
    _check(body, allowed - {"prompt", "echo", "suffix", "best_of"})
    sampling = sampling_fields(body)
    tokens = body.get("max_completion_tokens")
    if tokens is not None:
        if sampling.get("max_tokens", tokens) != tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        sampling["max_tokens"] = tokens
    wants, num_top = sampling.pop("logprobs", False), body.get("top_logprobs")
    if not isinstance(wants, bool):
        raise TypeError(f"logprobs must be true or false in a chat, got {wants!r}")
    if num_top is not None:
        _check_count("top_logprobs", num_top)
        if not wants:
            raise ValueError("top_logprobs needs logprobs: true")
    if wants:
        sampling["logprobs"] = num_top or 0
    template = template_fields(body)
    if body.get("tool_choice") == "none":
        template.pop("tools", None)
    if "messages" not in body:
        raise ValueError("body has no 'messages'")
    return ApiRequest(None, text_of_messages(body["messages"]), sampling, template)


def completion_request(body: Mapping[str, Any]) -> ApiRequest:
    """Sort out the body of a completion."""
    _check(body, {*SAMPLING_FIELDS, *_LABELS, *_ONLY_VALUES, "prompt"} - {"tool_choice"})
    if body.get("prompt") is None:
        raise ValueError("body has no 'prompt'")
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and not all(isinstance(i, int) for i in prompt):
        raise ValueError("prompt must be one string or one list of token ids; make it lines")
    sampling = sampling_fields(body)
    if sampling.get("logprobs") is not None:
        _check_count("logprobs", sampling["logprobs"])
    return ApiRequest(prompt, None, sampling, {})


def text_of_messages(messages: Any) -> list[Any]:
    """Messages as chat templates want them: contents that come in text parts are joined."""
    if not isinstance(messages, list) or not messages:
        raise TypeError("messages must be a list with at least one message")
    result = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"messages[{place}] must be an object with a 'role'")
        content = message.get("content")
        if isinstance(content, list):
            try:
                message = {**message, "content": joined_text(content)}
            except ValueError as error:
                raise ValueError(f"messages[{place}].content {error}") from error
        elif content is not None and not isinstance(content, str):
            raise TypeError(f"messages[{place}].content must be a string or a list of text parts")
        elif content is None and message["role"] != "assistant":
            raise ValueError(f"messages[{place}] has no 'content'")
        result.append(message)
    return result


def sampling_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that go into SamplingParams as they are."""
    # null asks for the default, as in the API.
    named = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    if "logit_bias" in named:
        named["logit_bias"] = _int_keys(named["logit_bias"])
    return named


def template_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the chat template, each of its type."""
    named = {name: body[name] for name in _TEMPLATE_TYPES if body.get(name) is not None}
    for name, value in named.items():
        kind, text = _TEMPLATE_TYPES[name]
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {text}, got {value!r}")
    return named


def _int_keys(biases: Any) -> Any:
    if not isinstance(biases, dict):
        return biases
    for key in biases:
        # Not whatever `int` takes: " 7", "1_0" and "07" would be guesses, and two of them one id.
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
            raise ValueError(f"logit_bias has the key {key[:40]!r}, which is no token id")
    return {int(key): bias for key, bias in biases.items()}


def _check(body: Mapping[str, Any], allowed: set[str]) -> None:
    for name, value in body.items():
        if name not in allowed:
            close = difflib.get_close_matches(name[:100], allowed, n=1)  # slow for long ones
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown field {name!r} in body.{hint}")
        values = _ONLY_VALUES.get(name)
        if values is not None and not any(value == known for known in values):
            listed = " or ".join(map(repr, values[1:] or values))
            raise ValueError(f"{name} must be {listed} here, got {value!r}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOP_LOGPROBS:
        raise ValueError(f"{name} must be from 0 to {MAX_TOP_LOGPROBS}, got {value!r}")
