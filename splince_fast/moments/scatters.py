"""Accumulators without the scatter of all rows: variances alone, or those and a sample's scatter.

Rows may be dense or, for variances alone, sparse.

A sample: any positive definite matrix in place of Cov(x) gives an eraser with exact constraints;
the matrix determines only how far the distortion exceeds the minimum. The matrix is S + D, with S
the covariance of the sampled rows. D is diagonal: where the variance of a feature in all rows
exceeds that in the sample by more than the sampling error, the entry of D is the difference, and 0
elsewhere. D restores the variance of a feature that comes from a few rows, none of them sampled.

A row is sampled if the hash of its position in the stream is below the fraction `subsample`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Assignment, Change, sample_columns
from splince_fast._runtime import threads
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.rows import (
    NO_WEIGHT,
    Rows,
    SparseRows,
    abbreviated,
    is_sparse,
    parts,
    splitmix64,
    subtracted,
)
from splince_fast._solve.options import check_moment_options
from splince_fast.exceptions import InputError, NotEnoughDataError, SampledScatterWarning
from splince_fast.labels import Encoded, VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.block import Block, BlockSums, sum_block
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.state import Diagonal, State
from splince_fast.moments.variables import Variable
from splince_fast.sources.base import Source

Float = NDArray[np.float64]

# The shift of a block is the mean of this many rows at its start.
_HEAD = 16
# Sparse rows per block. Blocks are larger than for dense rows, since the merge of a block takes
# O(d k) operations even if the block has few stored entries.
_SPARSE_ROWS = 1 << 14
# A column of sparse rows is summed about 0 unless |mean| exceeds this many standard deviations.
_FAR = 16.0
# Numbers of sampled rows per feature. With fewer than LEAST_ROWS the distortion may far exceed the
# minimum, and an error is raised. With GOOD_ROWS it exceeds the minimum by at most 5 percent.
LEAST_ROWS, GOOD_ROWS = 4, 22
# A warning names the features whose variances in all rows and in the sample differ by more than
# this factor.
_FACTOR = 2.0
# Two variances differ if their difference exceeds this number of Gaussian standard errors.
_STANDARD_ERRORS = 4.0


class DiagonalAccumulator(Accumulator):
    """An accumulator of variances: O(d k) numbers for k label columns."""

    def n_merges(self, rows: Rows, n: int) -> int:
        step = self.parameters.block_rows or _SPARSE_ROWS
        return -(-n // step) if is_sparse(rows.array) else super().n_merges(rows, n)

    def _add_rows(
        self,
        rows: Rows,
        n: int,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        in_order: bool,
        index: NDArray[np.intp] | None,
        sink: Callable[[list[Change]], None],
    ) -> None:
        """Pass the changes to `sink`; sparse rows are merged at once, without a buffer."""
        if not isinstance(rows, SparseRows):
            super()._add_rows(rows, n, weight, encoded, in_order, index, sink)
            return
        rows = rows if index is None else rows.select(index)
        block, state, variables = self._encoded(rows, n, weight, encoded, None)
        step = self.parameters.block_rows or _SPARSE_ROWS
        for start in range(0, n, step):
            part = block.slice(start, min(n, start + step))
            changes, variables = self._merge(part, state, variables)
            sink(changes)
        sink([Assignment(self, {"state": state, "variables": variables})])

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Return the rows per block; the reduction needs no work memory."""
        threads.thread_count()  # raises InputError if SPLINCE_FAST_NUM_THREADS is invalid
        capacity = self.parameters.capacity(width, dtype.itemsize)
        self._work.capacities[width, dtype] = capacity
        return capacity

    def _empty_state(self, width: int) -> State:
        return State.empty(width, Diagonal)

    def _reduce(
        self, block: Block, codes: NDArray[np.intp], class_weights: Float, values: Float
    ) -> BlockSums:
        """Return the sums of a block about a shift, with the sums of squares about its mean."""
        if is_sparse(block.rows):
            return _sum_sparse(block.rows, block.weight, codes, len(class_weights), values)
        head = block.slice(0, min(block.n, _HEAD))
        shift = sample_columns(head.rows, head.index, head.weight, 1)[0]
        sums = sum_block(
            block.rows, block.weight, shift, codes, len(class_weights), values, block.index
        )
        squares = np.maximum(0.0, sums.squares - sums.total**2 / sums.weight_sum)
        return replace(sums, squares=squares)


