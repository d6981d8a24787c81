"""Base class of labelled variables z: sums from which Cov(x, z) is computed.

Sums of x are sums of deviations x - r from the reference point r of the state, for full precision
if the data are far from 0. The sums are not divided by the weight sum, so that states are merged by
addition.

An update of a variable has three steps: `encode` encodes labels with the classes of the state and
changes nothing; `request` requests sums over a block; `commit` adds the sums, and cannot fail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import Layout, Tensors
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
# Encoded labels of n rows: class codes, (n,) intp, with -1 for missing labels; or values, (n, k)
# float64, with NaN for missing labels.
Labels = NDArray[Any]


class Request(NamedTuple):
    """Sums that a variable requests over a block, and the arguments of `commit` for them."""

    codes: Codes | None  # (n,): number of the class sum of each row, below n_sums; -1 for none
    n_sums: int
    values: Float | None  # (q, n): for q sums of x, coefficient times weight of each row
    commit_data: tuple[Any, ...]  # further data for `commit`, by kind of variable


class Variable(ABC):
    """Sums of x and of one variable z over the rows that have a label."""

    __slots__ = ()

    kind: ClassVar[str]
    missing_label: ClassVar[float]  # the code or value of a missing label
    TENSORS: ClassVar[Layout]  # of a file; d features, k classes or columns
    width: int  # number of features d of x
    n_columns: int  # number of classes or columns

    # -- filling ---------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def new(cls, width: int, column: Any) -> Self:
        """Return a variable without rows for the labels of a column."""

    @abstractmethod
    def encode(self, column: Any, name: object) -> tuple[Labels | None, Any]:
        """Return the encoded labels, and the argument of `register`; change nothing."""
        # Both are None for a column without labels. The argument of `register` is None if the
        # column has no new names.

    @abstractmethod
    def register(self, new_names: Any) -> None:
        """Register the new names that `encode` returned."""

    @abstractmethod
    def request(self, labels: Labels, weight: Float | None) -> Request:
        """Return a request for sums over a block; allocate the memory for `commit`."""

    @abstractmethod
    def commit(self, request: Request, class_sums: Float, products: Float) -> None:
        """Add the sums of a block; cannot fail, since `request` has allocated the memory."""

    @abstractmethod
    def moved(self, offset: Float) -> Self:
        """Return a copy about the reference point r - offset, with r the reference point so far."""

    # -- algebra ---------------------------------------------------------------------------

    @abstractmethod
    def empty_like(self) -> Self:
        """Return a variable of the same kind and width without rows."""

    @abstractmethod
    def copy(self) -> Self:
        """Return an independent copy."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply every weight by a factor."""

    @abstractmethod
    def merged(self, other: Variable, offset: Float, sign: int, name: object) -> Self:
        """Return self + sign * other."""
        # `offset` is the reference point of x in `other` minus the reference point in `self`.

    @abstractmethod
    def depends_on_label(
        self, features: NDArray[np.intp], mean_deviation: Float, rounding: Float
    ) -> NDArray[np.bool_]:
        """Return, for each of `features`, whether its mean depends on the label."""
        # For classes, the mean depends on the label if a class mean differs from the mean by more
        # than `rounding`, (d,); for continuous z, if the mean changes by more than `rounding` per
        # standard deviation of z. `mean_deviation`, (d,), is the mean of x minus the reference
        # point.

    @abstractmethod
    def make_constant(self, features: NDArray[np.intp], mean_deviation: Float) -> None:
        """Set the sums as if each of `features` were constant and equal to its mean."""
        # The mean is the reference point plus `mean_deviation`, (d,).

    # -- reading ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Number of labelled rows."""

    @property
    @abstractmethod
    def weight(self) -> float:
        """Weight sum of the labelled rows."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Kind and size of the variable as text."""

    @abstractmethod
    def class_names(self, name: object) -> list[ClassName]:
        """Return the names of the classes; raise LabelError if the variable is continuous."""

    @abstractmethod
    def cross_covariance(self, ddof: float, name: object) -> Float:
        """Return Cov(x, z) over the labelled rows, (d, k)."""

    @abstractmethod
    def span(self) -> Float:
        """Return vectors, (k', d), that span the columns of Cov(x, z), ddof = 0."""
        # The columns of z are standardised for this. If z is constant, k' is 0.

    # -- storing ---------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> Tensors:
        """Return the sums as named arrays."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Return the kind and the names of the variable as JSON values."""

    @classmethod
    @abstractmethod
    def read(cls, width: int, meta: Mapping[str, Any], tensors: Tensors) -> Self:
        """Return the variable that `tensors` wrote; raise FileFormatError if it is invalid."""

    @abstractmethod
    def read_labels(self, labels: NDArray[np.generic], n_rows: int, key: str) -> Labels:
        """Return labels of buffered rows from a file; raise FileFormatError if they are invalid."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def add_at(target: Float, index: NDArray[np.intp], added: Float, scratch: Float) -> None:
    """Compute target[index] += added for distinct rows `index`; allocate no memory."""
    np.take(target, index, axis=0, out=scratch, mode="clip")  # mode="raise" would allocate a buffer
    scratch += added
    target[index] = scratch


def check_ddof(ddof: object) -> None:
    if not is_number(ddof) or not np.isfinite(float(ddof)):
        raise InputError(f"ddof is {ddof!r}; it must be a finite number, such as 0 or 1")


def denominator(weight: float, ddof: float, name: object) -> float:
    """Return weight - ddof; raise NotEnoughDataError unless it is positive."""
    check_ddof(ddof)
    if weight - ddof <= 0:
        raise NotEnoughDataError(
            f"the covariance with {name!r} needs a total weight above ddof = {ddof:g}, and its "
            f"labelled rows have {weight:g}; add rows or pass ddof=0"
        )
    return weight - ddof


def look_up(variables: Mapping[VariableName, Variable], name: VariableName) -> Variable:
    """Return the variable of this name; raise UnknownVariableError if there is none."""
    try:
        return variables[name]
    except (KeyError, TypeError):  # TypeError: the name is not hashable
        names = ", ".join(map(repr, variables)) or "none"
        hint = (
            f"; for a joint variable, pass joint=[{name!r}] to Moments"
            if isinstance(name, tuple)
            else ""
        )
        raise UnknownVariableError(
            f"no variable {name!r} was accumulated, or none of its labels is present; the "
            f"variables are: {names}{hint}"
        ) from None


def refuse_other_kind(name: object, ours: Variable, theirs: Variable) -> None:
    """Raise IncompatibleMomentsError unless both variables are of one kind."""
    if type(ours) is not type(theirs):
        raise IncompatibleMomentsError(
            f"the variable {name!r} is {ours.kind} on one side and {theirs.kind} on the other; "
            "accumulate both with the same kinds="
        )


def contradiction(name: object, ours: str, theirs: str) -> LabelError:
    """Return the error for a variable whose kind differs from earlier blocks."""
    held = {"classes": "classes", "continuous": "continuous values"}
    return LabelError(
        f"the variable {name!r} held {held[ours]} in earlier blocks and holds {held[theirs]} in "
        f"this one; give it one dtype, or fix it with Moments(kinds={{{name!r}: {ours!r}}})"
    )
