"""Per labelled variable: the sums from which its cross-covariance with x follows.

All sums of x are taken of deviations from one fixed reference point of the state they belong to,
so that they keep full precision whatever the offset of the data, and they are stored without
normalisation, so that merging is addition. With r the reference, over the rows that carry a label:

* class-coded:  n_c, w_c = sum w_i and s_c = sum w_i (x_i - r) per class c;
* continuous:   n, w, sum w (x - r), sum w (z - t), sum w (z - t)(x - r)^T and
  sum w (z - t)(z - t)^T, with t a reference for z.

Above 400 lines because both kinds live the same life here: filled, merged, read, and filed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import check_tensors, refuse_negative
from splince_fast.exceptions import (
    FileFormatError,
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NotEnoughDataError,
)
from splince_fast.labels import (
    ClassCodes,
    ClassName,
    Columns,
    Encoded,
    VariableName,
    class_key,
    names_from_json,
    names_to_json,
)

Float = NDArray[np.float64]
Int = NDArray[np.int64]


def check_ddof(ddof: object) -> None:
    """Raise InputError unless `ddof` is a finite number."""
    if not isinstance(ddof, (int, float, np.integer, np.floating)) or not np.isfinite(float(ddof)):
        raise InputError(f"ddof is {ddof!r}; it must be a finite number, such as 0 or 1")


def _denominator(weight: float, ddof: float, name: object) -> float:
    """weight - ddof, or an error that says why there is no covariance."""
    check_ddof(ddof)
    if weight - ddof <= 0:
        raise NotEnoughDataError(
            f"the covariance with {name!r} needs a total weight above ddof = {ddof:g}, and its "
            f"labelled rows weigh {weight:g}; add rows or pass ddof=0"
        )
    return weight - ddof


@dataclass(slots=True)
class ClassSums:
    """Sums per class. Arrays grow along their first axis as classes appear."""

    width: int
    names: list[ClassName]
    rows: Int
    weights: Float
    sums: Float
    index: dict[tuple[Any, ...], int] = field(init=False)

    kind = "classes"

    def __post_init__(self) -> None:
        self.index = {class_key(name): i for i, name in enumerate(self.names)}

    @classmethod
    def empty(cls, width: int) -> ClassSums:
        return cls(width, [], np.zeros(0, np.int64), np.zeros(0), np.zeros((0, width)))

    def empty_like(self) -> ClassSums:
        return ClassSums.empty(self.width)

    @property
    def weight(self) -> float:
        return float(self.weights.sum())

    @property
    def n_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def n_columns(self) -> int:
        return len(self.names)

    def places(self, names: Sequence[ClassName]) -> list[int]:
        """Positions of classes; those not yet known get a name, and room by `allocate`."""
        keys = list(map(class_key, names))
        for key, name in zip(keys, names, strict=True):
            if key not in self.index:
                self.index[key] = len(self.names)
                self.names.append(name)
        return list(map(self.index.__getitem__, keys))

    def forget(self, n_names: int) -> None:
        """Take back the names beyond the first `n_names`, which hold nothing yet."""
        for name in self.names[n_names:]:
            del self.index[class_key(name)]
        del self.names[n_names:]
        self.rows, self.weights = self.rows[:n_names], self.weights[:n_names]
        self.sums = self.sums[:n_names]

    def allocate(self) -> None:
        """Give every named class its place in the arrays."""
        fresh = len(self.names) - len(self.rows)
        if fresh:
            rows = np.concatenate([self.rows, np.zeros(fresh, np.int64)])
            weights = np.concatenate([self.weights, np.zeros(fresh)])
            sums = np.concatenate([self.sums, np.zeros((fresh, self.width))])
            self.rows, self.weights, self.sums = rows, weights, sums

    def add(self, where: NDArray[np.intp], rows: Int, weights: Float, sums: Float) -> None:
        """Add the sums of a block, given for the classes `where` (each at most once)."""
        from splince_fast._kernels import accumulate

        self.rows[where] += rows
        self.weights[where] += weights
        accumulate.add_rows(self.sums, where, sums)

    def copy(self) -> ClassSums:
        return ClassSums(
            self.width, list(self.names), self.rows.copy(), self.weights.copy(), self.sums.copy()
        )

    def merged(self, other: Variable, shift: Float, sign: int, name: object) -> ClassSums:
        """self + sign * other, with `shift` = reference of other - reference of self."""
        if not isinstance(other, ClassSums):
            raise _other_kind(name, self, other)
        if self.names and other.names and type(self.names[0]) is not type(other.names[0]):
            raise IncompatibleMomentsError(
                f"the classes of {name!r} are of type {type(self.names[0]).__name__} on one side "
                f"and {type(other.names[0]).__name__} on the other; use one type throughout"
            )
        result = self.copy()
        if sign < 0:
            unknown = [c for c in other.names if class_key(c) not in self.index]
            if unknown:
                raise IncompatibleMomentsError(
                    f"cannot remove a part whose variable {name!r} has the class {unknown[0]!r}, "
                    "which the whole never saw: it is not a part of it"
                )
        where = np.array(result.places(other.names), np.intp)
        result.allocate()
        result.rows[where] += sign * other.rows
        result.weights[where] += sign * other.weights
        result.sums[where] += sign * (other.sums + other.weights[:, None] * shift)
        if sign < 0:
            if (result.rows < 0).any():
                worst = result.names[int(np.argmin(result.rows))]
                raise IncompatibleMomentsError(
                    f"cannot remove a part that holds more rows of {name!r} = {worst!r} than the "
                    "whole: it is not a part of it"
                )
            empty = result.rows == 0
            if (result.weights[~empty] <= 0).any():
                raise IncompatibleMomentsError(
                    f"cannot remove a part whose rows of {name!r} weigh as much as the whole's, "
                    "which has more of them: it is not a part of it"
                )
            result.weights[empty] = 0.0
            result.sums[empty] = 0.0
        return result

    def cross_covariance(self, ddof: float, name: object) -> Float:
        """(d, k): Cov(x, 1[z = c]) = (s_c - (w_c / w) s) / (w - ddof), s the sum over classes."""
        weight = self.weight
        denominator = _denominator(weight, ddof, name)
        total = self.sums.sum(axis=0)
        share = self.weights / weight
        return np.asarray((self.sums - share[:, None] * total).T / denominator)

    def span(self) -> Float:
        """(k', d): rows that span Cov(x, z), ddof = 0, in units of deviations; none if constant."""
        from splince_fast._kernels import solve

        return solve.class_span(self.sums, self.weights)

    def tensors(self) -> dict[str, NDArray[Any]]:
        return {"rows": self.rows, "weights": self.weights, "sums": self.sums}

    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": names_to_json(tuple(self.names))}

    @classmethod
    def read(cls, width: int, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> ClassSums:
        names = list(names_from_json(meta["names"]))
        k = len(names)
        check_tensors(
            tensors,
            {
                "rows": (np.int64, (k,)),
                "weights": (np.float64, (k,)),
                "sums": (np.float64, (k, width)),
            },
        )
        refuse_negative(tensors, ("rows", "weights"))
        return cls(width, names, tensors["rows"], tensors["weights"], tensors["sums"])


@dataclass(slots=True)
class ColumnSums:
    """Sums of the columns of a continuous variable."""

    width: int
    names: list[str]
    n_rows: int
    weight: float
    reference: Float  # (k,)
    x_sum: Float  # (d,)
    z_sum: Float  # (k,)
    products: Float  # (k, d)
    squares: Float  # (k, k)

    kind = "continuous"

    @classmethod
    def empty(cls, width: int, names: tuple[str, ...], reference: Float) -> ColumnSums:
        k = len(names)
        return cls(width, list(names), 0, 0.0, reference.copy(), np.zeros(width), np.zeros(k),
                   np.zeros((k, width)), np.zeros((k, k)))  # fmt: skip

    def empty_like(self) -> ColumnSums:
        return ColumnSums.empty(self.width, tuple(self.names), self.reference)

    @property
    def n_columns(self) -> int:
        return len(self.names)

    @property
    def unnamed(self) -> bool:
        """Whether the columns have no names but their numbers."""
        return _unnamed(self.names)

    def copy(self) -> ColumnSums:
        return ColumnSums(self.width, list(self.names), self.n_rows, self.weight,
                          self.reference.copy(), self.x_sum.copy(), self.z_sum.copy(),
                          self.products.copy(), self.squares.copy())  # fmt: skip

    def add(self, n_rows: int, weight: float, x_sum: Float, z_sum: Float, products: Float,
            squares: Float) -> None:  # fmt: skip
        """Add the sums of a block, taken about the references of this variable and its state."""
        self.n_rows += n_rows
        self.weight += weight
        self.x_sum += x_sum
        self.z_sum += z_sum
        self.products += products
        self.squares += squares

    def merged(self, other: Variable, shift: Float, sign: int, name: object) -> ColumnSums:
        """self + sign * other, with `shift` = reference of other - reference of self."""
        if not isinstance(other, ColumnSums):
            raise _other_kind(name, self, other)
        if self.n_columns != other.n_columns:
            raise IncompatibleMomentsError(
                f"the variable {name!r} has {self.n_columns} columns on one side and "
                f"{other.n_columns} on the other; accumulate both from the same columns"
            )
        if self.names != other.names and not (self.unnamed or other.unnamed):
            raise IncompatibleMomentsError(
                f"the variable {name!r} has the columns {self.names} on one side and "
                f"{other.names} on the other; accumulate both from the same columns"
            )
        result = self.copy()
        if self.unnamed:
            result.names = list(other.names)
        if sign < 0 and other.n_rows > self.n_rows:
            raise IncompatibleMomentsError(
                f"cannot remove a part with {other.n_rows} rows labelled with {name!r} from a "
                f"whole with {self.n_rows}: it is not a part of it"
            )
        step = other.reference - self.reference
        z_sum = other.z_sum + other.weight * step
        x_sum = other.x_sum + other.weight * shift
        products = (
            other.products
            + np.outer(step, other.x_sum)
            + np.outer(other.z_sum, shift)
            + other.weight * np.outer(step, shift)
        )
        squares = (
            other.squares
            + np.outer(step, other.z_sum)
            + np.outer(other.z_sum, step)
            + other.weight * np.outer(step, step)
        )
        result.add(sign * other.n_rows, sign * other.weight, sign * x_sum, sign * z_sum,
                   sign * products, sign * squares)  # fmt: skip
        if result.n_rows == 0:
            return self.empty_like()
        if result.weight <= 0:
            raise IncompatibleMomentsError(
                f"cannot remove a part whose rows labelled with {name!r} weigh as much as the "
                "whole's, which has more of them: it is not a part of it"
            )
        return result

    def cross_covariance(self, ddof: float, name: object) -> Float:
        """(d, k): (sum w (x-r)(z-t)^T - sum w (x-r) sum w (z-t)^T / w) / (w - ddof)."""
        denominator = _denominator(self.weight, ddof, name)
        columns = self.products - np.outer(self.z_sum / self.weight, self.x_sum)
        return np.asarray(columns.T / denominator)

    def variance(self) -> Float:
        """Cov(z, z) with ddof = 0."""
        mean = self.z_sum / self.weight
        return np.asarray(self.squares / self.weight - np.outer(mean, mean))

    def span(self) -> Float:
        """(k', d): Cov(x, z), ddof = 0, in units of z's deviations; constant columns left out."""
        if self.weight == 0:
            return np.zeros((0, self.width))
        from splince_fast._kernels import solve

        return solve.column_span(
            self.products, self.z_sum, self.x_sum, self.squares, self.reference, self.weight
        )

    def deviations(self) -> Float:
        """(k,) standard deviations, ddof = 0; exactly 0 where constant but for rounding."""
        from splince_fast._kernels import solve

        return solve.column_deviations(self.z_sum, self.squares, self.reference, self.weight)

    def tensors(self) -> dict[str, NDArray[Any]]:
        return {
            "counts": np.array([self.n_rows], np.int64),
            "weight": np.array([self.weight]),
            "reference": self.reference,
            "x_sum": self.x_sum,
            "z_sum": self.z_sum,
            "products": self.products,
            "squares": self.squares,
        }

    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": list(self.names)}

    @classmethod
    def read(cls, width: int, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> ColumnSums:
        names = meta["names"]
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise FileFormatError(f"column names are not a list of strings: {json.dumps(names)}")
        k, real = len(names), np.float64
        check_tensors(
            tensors, {"counts": (np.int64, (1,)), "weight": (real, (1,)), "reference": (real, (k,)),
                      "x_sum": (real, (width,)), "z_sum": (real, (k,)),
                      "products": (real, (k, width)), "squares": (real, (k, k))}
        )  # fmt: skip
        refuse_negative(tensors, ("counts", "weight"))
        if (np.diag(tensors["squares"]) < 0).any():
            raise FileFormatError("a continuous variable has a negative sum of squares")
        return cls(width, names, int(tensors["counts"][0]), float(tensors["weight"][0]),
                   tensors["reference"], tensors["x_sum"], tensors["z_sum"], tensors["products"],
                   tensors["squares"])  # fmt: skip


Variable = ClassSums | ColumnSums


def _unnamed(names: list[str]) -> bool:
    return names == [str(i) for i in range(len(names))]


def _other_kind(name: object, ours: Variable, theirs: Variable) -> IncompatibleMomentsError:
    return IncompatibleMomentsError(
        f"the variable {name!r} is {ours.kind} on one side and {theirs.kind} on the other; "
        "accumulate both with the same kinds="
    )


def check_consistent(
    variables: Mapping[VariableName, Variable], encoded: Mapping[VariableName, Encoded]
) -> None:
    """Raise LabelError where a block contradicts what earlier blocks said of a variable."""
    for name, column in encoded.items():
        known = variables.get(name)
        if isinstance(column, Columns):
            if column.present is not None and not column.present.any():
                continue
            if column.values.size and np.abs(column.values).max() > 1e140:
                raise LabelError(
                    f"the variable {name!r} holds numbers as large as "
                    f"{np.abs(column.values).max():.1e}, whose squares leave the range of "
                    "float64; rescale it"
                )
        if known is None or (isinstance(column, ClassCodes) and not column.classes):
            continue
        found = "classes" if isinstance(column, ClassCodes) else "continuous"
        if known.kind != found:
            raise LabelError(
                f"the variable {name!r} was {known.kind} in earlier blocks and is {found} in this "
                f"one; give it one dtype, or fix it with Moments(kinds={{{name!r}: "
                f"{known.kind!r}}})"
            )
        if isinstance(known, ClassSums) and isinstance(column, ClassCodes):
            before, now = type(known.names[0]), type(column.classes[0])
            if before is not now:
                raise LabelError(
                    f"the classes of {name!r} were of type {before.__name__} in earlier blocks "
                    f"(such as {known.names[0]!r}) and are of type {now.__name__} in this one "
                    f"(such as {column.classes[0]!r}); use one type throughout"
                )
        if isinstance(known, ColumnSums) and isinstance(column, Columns):
            names = list(column.columns)
            if len(names) != known.n_columns or not (
                names == known.names or known.unnamed or _unnamed(names)
            ):
                raise LabelError(
                    f"the variable {name!r} had the columns {known.names} in earlier blocks and "
                    f"has {names} in this one; pass the same columns in the same order"
                )


def merged_variables(
    ours: Mapping[VariableName, Variable],
    theirs: Mapping[VariableName, Variable],
    shift: Float,
    sign: int,
) -> dict[VariableName, Variable]:
    """Variables of both sides (sign 1) or of the first without the second (sign -1).

    `shift` is the reference point of their state minus that of ours.
    """
    result = dict(ours)
    for name, variable in theirs.items():
        known = result.get(name)
        if known is None:
            if sign < 0:
                raise IncompatibleMomentsError(
                    f"cannot remove a part that has the variable {name!r}, which the whole never "
                    "saw: it is not a part of it"
                )
            known = variable.empty_like()
        result[name] = known.merged(variable, shift, sign, name)
    # What was not merged is still shared with its first owner.
    return {name: v.copy() if v is ours.get(name) else v for name, v in result.items()}