def _sum_sparse(
    rows: Any, weight: Float | None, codes: NDArray[np.intp], n_sums: int, values: Float
) -> BlockSums:
    """Return the sums of a block of sparse rows about a shift."""
    # Only stored entries are read. Columns are summed about 0, except columns whose mean is more
    # than 16 standard deviations from 0. These are summed about a shift near the mean, which makes
    # them dense, but adds few entries: such a column has less than one implicit zero in 257 rows.
    sums = sum_stored(rows, weight, codes, n_sums, values)
    far = far_from_zero(sums.total / sums.weight_sum, sums.squares / sums.weight_sum)
    if len(far):
        shift = np.zeros(rows.shape[1])
        head = rows[:_HEAD][:, far].toarray()
        shift[far] = sample_columns(head, None, None if weight is None else weight[:_HEAD], 1)[0]
        sums = sum_stored(subtracted(rows, shift), weight, codes, n_sums, values)
        sums.shift = shift
    return sums


def sum_stored(
    rows: Any,
    weight: Float | None,
    codes: NDArray[np.intp],
    n_sums: int,
    values: Float,
    mean: Float | None = None,
) -> BlockSums:
    """Return the sums of sparse rows about 0, but the sums of squares about `mean`."""
    # By default, `mean` is that of the rows.
    import splince_fast._kernels.sparse as kernels

    n, d = rows.shape
    row_weights = NO_WEIGHT if weight is None else weight
    weight_sum = float(n) if weight is None else float(weight.sum())
    total, squares = np.zeros(d), np.empty(d)
    class_sums, products = np.zeros((n_sums, d)), np.zeros((len(values), d))
    kernels.sum_rows(*parts(rows), row_weights, codes, values, total, class_sums, products)
    mean = total / weight_sum if mean is None else mean
    kernels.sum_squares(*parts(rows), row_weights, mean, weight_sum, squares)
    return BlockSums(n, weight_sum, np.zeros(d), total, squares, class_sums, products)


def far_from_zero(mean: Float, variances: Float) -> NDArray[np.intp]:
    """Return the columns whose mean is more than 16 standard deviations from 0."""
    return np.flatnonzero(np.abs(mean) > _FAR * np.sqrt(variances))


