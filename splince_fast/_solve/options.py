"""The options of a fit, declared once: name, default, check and help text.

`OPTIONS` are the options of the methods, which control the solve. `MOMENT_OPTIONS` are the options
of the accumulation, which control the statistics that moments store, and of extra passes over the
rows. Signatures of functions and estimators repeat the names and defaults, and a test compares the
signatures with these tables. The flags of the command line are made from the tables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, TypeGuard

import numpy as np

from splince_fast.exceptions import InputError


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a fit."""

    name: str
    default: Any
    accepts: Callable[[Any], bool]  # function that returns whether a value is valid
    must_be: str  # description of the valid values, for error messages
    help: str
    choices: tuple[str, ...] = ()  # strings among the valid values
    # type of the numbers among the valid values; None if no number is valid
    number: type[float] | type[int] | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def check(self, value: object) -> None:
        if not self.accepts(value):
            raise InputError(f"{self.name} is {value!r}; it must be {self.must_be}")

    def parse(self, text: str) -> Any:
        """Convert an argument of the command line to a valid value of this option."""
        value: object = text
        if text not in self.choices and self.number is not None:
            with contextlib.suppress(ValueError):  # `check` refuses the string
                value = self.number(text)
        self.check(value)
        return value


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number of Python or NumPy, and not a boolean."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _in_unit_interval(value: Any) -> bool:
    return is_number(value) and 0 <= float(value) <= 1


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy, and not a boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _one_of(name: str, default: str, choices: tuple[str, ...], help: str) -> Option:
    def accepts(value: object) -> bool:
        return isinstance(value, str) and value in choices

    must_be = f"one of {', '.join(map(repr, choices))}"
    return Option(name, default, accepts, must_be, help, choices)


SHRINKAGES = ("oas", "cv")
# Shrinkage intensities that "cv" compares, in addition to "oas"; None is 0.
INTENSITIES = (None, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1)

OPTIONS = {
    option.name: option
    for option in (
        Option(
            "max_amplification",
            None,
            lambda a: a is None or (is_number(a) and a >= 1),
            "a number of at least 1",
            "drop kept directions whose amplification, 1 / sin(angle to the concept), exceeds A",
            number=float,
        ),
        _one_of(
            "on_infeasible",
            "raise",
            ("raise", "drop"),
            "a kept direction in the span of the concept is an error, or is dropped",
        ),
        _one_of(
            "null_space",
            "keep",
            ("keep", "drop"),
            "keep dimensions without variance, or set them to their mean",
        ),
        Option(
            "shrinkage",
            None,
            lambda s: (
                s is None or (s in SHRINKAGES if isinstance(s, str) else _in_unit_interval(s))
            ),
            "None, 'oas', 'cv' or a number in [0, 1]",
            "shrink the covariance towards a multiple of the identity, by this intensity or rule; "
            "'cv' minimises the distortion of held-out rows",
            SHRINKAGES,
            number=float,
        ),
        Option(
            "rank_tol",
            "auto",
            lambda t: t == "auto" if isinstance(t, str) else _in_unit_interval(t) and t < 1,
            "'auto' or a number in [0, 1)",
            "ignore singular values of the concept below A times the largest",
            ("auto",),
            number=float,
        ),
        _one_of(
            "solver",
            "auto",
            ("auto", "cholesky", "eigh"),
            "factorisation of the covariance",
        ),
        Option(
            "strength",
            1,
            _in_unit_interval,
            "a number in [0, 1]",
            "fraction that is kept of the covariance that LEACE removes from the task; 1 is "
            "SPLINCE, 0 is LEACE",
            number=float,
        ),
    )
}

MAX_PASSES = 1000

# Options of the accumulation of moments, and of extra passes over the rows.
MOMENT_OPTIONS = {
    option.name: option
    for option in (
        Option(
            "subsample",
            1.0,
            lambda p: p == "auto" if isinstance(p, str) else is_number(p) and 0 < p <= 1,
            "a number above 0 and at most 1, the fraction of the rows for the covariance, or "
            "'auto'",
            "fraction of the rows for the covariance; 'auto' takes the smallest for which the rows "
            "are expected to change at most 5 percent more",
            ("auto",),
            number=float,
        ),
        _one_of(
            "covariance_type",
            "full",
            ("full", "diag"),
            "the d x d covariance, or its diagonal alone, for wide or sparse rows",
        ),
        Option(
            "passes",
            0,
            lambda n: is_integer(n) and 0 <= n <= MAX_PASSES,
            f"an integer from 0 to {MAX_PASSES}",
            "extra passes over the rows, each of which lowers the distortion",
            number=int,
        ),
    )
}


def check_moment_options(
    subsample: object, covariance_type: object, passes: object = 0, shrinkage: object = None,
    solver: str = "auto", groups: object = None,
) -> None:  # fmt: skip
    """Raise InputError if options of the accumulation are invalid or exclude each other."""
    values = subsample, covariance_type, passes
    for option, value in zip(MOMENT_OPTIONS.values(), values, strict=True):
        if value is not option.default:
            option.check(value)
    reason = "needs the complete covariance, and covariance_type='diag' keeps none; "
    if covariance_type == "full":
        if passes:
            raise InputError(
                f"passes is {passes}, but extra passes need covariance_type='diag'; pass it, too, "
                "or leave passes out"
            )
    elif subsample != 1:
        raise InputError(
            f"covariance_type='diag' and subsample={subsample} exclude each other, because both "
            "replace the exact covariance; pass 'diag' if d x d numbers do not fit in memory, "
            "otherwise subsample"
        )
    elif isinstance(shrinkage, str):
        raise InputError(f"shrinkage {shrinkage!r} {reason}pass a number in [0, 1], or none")
    elif solver != "auto":
        raise InputError(f"solver {solver!r} {reason}leave it at 'auto'")
    elif passes and shrinkage:
        raise InputError(
            f"passes is {passes} and shrinkage {shrinkage}, but extra passes do not shrink the "
            "covariance; leave one of them out"
        )
    if groups is not None and shrinkage != "cv":
        raise InputError(
            "groups assigns rows to the folds on which shrinkage 'cv' is chosen; leave groups out, "
            "or choose shrinkage 'cv'"
        )


_DECLARED = tuple(OPTIONS.values())
_DEFAULTS = tuple(option.default for option in _DECLARED)
_values = attrgetter(*OPTIONS)


@dataclass(slots=True)  # frozen=True would add 10 % to the time of a small solve
class Options:
    """Validated options of one solve, which are not modified after creation."""

    max_amplification: float | None = None
    on_infeasible: str = "raise"
    null_space: str = "keep"
    shrinkage: float | str | None = None
    rank_tol: float | str = "auto"
    solver: str = "auto"
    strength: float = 1

    def __post_init__(self) -> None:
        values = _values(self)
        if not all(map(is_, values, _DEFAULTS)):
            for value, option in zip(values, _DECLARED, strict=True):
                if value is not option.default:
                    option.check(value)
