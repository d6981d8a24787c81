"""The options of the methods, declared once: name, default, check, who takes them, and in words.

Signatures and the parameters of the estimators repeat names and defaults, as they must be
readable; a test holds them against this table. The flags of the command line are made from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import numpy as np

from splince_fast.exceptions import InputError


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its default, what it may be, the methods that take it, and what it does.

    Attributes
    ----------
    choices : tuple of str
        Words that it may be.
    number : bool
        Whether it may be a number.
    """

    name: str
    default: Any
    accepts: Callable[[Any], bool]
    must_be: str
    methods: tuple[str, ...]
    help: str
    choices: tuple[str, ...] = ()
    number: bool = False

    @property
    def flag(self) -> str:
        """As the command line calls it."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise InputError unless `value` is acceptable."""
        if not self.accepts(value):
            raise InputError(f"{self.name} is {value!r}; it must be {self.must_be}")

    def parse(self, text: str) -> Any:
        """The value that a word of the command line stands for.

        Raises
        ------
        InputError
            Neither a choice nor a number that is accepted.
        """
        value: Any = text
        if text not in self.choices and self.number:
            with contextlib.suppress(ValueError):  # refused below, in the same words
                value = float(text)
        self.check(value)
        return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating))


def _in_unit_interval(value: Any) -> bool:
    return _is_number(value) and 0 <= float(value) <= 1


def _one_of(
    name: str, default: str, choices: tuple[str, ...], methods: tuple[str, ...], help: str
) -> Option:
    def accepts(value: Any) -> bool:
        return isinstance(value, str) and value in choices

    must_be = f"one of {', '.join(map(repr, choices))}"
    return Option(name, default, accepts, must_be, methods, help, choices)


KEEPING, _WHITENED = ("splince", "sal"), ("splince", "leace")
METHODS = ("splince", "leace", "sal", "mean_projection")
SHRINKAGES = ("oas", "ledoit-wolf", "cv")
# What "cv" tries, beside "oas".
INTENSITIES = (None, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1)

OPTIONS = {
    option.name: option
    for option in (
        Option(
            "max_amplification",
            None,
            lambda a: a is None or (_is_number(a) and a >= 1),
            "a number of at least 1",
            KEEPING,
            "give up kept directions that would lengthen corrections more than this",
            number=True,
        ),
        _one_of(
            "on_infeasible",
            "raise",
            ("raise", "drop"),
            KEEPING,
            "what to do where what is kept lies in what is erased",
        ),
        _one_of(
            "null_space",
            "keep",
            ("keep", "drop"),
            _WHITENED,
            "what to do with dimensions in which the rows do not vary",
        ),
        Option(
            "shrinkage",
            None,
            lambda s: (
                s is None or (s in SHRINKAGES if isinstance(s, str) else _in_unit_interval(s))
            ),
            "None, 'oas', 'ledoit-wolf', 'cv' or a number in [0, 1]",
            _WHITENED,
            "share of an isotropic covariance in that which is factored; 'cv' takes the one of the "
            "least change of rows not seen",
            SHRINKAGES,
            number=True,
        ),
        Option(
            "rank_tol",
            "auto",
            lambda t: t == "auto" if isinstance(t, str) else _in_unit_interval(t) and t < 1,
            "'auto' or a number in [0, 1)",
            METHODS,
            "leave directions of the concept alone that are weaker than this times the strongest",
            ("auto",),
            number=True,
        ),
        _one_of(
            "solver",
            "auto",
            ("auto", "cholesky", "eigh"),
            _WHITENED,
            "how the covariance is factored",
        ),
    )
}


def options_of(method: str) -> dict[str, Option]:
    """The options that a method takes, by name."""
    return {name: option for name, option in OPTIONS.items() if method in option.methods}


_DECLARED = tuple(OPTIONS.values())
_DEFAULTS = tuple(option.default for option in _DECLARED)
_values = attrgetter(*OPTIONS)


@dataclass(slots=True)  # not frozen: that would cost a tenth of a small solve
class Options:
    """The options of one solve, checked and then never changed.

    What a method does not take has its default.
    """

    max_amplification: float | None = None
    on_infeasible: str = "raise"
    null_space: str = "keep"
    shrinkage: float | str | None = None
    rank_tol: float | str = "auto"
    solver: str = "auto"

    def __post_init__(self) -> None:
        values = _values(self)
        if not all(map(is_, values, _DEFAULTS)):
            for value, option in zip(values, _DECLARED, strict=True):
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
