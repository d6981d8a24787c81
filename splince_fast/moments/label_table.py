"""Second moments sum w f f^T of the label features f of all variables.

The label features of a class-coded variable are the indicators of its classes. The label features
of a continuous variable are its columns minus an origin, and an indicator of presence. In rows
where the label is missing, all label features of the variable are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import Layout, Tensors, check_tensors
from splince_fast.exceptions import FileFormatError
from splince_fast.labels import VariableName
from splince_fast.moments.block import Labels
from splince_fast.moments.variables import ClassSums, ColumnSums, Variable

Float = NDArray[np.float64]
Index = NDArray[np.intp]

# Label features of one variable in n rows. The tuple holds the row numbers of the variable in the
# Gram matrix; the class codes + 1, (n,), or None for a continuous variable; and, for a continuous
# variable, the values of its features, (n, k).
_Features = tuple[Index, Index | None, Float]

_NO_VALUES, _NO_INDEX = np.zeros((0, 0)), np.zeros(0, np.intp)
# A variable with more label features is left out of the table, since the size of the table is
# quadratic in the number of label features.
_MAX_FEATURES = 256


@dataclass(slots=True)
class LabelTable:
    """Gram matrix of the label features of all variables."""

    gram: Float = field(default_factory=lambda: np.zeros((0, 0)))  # (k, k): sum w f f^T
    # row numbers in the Gram matrix of the classes or columns of each variable, in their order;
    # empty for a variable that is left out of the table
    index: dict[VariableName, Index] = field(default_factory=dict)
    # origin that is subtracted from the columns of each continuous variable
    origins: dict[VariableName, Float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.gram.nbytes

    def copy(self) -> LabelTable:
        return LabelTable(
            self.gram.copy(),
            {name: index.copy() for name, index in self.index.items()},
            {name: origin.copy() for name, origin in self.origins.items()},
        )

    # -- filling ---------------------------------------------------------------------------

    def _reserve(self, name: VariableName, n_features: int) -> Index:
        """Return the row numbers of a variable in the Gram matrix; rows are added if necessary."""
        index = self.index.get(name)
        if index is None:
            index = np.zeros(0, np.intp)
        elif not len(index):
            return index
        if n_features > _MAX_FEATURES:
            self.gram[index, :] = 0.0
            self.gram[:, index] = 0.0
            index = np.zeros(0, np.intp)
        elif n_features > len(index):
            size, n_added = len(self.gram), n_features - len(index)
            gram = np.zeros((size + n_added, size + n_added))
            gram[:size, :size] = self.gram
            self.gram = gram
            index = np.concatenate([index, np.arange(size, size + n_added)])
        self.index[name] = index
        return index

    def with_products(
        self,
        labels: Mapping[VariableName, Labels],
        variables: Mapping[VariableName, Variable],
        weight: Float | None,
    ) -> tuple[LabelTable, Float]:
        """Return this table or a larger copy, and the products of a block to add to its matrix."""
        # The products are those of the label features of two variables. `labels` are encoded with
        # the classes of `variables`.
        table = self
        features: list[_Features] = []
        for name, column in labels.items():
            variable = variables[name]
            continuous = not isinstance(variable, ClassSums)
            index = table.index.get(name)
            if index is None or 0 < len(index) < variable.n_columns + continuous:
                table = self.copy() if table is self else table
                index = table._reserve(name, variable.n_columns + continuous)
            if not continuous:
                if len(index):
                    # Codes + 1, so that missing labels, with code -1, are counted in bin 0.
                    features.append((index, column + 1, _NO_VALUES))
                continue
            present = np.asarray(~np.isnan(column).any(axis=1))
            if len(index) and present.any():
                if name not in table.origins:
                    table = self.copy() if table is self else table
                    table.origins[name] = column[present.argmax()].copy()
                values = np.where(present[:, None], column - table.origins[name], 0.0)
                features.append((index, None, np.column_stack([values, present])))
        added = np.zeros_like(table.gram)
        for i, first in enumerate(features):
            for second in features[:i]:
                block = _products(first, second, weight)
                added[first[0][:, None], second[0]] = block
                added[second[0][:, None], first[0]] = block.T
        return table, added

    def reorder(self, name: VariableName, old: ClassSums, new: ClassSums) -> None:
        """Change the class order of a variable from `old` to `new`, which may have more classes."""
        before = self.index.get(name)
        if before is None or not len(before):
            return
        index = self._reserve(name, new.n_columns)
        if not len(index):
            return
        kept = new.positions(old.names)
        added = np.setdiff1d(np.arange(new.n_columns), kept)
        after = np.empty_like(index)
        after[np.concatenate([kept, added])] = index
        self.index[name] = after

    def merge(
        self,
        other: LabelTable,
        sign: int,
        ours: Mapping[VariableName, Variable],
        theirs: Mapping[VariableName, Variable],
    ) -> None:
        """Add (sign 1) or subtract (sign -1) a table."""
        # `ours` are the variables after the merge, and `theirs` are the variables of `other`. The
        # two tables may subtract different origins from a continuous variable, t in this table and
        # t' in `other`: a column f of `other` becomes f + (t' - t) p, with p the indicator of
        # presence.
        size = len(other.gram)
        blocks: list[tuple[Index, Index, Float]] = []
        for name, index in other.index.items():
            variable, other_variable = ours[name], theirs[name]
            continuous = isinstance(variable, ColumnSums)
            # A variable that `other` leaves out must be left out of this table, too: request more
            # label features than the limit.
            n_extra = 1 if continuous else 0 if len(index) else _MAX_FEATURES
            target = self._reserve(name, variable.n_columns + n_extra)
            if not len(target) or not len(index):
                continue
            block = np.eye(len(index))
            if continuous:
                origin = other.origins.get(name)
                if origin is not None:
                    block[:-1, -1] = origin - self.origins.setdefault(name, origin.copy())
            else:
                order = cast(ClassSums, variable).positions_of(cast(ClassSums, other_variable))
                target = target[order][: len(index)]
            blocks.append((target, index, block))
        transform = np.zeros((len(self.gram), size))
        for target, index, block in blocks:
            transform[np.ix_(target, index)] = block
        self.gram += sign * (transform @ other.gram @ transform.T)

    # -- reading ---------------------------------------------------------------------------

    def pair_covariance(
        self, a: VariableName, b: VariableName, variables: Mapping[VariableName, Variable]
    ) -> tuple[Float, float] | None:
        """Return Cov(a, b), (k_a, k_b), and the weight sum, over the rows with both labels."""
        # Return None if no row has both labels, or if a variable is left out of the table.
        index = [self.index.get(name, _NO_INDEX) for name in (a, b)]
        block = self.gram[np.ix_(*index)]
        continuous = [isinstance(variables[name], ColumnSums) for name in (a, b)]
        # Sums of each feature over the rows with both labels.
        first_sums = block[:, -1] if continuous[1] else block.sum(axis=1)
        second_sums = block[-1] if continuous[0] else block.sum(axis=0)
        weight = float(first_sums[-1] if continuous[0] else first_sums.sum()) if block.size else 0.0
        if weight <= 0:
            return None
        if continuous[0]:
            block, first_sums = block[:-1], first_sums[:-1]
        if continuous[1]:
            block, second_sums = block[:, :-1], second_sums[:-1]
        covariance = np.zeros([variables[name].n_columns for name in (a, b)])
        covariance[: block.shape[0], : block.shape[1]] = (
            block / weight - np.outer(first_sums, second_sums) / weight**2
        )
        return covariance, weight

    # -- storing ---------------------------------------------------------------------------

    def tensors(self, order: Sequence[VariableName]) -> Tensors:
        """Return the table as arrays whose names contain the number of each variable in `order`."""
        entries = [(i, self.index[name]) for i, name in enumerate(order) if name in self.index]
        rows = np.concatenate([index for _, index in entries]) if entries else _NO_INDEX
        tensors: Tensors = {"gram": self.gram[np.ix_(rows, rows)]}
        start = 0
        for i, index in entries:
            tensors[f"places.{i}"] = np.arange(start, start + len(index), dtype=np.int64)
            start += len(index)
        for name, origin in self.origins.items():
            tensors[f"origin.{order.index(name)}"] = origin
        return tensors

    @classmethod
    def read(cls, tensors: Tensors, variables: Mapping[VariableName, Variable]) -> LabelTable:
        """Return the table of `tensors`; raise FileFormatError if they are invalid."""
        table = cls()
        gram = tensors.get("gram")
        size = 0 if gram is None or not gram.ndim else len(gram)
        (table.gram,) = check_tensors(tensors, {"gram": (np.float64, (size, size))})
        places: list[int] = []
        for i, (name, variable) in enumerate(variables.items()):
            index = tensors.get(f"places.{i}")
            if index is None:
                continue
            continuous = isinstance(variable, ColumnSums)
            n_features = variable.n_columns + (1 if continuous else 0)
            valid = index.dtype == np.int64 and index.ndim == 1 and len(index) <= n_features
            if not valid or (continuous and len(index) not in (0, n_features)):
                raise FileFormatError(f"the table of labels has no valid index for {name!r}")
            table.index[name] = index.astype(np.intp)
            places += index.tolist()
            if (key := f"origin.{i}") in tensors:
                layout: Layout = {key: (np.float64, (variable.n_columns,))}
                (table.origins[name],) = check_tensors(tensors, layout)
        if places != list(range(size)):
            raise FileFormatError("the rows of the table of labels are not those of its variables")
        return table


def _products(first: _Features, second: _Features, weight: Float | None) -> Float:
    """Return sum w f g^T, with f and g the label features of two variables."""
    first_index, first_codes, first_values = first
    second_index, second_codes, second_values = second
    if first_codes is not None and second_codes is not None:
        shape = len(first_index) + 1, len(second_index) + 1
        cells = np.bincount(first_codes * shape[1] + second_codes, weight, shape[0] * shape[1])
        return np.asarray(cells.reshape(shape)[1:, 1:], np.float64)
    if first_codes is None and second_codes is None:
        return np.asarray(
            (first_values if weight is None else first_values * weight[:, None]).T @ second_values
        )
    if first_codes is None:
        return _products(second, first, weight).T
    weighted = second_values if weight is None else second_values * weight[:, None]
    sums = [np.bincount(first_codes, column, len(first_index) + 1)[1:] for column in weighted.T]
    return np.array(sums, np.float64).T
