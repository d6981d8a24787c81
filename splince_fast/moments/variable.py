"""Base class of labelled variables z: sums from which Cov(x, z) is computed.

Sums of x are sums of deviations x - r from the reference point r of the state, for full precision
if the data are far from 0. The sums are not divided by the weight sum, so that states are merged by
addition.

An update of a variable has three steps: `encode` encodes labels with the classes of the variable,
`label_sums` sums the labels of a block, and `add` prepares the addition of the sums to the state.
None of them changes the variable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Change
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
from splince_fast.moments.block import Codes, Labels

Float = NDArray[np.float64]


class LabelSums(NamedTuple):
    """Sums of the labels of a block, and the sums of x that a variable needs for it."""

    codes: Codes | None  # (n,): number of the class sum of each row; -1 for none
    weights: Float  # (c,): weight sum of each class sum of x
    values: Float  # (q, n): for q products with x, coefficient times weight of each row
    data: tuple[Any, ...]  # sums of the labels, by kind of variable


class Variable(ABC):
    """Sums of x and of one variable z over the rows that have a label."""

    __slots__ = ()

    kind: ClassVar[str]
    TENSORS: ClassVar[Layout]  # of a file; d features, k classes or columns
    width: int  # number of features d of x
    n_columns: int  # number of classes or columns

    # -- filling ---------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def new(cls, width: int, column: Any) -> Self:
        """Return a variable without rows for the labels of a column."""

    @abstractmethod
    def encode(self, column: Any, name: object) -> tuple[Labels | None, Self]:
        """Return the encoded labels, and this variable with the new names of the column."""
        # The labels are None for a column without labels. The variable is this object if the
        # column has no new names; otherwise it shares the sums of this object.

    @abstractmethod
    def label_sums(self, labels: Labels, weight: Float | None) -> LabelSums:
        """Return the sums of the labels of a block."""

    @abstractmethod
    def add(self, sums: LabelSums, class_sums: Float, products: Float) -> list[Change]:
        """Return the changes that add the sums of a block."""
        # `class_sums`, (c, d), and `products`, (q, d), are sums of x - r.

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
