"""Sums of all rows, and the scatter of a sample of them: O(n d) and O(p n d^2).

Any positive definite matrix in place of Cov(x) gives an eraser with exact constraints; it alone
decides how much more than the least possible is changed. So sums per class and variances are
taken from all rows, in one pass that copies nothing, and the scatter from rows that a hash of
their position in the stream selects, with weights 1 / pi (Horvitz and Thompson 1952)::

    pi_i = min(1, p max(1, q_i / mean q)),    q_i = w_i sum_j (x_ij - mean_j)^2 / v_j

with the mean and the variances v of the rows up to the block before. Rows that alone carry a
direction, which a uniform sample misses, have a large q and are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime.arrays import Rows
from splince_fast._runtime.hashing import splitmix64
from splince_fast._solve.options import check_reading
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, VariableName
from splince_fast.moments.accumulator import Accumulator, Batch, joined_requests
from splince_fast.moments.block_sums import BlockSums, DiagonalAccumulator
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.state import EPS64, Diagonal, State, head_mean
from splince_fast.sources.base import Source

Float = NDArray[np.float64]

# Sampled rows per feature. Fewer than the first number are refused, as the excess distortion may be
# large; the second gives an excess of 5 percent, with a margin for the labels.
LEAST_ROWS, GOOD_ROWS = 4, 22
# Variance assumed for a feature that was constant so far, as a fraction of the largest.
_CONSTANT = 1e-20


@dataclass(slots=True)
class SampledRows:
    """The sampled rows, from which the scatter is estimated.

    Attributes
    ----------
    rows : Accumulator
        Their moments, with the weights w / pi.
    squares : float
        Sum of the squares of these weights.
    labels, all_labels : LabelTable
        Of these rows and of all.
    position : int
        Rows that were offered.
    """

    rows: Accumulator
    squares: float = 0.0
    labels: LabelTable = field(default_factory=LabelTable)
    all_labels: LabelTable = field(default_factory=LabelTable)
    position: int = 0

    def copy(self) -> SampledRows:
        """An independent copy."""
        labels, all_labels = self.labels.copy(), self.all_labels.copy()
        return SampledRows(self.rows.copy(), self.squares, labels, all_labels, self.position)

    @property
    def effective(self) -> float:
        """(sum w)^2 / sum w^2, the effective number of rows."""
        state = self.rows.state
        weight = 0.0 if state is None else state.weight
        return weight * weight / self.squares if self.squares > 0 else 0.0


class SampledAccumulator(DiagonalAccumulator):
    """An accumulator whose state keeps variances, beside a sample that keeps the scatter.

    Attributes
    ----------
    sample : SampledRows
    """

    # The sample must not depend on the size of updates.
    ordered = True

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        inner = Parameters(parameters.block_rows, parameters.kinds, (), parameters.ledoit_wolf)
        self.sample = SampledRows(Accumulator(inner))
        self._key = splitmix64(np.array([parameters.random_state], np.uint64))[0]

    @property
    def has_pending(self) -> bool:
        return self.waiting or self.sample.rows.has_pending

    def merge_pending(self) -> None:
        self.flush()
        self.sample.rows.flush()

    @property
    def nbytes(self) -> int:
        sample = self.sample
        tables = sample.labels.nbytes + sample.all_labels.nbytes
        return super().nbytes + sample.rows.nbytes + tables

    # -- filling ---------------------------------------------------------------------------

    def _empty_state(self, width: int) -> State:
        return State.of_variances(width)

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Accumulate the sums of a block and sample its rows, then merge both into the state."""
        state, rows, index, n = batch.state, block.rows, block.index, len(block)
        weight = None if block.weight is None else np.ascontiguousarray(block.weight)
        shift = state.mean if state.weight else head_mean(rows, weight, index)
        asked = [batch.variables[name].ask(labels, weight) for name, labels in block.labels.items()]
        codes, n_sums, values = joined_requests(asked, n)
        block_sums = BlockSums(rows, weight, shift, codes, n_sums, values, index)
        first = not state.weight
        block_sums.compute(np.zeros(len(shift)) if first else _inverse(state))
        block_sums.check()
        variances = Diagonal(block_sums.variances)
        own = State(shift, n, block_sums.weight_sum, block_sums.total.copy(), variances, None)
        if first:
            block_sums.compute(_inverse(own))
        common = self._common_reference(state, own)
        size = block_sums.leverage.sum(axis=0)
        if weight is not None:
            size *= weight
        position = (int(self._key) + self.sample.position) % 2**64
        chosen, inclusion = row_kernels.choose_rows(size, self.parameters.subsample, position)
        shares = (1.0 if weight is None else weight[chosen]) / inclusion
        labels = {name: column[chosen] for name, column in block.labels.items()}
        names = {name: _names_of(batch, name) for name in labels}
        # Allocate before mutating.
        where = chosen if index is None else index[chosen]
        self._take(rows, where, shares, labels, names)
        self._add_sums(batch, block, asked, own, block_sums.sums, common)
        self.sample.position += n
        self.sample.squares += float(shares @ shares)
        if len(values):
            self.sample.all_labels.add(block.labels, batch.variables, weight)
        else:  # one row per cell
            first, weights = block_sums.cells
            labels_of_cells = {name: column[first] for name, column in block.labels.items()}
            self.sample.all_labels.add(labels_of_cells, batch.variables, weights)
        if len(chosen):
            self.sample.labels.add(labels, batch.variables, shares)

    def _take(
        self,
        rows: NDArray[np.generic],
        index: NDArray[np.intp],
        weight: Float,
        labels: Mapping[VariableName, NDArray[Any]],
        names: Mapping[VariableName, tuple[Any, ...]],
    ) -> None:
        """Add the rows `index` to the sample."""
        if not len(index):
            return
        encoded: dict[VariableName, Encoded] = {}
        for name, column in labels.items():
            if column.dtype.kind == "i":
                encoded[name] = ClassCodes(names[name], column)
                continue
            present = ~np.isnan(column).any(axis=1)
            filled = np.where(present[:, None], column, 0.0)
            encoded[name] = Columns(names[name], filled, None if present.all() else present)
        self.sample.rows.update(
            Rows.from_array(rows), weight, encoded, in_order=True, checked=True, index=index
        )

    # -- algebra ---------------------------------------------------------------------------

    def add(self, other: Accumulator) -> None:
        """Add the sums of another accumulator, and its sample."""
        self.check_like(other)
        if other.state is None:
            return
        theirs = cast(SampledAccumulator, other)
        # Adding samples may raise MemoryError: add to a copy.
        sampled = self.sample.rows.copy()
        sampled.add(theirs.sample.rows)
        super().add(other)
        self._combine(sampled, self.sample, theirs, 1)

    def without(self, part: Accumulator) -> Accumulator:
        """The accumulator without a part, sample without sample."""
        result = cast(SampledAccumulator, super().without(part))
        if part.state is not None:
            theirs = cast(SampledAccumulator, part)
            sampled = self.sample.rows.without(theirs.sample.rows)
            result._combine(sampled, result.sample, theirs, -1)
        return result

    def _combine(
        self, rows: Accumulator, own: SampledRows, part: SampledAccumulator, sign: int
    ) -> None:
        theirs = part.sample
        position = own.position + (theirs.position if sign > 0 else 0)
        squares = max(0.0, own.squares + sign * theirs.squares)
        if rows.state is None or not rows.state.weight:
            squares = 0.0
        own.labels.merge(theirs.labels, sign, self.variables, part.variables)
        own.all_labels.merge(theirs.all_labels, sign, self.variables, part.variables)
        self.sample = SampledRows(rows, squares, own.labels, own.all_labels, position)

    def sort_classes(self, name: VariableName, order: list[ClassName]) -> None:
        old = self.variables.get(name)
        super().sort_classes(name, order)
        if isinstance(old, ClassSums):
            new = cast(ClassSums, self.variables[name])
            self.sample.labels.reorder(name, old, new)
            self.sample.all_labels.reorder(name, old, new)

    def scale(self, factor: float) -> None:
        super().scale(factor)
        self.sample.rows.scale(factor)
        self.sample.squares *= factor**2
        self.sample.labels.gram *= factor
        self.sample.all_labels.gram *= factor

    def copy(self) -> Accumulator:
        other = cast(SampledAccumulator, super().copy())
        other.sample = self.sample.copy()
        return other


