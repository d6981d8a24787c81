"""Checks of the parameters that baselines have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from splince_fast._solve.options import is_integer
from splince_fast.exceptions import InputError


def check_number(value: Any, name: str, low: float, *, strict: bool = True) -> None:
    """Raise InputError unless `value` is a finite real number above (or at) `low`."""
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not good or not np.isfinite(value) or value < low or (strict and value == low):
        raise InputError(
            f"{name} is {value!r}; it must be a number {'above' if strict else 'of at least'} {low}"
        )


def check_count(value: Any, name: str) -> None:
    """Raise InputError unless `value` is a positive integer."""
    if not is_integer(value) or value < 1:
        raise InputError(f"{name} is {value!r}; it must be a positive integer")


def check_share(share: Any) -> None:
    """Raise InputError unless `share` is a proportion in [0, 1)."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise InputError(f"validation_share is {share!r}; it must be a number in [0, 1)")


def candidates(given: Any, name: str) -> list[Any]:
    """The positive numbers to choose from: one, or a sequence of them.

    Raises
    ------
    InputError
        No number, no positive one, or an empty sequence.
    """
    values = list(given) if isinstance(given, Sequence | np.ndarray) else [given]
    if not values or isinstance(given, str):
        raise InputError(
            f"{name} is {given!r}; it must be a number or a non-empty sequence of them"
        )
    for value in values:
        check_number(value, name, 0.0)
    return values


def generator(random_state: Any) -> np.random.Generator:
    """A generator from what scikit-learn takes as a seed; an integer seeds it directly."""
    if random_state is None or isinstance(random_state, int | np.integer | np.random.Generator):
        return np.random.default_rng(random_state)
    return np.random.default_rng(check_random_state(random_state).randint(2**31 - 1))
