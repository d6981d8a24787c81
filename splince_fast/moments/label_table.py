"""Second moments of the labels themselves, within and between variables: sum w f f^T.

The features f of a class-coded variable are the indicators of its classes, 0 where the label is
missing. Those of a continuous one are its columns about an origin, and an indicator of their
presence, all 0 where it is missing. The residual of x about its regression on the labels needs
them (:mod:`splince_fast.moments.metric`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import NO_WEIGHT
from splince_fast._runtime.files import check_tensors
from splince_fast.exceptions import FileFormatError
from splince_fast.labels import VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.variable import Labels, Variable

Float = NDArray[np.float64]
Places = NDArray[np.intp]

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

    def copy(self) -> LabelTable:
        """An independent copy."""
        other = LabelTable()
        other.gram = self.gram.copy()
        other._places = {name: places.copy() for name, places in self._places.items()}
        other._origins = {name: origin.copy() for name, origin in self._origins.items()}
        return other

    # -- filling ---------------------------------------------------------------------------

    def _make_room(self, name: VariableName, features: int) -> Places:
        """Rows of the gram for so many features of a variable; none once it has too many."""
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
    ) -> None:
        """Add the labels of some rows, which are in terms of `variables`."""
        import splince_fast._kernels.sampled as kernels

        codes: list[Labels] = []
        values: list[Float] = []
        where: list[Places] = []
        n = 0
        for name, column in labels.items():
            n, variable = len(column), variables[name]
            if isinstance(variable, ClassSums):
                places = self._make_room(name, variable.n_columns)
                if len(places):
                    # A missing label, -1, picks the last entry.
                    codes.append(np.append(places, -1).take(column, mode="wrap"))
                continue
            places = self._make_room(name, variable.n_columns + 1)
            present = np.asarray(~np.isnan(column).any(axis=1))
            if len(places) and present.any():
                origin = self._origins.setdefault(name, column[present.argmax()].copy())
                values.append(np.where(present[:, None], column - origin, 0.0).T)
                values.append(present[None].astype(np.float64))
                where.append(places)
        if codes or values:
            kernels.add_label_products(
                np.array(codes, np.intp) if codes else np.empty((0, n), np.intp),
                np.concatenate(values) if values else np.empty((0, n)),
                np.concatenate(where) if where else np.empty(0, np.intp),
                NO_WEIGHT if weight is None else weight,
                self.gram,
            )

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

    # -- storing ---------------------------------------------------------------------------

    def tensors(self, order: Sequence[VariableName]) -> dict[str, NDArray[Any]]:
        """The table as named arrays; variables by their number in `order`."""
        tensors: dict[str, NDArray[Any]] = {"gram": self.gram}
        for name, places in self._places.items():
            tensors[f"places.{order.index(name)}"] = places.astype(np.int64)
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
        used = 0
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
            used += len(places)
            if f"origin.{i}" in tensors:
                key = f"origin.{i}"
                check_tensors(tensors, {key: (np.float64, (variable.n_columns,))})
                table._origins[name] = tensors[key]
        if used > size:
            raise FileFormatError("the table of labels names more places than it has")
        return table


def _none(places: Places) -> int:
    """Features beyond the limit for a variable that the other side left out."""
    return 0 if len(places) else _MOST
