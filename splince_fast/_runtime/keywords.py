"""Validation of arguments, and descriptions of arguments in messages."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from splince_fast.exceptions import InputError


def described_type(value: object) -> str:
    """Return the type of a value with an article, such as "an int"; "None" for None."""
    name = type(value).__name__
    article = "an" if name[0] in "aeioAEIO" or name.startswith("nd") else "a"
    return "None" if value is None else f"{article} {name}"


def as_names(value: object, argument: str) -> tuple[str, ...]:
    """Return one name or several as a tuple; raise InputError unless all are strings."""
    names = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"{argument} is {value!r}; pass a name, or a sequence of names")
    return names


def as_values(value: Any) -> list[Any]:
    """Return the items of a sequence or array as a list; return [value] for any other value."""
    several = isinstance(value, Sequence) or getattr(value, "ndim", 0) != 0
    return list(value) if several else [value]


def check_names(names: Iterable[str], valid: Iterable[str], where: str) -> None:
    """Raise InputError for a name that is not valid; the message suggests the nearest valid one."""
    valid_names = list(valid)
    for name in names:
        if name not in valid_names:
            nearest = difflib.get_close_matches(name, valid_names, n=1)
            hint = f"; did you mean {nearest[0]}=?" if nearest else ""
            raise InputError(f"{where} takes no {name}={hint} (it takes {', '.join(valid_names)})")


def check_keywords(
    names: Iterable[str],
    function: Callable[..., object],
    *,
    without: Container[str] = (),
    where: str | None = None,
) -> None:
    """Raise InputError for a name that is no parameter of a function, or is in `without`."""
    # A function with ``**kwargs`` takes all names.
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        valid = [p.name for p in parameters if p.name not in without]
        unwrapped: Any = getattr(function, "func", function)  # `func` exists for functools.partial
        check_names(names, valid, unwrapped.__name__ if where is None else where)
