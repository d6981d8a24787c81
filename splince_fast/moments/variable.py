"""Base of labelled variables: sums from which Cov(x, z) follows.

All sums of x are taken of deviations from the reference point of the state they belong to, so
that they keep full precision whatever the offset of the data, and they are stored without
normalisation, so that merging is addition. An update of a variable has three steps: `begin`
encodes labels by the classes of the state and changes nothing; `ask` requests sums over a block;
`commit` adds these sums, and cannot fail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import Tensors
from splince_fast._solve.options import is_number
from splince_fast.exceptions import (
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NotEnoughDataError,
    UnknownVariableError,
)
from splince_fast.labels import ClassName, VariableName

Float = NDArray[np.float64]
Codes = NDArray[np.intp]
# Labels of rows encoded by a state: (n,) intp of classes, -1 where missing, or (n, k) float64,
# NaN where missing.
Labels = NDArray[Any]


class Request(NamedTuple):
    """Sums that a variable requests over a block, and data for their commit."""

    codes: Codes | None  # (n,) into n_sums class sums, -1 for none
    n_sums: int
    values: Float | None  # (q, n), multiplied by the weights
    kept: tuple[Any, ...]


class Variable(ABC):
    """Sums over the rows that carry a label.

    Attributes
    ----------
    kind : {"classes", "continuous"}
    blank : int or float
        The code or value of a missing label.
    width : int
        Features d of x.
    n_columns : int
        Number of classes or columns.
    """

    __slots__ = ()

    kind: ClassVar[str]
    blank: ClassVar[float]
    width: int
    n_columns: int

    # -- filling ---------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def new(cls, width: int, column: Any) -> Self:
        """An empty variable for a column that was never seen."""

    @abstractmethod
    def begin(self, column: Any, name: object) -> tuple[Labels | None, Any]:
        """Labels encoded by the classes of the state, and the argument of `learn`; changes nothing.

        Both are None for a column without labels; the latter where nothing is new.

        Raises
        ------
        LabelError
            A column of the same kind contradicts earlier blocks, or cannot be summed.
        """

    @abstractmethod
    def learn(self, new_names: Any) -> None:
        """Register the new names that `begin` returned."""

    @abstractmethod
    def ask(self, labels: Labels, weight: Float | None) -> Request:
        """Sums to request over a block, with memory for them; no readable state changes."""

    @abstractmethod
    def commit(self, request: Request, class_sums: Float, products: Float) -> None:
        """Add the sums of a block; cannot fail."""

    @abstractmethod
    def moved(self, step: Float) -> Self:
        """The same sums about another reference point, `step` = the old one minus the new one."""

    # -- algebra ---------------------------------------------------------------------------

    @abstractmethod
    def empty_like(self) -> Self:
        """The same variable without rows."""

    @abstractmethod
    def copy(self) -> Self:
        """An independent copy."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply every weight by a factor."""

    @abstractmethod
    def merged(self, other: Variable, shift: Float, sign: int, name: object) -> Self:
        """self + sign * other, with `shift` = reference of other - reference of self."""

    @abstractmethod
    def varies(self, features: NDArray[np.intp], gap: Float, rounding: Float) -> NDArray[np.bool_]:
        """Whether x, which is `gap` from the reference point on average, differs between labels.

        By more than `rounding`, (d,), in the mean of a class or in units of z's deviation.
        """

    @abstractmethod
    def clear(self, features: NDArray[np.intp], gap: Float) -> None:
        """Make features constant: x is `gap` from the reference point in every row."""

    # -- reading ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Rows that carry a label."""

    @property
    @abstractmethod
    def weight(self) -> float:
        """Their weight."""

    @property
    @abstractmethod
    def described(self) -> str:
        """The kind and size in a few words."""

    @abstractmethod
    def class_names(self, name: object) -> list[ClassName]:
        """Names of the classes; LabelError where there are none."""

    @abstractmethod
    def cross_covariance(self, ddof: float, name: object) -> Float:
        """(d, k): Cov(x, z) over the rows that carry a label."""

    @abstractmethod
    def span(self) -> Float:
        """(k', d): rows that span Cov(x, z), ddof = 0; none where z is constant."""

    # -- storing ---------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> Tensors:
        """The sums as named arrays."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """The kind and the names, as JSON."""

    @classmethod
    @abstractmethod
    def read(cls, width: int, meta: Mapping[str, Any], tensors: Tensors) -> Self:
        """The inverse of `tensors` and `metadata`; FileFormatError where they are impossible."""

    @abstractmethod
    def read_labels(self, labels: NDArray[np.generic], n_rows: int, key: str) -> Labels:
        """Labels of waiting rows from a file; FileFormatError where they are impossible."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def add_at(target: Float, index: NDArray[np.intp], added: Float, scratch: Float) -> None:
    """target[index] += added, where `index` has each row once; needs no memory but `scratch`.

    Parameters
    ----------
    target : (k, d) float64, changed in place
    index : (c,) intp
    added, scratch : (c, d) float64
        `scratch` is overwritten.
    """
    np.take(target, index, axis=0, out=scratch, mode="clip")  # unlike "raise", without a buffer
    scratch += added
    target[index] = scratch


def check_ddof(ddof: object) -> None:
    """Raise InputError unless `ddof` is a finite number."""
    if not is_number(ddof) or not np.isfinite(float(ddof)):
        raise InputError(f"ddof is {ddof!r}; it must be a finite number, such as 0 or 1")


def denominator(weight: float, ddof: float, name: object) -> float:
    """weight - ddof; NotEnoughDataError unless it is positive."""
    check_ddof(ddof)
    if weight - ddof <= 0:
        raise NotEnoughDataError(
            f"the covariance with {name!r} needs a total weight above ddof = {ddof:g}, and its "
            f"labelled rows weigh {weight:g}; add rows or pass ddof=0"
        )
    return weight - ddof


def look_up(variables: Mapping[VariableName, Variable], name: VariableName) -> Variable:
    """The variable of this name; UnknownVariableError if there is none."""
    try:
        return variables[name]
    except (KeyError, TypeError):  # what is not hashable is a TypeError
        names = ", ".join(map(repr, variables)) or "none"
        hint = f"; Moments(joint=[{name!r}]) does it" if isinstance(name, tuple) else ""
        raise UnknownVariableError(
            f"no variable {name!r} was accumulated, or none of its labels is present; the "
            f"variables are: {names}{hint}"
        ) from None


def refuse_other_kind(name: object, ours: Variable, theirs: Variable) -> None:
    """Raise IncompatibleMomentsError unless both sides read a variable alike."""
    if type(ours) is not type(theirs):
        raise IncompatibleMomentsError(
            f"the variable {name!r} is {ours.kind} on one side and {theirs.kind} on the other; "
            "accumulate both with the same kinds="
        )


def contradiction(name: object, ours: str, theirs: str) -> LabelError:
    """The error of a variable that is of another kind than in earlier blocks."""
    return LabelError(
        f"the variable {name!r} was {ours} in earlier blocks and is {theirs} in this one; give it "
        f"one dtype, or fix it with Moments(kinds={{{name!r}: {ours!r}}})"
    )
