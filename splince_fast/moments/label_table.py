"""Second moments sum w f g^T of the label features f and g of every two variables.

The label features of a class-coded variable are the indicators of its classes. The label features
of a continuous variable are its columns minus an origin, and an indicator of presence. In rows
where the label is missing, all label features of the variable are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import Tensors, check_tensors
from splince_fast.exceptions import FileFormatError
from splince_fast.labels import VariableName
from splince_fast.moments.block import Labels
from splince_fast.moments.variables import ClassSums, Variable

Float = NDArray[np.float64]
Pair = tuple[VariableName, VariableName]  # in the order of `repr`
Variables = Mapping[VariableName, Variable]

# A variable with more classes or columns is left out of the table, whose size is quadratic in their
# number. The sums of its earlier rows may remain in the table, but are not read.
_MAX_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class LabelTable:
    """Immutable table of the sums for every two variables that were labelled in one update."""

    # sum w f g^T, (k_f, k_g), by the names of f and g; without the last classes, if these have not
    # occurred in an update with labels of both
    cells: Mapping[Pair, Float] = field(default_factory=dict)
    # origin that is subtracted from the columns of each continuous variable
    origins: Mapping[VariableName, Float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(cells.nbytes for cells in self.cells.values())

    def scaled(self, factor: float) -> LabelTable:
        cells = {pair: factor * cells for pair, cells in self.cells.items()}
        return LabelTable(cells, self.origins)

    def with_block(
        self, labels: Mapping[VariableName, Labels], variables: Variables, weight: Float | None
    ) -> LabelTable:
        """Return the table with a block, whose labels are encoded with the classes of variables."""
        origins, features = self.origins, dict[VariableName, tuple[Labels, int]]()
        for name in sorted(labels, key=repr):
            variable, column = variables[name], labels[name]
            if len(variable.names) > _MAX_COLUMNS:
                continue
            if isinstance(variable, ClassSums):
                features[name] = column, len(variable.names)
                continue
            present = np.asarray(~np.isnan(column).any(axis=1))
            if present.any():
                if name not in origins:
                    origins = {**origins, name: column[present.argmax()].copy()}
                values = np.where(present[:, None], column - origins[name], 0.0)
                features[name] = np.column_stack([values, present]), 0
        cells = dict(self.cells)
        for pair in combinations(features, 2):
            added = _products(*features[pair[0]], *features[pair[1]], weight)
            if (old := cells.get(pair)) is not None:
                added[: old.shape[0], : old.shape[1]] += old
            cells[pair] = added
        return LabelTable(cells, origins)

    def merged(
        self, other: LabelTable, sign: int, ours: Variables, theirs: Variables
    ) -> LabelTable:
        """Return the sum (sign 1) or difference (sign -1) of two tables."""
        # `ours` are the variables after the merge, and `theirs` are the variables of `other`. The
        # two tables may subtract different origins from a continuous variable, t in this table and
        # t' in `other`: a column f of `other` becomes f + (t' - t) p, with p the indicator of
        # presence.
        origins, cells = {**other.origins, **self.origins}, dict(self.cells)

        def transform(name: VariableName) -> Float:
            variable, other_variable = ours[name], theirs[name]
            if isinstance(variable, ClassSums) and isinstance(other_variable, ClassSums):
                unit = np.eye(len(variable.names))
                return unit[:, variable.positions_of(other_variable)]
            unit = np.eye(len(variable.names) + 1)
            unit[:-1, -1] = other.origins[name] - origins[name]
            return unit

        for pair, theirs_of_pair in other.cells.items():
            if max(len(ours[name].names) for name in pair) <= _MAX_COLUMNS:
                (k, m), first, second = theirs_of_pair.shape, *map(transform, pair)
                added = sign * (first[:, :k] @ theirs_of_pair @ second[:, :m].T)
                if (old := cells.get(pair)) is not None:
                    added[: old.shape[0], : old.shape[1]] += old
                cells[pair] = added
        return LabelTable(cells, origins)

    def _full(self, pair: Pair, variables: Variables) -> Float:
        """Return the sums of a pair for all classes; zeros if there are none."""
        cells = {pair: np.zeros([_n_features(variables[name]) for name in pair])}
        if pair in self.cells:
            k, m = self.cells[pair].shape
            cells[pair][:k, :m] = self.cells[pair]
        return cells[pair]

    def pair_covariance(
        self, a: VariableName, b: VariableName, variables: Variables
    ) -> tuple[Float, float] | None:
        """Return Cov(a, b), (k_a, k_b), and the weight sum, over the rows with both labels."""
        # Return None if no row has both labels, or if a variable is left out of the table.
        first, second = sorted((a, b), key=repr)
        if max(len(variables[name].names) for name in (a, b)) > _MAX_COLUMNS:
            return None
        sums = self._full((first, second), variables)
        if first != a:
            sums = sums.T
        # The presence of a label is the sum of the indicators, or the last feature.
        classes = [isinstance(variables[name], ClassSums) for name in (a, b)]
        first_sums = sums.sum(axis=1) if classes[1] else sums[:, -1]
        second_sums = sums.sum(axis=0) if classes[0] else sums[-1]
        weight = float(first_sums.sum() if classes[0] else first_sums[-1])
        if weight <= 0:
            return None
        covariance = sums / weight - np.outer(first_sums, second_sums) / weight**2
        k, m = (len(variables[name].names) for name in (a, b))
        return covariance[:k, :m], weight

    def tensors(self, variables: Variables) -> Tensors:
        """Return the table as arrays whose names contain the positions of the variables."""
        order = list(variables)
        return {
            ".".join(str(order.index(name)) for name in pair): self._full(pair, variables)
            for pair in self.cells
        } | {f"origin.{order.index(name)}": origin for name, origin in self.origins.items()}

    @classmethod
    def read(cls, tensors: Tensors, names: Sequence[str], variables: Variables) -> LabelTable:
        """Return the table of the tensors `names`; raise FileFormatError if they are invalid."""
        order = list(variables)
        cells, origins = dict[Pair, Float](), dict[VariableName, Float]()
        for name in names:
            first, second = name.split(".")
            b = order[int(second)]
            if first == "origin":
                layout = {name: (np.float64, (len(variables[b].names),))}
                (origins[b],) = check_tensors(tensors, layout)
                continue
            a = order[int(first)]
            shape = _n_features(variables[a]), _n_features(variables[b])
            (cells[a, b],) = check_tensors(tensors, {name: (np.float64, shape)})
        for b in {name for pair in cells for name in pair} - origins.keys():
            if not isinstance(variables[b], ClassSums):
                raise FileFormatError(f"the table of labels has no origin for {b!r}")
        return cls(cells, origins)


def _n_features(variable: Variable) -> int:
    return len(variable.names) + (not isinstance(variable, ClassSums))


def _products(f: Labels, k: int, g: Labels, m: int, weight: Float | None) -> Float:
    """Return sum w f g^T, with f and g class codes below k and m, (n,), or values, (n, ...)."""
    # Codes + 1, so that missing labels, with code -1, are counted in bin 0.
    if f.ndim == g.ndim == 1:
        sums = np.bincount((f + 1) * (m + 1) + g + 1, weight, (k + 1) * (m + 1))
        return sums.reshape(k + 1, m + 1)[1:, 1:].astype(np.float64)
    if f.ndim == 2 and g.ndim == 1:
        return _products(g, m, f, k, weight).T
    weighted = g if weight is None else g * weight[:, None]
    if f.ndim == 2:
        return np.asarray(f.T @ weighted)
    return np.array([np.bincount(f + 1, column, k + 1)[1:] for column in weighted.T]).T
