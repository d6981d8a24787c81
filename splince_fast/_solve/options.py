"""The options of a fit, declared once: name, default, valid values and help text.

`OPTIONS` are the options of the methods, which control the solve. `MOMENT_OPTIONS` control the
statistics that moments store, and extra passes over the rows. Signatures of functions and
estimators repeat names and defaults, which a test compares with these tables; the command line
makes its flags from them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

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

    def check(self, value: Any) -> None:
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


def _table(*rows: tuple[Any, ...]) -> dict[str, Option]:
    return {row[0]: Option(*row) for row in rows}


# Shrinkage intensities that "cv" compares, in addition to "oas"; None is 0.
INTENSITIES = (None, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1)
MAX_PASSES = 1000

_AMPLIFICATION = (
    "drop kept directions whose amplification, 1 / sin(angle to the concept), exceeds A"
)
_INFEASIBLE = "a kept direction in the span of the concept is an error, or is dropped"
_NULL_SPACE = "keep dimensions without variance, or set them to their mean"
_SHRINKAGE = "intensity of the shrinkage of the covariance, or a rule; 'cv' takes held-out rows"
_RANK_TOL = "ignore singular values of the concept below A times the largest"
_SOLVER = "factorisation of the covariance"
_STRENGTH = "fraction that is kept of the covariance that LEACE removes from the task"
_SUBSAMPLE = "fraction of the rows for the covariance; 'auto' changes rows 5 percent more at most"
_TYPE = "the d x d covariance, or its diagonal alone, for wide or sparse rows"
_PASSES = "extra passes over the rows, each of which lowers the distortion"

OPTIONS = _table(
    ("max_amplification", None, _AMPLIFICATION, (), float, "[1, inf]", "of at least 1"),
    ("on_infeasible", "raise", _INFEASIBLE, ("raise", "drop")),
    ("null_space", "keep", _NULL_SPACE, ("keep", "drop")),
    ("shrinkage", None, _SHRINKAGE, ("oas", "cv"), float),
    ("rank_tol", "auto", _RANK_TOL, ("auto",), float, "[0, 1)"),
    ("solver", "auto", _SOLVER, ("auto", "cholesky", "eigh")),
    ("strength", 1, _STRENGTH, (), float),
)
MOMENT_OPTIONS = _table(
    ("subsample", 1.0, _SUBSAMPLE, ("auto",), float, "(0, 1]", "above 0 and at most 1"),
    ("covariance_type", "full", _TYPE, ("full", "diag")),
    ("passes", 0, _PASSES, (), int, f"[0, {MAX_PASSES}]"),
)


def check_moment_options(
    subsample: object, covariance_type: object, passes: object = 0, shrinkage: object = None,
    solver: str = "auto", groups: object = None,
) -> None:  # fmt: skip
    """Raise InputError if options of the accumulation are invalid or exclude each other."""
    values = subsample, covariance_type, passes
    for option, value in zip(MOMENT_OPTIONS.values(), values, strict=True):
        if type(value) is not type(option.default) or value != option.default:
            option.check(value)
    diagonal = covariance_type == "diag"
    needs = "needs the complete covariance, and covariance_type='diag' keeps none"
    excluded = {
        "groups assigns rows to the folds of shrinkage='cv'; leave groups out, or choose 'cv'": (
            groups is not None and shrinkage != "cv"
        ),
        f"passes is {passes}, but extra passes need covariance_type='diag'": (
            passes and not diagonal
        ),
        f"covariance_type='diag' and subsample={subsample} exclude each other": (
            diagonal and subsample != 1
        ),
        f"shrinkage {shrinkage!r} {needs}; pass a number in [0, 1]": (
            diagonal and isinstance(shrinkage, str)
        ),
        f"solver {solver!r} {needs}; leave it at 'auto'": diagonal and solver != "auto",
        f"passes is {passes} and shrinkage {shrinkage}; leave one of them out": (
            passes and shrinkage
        ),
    }
    for text, condition in excluded.items():
        if condition:
            raise InputError(text)


class Options(NamedTuple):
    """Options of one solve, in the order of `OPTIONS`; `checked` validates them."""

    max_amplification: float | None = None
    on_infeasible: str = "raise"
    null_space: str = "keep"
    shrinkage: float | str | None = None
    rank_tol: float | str = "auto"
    solver: str = "auto"
    strength: float = 1

    def checked(self) -> Options:
        for option, value in zip(OPTIONS.values(), self, strict=True):
            if value is not option.default:
                option.check(value)
        return self
