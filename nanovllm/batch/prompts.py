"""Conversations as the engine's prompts: laid out by the chat template, tokenised together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def chat_text(tokenizer: Any, messages: list[Any], template: Mapping[str, Any]) -> str:
    """A conversation as text. `template` has options such as tools and chat_template_kwargs.

    ValueError says what the template did not like.
    """
    options = {k: v for k, v in template.items() if k != "chat_template_kwargs"}
    options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
    try:
        options.update(template.get("chat_template_kwargs") or {})
        if tokenizer is not None and (options.get("chat_template") or tokenizer.chat_template):
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template raises what it likes
        raise ValueError(
            f"the chat template refused the messages: {type(error).__name__}: {error}"
        ) from error
    raise ValueError("the model has no chat template")


def encode_chats(tokenizer: Any, texts: list[str]) -> list[dict[str, Any] | ValueError]:
    """Prompts for the engine from texts that the template wrote; an error for what is no text."""
    if not texts:
        return []
    # The template has written the special tokens: no second BOS.
    try:
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception as error:  # half a surrogate pair, for one; any text of them may be why
        if len(texts) > 1:
            return [prompt for text in texts for prompt in encode_chats(tokenizer, [text])]
        reason = f"{type(error).__name__}: {error}"
        return [ValueError(f"what the chat template wrote cannot be tokenised: {reason}")]
    return [
        {"prompt": text, "prompt_token_ids": token_ids}
        for text, token_ids in zip(texts, encoded, strict=True)
    ]