class SampledAccumulator(DiagonalAccumulator):
    """An accumulator of the variances of all rows and of the scatter of a sample of the rows."""

    # Rows are added in the order of the stream, so that the sample is the same for all block sizes.
    always_in_order = True

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        # moments of the sampled rows, with weights w / subsample
        self.sample = Accumulator(Parameters(parameters.block_rows, {}, ()))
        self.squares = 0.0  # sum of the squared weights
        self.position = 0  # number of rows from which the sample was drawn
        self._key = int(splitmix64(np.array([parameters.random_state], np.uint64))[0])

    @property
    def has_pending(self) -> bool:
        return self.has_buffered or self.sample.has_pending

    def merge_pending(self) -> None:
        self.flush()
        self.sample.flush()

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.sample.nbytes

    def _merge(
        self, block: Block, state: State, variables: dict[VariableName, Variable]
    ) -> tuple[list[Change], dict[VariableName, Variable]]:
        changes, variables = super()._merge(block, state, variables)
        start = np.uint64((self._key + self.position) % 2**64)
        hashed = splitmix64(np.arange(block.n, dtype=np.uint64) + start)
        # The 53 highest bits of a hash give a number in [0, 1).
        fraction = self.parameters.subsample
        sampled = np.flatnonzero((hashed >> np.uint64(11)) * 2.0**-53 < fraction)
        weight = np.ones(block.n) if block.weight is None else block.weight
        weights = weight[sampled] / fraction
        index = sampled if block.index is None else block.index[sampled]
        changes += self.sample.prepare(
            Rows.from_array(block.rows), weights, {}, in_order=True, checked=True, index=index
        )
        position, squares = self.position + block.n, self.squares + float(weights @ weights)
        return [*changes, Assignment(self, {"position": position, "squares": squares})], variables

    # -- algebra ---------------------------------------------------------------------------

    def merged(self, other: Accumulator) -> list[Change]:
        changes = super().merged(other)
        if other.state is None:
            return changes
        theirs = cast(SampledAccumulator, other)
        counts = {
            "position": self.position + theirs.position, "squares": self.squares + theirs.squares
        }  # fmt: skip
        return [*changes, *self.sample.merged(theirs.sample), Assignment(self, counts)]

    def without(self, part: Accumulator) -> Accumulator:
        result = cast(SampledAccumulator, super().without(part))
        if part.state is not None:
            theirs = cast(SampledAccumulator, part)
            result.sample = self.sample.without(theirs.sample)
            state = result.sample.state
            remains = state is not None and state.weight > 0
            result.squares = max(0.0, self.squares - theirs.squares) if remains else 0.0
        return result

    def scale(self, factor: float) -> None:
        super().scale(factor)
        self.sample.scale(factor)
        self.squares *= factor**2

    def copy(self) -> Accumulator:
        other = cast(SampledAccumulator, super().copy())
        other.sample, other.squares = self.sample.copy(), self.squares
        other.position = self.position
        return other

    # -- reading ---------------------------------------------------------------------------

    def check_rows(self, shrunk: bool) -> None:
        """Raise NotEnoughDataError if the sample has fewer than 4 rows per feature that varies."""
        # With shrinkage, 2 rows are enough.
        state, rows = self.nonempty_state(), self.sample.n_rows
        varying = int(np.count_nonzero(state.second.diagonal()))
        needed = 2 if shrunk else max(2, LEAST_ROWS * varying)
        if rows < needed:
            raise NotEnoughDataError(
                f"the covariance of {state.width} features is estimated from {rows:,} sampled "
                f"rows of {state.n_rows:,} (subsample={self.parameters.subsample:g}), and "
                f"{needed:,} are needed: {LEAST_ROWS} for each feature that varies. Accumulate "
                "with a larger subsample= (1 uses all rows), add rows, or pass shrinkage='oas'"
            )

    def factor_input(self) -> FactorInput:
        """Return the estimate S + D of Cov(x). No rows may be buffered."""
        self.check_rows(shrunk=True)
        state, sample = self.nonempty_state(), self.sample.nonempty_state()
        n_effective = sample.weight**2 / self.squares
        matrix = sample.scatter / sample.weight
        diagonal = np.einsum("ii->i", matrix)
        variances = state.second.diagonal() / state.weight
        error = _STANDARD_ERRORS * (2.0 / n_effective) ** 0.5 * diagonal
        difference = variances - diagonal
        large = (_FACTOR - 1.0) * np.minimum(variances, diagonal)
        features = np.flatnonzero(np.abs(difference) > np.maximum(error, large))
        if len(features):
            warn(
                f"the variance of {len(features)} feature(s) "
                f"({abbreviated(features, self.feature_names)}) in the sampled rows is wrong by "
                f"more than a factor of {_FACTOR:g}, because a few rows contribute most of it. "
                "Erasure is exact, but x may change more than the report expects; pass a larger "
                "subsample=",
                SampledScatterWarning,
            )
        # A difference within the sampling error would inflate directions of small variance.
        diagonal += np.where(difference > error, difference, 0.0)
        statistics = SampleStatistics(sample.n_rows, n_effective, sample.n_rows / state.n_rows)
        return FactorInput(
            matrix, 1.0, sample.n_rows, n_effective, sample.unit_roundoff, statistics
        )


