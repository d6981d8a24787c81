"""The options of the methods, declared once: name, default, check, and who takes them.

Signatures, the parameters of the estimators and the flags of the command line repeat names and
defaults, as they must be readable; a test holds them against this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from splince_fast.exceptions import InputError


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its default, what it may be, and the methods that take it."""

    name: str
    default: Any
    accepts: Callable[[Any], bool]
    must_be: str
    methods: tuple[str, ...]
    choices: tuple[str, ...] = ()

    def check(self, value: Any) -> None:
        """Raise InputError unless `value` is acceptable."""
        if not self.accepts(value):
            raise InputError(f"{self.name} is {value!r}; it must be {self.must_be}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating))


def _in_unit_interval(value: Any) -> bool:
    return _is_number(value) and 0 <= float(value) <= 1


def _one_of(name: str, default: str, choices: tuple[str, ...], methods: tuple[str, ...]) -> Option:
    def accepts(value: Any) -> bool:
        return isinstance(value, str) and value in choices

    return Option(name, default, accepts, f"one of {', '.join(map(repr, choices))}", methods,
                  choices)  # fmt: skip


_KEEPING, _WHITENED = ("splince", "sal"), ("splince", "leace")
_ALL = ("splince", "leace", "sal", "mean_projection")
SHRINKAGES = ("oas", "ledoit-wolf")

OPTIONS = {
    option.name: option
    for option in (
        Option(
            "max_amplification",
            None,
            lambda a: a is None or (_is_number(a) and a >= 1),
            "a number of at least 1",
            _KEEPING,
        ),
        _one_of("on_infeasible", "raise", ("raise", "drop"), _KEEPING),
        _one_of("null_space", "keep", ("keep", "drop"), _WHITENED),
        Option(
            "shrinkage",
            None,
            lambda s: (
                s is None or (s in SHRINKAGES if isinstance(s, str) else _in_unit_interval(s))
            ),
            "None, 'oas', 'ledoit-wolf' or a number in [0, 1]",
            _WHITENED,
            SHRINKAGES,
        ),
        Option(
            "rank_tol",
            "auto",
            lambda t: t == "auto" if isinstance(t, str) else _in_unit_interval(t) and t < 1,
            "'auto' or a number in [0, 1)",
            _ALL,
        ),
        _one_of("solver", "auto", ("auto", "cholesky", "eigh"), _WHITENED),
    )
}


def options_of(method: str) -> dict[str, Option]:
    """The options that a method takes, by name."""
    return {name: option for name, option in OPTIONS.items() if method in option.methods}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one solve, checked; what a method does not take has its default."""

    max_amplification: float | None = None
    on_infeasible: str = "raise"
    null_space: str = "keep"
    shrinkage: float | str | None = None
    rank_tol: float | str = "auto"
    solver: str = "auto"

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not option.default:
                option.check(value)

    @property
    def drop_below(self) -> float:
        """Sine of the angle below which kept directions are given up."""
        return 1.0 / self.max_amplification if self.max_amplification else 0.0

    @property
    def may_drop(self) -> bool:
        """Whether kept directions at the rounding level may be given up."""
        return self.on_infeasible == "drop" or self.max_amplification is not None
