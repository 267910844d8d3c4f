"""Checks of user input, whose errors say what was given, what is allowed and what to do."""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

_P = ParamSpec("_P")
_R = TypeVar("_R")


def check_int(
    name: str, value: Any, *, minimum: int, maximum: int | None = None, advice: str = ""
) -> int:
    """Return `value` as an int in [minimum, maximum], or raise; a bool is not an int."""
    number = None
    with contextlib.suppress(TypeError):
        number = plain_int(value)
    if number is None:
        raise TypeError(_message(f"{name} must be an int", value, advice))
    if maximum is not None and not minimum <= number <= maximum:
        allowed = f"must be from {minimum} to {maximum}"
    elif number < minimum:
        allowed = f"must be at least {minimum}"
    else:
        return number
    raise ValueError(_message(f"{name} {allowed}", value, advice))


def plain_int(value: Any) -> int:
    """An integer of any library as an int; what raises is no integer, nor is a truth value."""
    if isinstance(value, np.integer):  # at once: prompts may be millions of them
        return int(value)
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError("a truth value is no number")
    return operator.index(value)


def check_float(
    name: str,
    value: Any,
    *,
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = math.inf,
    advice: str = "",
) -> float:
    """Return `value` as a finite float with minimum <= value <= maximum and value > above."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(_message(f"{name} must be a number", value, advice))
    try:
        number = float(value)
    except OverflowError:  # an int too large for a float
        number = math.inf
    if math.isfinite(number) and minimum <= number <= maximum and number > above:
        return number
    lower = f"({above:g}" if above > -math.inf else f"[{minimum:g}"
    upper = f"{maximum:g}]" if maximum < math.inf else "inf)"
    raise ValueError(_message(f"{name} must be a finite number in {lower}, {upper}", value, advice))


def check_bool(name: str, value: Any) -> bool:
    """Return `value`, which must be True or False, or NumPy's: 0, "no" and the like are refused."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(_message(f"{name} must be True or False", value))
    return bool(value)


def check_callable(name: str, value: Any) -> None:
    """TypeError unless `value` can be called, or is None."""
    if value is not None and not callable(value):
        raise TypeError(_message(f"{name} must be a function or None", value))


def check_choice(name: str, value: Any, choices: Iterable[str], advice: str = "") -> str:
    """Return `value`, which must be one of `choices`."""
    names = [repr(choice) for choice in choices]
    allowed = f"{name} must be {'one of ' if len(names) > 1 else ''}{', '.join(names)}"
    if not isinstance(value, str):
        raise TypeError(_message(allowed, value, advice))
    if value not in choices:
        raise ValueError(_message(allowed, value, advice))
    return value


def unknown_name_error(
    what: str, name: str, allowed: Iterable[str], advice: Mapping[str, str]
) -> TypeError:
    """Return the error for an unknown option: what to do, or the nearest name, and all names.

    advice: what to do about names that are known elsewhere, as whole sentences
    """
    names = list(allowed)
    hint = advice.get(name)
    if hint is None:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Leave it out."
    return TypeError(" ".join(filter(None, [f"{what} {name!r}.", hint, _list_names(names)])))


@contextlib.contextmanager
def errors_named(name: object) -> Iterator[None]:
    """Put `name`, of a file or a tensor, before what a check in the block raises: a ValueError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def hint_unknown_keywords(
    what: str, advice: Mapping[str, str]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a method so that an unknown keyword is met with `unknown_name_error`."""

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        allowed = tuple(inspect.signature(method).parameters)[1:]  # without self

        # Not `**unknown` in the signature itself: type checkers would let misspelt names pass.
        @functools.wraps(method)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in allowed:
                    raise unknown_name_error(what, name, allowed, advice)
            return method(*args, **kwargs)

        return checked

    return decorate


def _message(requirement: str, value: Any, advice: str = "") -> str:
    given = repr(value)
    if len(given) > 200:
        given = given[:200] + "..."
    if not isinstance(value, (int, float, str)) or isinstance(value, bool):
        given += f" of type {type(value).__name__}"
    return f"{requirement}, got {given}.{' ' + advice if advice else ''}"


def _list_names(names: list[str]) -> str:
    return f"Options: {', '.join(names)}."
