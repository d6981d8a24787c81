"""Scatters without the d x d matrix of all rows: variances alone, or those and a sample's scatter.

A row is sampled if the hash of its position in the stream is below the fraction `subsample`. The
matrix in place of Cov(x) is S + D, with S the covariance of the sampled rows. D is diagonal: where
the variance of a feature in all rows exceeds that in the sample by more than the sampling error, it
is the difference, and 0 elsewhere. D restores the variance of a feature that comes from a few rows,
none of them sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Assignment, Change, sample_columns
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.files import Tensors, check_tensors
from splince_fast._runtime.rows import (
    NO_WEIGHT,
    Rows,
    abbreviated,
    is_sparse,
    parts,
    splitmix64,
    subtracted,
)
from splince_fast._solve.options import check_moment_options
from splince_fast.exceptions import InputError, NotEnoughDataError, SampledScatterWarning
from splince_fast.moments.block import Block, BlockSums, sum_block
from splince_fast.moments.state import FactorInput, Scatter, State
from splince_fast.sources.base import Source

Float = NDArray[np.float64]

# The shift of a block is the mean of this many rows at its start.
_HEAD = 16
# A column of sparse rows is summed about 0 unless |mean| exceeds this many standard deviations.
_FAR = 16.0
# Numbers of sampled rows per feature: fewer than LEAST_ROWS are an error; with GOOD_ROWS the
# distortion exceeds the minimum by at most 5 percent.
LEAST_ROWS, GOOD_ROWS = 4, 22
# A warning names the features whose variances in all rows and in the sample differ by more than
# this factor.
_FACTOR = 2.0
# Two variances differ if their difference exceeds this number of Gaussian standard errors.
_STANDARD_ERRORS = 4.0


@dataclass(slots=True, eq=False)
class Diagonal(Scatter):
    """The diagonal of a scatter only; `matrix` has shape (d,)."""

    @classmethod
    def empty(cls, width: int) -> Diagonal:
        return cls(np.zeros(width))

    def diagonal(self) -> Float:
        return self.matrix

    def added(
        self, sums: BlockSums, difference: Float, coefficient: float, block: Block
    ) -> list[Change]:
        matrix = self.matrix + sums.squares + coefficient * difference * difference
        return [Assignment(self, {"matrix": matrix})]

    def merged(self, other: Any, sign: int, difference: Float, coefficient: float) -> list[Change]:
        matrix = self.matrix + sign * (other.matrix + coefficient * difference * difference)
        return [Assignment(self, {"matrix": matrix})]

    def tensors(self, packed: bool) -> Tensors:
        return {"variances": self.matrix}

    def read(self, tensors: Tensors, width: int) -> None:
        (self.matrix,) = check_tensors(tensors, {"variances": (np.float64, (width,))})


@dataclass(slots=True, eq=False)
class Sampled(Diagonal):
    """The diagonal of the scatter of all rows, and the moments of a sample of the rows."""

    # accumulator of the sampled rows, with weights w / subsample; its module imports this one
    sample: Any = None
    subsample: float = 1.0
    random_state: int = 0
    squares: float = 0.0  # sum of the squared weights
    position: int = 0  # number of rows from which the sample was drawn

    @property
    def nbytes(self) -> int:
        return int(self.matrix.nbytes + self.sample.nbytes)

    def copy(self) -> Self:
        return replace(self, matrix=self.matrix.copy(), sample=self.sample.copy())

    def scale(self, factor: float) -> None:
        self.matrix *= factor
        self.sample.scale(factor)
        self.squares *= factor**2

    def added(
        self, sums: BlockSums, difference: Float, coefficient: float, block: Block
    ) -> list[Change]:
        changes = Diagonal.added(self, sums, difference, coefficient, block)
        key = int(splitmix64(np.array([self.random_state], np.uint64))[0])
        start = np.uint64((key + self.position) % 2**64)
        hashed = splitmix64(np.arange(block.n, dtype=np.uint64) + start)
        # The 53 highest bits of a hash give a number in [0, 1).
        sampled = np.flatnonzero((hashed >> np.uint64(11)) * 2.0**-53 < self.subsample)
        weight = np.ones(block.n) if block.weight is None else block.weight
        weights = weight[sampled] / self.subsample
        changes += self.sample.prepare(
            Rows.from_array(block.rows), weights, {}, in_order=True, checked=True,
            index=sampled if block.index is None else block.index[sampled],
        )  # fmt: skip
        position, squares = self.position + block.n, self.squares + float(weights @ weights)
        return [*changes, Assignment(self, {"position": position, "squares": squares})]

    def merged(self, other: Any, sign: int, difference: Float, coefficient: float) -> list[Change]:
        changes = Diagonal.merged(self, other, sign, difference, coefficient)
        if sign > 0:
            counts = {
                "position": self.position + other.position, "squares": self.squares + other.squares
            }  # fmt: skip
            return [*changes, *self.sample.merged(other.sample), Assignment(self, counts)]
        sample = self.sample.without(other.sample)
        remains = sample.state is not None and sample.state.weight > 0
        squares = max(0.0, self.squares - other.squares) if remains else 0.0
        return [*changes, Assignment(self, {"sample": sample, "squares": squares})]

    def check_rows(self, state: State, shrunk: bool) -> None:
        """Raise NotEnoughDataError if the sample has fewer than 4 rows per feature that varies."""
        # With shrinkage, 2 rows are enough.
        rows, varying = self.sample.n_rows, int(np.count_nonzero(self.matrix))
        needed = 2 if shrunk else max(2, LEAST_ROWS * varying)
        if rows < needed:
            raise NotEnoughDataError(
                f"the covariance of {len(self.matrix)} features is estimated from {rows:,} sampled "
                f"rows of {state.n_rows:,} (subsample={self.subsample:g}), and {needed:,} are "
                f"needed: {LEAST_ROWS} for each feature that varies. Accumulate with a larger "
                "subsample= (1 uses all rows), add rows, or pass shrinkage='oas'"
            )

    def factor_input(self, state: State, names: tuple[str, ...] | None) -> FactorInput:
        """Return the estimate S + D of Cov(x). No rows may be buffered."""
        self.check_rows(state, shrunk=True)
        sample = self.sample.nonempty_state()
        n_effective = sample.weight**2 / self.squares
        matrix = sample.second.matrix / sample.weight
        diagonal = np.einsum("ii->i", matrix)
        variances = self.matrix / state.weight
        error = _STANDARD_ERRORS * (2.0 / n_effective) ** 0.5 * diagonal
        difference = variances - diagonal
        large = (_FACTOR - 1.0) * np.minimum(variances, diagonal)
        features = np.flatnonzero(np.abs(difference) > np.maximum(error, large))
        if len(features):
            warn(
                f"the variance of {len(features)} feature(s) ({abbreviated(features, names)}) in "
                f"the sampled rows is wrong by more than a factor of {_FACTOR:g}, because a few "
                "rows contribute most of it. Erasure is exact, but x may change more than the "
                "report expects; pass a larger subsample=",
                SampledScatterWarning,
            )
        # A difference within the sampling error would inflate directions of small variance.
        diagonal += np.where(difference > error, difference, 0.0)
        statistics = SampleStatistics(sample.n_rows, n_effective, sample.n_rows / state.n_rows)
        return FactorInput(
            matrix, 1.0, sample.n_rows, n_effective, sample.second.unit_roundoff, statistics
        )


class SampleStatistics(NamedTuple):
    """Properties of the sample from which Cov(x) was estimated."""

    n_rows: int
    n_effective: float  # effective number m of sampled rows, (sum w)^2 / sum w^2
    fraction: float  # fraction of all rows that was sampled

    def distortion(self, left: Float, gram: Float, regressors: int) -> tuple[float, float | None]:
        """Estimate the distortion E|left^T right (x - mean)|^2 and its excess, without bias."""
        # The distortion is the residual variance of a regression on p other coordinates, fitted to
        # the m sampled rows. In the sample, it is too small by the factor 1 - p / m; in other rows
        # it exceeds the minimum by the fraction p / (m - p - 2). If the sample is a fraction f of
        # all rows, both numerators are (1 - f) p. `gram` is right M right^T, for the estimate M of
        # Cov(x).
        p, m = regressors, self.n_effective
        naive = float(np.sum((left @ left.T) * gram))
        if m - p - 2 <= 0:
            return naive, None
        unseen = 1.0 - self.fraction
        excess = unseen * p / (m - p - 2)
        return naive / (1.0 - unseen * p / m) * (1.0 + excess), excess


# -- sums of blocks ------------------------------------------------------------------------------


def sum_variances(block: Block, codes: NDArray[np.intp], n_sums: int, values: Float) -> BlockSums:
    """Return the sums of a block about a shift, with the sums of squares about its mean."""
    rows: Any = block.rows
    weight = block.weight
    if not is_sparse(rows):
        head = block.slice(0, min(block.n, _HEAD))
        shift = sample_columns(head.rows, head.index, head.weight, 1)[0]
        sums = sum_block(block, shift, codes, n_sums, values)
        squares = np.maximum(0.0, sums.squares - sums.total**2 / sums.weight_sum)
        return replace(sums, squares=squares)
    # Only stored entries are read, and columns are summed about 0; those whose mean is more than 16
    # standard deviations from 0, about a shift near the mean, which makes them dense, but adds few
    # entries: such a column has less than one implicit zero in 257 rows.
    sums = sum_stored(rows, weight, codes, n_sums, values)
    far = far_from_zero(sums.total / sums.weight_sum, sums.squares / sums.weight_sum)
    if len(far):
        shift = np.zeros(rows.shape[1])
        head_rows = rows[:_HEAD][:, far].toarray().astype(np.float64)
        head_weight = None if weight is None else weight[:_HEAD]
        shift[far] = sample_columns(head_rows, None, head_weight, 1)[0]
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
    return np.flatnonzero(np.abs(mean) > _FAR * np.sqrt(variances))


# -- arguments -----------------------------------------------------------------------------------


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
