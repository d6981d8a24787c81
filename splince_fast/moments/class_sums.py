"""A class-coded variable: per class c, n_c, w_c = sum w_i and s_c = sum w_i (x_i - r)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels, spans
from splince_fast._runtime.files import check_tensors, refuse_negative
from splince_fast.exceptions import FileFormatError, IncompatibleMomentsError, LabelError
from splince_fast.labels import ClassCodes, ClassName, class_key, names_from_json, names_to_json
from splince_fast.labels.containers import read_declared
from splince_fast.moments.variable import Codes, Request, Variable, denominator, refuse_other_kind

Float = NDArray[np.float64]
Int = NDArray[np.int64]


class ClassSums(Variable):
    """Sums per class. Arrays grow along their first axis when rows of new classes are added."""

    __slots__ = ("_begun", "_looked_up", "_names", "_places", "rows", "sums", "weights", "width")

    kind = "classes"
    blank = -1

    def __init__(
        self, width: int, names: list[ClassName], rows: Int, weights: Float, sums: Float
    ) -> None:
        self.width = width
        self._names: list[ClassName] = []
        self._places: dict[Any, int] = {}
        self.rows = rows
        self.weights = weights
        self.sums = sums
        # The classes that the last block declared, and their positions, -1 behind them; the same
        # of a block that brings new names, with these, until they are learned.
        self._looked_up: tuple[tuple[ClassName, ...], Codes] | None = None
        self._begun: tuple[tuple[ClassName, ...], Codes, list[ClassName]] | None = None
        self.learn(names)

    @classmethod
    def without_rows(cls, width: int) -> ClassSums:
        """No classes yet."""
        return cls(width, [], np.zeros(0, np.int64), np.zeros(0), np.zeros((0, width)))

    @property
    def names(self) -> list[ClassName]:
        """Names of the classes, in the order of the sums."""
        return self._names.copy()

    @property
    def places(self) -> dict[Any, int]:
        """Positions by class key, in their order.

        Made when a name is looked up for the first time: declared classes may be many.
        """
        places, names = self._places, self._names
        if len(places) < len(names):
            # Whole before it is kept: several threads may read.
            places = dict(zip(_keys(names), range(len(names)), strict=True))
            self._places = places
        return places

    # -- filling ---------------------------------------------------------------------------

    @classmethod
    def new(cls, width: int, column: ClassCodes) -> ClassSums:
        return cls.without_rows(width)

    @staticmethod
    def is_blank(column: ClassCodes) -> bool:
        return not column.classes

    def begin(
        self, column: ClassCodes, name: object
    ) -> tuple[Codes | None, list[ClassName] | None]:
        classes, known = column.classes, len(self._names)
        if not classes:
            return None, None
        if known and type(self._names[0]) is not type(classes[0]):
            first = self._names[0]
            raise LabelError(
                f"the classes of {name!r} were of type {type(first).__name__} in earlier "
                f"blocks (such as {first!r}) and are of type {type(classes[0]).__name__} in "
                f"this one (such as {classes[0]!r}); use one type throughout"
            )
        if self._looked_up is not None:
            before, lookup = self._looked_up
            # Equal tuples of joint classes may hold True in place of 1.
            if before is classes or (before == classes and type(classes[0]) is not tuple):
                return lookup.take(column.codes, mode="wrap"), None
        # -1, a missing label, picks the last entry.
        lookup = np.full(len(classes) + 1, -1, np.intp)
        if known:
            found = map(self.places.get, _keys(classes), repeat(-1))
            lookup[:-1] = np.fromiter(found, np.intp, len(classes))
        unknown = np.flatnonzero(lookup[:-1] < 0)
        lookup[unknown] = np.arange(known, known + len(unknown))
        fresh = [classes[i] for i in unknown.tolist()] if known else list(classes)
        if fresh:
            self._begun = classes, lookup, fresh
        else:
            self._looked_up = classes, lookup
        return lookup.take(column.codes, mode="wrap"), fresh or None

    def learn(self, fresh: list[ClassName]) -> None:
        places, start = self._places, self.n_columns
        self._names += fresh
        if start and len(places) == start:
            places.update(zip(_keys(fresh), range(start, start + len(fresh)), strict=True))
        if self._begun is not None and self._begun[2] is fresh:
            self._looked_up = self._begun[:2]
        self._begun = None

    def code_of(self, column: Any, name: str) -> int:
        """Code of the only label of a column: of a known class, or declared as the last block's.

        -1 for a column of any other kind or length, and for a missing label.
        """
        if type(column) is np.ndarray:
            if column.shape != (1,) or column.dtype.kind not in "biuU":
                return -1
            return self.places.get(class_key(column.item()), -1)
        declared = read_declared(column, name)
        if declared is None or self._looked_up is None or len(declared.data) != 1:
            return -1
        classes, lookup = self._looked_up
        return int(lookup[declared.data[0]]) if declared.categories is classes else -1

    def ask(self, labels: Codes, weight: Float | None) -> Request:
        # Sums are kept only for the classes that occur; code -1 is not counted.
        codes, present, rows, weights, size = row_kernels.count_classes(
            labels, weight, len(self._names)
        )
        # Room for every class, made before anything is added to any variable.
        room = size - len(self.rows)
        grown = None
        if room > 0:
            grown = self._padded(size)
        return Request(codes, len(present), None, (present, rows, weights, grown))

    def commit(self, request: Request, class_sums: Float, products: Float) -> None:
        present, rows, weights, grown = request.kept
        if grown is not None:
            self.rows, self.weights, self.sums = grown
        classes = zip(present.tolist(), rows.tolist(), weights.tolist(), class_sums, strict=True)
        for c, n, weight, added in classes:
            self.rows[c] += n
            self.weights[c] += weight
            self.sums[c] += added

    def moved(self, step: Float) -> ClassSums:
        other = self.copy()
        other.sums += other.weights[:, None] * step
        return other

    # -- algebra ---------------------------------------------------------------------------

    def empty_like(self) -> ClassSums:
        return self.without_rows(self.width)

    def copy(self) -> ClassSums:
        return ClassSums(
            self.width, self.names, self.rows.copy(), self.weights.copy(), self.sums.copy()
        )

    def scale(self, factor: float) -> None:
        self.weights *= factor
        self.sums *= factor

    def merged(self, other: Variable, shift: Float, sign: int, name: object) -> ClassSums:
        refuse_other_kind(name, self, other)
        other = cast(ClassSums, other)
        theirs = other.names
        if self._names and theirs:
            known = self._names[0]
            if type(known) is not type(theirs[0]):
                raise IncompatibleMomentsError(
                    f"the classes of {name!r} are of type {type(known).__name__} on one side and "
                    f"{type(theirs[0]).__name__} on the other; use one type throughout"
                )
        fresh = [c for c in theirs if class_key(c) not in self.places]
        if sign < 0 and fresh:
            raise IncompatibleMomentsError(
                f"cannot remove a part whose variable {name!r} has the class {fresh[0]!r}, "
                "which the whole never saw: it is not a part of it"
            )
        result = self.copy()
        result.learn(fresh)
        result.rows, result.weights, result.sums = result._padded()
        where = result.positions(theirs)
        rows, weights, sums = other._padded()
        result.rows[where] += sign * rows
        result.weights[where] += sign * weights
        result.sums[where] += sign * (sums + weights[:, None] * shift)
        if sign < 0:
            result._refuse_no_part(name)
        return result

    def _refuse_no_part(self, name: object) -> None:
        """Raise IncompatibleMomentsError where more was removed than was there."""
        if (self.rows < 0).any():
            worst = self.names[int(np.argmin(self.rows))]
            raise IncompatibleMomentsError(
                f"cannot remove a part that holds more rows of {name!r} = {worst!r} than the "
                "whole: it is not a part of it"
            )
        empty = self.rows == 0
        if (self.weights[~empty] <= 0).any():
            raise IncompatibleMomentsError(
                f"cannot remove a part whose rows of {name!r} weigh as much as the whole's, "
                "which has more of them: it is not a part of it"
            )
        self.weights[empty] = 0.0
        self.sums[empty] = 0.0

    def varies(self, features: NDArray[np.intp], gap: Float, rounding: Float) -> NDArray[np.bool_]:
        weights = self.weights[:, None]
        beyond = np.abs(self.sums[:, features] - weights * gap[features])
        return np.asarray((beyond > weights * rounding[features]).any(axis=0))

    def clear(self, features: NDArray[np.intp], gap: Float) -> None:
        self.sums[:, features] = np.outer(self.weights, gap[features])

    def positions(self, names: list[ClassName]) -> NDArray[np.intp]:
        """Where classes that are all known stand in the order of the sums."""
        return np.array([self.places[key] for key in _keys(names)], np.intp)

    def in_order(self, names: list[ClassName]) -> ClassSums:
        """The same sums with their classes in this order, which may name classes without rows."""
        result = self.without_rows(self.width)
        result.learn(names)
        result.rows, result.weights, result.sums = result._padded()
        rows, weights, sums = self._padded()
        for name, position in zip(self.names, range(len(rows)), strict=True):
            there = result.places[class_key(name)]
            result.rows[there] = rows[position]
            result.weights[there] = weights[position]
            result.sums[there] = sums[position]
        return result

    # -- reading ---------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        return int(self.rows.sum())

    @property
    def weight(self) -> float:
        return float(self.weights.sum())

    @property
    def n_columns(self) -> int:
        return len(self._names)

    @property
    def described(self) -> str:
        return f"{self.n_columns} classes"

    def class_names(self, name: object) -> list[ClassName]:
        return self.names

    def cross_covariance(self, ddof: float, name: object) -> Float:
        """(d, k): Cov(x, 1[z = c]) = (s_c - (w_c / w) s) / (w - ddof), s the sum over classes."""
        weight = self.weight
        over = denominator(weight, ddof, name)
        total = self.sums.sum(axis=0)
        share = self.weights / weight
        return np.asarray((self.sums - share[:, None] * total).T / over)

    def span(self) -> Float:
        """(k', d): rows that span Cov(x, z), ddof = 0, in units of deviations; none if constant."""
        return spans.class_span(self.sums, self.weights)

    # -- storing ---------------------------------------------------------------------------

    def _padded(self, size: int | None = None) -> tuple[Int, Float, Float]:
        """The sums with zeros for the classes that only waiting rows have, or for `size` classes.

        Memory that nobody writes to is none: most of many declared classes may never occur.
        """
        size = self.n_columns if size is None else size
        if size == len(self.rows):
            return self.rows, self.weights, self.sums
        padded = np.zeros(size, np.int64), np.zeros(size), np.zeros((size, self.width))
        for to, known in zip(padded, (self.rows, self.weights, self.sums), strict=True):
            to[: len(known)] = known
        return padded

    def tensors(self) -> dict[str, NDArray[Any]]:
        return dict(zip(("rows", "weights", "sums"), self._padded(), strict=True))

    def metadata(self) -> dict[str, Any]:
        return {"kind": self.kind, "names": names_to_json(tuple(self.names))}

    @classmethod
    def read(cls, width: int, meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> ClassSums:
        names = list(names_from_json(meta["names"]))
        k, real = len(names), np.float64
        check_tensors(
            tensors,
            {"rows": (np.int64, (k,)), "weights": (real, (k,)), "sums": (real, (k, width))},
        )
        refuse_negative(tensors, ("rows", "weights"))
        return cls(width, names, tensors["rows"], tensors["weights"], tensors["sums"])

    def read_labels(self, labels: NDArray[Any], n_rows: int, key: str) -> Codes:
        check_tensors({key: labels}, {key: (np.int64, (n_rows,))})
        if n_rows and (labels.min() < -1 or labels.max() >= self.n_columns):
            raise FileFormatError(f"the tensor {key!r} names a class that does not exist")
        return labels.astype(np.intp)


def _keys(names: Sequence[ClassName]) -> Iterable[Hashable]:
    """`class_key` of each; names are of one type, and all but joint ones need no call each."""
    if len(names) and type(names[0]) is tuple:
        return map(class_key, names)
    return zip(map(type, names), names, strict=True)
