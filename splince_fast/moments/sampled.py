"""Sums and variances of all rows in O(n d), and the scatter of a sample of the rows in O(p n d^2).

Any positive definite matrix in place of Cov(x) gives an eraser with exact constraints; the matrix
determines only how far the distortion exceeds the minimum. Therefore the scatter is computed from a
sample of about a fraction p of the rows. Sums per class and variances are computed from all rows,
which are not copied. A hash of i samples row i of the stream with probability pi_i; a sampled row
has the weight w_i / pi_i (Horvitz and Thompson 1952)::

    pi_i = min(1, p max(1, q_i / mean q)),    q_i = w_i sum_j (x_ij - mean_j)^2 / v_j

The mean and the variances v are those of all previous blocks; for the first block, those of this
block. The mean of q is taken over the block of row i. If a single row has all the variance in some
direction, its q_i is large: the row is sampled, although a uniform sample would probably miss it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import row_kernels
from splince_fast._runtime.hashing import splitmix64
from splince_fast._runtime.rows import Rows
from splince_fast._solve.options import check_moment_options
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

# Numbers of sampled rows per feature. With fewer than LEAST_ROWS the distortion may far exceed the
# minimum, and an error is raised. With GOOD_ROWS it exceeds the minimum by about 5 percent, with a
# margin for the labels.
LEAST_ROWS, GOOD_ROWS = 4, 22
# Lower bound on the variances v_j, as a fraction of the largest variance. The bound applies to
# features that were constant in all previous rows.
_LEAST_VARIANCE = 1e-20


@dataclass(slots=True)
class SampledRows:
    """The sampled rows, from which the scatter is estimated."""

    rows: Accumulator  # moments of the sampled rows, with weights w / pi
    squares: float = 0.0  # sum of the squared weights, sum (w / pi)^2
    # products of label features over the sampled rows, and over all rows
    labels: LabelTable = field(default_factory=LabelTable)
    all_labels: LabelTable = field(default_factory=LabelTable)
    position: int = 0  # number of rows from which the sample was drawn

    def copy(self) -> SampledRows:
        labels, all_labels = self.labels.copy(), self.all_labels.copy()
        return SampledRows(self.rows.copy(), self.squares, labels, all_labels, self.position)

    @property
    def n_effective(self) -> float:
        """Effective number of rows, (sum w)^2 / sum w^2 over the weights of the sampled rows."""
        state = self.rows.state
        weight = 0.0 if state is None else state.weight
        return weight * weight / self.squares if self.squares > 0 else 0.0


class SampledAccumulator(DiagonalAccumulator):
    """An accumulator of the variances of all rows and of the scatter of a sample of the rows."""

    # Rows are added in the order of the stream, so that the sample is the same for all block sizes.
    always_in_order = True

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        sample_parameters = Parameters(parameters.block_rows, parameters.kinds, ())
        self.sample = SampledRows(Accumulator(sample_parameters))
        self._key = splitmix64(np.array([parameters.random_state], np.uint64))[0]

    @property
    def has_pending(self) -> bool:
        return self.has_buffered or self.sample.rows.has_pending

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
        return State.empty_diagonal(width)

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Compute the sums of a block, sample its rows, and add both to the state."""
        state, rows, index, n = batch.state, block.rows, block.index, len(block)
        weight = None if block.weight is None else np.ascontiguousarray(block.weight)
        shift = state.mean if state.weight else head_mean(rows, weight, index)
        requests = [batch.variables[name].request(z, weight) for name, z in block.labels.items()]
        codes, n_sums, values = joined_requests(requests, n)
        block_sums = BlockSums(rows, weight, shift, codes, n_sums, values, index)
        is_first = not state.weight
        block_sums.compute(np.zeros(len(shift)) if is_first else _inverse_variances(state))
        block_sums.check()
        scatter = Diagonal(block_sums.centred_squares)
        total = block_sums.total.copy()
        block_state = State(shift, n, block_sums.weight_sum, total, scatter)
        if is_first:
            block_sums.compute(_inverse_variances(block_state))
        common = self._common_reference(state, block_state)
        leverage = block_sums.leverage.sum(axis=0)
        if weight is not None:
            leverage *= weight
        start = (int(self._key) + self.sample.position) % 2**64
        sampled, probabilities = row_kernels.choose_rows(leverage, self.parameters.subsample, start)
        sample_weight = (1.0 if weight is None else weight[sampled]) / probabilities
        labels = {name: column[sampled] for name, column in block.labels.items()}
        names = {name: _names_of(batch, name) for name in labels}
        # Allocate before mutating.
        sampled_index = sampled if index is None else index[sampled]
        self._add_to_sample(rows, sampled_index, sample_weight, labels, names)
        self._add_sums(batch, block, requests, block_state, block_sums.sums, common)
        self.sample.position += n
        self.sample.squares += float(sample_weight @ sample_weight)
        if len(values):
            self.sample.all_labels.add(block.labels, batch.variables, weight)
        else:  # add one row per cell of equal class codes, with the weight sum of the cell
            cell_rows, weights = block_sums.cells
            labels_of_cells = {name: column[cell_rows] for name, column in block.labels.items()}
            self.sample.all_labels.add(labels_of_cells, batch.variables, weights)
        if len(sampled):
            self.sample.labels.add(labels, batch.variables, sample_weight)

    def _add_to_sample(
        self,
        rows: NDArray[np.generic],
        index: NDArray[np.intp],
        weight: Float,
        labels: Mapping[VariableName, NDArray[Any]],
        names: Mapping[VariableName, tuple[Any, ...]],
    ) -> None:
        """Add the rows `index` to the sample, with their weights w / pi."""
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
        self.check_compatible(other)
        if other.state is None:
            return
        theirs = cast(SampledAccumulator, other)
        # Add to a copy: if a MemoryError is raised, the sample is unchanged.
        sampled = self.sample.rows.copy()
        sampled.add(theirs.sample.rows)
        super().add(other)
        self._combine(sampled, self.sample, theirs, 1)

    def without(self, part: Accumulator) -> Accumulator:
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


