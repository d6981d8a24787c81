"""Parameters of the association protocol, checked before any row is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from splince_fast._solve.options import is_integer
from splince_fast.exceptions import InputError

MODES = ("subsample", "weights")


def check_p(p: Any) -> None:
    """Refuse an association that is no number in [0, 1]."""
    if isinstance(p, bool) or not isinstance(p, int | float | np.floating) or not 0 <= p <= 1:
        raise InputError(
            f"the association p is {p!r}; it is a probability P(z = aligned_class | y = 1) in [0, "
            "1]: .5 is none, 1 complete"
        )


def check_sizes(sizes: Any) -> tuple[int, int, int]:
    """Three non-negative integers, those of training and test positive."""
    whole = isinstance(sizes, Sequence) and len(sizes) == 3
    if not whole or not all(is_integer(s) and s >= 0 for s in sizes):
        raise InputError(f"sizes is {sizes!r}; pass (training, validation, test) numbers of rows")
    if sizes[0] < 1 or sizes[2] < 1:
        raise InputError(f"sizes is {sizes!r}; training and test need at least one row")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def check_shortage(on_shortage: Any) -> None:
    """Refuse what is no answer to a cell of too few rows."""
    if on_shortage not in ("raise", "shrink"):
        raise InputError(f"on_shortage is {on_shortage!r}; choose 'raise' or 'shrink'")


def check_method(method: Any, name: str = "method") -> None:
    """Refuse an unknown way to reach an association."""
    if method not in MODES:
        raise InputError(
            f"{name} is {method!r}; choose 'subsample' (cells lose rows) or 'weights' "
            "(cells are weighted)"
        )
