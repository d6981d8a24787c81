"""Second moments of the labels themselves, within and between variables: sum w f f^T.

The features f of a class-coded variable are the indicators of its classes, 0 where the label is
missing. Those of a continuous one are its columns about an origin, and an indicator of their
presence, all 0 where it is missing. The residual of x about its regression on the labels needs
them (:mod:`splince_fast.moments.covariance_estimate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import check_tensors
from splince_fast.exceptions import FileFormatError
from splince_fast.labels import VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.variable import Labels, Variable

Float = NDArray[np.float64]
Places = NDArray[np.intp]

_NONE, _NO_PLACES = np.zeros((0, 0)), np.zeros(0, np.intp)
# A variable of more features is left out: the table takes the square of their number.
_MOST = 256


class LabelTable:
    """The table of all variables.

    Attributes
    ----------
    gram : ndarray of shape (k, k)
    """

    def __init__(self) -> None:
        self.gram: Float = np.zeros((0, 0))
        # Rows of the gram, in the order of a variable's classes or columns; empty if left out.
        self._places: dict[VariableName, Places] = {}
        self._origins: dict[VariableName, Float] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the gram."""
        return self.gram.nbytes

    @property
    def is_compact(self) -> bool:
        """Whether every row of the gram is that of a class or column."""
        return sum(map(len, self._places.values())) == len(self.gram)

    def copy(self) -> LabelTable:
        """An independent copy."""
        other = LabelTable()
        other.gram = self.gram.copy()
        other._places = {name: places.copy() for name, places in self._places.items()}
        other._origins = {name: origin.copy() for name, origin in self._origins.items()}
        return other

    # -- filling ---------------------------------------------------------------------------

    def _make_room(self, name: VariableName, features: int) -> Places:
        """Reserve rows of the Gram matrix for the columns of a variable; none above the limit."""
        places = self._places.get(name)
        if places is None:
            places = np.zeros(0, np.intp)
        elif not len(places):
            return places
        if features > _MOST:
            self.gram[places, :] = 0.0
            self.gram[:, places] = 0.0
            places = np.zeros(0, np.intp)
        elif features > len(places):
            size, more = len(self.gram), features - len(places)
            gram = np.zeros((size + more, size + more))
            gram[:size, :size] = self.gram
            self.gram = gram
            places = np.concatenate([places, np.arange(size, size + more)])
        self._places[name] = places
        return places

    def add(
        self,
        labels: Mapping[VariableName, Labels],
        variables: Mapping[VariableName, Variable],
        weight: Float | None,
        *,
        within: bool = True,
    ) -> None:
        """Add the labels of some rows, which are in terms of `variables`.

        Without `within` only products of two variables are added.
        """
        features: list[tuple[Places, NDArray[np.intp] | None, Float]] = []
        for name, column in labels.items():
            variable = variables[name]
            if isinstance(variable, ClassSums):
                places = self._make_room(name, variable.n_columns)
                if len(places):
                    # The first cell is for missing labels, of code -1.
                    features.append((places, column + 1, _NONE))
                continue
            places = self._make_room(name, variable.n_columns + 1)
            present = np.asarray(~np.isnan(column).any(axis=1))
            if len(places) and present.any():
                origin = self._origins.setdefault(name, column[present.argmax()].copy())
                values = np.where(present[:, None], column - origin, 0.0)
                features.append((places, None, np.column_stack([values, present])))
        for i, first in enumerate(features):
            for second in features[: i + within]:
                block = _products(first, second, weight)
                self.gram[np.ix_(first[0], second[0])] += block
                if second is not first:
                    self.gram[np.ix_(second[0], first[0])] += block.T

    def reorder(self, name: VariableName, old: ClassSums, new: ClassSums) -> None:
        """Follow a class-coded variable whose classes are those of `new` from now on."""
        before = self._places.get(name)
        if before is None or not len(before):
            return
        places = self._make_room(name, new.n_columns)
        if not len(places):
            return
        known = new.positions(old.names)
        fresh = np.setdiff1d(np.arange(new.n_columns), known)
        after = np.empty_like(places)
        after[np.concatenate([known, fresh])] = places
        self._places[name] = after

    def merge(
        self,
        other: LabelTable,
        sign: int,
        ours: Mapping[VariableName, Variable],
        theirs: Mapping[VariableName, Variable],
    ) -> None:
        """Add or take back a table; `ours` are the variables of both sides, `theirs` the other's.

        Columns about their origin t' are about ours t with f + (t' - t) times the presence.
        """
        size = len(other.gram)
        moves: list[tuple[Places, Places, Float]] = []
        for name, places in other._places.items():
            mine, yours = ours[name], theirs[name]
            columns = isinstance(mine, ColumnSums)
            target = self._make_room(name, mine.n_columns + (1 if columns else _none(places)))
            if not len(target) or not len(places):
                continue
            shift = np.eye(len(places))
            if columns:
                origin = other._origins.get(name)
                if origin is not None:
                    shift[:-1, -1] = origin - self._origins.setdefault(name, origin.copy())
            else:
                known = cast(ClassSums, mine).positions(cast(ClassSums, yours).names)
                target = target[known[: len(places)]]
            moves.append((target, places, shift))
        step = np.zeros((len(self.gram), size))
        for target, places, shift in moves:
            step[np.ix_(target, places)] = shift
        self.gram += sign * (step @ other.gram @ step.T)

    # -- reading ---------------------------------------------------------------------------

    def columns_of(self, name: VariableName, variable: Variable) -> int:
        """Columns of a variable that `covariance` knows; 0 if it was left out."""
        return variable.n_columns if len(self._places.get(name, ())) else 0

    def covariance(
        self,
        names: Sequence[VariableName],
        variables: Mapping[VariableName, Variable],
        weight: float,
    ) -> Float:
        """Cov(v, v), ddof = 0, over rows of this weight, of variables centred over labelled rows.

        v = f - mean f where there is a label and 0 elsewhere, so that Cov(x, v) is the share of
        the labelled rows times their Cov(x, z).
        """
        parts: list[Float] = []
        where: list[Places] = []
        for name in names:
            places, k = self._places[name], variables[name].n_columns
            own = self.gram[np.ix_(places, places)]
            if isinstance(variables[name], ColumnSums):
                present = own[-1, -1]
                centred = np.concatenate([np.eye(k), -own[:-1, -1:] / (present or 1.0)], axis=1)
            else:
                sums = np.diag(own)
                centred = np.zeros((k, len(places)))
                centred[: len(places)] = np.eye(len(places)) - (sums / (sums.sum() or 1.0))[:, None]
            parts.append(centred)
            where.append(places)
        rows = sum(len(part) for part in parts)
        step = np.zeros((rows, len(self.gram)))
        start = 0
        for part, places in zip(parts, where, strict=True):
            step[start : start + len(part), places] = part
            start += len(part)
        return np.asarray(step @ self.gram @ step.T / weight)

    def pair_covariance(
        self, a: VariableName, b: VariableName, variables: Mapping[VariableName, Variable]
    ) -> tuple[Float, float] | None:
        """Covariance (k_a, k_b) of two variables, and the weight of the rows that carry both.

        None where one of them was left out, or no row carries both.
        """
        places = [self._places.get(name, _NO_PLACES) for name in (a, b)]
        block = self.gram[np.ix_(*places)]
        columns = [isinstance(variables[name], ColumnSums) for name in (a, b)]
        # Sums of each feature over the rows that carry both, and these features alone.
        first = block[:, -1] if columns[1] else block.sum(axis=1)
        second = block[-1] if columns[0] else block.sum(axis=0)
        both = float(first[-1] if columns[0] else first.sum()) if block.size else 0.0
        if both <= 0:
            return None
        if columns[0]:
            block, first = block[:-1], first[:-1]
        if columns[1]:
            block, second = block[:, :-1], second[:-1]
        found = np.zeros([variables[name].n_columns for name in (a, b)])
        found[: block.shape[0], : block.shape[1]] = block / both - np.outer(first, second) / both**2
        return found, both

    # -- storing ---------------------------------------------------------------------------

    def tensors(self, order: Sequence[VariableName]) -> dict[str, NDArray[Any]]:
        """The table as named arrays, in the order of the variables in `order`."""
        known = [(i, self._places[name]) for i, name in enumerate(order) if name in self._places]
        every = np.concatenate([places for _, places in known]) if known else _NO_PLACES
        tensors: dict[str, NDArray[Any]] = {"gram": self.gram[np.ix_(every, every)]}
        start = 0
        for i, places in known:
            tensors[f"places.{i}"] = np.arange(start, start + len(places), dtype=np.int64)
            start += len(places)
        for name, origin in self._origins.items():
            tensors[f"origin.{order.index(name)}"] = origin
        return tensors

    @classmethod
    def read(
        cls, tensors: Mapping[str, NDArray[Any]], variables: Mapping[VariableName, Variable]
    ) -> LabelTable:
        """The inverse of `tensors`; FileFormatError where they are impossible."""
        table = cls()
        gram = tensors.get("gram")
        size = 0 if gram is None or not gram.ndim else len(gram)
        check_tensors(tensors, {"gram": (np.float64, (size, size))})
        table.gram = tensors["gram"]
        used: list[int] = []
        for i, (name, variable) in enumerate(variables.items()):
            places = tensors.get(f"places.{i}")
            if places is None:
                continue
            columns = isinstance(variable, ColumnSums)
            most = variable.n_columns + (1 if columns else 0)
            fits = places.dtype == np.int64 and places.ndim == 1 and len(places) <= most
            if not fits or (len(places) and not 0 <= places.min() <= places.max() < size):
                raise FileFormatError(f"the table of labels has no places for {name!r}")
            if columns and len(places) not in (0, most):
                raise FileFormatError(f"the table of labels lacks columns of {name!r}")
            table._places[name] = places.astype(np.intp)
            used += places.tolist()
            if f"origin.{i}" in tensors:
                key = f"origin.{i}"
                check_tensors(tensors, {key: (np.float64, (variable.n_columns,))})
                table._origins[name] = tensors[key]
        if len(set(used)) < len(used):
            raise FileFormatError("the table of labels names a place twice")
        return table


def _products(first: Any, second: Any, weight: Float | None) -> Float:
    """sum w f g^T of the features of two variables: cells of codes, or matrix products."""
    (p, codes, values), (q, others, columns) = first, second
    if codes is not None and others is not None:
        shape = len(p) + 1, len(q) + 1
        cells = np.bincount(codes * shape[1] + others, weight, shape[0] * shape[1])
        return np.asarray(cells.reshape(shape)[1:, 1:], np.float64)
    if codes is None and others is None:
        return np.asarray((values if weight is None else values * weight[:, None]).T @ columns)
    if codes is None:
        return _products(second, first, weight).T
    weighted = columns if weight is None else columns * weight[:, None]
    sums = [np.bincount(codes, column, len(p) + 1)[1:] for column in weighted.T]
    return np.array(sums, np.float64).T


def _none(places: Places) -> int:
    """Features beyond the limit for a variable that the other side left out."""
    return 0 if len(places) else _MOST
