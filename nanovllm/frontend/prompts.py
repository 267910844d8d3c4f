"""The forms that prompts come in: one told from several, and each read as text or ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.utils.checks import plain_int

_MAX_SHOWN_CHARS = 200


def prompt_list(prompts: Any, name: str = "prompts") -> tuple[list[Any], bool]:
    """All of `prompts` as a list, and whether it was a single one; errors call them `name`."""
    if hasattr(prompts, "tolist"):
        try:
            prompts = plain_list(prompts)  # what has one dimension is one prompt
        except ValueError as error:
            raise ValueError(f"{name} {error}.") from error
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    check_no_table(name, prompts)
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        a_dict = ", a dict with 'prompt' or 'prompt_token_ids'" if name == "prompts" else ""
        raise TypeError(
            f"{name} must be a string, a list of token ids{a_dict}, or an iterable of those, "
            f"got {type(prompts).__name__}."
        )
    items = list(prompts)
    is_single = bool(items) and all(map(_is_token_id, items))
    return ([items], True) if is_single else (items, False)


def check_no_table(name: str, value: Any) -> None:
    """TypeError for a data frame: as an iterable it is its columns' names, not its rows."""
    columns = getattr(value, "columns", None)
    if columns is not None:
        names = list(map(str, getattr(value, "column_names", columns)))
        raise TypeError(
            f"{name} must be a list or one column, got a {type(value).__name__} with the columns "
            f"{_shown(names)}. Pass one of them, such as table[{names[0] if names else 'text'!r}]."
        )


def read_prompt(prompt: Any) -> tuple[str | None, list[int]]:
    """Text and ids of a prompt in any form; the ids are empty where text must be encoded.

    ValueError or TypeError, in words to follow the prompt's number.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("is empty: it has no token to continue from. Give it some text")
        check_text(prompt)
        return prompt, []
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise ValueError(
                "is a dict, which may have the keys 'prompt' and 'prompt_token_ids' and must have "
                f"one of them, got {sorted(map(str, prompt))}{_dict_advice(prompt)}"
            )
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"has 'prompt' of type {type(text).__name__}; it must be a string")
        ids = prompt.get("prompt_token_ids")
        if ids is None:
            return read_prompt("" if text is None else text)
        return text, _token_list(ids)
    return None, _token_list(prompt)


def _dict_advice(prompt: Mapping[Any, Any]) -> str:
    if "role" in prompt:
        return ". Pass conversations to chat"
    return ". Pass its input_ids" if "input_ids" in prompt else ""


def check_text(text: str) -> None:
    """Raise a ValueError where the tokenizer could not read `text`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"cannot be encoded: character {error.start} is one half of a surrogate pair. "
            "Decode its source with errors='replace'"
        ) from error


def plain_list(values: Any) -> Any:
    """An array or a tensor as lists, anything else as it is. ValueError: it has no numbers."""
    if not hasattr(values, "tolist"):
        return values
    try:
        return values.tolist()  # NumPy and torch
    except Exception as error:  # sparse, on the meta device, of a library's own making
        raise ValueError(
            f"cannot be read as a list of numbers: its tolist() raised {type(error).__name__}. "
            "Pass a dense array with data, or a list of ints"
        ) from error


def _token_list(ids: Any) -> list[int]:
    ids = plain_list(ids)
    if not isinstance(ids, list | tuple):
        shown = "" if ids is None else f" {_shown(ids)}"
        advice = ". The ids of a prompt are one list" if isinstance(ids, int) else ""
        raise TypeError(
            "must be a string, token ids or a dict with one of them, got "
            f"{type(ids).__name__}{shown}{advice}"
        )
    # Prompts may be millions of plain ints: those are not looked at one by one.
    token_ids = list(ids) if set(map(type, ids)) == {int} else [_token_id(i) for i in ids]
    if not token_ids:
        raise ValueError("is empty: it has no token to continue from. Give it at least one id")
    return token_ids


def _is_token_id(value: Any) -> bool:
    """Whether `value` is an int of Python's, NumPy's or, without dimensions, torch's."""
    if type(value) is int:
        return True
    is_array = bool(getattr(value, "ndim", None))  # an array of one number has an index, too
    if is_array or isinstance(value, str):
        return False
    try:
        plain_int(value)
    except Exception:  # no __index__, or a tensor's, which raises in several ways
        return False
    return True


def _token_id(value: Any) -> int:
    try:
        return plain_int(value)
    except Exception:  # as in _is_token_id
        advice = ""
    if isinstance(value, Mapping) and "role" in value:
        advice = ". Pass conversations to chat"
    elif isinstance(value, str):
        advice = ". Texts stand in one flat list, each a prompt of its own"
    raise TypeError(f"has {_shown(value)} among its token ids, which must be integers{advice}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."
