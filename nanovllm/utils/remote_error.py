"""An exception on its way from one of our processes to another."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

# What a user can act on, by name: others are faults of ours, of which the traceback says most.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, MemoryError, torch.OutOfMemoryError, ImportError, OSError)
}


@dataclass(frozen=True, slots=True)
class RemoteError:
    """What a process raised: its nearest known kind, its words, and its traceback as text.

    Not the exception itself: many cannot be pickled, and some not be unpickled.
    """

    kind: str  # "" for others
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        names = (kind.__name__ for kind in type(error).__mro__)
        trace = "".join(traceback.format_exception(error))
        return cls(next((name for name in names if name in _KINDS), ""), str(error), trace)

    def rebuilt(self, where: str) -> Exception:
        """The exception to raise here; `where` says whose it was, at the beginning of a sentence.

        Of a known kind it has the same words, and the traceback is a note; else it is a
        RuntimeError with the traceback.
        """
        text = f"{where} failed:\n{self.trace}"
        if not self.kind:
            return RuntimeError(text)
        error = _KINDS[self.kind](self.message)
        error.add_note(text)
        return error