def _inverse(state: State) -> Float:
    """(d,): 1 / variance, at most 1 / rounding of the variance; 0 if no feature varies."""
    variances = state.second.diagonal() / state.weight
    largest = variances.max(initial=0.0)
    if not largest > 0.0:
        return np.zeros(state.width)
    least = np.maximum((64 * EPS64 * state.mean) ** 2, _CONSTANT * largest)
    return np.asarray(1.0 / np.maximum(variances, least))


def _names_of(batch: Batch, name: VariableName) -> tuple[Any, ...]:
    """The classes or columns of a variable, new ones of the batch included."""
    variable, new_names = batch.variables[name], batch.new_names.get(name)
    new = [] if batch.learned or new_names is None else list(new_names)
    if isinstance(variable, ClassSums):
        return (*variable.names, *new)
    return tuple(new or cast(ColumnSums, variable).names)


def part_of_sample(like: Mapping[str, object], first: int) -> dict[str, Any]:
    """Arguments of moments for the part of a source that begins with block number `first`.

    Each part counts its rows from 0: a random_state of its own keeps their samples from being
    alike.
    """
    if not first or like["subsample"] == 1:
        return dict(like)
    mixed = splitmix64(splitmix64(np.array([like["random_state"]], np.uint64)) + np.uint64(first))
    return {**like, "random_state": int(mixed[0] >> np.uint64(1))}


def with_rate(parameters: Mapping[str, Any], source: Source, folds: int) -> dict[str, Any]:
    """The arguments of moments with `subsample` checked for a source, "auto" replaced."""
    arguments = dict(parameters)
    if "subsample" in arguments:
        check_reading(arguments["subsample"], arguments.get("sketch_size"))
        arguments["subsample"] = rate_for(
            arguments["subsample"], source.n_rows, source.n_features, source.name, folds
        )
    return arguments


def rate_for(
    subsample: float | str, n_rows: int | None, n_features: int | None, name: str, folds: int
) -> float:
    """The rate for a source: "auto" resolved; InputError if it leaves too few rows.

    Rows are split into `folds` moments; an eraser is fitted to all but one.
    """
    sized = n_rows is not None and n_features is not None
    if isinstance(subsample, str):
        if not sized:
            raise InputError(
                f"subsample='auto' needs the number of rows and features beforehand, which {name} "
                "does not tell; pass a number, such as 22 * d / n for d features and about n rows"
            )
        fitted = cast(int, n_rows) * max(1, folds - 1) / folds
        rate, enough = 1.0, GOOD_ROWS * cast(int, n_features)
        while rate / 2 * fitted >= enough:
            rate /= 2
        return rate
    if sized and subsample < 1:
        expected, needed = subsample * cast(int, n_rows), LEAST_ROWS * cast(int, n_features)
        if expected < needed:
            raise InputError(
                f"subsample={subsample:g} leaves about {expected:,.0f} of the {n_rows:,} rows for "
                f"the covariance of {n_features:,} features, and {needed:,} are needed; pass at "
                f"least {min(1.0, needed / cast(int, n_rows)):.2g}, or 'auto'"
            )
    return subsample
