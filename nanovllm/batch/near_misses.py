"""Keys of plain lines that look like misspelt parameters: data, but not without a word."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable

from nanovllm.batch.api_fields import SAMPLING_FIELDS, TEMPLATE_FIELDS

logger = logging.getLogger(__name__)

_PARAMETERS = SAMPLING_FIELDS | TEMPLATE_FIELDS
# What parameters are called elsewhere.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
}
_DATA = frozenset((*_PARAMETERS, "prompt", "messages", "custom_id", "tool"))
_CUTOFF = 0.87  # "topp" is 0.89 of "top_p", "step" 0.75 of "stop"
_MIN_CHARS, _MAX_CHARS = 4, 40
_MAX_KEYS = 10_000  # some data has another key in each line


class NearMisses:
    """Owns which keys were met in a job; each is looked at once."""

    def __init__(self) -> None:
        self.notes: list[str] = []  # one for each key that is nearly a parameter's name
        self._met: set[str] = set(_DATA)

    def look(self, keys: Iterable[str], line_number: int) -> None:
        """Warn of what is nearly a parameter among the keys of a line."""
        for key in keys:
            if key in self._met or len(self._met) > _MAX_KEYS:
                continue
            self._met.add(key)
            name = _nearest(key)
            if name is not None:
                self.notes.append(
                    f"Line {line_number}: key {key!r} is copied as data; did you mean {name!r}?"
                )
                logger.warning("%s", self.notes[-1])


def _nearest(key: str) -> str | None:
    if not _MIN_CHARS <= len(key) <= _MAX_CHARS:
        return None
    plain = key.lower().replace("-", "_")
    close = difflib.get_close_matches(plain, _PARAMETERS, n=1, cutoff=_CUTOFF)
    return _OTHER_NAMES.get(plain) or (close[0] if close else None)
