"""A parser of command lines whose errors are one line each, with the name that was meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that does not print all its options before what is wrong."""

    def parse_known_args(  # type: ignore[override]  # argparse's is overloaded
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, but what is unknown is an error: of a subcommand it names the options."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line."""
        advice = f"`{self.prog} --help` lists what is allowed."
        self.exit(
            2, f"{self.prog}: error: {message}{'' if message[-1] in '.?' else '.'} {advice}\n"
        )

    def _hint(self, argument: str) -> str:
        name = argument.partition("=")[0].replace("_", "-")
        if not name.startswith("-"):
            return ". A text of several words needs quotes."
        names = [text for action in self._actions for text in action.option_strings]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        return f". Did you mean {close[0]}?" if close else ""


def shard(text: str) -> tuple[int, int]:
    """Read `I/N`."""
    which, slash, num_shards = text.partition("/")
    if not (slash and which.isdigit() and num_shards.isdigit() and int(which) < int(num_shards)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N-1, got {text!r}")
    return int(which), int(num_shards)