class SampleStatistics(NamedTuple):
    """Properties of the sample from which Cov(x) was estimated."""

    n_rows: int
    n_effective: float  # effective number m of sampled rows, (sum w)^2 / sum w^2
    fraction: float  # fraction of all rows that was sampled

    def distortion(self, left: Float, gram: Float, regressors: int) -> tuple[float, float | None]:
        """Estimate the distortion E|left^T right (x - mean)|^2 and its excess, without bias."""
        # The excess is the distortion minus the least distortion of any eraser with the same
        # constraints. The distortion is the residual variance of a regression on p other
        # coordinates, fitted to the m sampled rows. In the sample, the residual variance is too
        # small by the factor 1 - p / m; in other rows it exceeds the minimum by the fraction
        # p / (m - p - 2). If the sample is a fraction f of all rows, both numerators are
        # (1 - f) p. `gram` is right M right^T, for the estimate M of Cov(x).
        p, m = regressors, self.n_effective
        naive = float(np.sum((left @ left.T) * gram))
        if m - p - 2 <= 0:
            return naive, None
        unseen = 1.0 - self.fraction
        excess = unseen * p / (m - p - 2)
        return naive / (1.0 - unseen * p / m) * (1.0 + excess), excess


class FactorInput(NamedTuple):
    """A covariance to factor, `scatter` / `weight`."""

    scatter: Float  # (d, d): Fortran-ordered, only the lower triangle is valid; or its diagonal
    weight: float
    n_rows: int  # number of rows, which limits the rank
    n_effective: float  # weight sum of the rows, or effective number of sampled rows
    unit_roundoff: float
    sample: SampleStatistics | None = None

    def times(self, rows: Float) -> Float:
        """Return the product of the covariance with each row of `rows`, (r, d)."""
        import scipy.linalg.blas

        product = scipy.linalg.blas.dsymm(1.0 / self.weight, self.scatter, rows.T, lower=1)
        return np.asarray(product.T)


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
    if "subsample" not in parameters:
        return dict(parameters)
    subsample = parameters["subsample"]
    check_moment_options(subsample, parameters.get("covariance_type", "full"))
    shape = source.n_rows, source.n_features
    return {**parameters, "subsample": subsample_for(subsample, *shape, source.name, folds)}


def subsample_for(
    subsample: float | str, n_rows: int | None, n_features: int | None, name: str, folds: int
) -> float:
    """Return `subsample` as a number for a source; raise InputError if it leaves too few rows."""
    # "auto" is the smallest power of 1/2 that leaves 22 sampled rows per feature for an eraser.
    # With `folds` above 1, an eraser is fitted to the rows of all folds except one.
    if n_rows is None or n_features is None:
        if isinstance(subsample, str):
            raise InputError(
                f"subsample='auto' needs the number of rows and features, which are unknown for "
                f"{name}; pass a number, such as 22 * d / n for d features and about n rows"
            )
        return subsample
    if isinstance(subsample, str):
        n_fitted, rate = n_rows * max(1, folds - 1) / folds, 1.0
        while rate / 2 * n_fitted >= GOOD_ROWS * n_features:
            rate /= 2
        return rate
    expected, needed = subsample * n_rows, LEAST_ROWS * n_features
    if subsample < 1 and expected < needed:
        raise InputError(
            f"subsample={subsample:g} leaves about {expected:,.0f} of the {n_rows:,} rows for the "
            f"covariance of {n_features:,} features, and {needed:,} are needed; pass at least "
            f"{min(1.0, needed / n_rows):.2g}, or 'auto'"
        )
    return subsample
