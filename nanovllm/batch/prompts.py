"""Conversations as the engine's prompts: laid out by the chat template, tokenised together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm.utils.tokenizer import encode_texts


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


def encode_chats(
    tokenizer: Any, texts: list[str], max_tokens: int
) -> list[dict[str, Any] | ValueError]:
    """Prompts for the engine from texts that the template wrote; an error for what is no text."""
    # The template has written the special tokens: no second BOS.
    encoded = encode_texts(tokenizer, texts, max_tokens=max_tokens, add_special_tokens=False)
    return [
        ValueError(f"what the chat template wrote {ids}")
        if isinstance(ids, ValueError)
        else {"prompt": text, "prompt_token_ids": ids}
        for text, ids in zip(texts, encoded, strict=True)
    ]
