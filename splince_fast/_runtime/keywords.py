"""Options that are passed on: a typed error for a misspelt one, before any work."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any

from splince_fast.exceptions import InputError


def check_names(given: Iterable[str], taken: Iterable[str], where: str) -> None:
    """Raise InputError for a name that is not `taken`, with the nearest one that is."""
    known = list(taken)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            raise InputError(f"{where} takes no {name}={hint} (it takes {', '.join(known)})")


def check_keywords(
    given: Iterable[str],
    function: Callable[..., Any],
    *,
    without: Container[str] = (),
    where: str | None = None,
) -> None:
    """As `check_names`, of the parameters of a function but for those `without`."""
    taken = inspect.signature(function).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in taken):
        names = [p.name for p in taken if p.name not in without]
        whole: Any = getattr(function, "func", function)  # of a functools.partial
        check_names(given, names, whole.__name__ if where is None else where)
