"""Text as tokens come, and where a stop string begins in it."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import Any

from nanovllm.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
# What Llama 2, Mistral and Phi-3 call a byte of a character that has no token of its own.
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def decode_options(params: SamplingParams) -> dict[str, bool]:
    return {
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
    }


def special_tokens(tokenizer: Any | None) -> tuple[str, ...]:
    """The tokens that `skip_special_tokens` leaves out."""
    if tokenizer is None:
        return ()
    return tuple(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)


class IncrementalText:
    """The text of a growing list of token ids; a stop string may hold tokens that it leaves out.

    A character whose bytes are not all there yet is held back: no piece ends in half a character.
    """

    def __init__(
        self, tokenizer: Any, params: SamplingParams, hidden_tokens: tuple[str, ...] = ()
    ) -> None:
        options = decode_options(params)
        self._shown = _Window(tokenizer, options)
        self._whole: _Window | None = None
        self._joints = [(0, 0)]  # lengths of `searchable` and `text` after each token
        if params.skip_special_tokens and any(
            token in stop for stop in params.stop for token in hidden_tokens
        ):
            self._whole = _Window(tokenizer, {**options, "skip_special_tokens": False})

    @property
    def text(self) -> str:
        return self._shown.text

    @property
    def searchable(self) -> str:
        """`text`, with special tokens where a stop string names one."""
        return self._shown.text if self._whole is None else self._whole.text

    def push(self, token_id: int) -> None:
        self._shown.push(token_id)
        if self._whole is not None:
            self._whole.push(token_id)
            while self._joints[-1][0] > len(self._whole.text):
                self._joints.pop()  # a byte has made others than it seemed of those before
            self._joints.append((len(self._whole.text), len(self._shown.text)))

    def finish(self) -> None:
        """Hold nothing back any more: no token comes that would complete a character."""
        for window in (self._shown, self._whole):
            if window is not None:
                window.finish()
        if self._whole is not None:
            self._joints.append((len(self._whole.text), len(self._shown.text)))

    def to_give(self, longest_stop: int) -> str:
        """The part of `text` that no later token changes, and no stop string still cuts."""
        num_final = (self._whole or self._shown).num_final
        return self.text_before(max(0, num_final - longest_stop + 1))[: self._shown.num_final]

    def text_before(self, place: int) -> str:
        """The part of `text` that stands before a place in `searchable`."""
        if self._whole is None:
            return self.text[:place]
        index = bisect_right(self._joints, place, key=lambda joint: joint[0]) - 1
        whole, shown = self._joints[index]
        # What the next token added: all of it shown, or nothing.
        end = self._joints[index + 1][1] if index + 1 < len(self._joints) else len(self.text)
        return self.text[: min(shown + place - whole, end)]


class _Window:
    """Decodes a growing list of ids a few at a time."""

    def __init__(self, tokenizer: Any, options: dict[str, bool]) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._ids: list[int] = []
        self._start = 0  # decoded again each time, since decoding depends on what stands before
        self._end = 0  # what tokens before it say is final
        self._final = ""
        self._run = ""  # of byte tokens: one more that fits no character spoils them all

    @property
    def text(self) -> str:
        return self._final + self._run

    @property
    def num_final(self) -> int:
        return len(self._final)

    def push(self, token_id: int) -> None:
        self._ids.append(token_id)
        rest = self._rest()
        if rest.endswith(_REPLACEMENT):
            self._run = ""
        elif rest == self._run or self._is_byte(token_id):  # what is left out ends no run
            self._run = rest
        else:
            self._end_run(rest)

    def finish(self) -> None:
        self._end_run(self._rest())

    def _end_run(self, rest: str) -> None:
        self._final += rest
        self._run = ""
        self._start, self._end = self._end, len(self._ids)

    def _rest(self) -> str:
        """The text behind what is final."""
        old = self._decode(self._start, self._end)
        return self._decode(self._start, len(self._ids))[len(old) :]

    def _is_byte(self, token_id: int) -> bool:
        name_of = getattr(self._tokenizer, "convert_ids_to_tokens", str)  # of a decoder alone: none
        return _BYTE_TOKEN.fullmatch(name_of(token_id) or "") is not None

    def _decode(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:end], **self._options))


def find_stop(text: str, stops: tuple[str, ...], searched: int) -> tuple[int, str] | None:
    """The stop string that begins first in `text`, and where; the longest of those that tie.

    searched: leading characters in which no stop string ends
    """
    hits = []
    for stop in stops:
        start = text.find(stop, max(0, searched - len(stop) + 1))
        if start >= 0:
            hits.append((start, -len(stop), stop))
    if not hits:
        return None
    start, _, stop = min(hits)
    return start, stop
