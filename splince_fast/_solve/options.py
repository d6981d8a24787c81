"""The options of a fit, declared once: name, default, valid values and help text.

`OPTIONS` are the options of the methods, which control the solve. `MOMENT_OPTIONS` are the options
of the accumulation, which control the statistics that moments store, and of extra passes over the
rows. Signatures of functions and estimators repeat the names and defaults, and a test compares the
signatures with these tables. The flags of the command line are made from the tables.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from splince_fast.exceptions import InputError


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number of Python or NumPy, and not a boolean."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy, and not a boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a fit; its default is valid, too."""

    name: str
    default: Any
    help: str
    choices: tuple[str, ...] = ()  # strings among the valid values
    number: type[float] | type[int] | None = None  # type of the numbers among them, if any
    interval: str = "[0, 1]"  # of the valid numbers; a parenthesis excludes the end beside it
    words: str = ""  # the interval in the error message

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def accepts(self, value: Any) -> bool:
        if value is None or isinstance(value, str):
            return value == self.default or value in self.choices
        if self.number is None or not (is_integer if self.number is int else is_number)(value):
            return False
        low, high = map(float, self.interval[1:-1].split(","))
        ends = [end for end, mark in ((low, "["), (high, "]")) if mark in self.interval]
        return bool(low < value < high) or value in ends

    def check(self, value: object) -> None:
        if self.accepts(value):
            return
        valid = ", ".join([*(["None"] if self.default is None else []), *map(repr, self.choices)])
        if self.number is None:
            valid = f"one of {valid}"
        else:
            kind = "an integer" if self.number is int else "a number"
            valid += f"{' or ' * bool(valid)}{kind} {self.words or f'in {self.interval}'}"
        raise InputError(f"{self.name} is {value!r}; it must be {valid}")

    def parse(self, text: str) -> Any:
        """Convert an argument of the command line to a valid value of this option."""
        value: object = text
        if text not in self.choices and self.number is not None:
            with contextlib.suppress(ValueError):  # `check` refuses the string
                value = self.number(text)
        self.check(value)
        return value


# Shrinkage intensities that "cv" compares, in addition to "oas"; None is 0.
INTENSITIES = (None, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
MAX_PASSES = 1000

OPTIONS = {
    option.name: option
    for option in (
        Option(
            "max_amplification",
            None,
            "drop kept directions whose amplification, 1 / sin(angle to the concept), exceeds A",
            number=float,
            interval="[1, inf]",
            words="of at least 1",
        ),
        Option(
            "on_infeasible",
            "raise",
            "a kept direction in the span of the concept is an error, or is dropped",
            ("raise", "drop"),
        ),
        Option(
            "null_space",
            "keep",
            "keep dimensions without variance, or set them to their mean",
            ("keep", "drop"),
        ),
        Option(
            "shrinkage",
            None,
            "shrink the covariance towards a multiple of the identity, by this intensity or rule; "
            "'cv' minimises the distortion of held-out rows",
            ("oas", "cv"),
            float,
        ),
        Option(
            "rank_tol",
            "auto",
            "ignore singular values of the concept below A times the largest",
            ("auto",),
            float,
            "[0, 1)",
        ),
        Option("solver", "auto", "factorisation of the covariance", ("auto", "cholesky", "eigh")),
        Option(
            "strength",
            1,
            "fraction that is kept of the covariance that LEACE removes from the task; 1 is "
            "SPLINCE, 0 is LEACE",
            number=float,
        ),
    )
}

MOMENT_OPTIONS = {
    option.name: option
    for option in (
        Option(
            "subsample",
            1.0,
            "fraction of the rows for the covariance; 'auto' takes the smallest for which the rows "
            "are expected to change at most 5 percent more",
            ("auto",),
            float,
            "(0, 1]",
            "above 0 and at most 1",
        ),
        Option(
            "covariance_type",
            "full",
            "the d x d covariance, or its diagonal alone, for wide or sparse rows",
            ("full", "diag"),
        ),
        Option(
            "passes",
            0,
            "extra passes over the rows, each of which lowers the distortion",
            number=int,
            interval=f"[0, {MAX_PASSES}]",
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
    diagonal = covariance_type == "diag"
    reason = "needs the complete covariance, and covariance_type='diag' keeps none"
    excluded = (
        (
            groups is not None and shrinkage != "cv",
            "groups assigns rows to the folds on which shrinkage 'cv' is chosen; leave groups out, "
            "or choose shrinkage 'cv'",
        ),
        (
            passes and not diagonal,
            f"passes is {passes}, but extra passes need covariance_type='diag'; pass it, too, or "
            "leave passes out",
        ),
        (
            diagonal and subsample != 1,
            f"covariance_type='diag' and subsample={subsample} exclude each other; "
            "pass 'diag' if d x d numbers do not fit in memory, otherwise subsample",
        ),
        (
            diagonal and isinstance(shrinkage, str),
            f"shrinkage {shrinkage!r} {reason}; pass a number in [0, 1], or none",
        ),
        (
            diagonal and solver != "auto",
            f"solver {solver!r} {reason}; leave it at 'auto'",
        ),
        (
            passes and shrinkage,
            f"passes is {passes} and shrinkage {shrinkage}, but extra passes do not shrink the "
            "covariance; leave one of them out",
        ),
    )
    for condition, text in excluded:
        if condition:
            raise InputError(text)


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
        for name, option in OPTIONS.items():
            if (value := getattr(self, name)) is not option.default:
                option.check(value)
