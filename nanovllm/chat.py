"""Conversations as prompts: checked, and laid out by the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.frontend.prompts import plain_list
from nanovllm.frontend.request_builder import BadPrompt
from nanovllm.sampling_params import CALL_ADVICE
from nanovllm.utils.checks import check_bool, hint_unknown_keywords

_EXAMPLE = "{'role': 'user', 'content': 'Hello'}"
# What `chat` has arguments for, and what it decides itself.
_TAKEN = (
    "conversation",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tools",
    "tokenize",
    "return_dict",
    "return_tensors",
)


@hint_unknown_keywords("chat has no option", CALL_ADVICE)
def chat_prompts(
    tokenizer: Any,
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: list[Any] | None = None,
) -> list[str | BadPrompt]:
    """The text of each conversation, or why it has none. Special tokens are written in it.

    ValueError or TypeError where nothing can be right: no template, options that contradict.
    """
    check_bool("add_generation_prompt", add_generation_prompt)
    check_bool("continue_final_message", continue_final_message)
    if chat_template is not None and not isinstance(chat_template, str):
        raise TypeError(f"chat_template must be a Jinja template, got {chat_template!r:.80}.")
    if chat_template is not None and "{" not in chat_template:
        raise ValueError(
            "chat_template must be the text of a Jinja template; without '{{' and '{%' it lays out "
            f"all conversations alike, got {chat_template!r:.200}. Pass what is in the file."
        )
    if tools is not None and not isinstance(tools, list | tuple):
        raise TypeError(f"tools must be a list of functions or JSON schemas, got {tools!r:.80}.")
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "continue_final_message=True continues the last message, so nothing may come after it. "
            "Pass add_generation_prompt=False with it."
        )
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise TypeError(
            "chat_template_kwargs must be a dict such as {'enable_thinking': False}, got "
            f"{chat_template_kwargs!r:.80} of type {type(chat_template_kwargs).__name__}."
        )
    options = dict(chat_template_kwargs or {})
    if taken := sorted(options.keys() & set(_TAKEN)):
        raise TypeError(
            f"chat_template_kwargs must not hold {taken[0]!r}: chat has an argument of that "
            "name, or decides it itself."
        )
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path} has no chat template. "
            "Pass chat_template=..., or use generate."
        )
    options.update(
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        tools=tools,
    )
    prompts: list[str | BadPrompt] = []
    for index, conversation in enumerate(_conversations(messages)):
        try:
            plain = _checked(conversation, continue_final_message=continue_final_message)
        except ValueError as error:
            prompts.append(BadPrompt(index, None, str(error)))
            continue
        try:
            prompts.append(str(tokenizer.apply_chat_template(plain, tokenize=False, **options)))
        except Exception as error:  # a template is a program, and raises what it likes
            what = f"{type(error).__name__}: {error}".rstrip(".")
            reason = f"cannot be laid out by the chat template ({what})"
            prompts.append(BadPrompt(index, None, reason))
    return prompts


def joined_text(parts: list[Any] | tuple[Any, ...]) -> str:
    """The text of a content in parts, as the OpenAI API has it.

    ValueError, in words to follow the content's name: a part is no text.
    """
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"has a part of type {kind!r}; only text is read")
        texts.append(part["text"])
    return "".join(texts)


def _is_for_the_template(message: Mapping[str, Any]) -> bool:
    """A tool's result may be data, which some templates write as JSON."""
    content = message.get("content")
    is_data = isinstance(content, Mapping)
    if isinstance(content, list | tuple):
        is_data = any(not isinstance(p, Mapping) or p.get("type") != "text" for p in content)
    return is_data and message["role"] in ("tool", "ipython")


def _conversations(messages: Any) -> list[Any]:
    """One conversation or several, as a list of conversations."""
    messages = plain_list(messages)
    if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping):
        items = list(messages)
        if any(isinstance(item, list | tuple) for item in items) or not items:
            return items
        if any(isinstance(item, Mapping) for item in items):
            return [items]
    raise TypeError(
        f"messages must be a list of dicts such as {_EXAMPLE}, or a list of such lists, got "
        f"{str(messages)[:80]!r} of type {type(messages).__name__}."
    )


def _checked(conversation: Any, *, continue_final_message: bool) -> list[Mapping[str, Any]]:
    """The messages, with strings for contents in parts: templates leave those out, or print lists.

    ValueError: what is wrong with the conversation, as a template would not say it.
    """
    if not isinstance(conversation, list | tuple) or not conversation:
        raise ValueError(
            f"must be a list of messages such as {_EXAMPLE}, got {str(conversation)[:80]!r}"
        )
    plain = [_checked_message(*item) for item in enumerate(conversation)]
    if continue_final_message and plain[-1].get("content") is None:
        raise ValueError(
            "has a last message without text, which continue_final_message=True continues"
        )
    return plain


def _checked_message(place: int, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise ValueError(
            f"has message {place} of type {kind}; it must be a dict such as {_EXAMPLE}"
        )
    if not isinstance(message.get("role"), str):
        raise ValueError(f"has message {place} without a 'role', which must be a string")
    content = message.get("content")
    may_be_none = "content" in message and message["role"] == "assistant"
    if content is None and not (may_be_none or message.get("tool_calls")):
        raise ValueError(f"has message {place} without 'content'")
    if content is None or isinstance(content, str) or _is_for_the_template(message):
        return message
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise ValueError(f"has message {place} with 'content' of type {kind}; it must be a string")
    try:
        return {**message, "content": joined_text(content)}
    except ValueError as error:
        raise ValueError(f"has message {place} whose 'content' {error}") from error