def _inverse_variances(state: State) -> Float:
    """Return the inverse variances, (d,), with variances bounded below; 0 if no feature varies."""
    variances = state.second.diagonal() / state.weight
    largest = variances.max(initial=0.0)
    if not largest > 0.0:
        return np.zeros(state.width)
    least = np.maximum((64 * EPS64 * state.mean) ** 2, _LEAST_VARIANCE * largest)
    return np.asarray(1.0 / np.maximum(variances, least))


def _names_of(batch: Batch, name: VariableName) -> tuple[Any, ...]:
    """Return the names of the classes or columns of a variable, including new ones in the batch."""
    variable, new_names = batch.variables[name], batch.new_names.get(name)
    new = [] if batch.registered or new_names is None else list(new_names)
    if isinstance(variable, ClassSums):
        return (*variable.names, *new)
    return tuple(new or cast(ColumnSums, variable).names)


def arguments_of_part(arguments: Mapping[str, object], first: int) -> dict[str, Any]:
    """Return the arguments of `Moments` for the part of a source that begins at block `first`."""
    # `arguments` holds the arguments for the source. Each part counts its rows from 0 and has
    # another random_state, so that the samples of the parts are independent.
    if not first or arguments["subsample"] == 1:
        return dict(arguments)
    key = splitmix64(np.array([arguments["random_state"]], np.uint64))
    mixed = splitmix64(key + np.uint64(first))
    return {**arguments, "random_state": int(mixed[0] >> np.uint64(1))}


def with_subsample(parameters: Mapping[str, Any], source: Source, folds: int) -> dict[str, Any]:
    """Return the arguments of moments, with a valid number as `subsample` in place of "auto"."""
    arguments = dict(parameters)
    if "subsample" in arguments:
        check_moment_options(arguments["subsample"], arguments.get("sketch_size"))
        arguments["subsample"] = subsample_for(
            arguments["subsample"], source.n_rows, source.n_features, source.name, folds
        )
    return arguments


def subsample_for(
    subsample: float | str, n_rows: int | None, n_features: int | None, name: str, folds: int
) -> float:
    """Return `subsample` as a number for a source; raise InputError if it leaves too few rows."""
    # "auto" is the smallest power of 1/2 that leaves 22 sampled rows per feature for an eraser.
    # With `folds` above 1, an eraser is fitted to the rows of all folds except one.
    has_shape = n_rows is not None and n_features is not None
    if isinstance(subsample, str):
        if not has_shape:
            raise InputError(
                f"subsample='auto' needs the number of rows and features, which are unknown for "
                f"{name}; pass a number, such as 22 * d / n for d features and about n rows"
            )
        n_fitted = cast(int, n_rows) * max(1, folds - 1) / folds
        rate, needed = 1.0, GOOD_ROWS * cast(int, n_features)
        while rate / 2 * n_fitted >= needed:
            rate /= 2
        return rate
    if has_shape and subsample < 1:
        expected, needed = subsample * cast(int, n_rows), LEAST_ROWS * cast(int, n_features)
        if expected < needed:
            raise InputError(
                f"subsample={subsample:g} leaves about {expected:,.0f} of the {n_rows:,} rows for "
                f"the covariance of {n_features:,} features, and {needed:,} are needed; pass at "
                f"least {min(1.0, needed / cast(int, n_rows)):.2g}, or 'auto'"
            )
    return subsample
