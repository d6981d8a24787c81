"""The scatter of a uniform sample of the rows, with means, variances and class sums of all rows.

Any positive definite matrix in place of Cov(x) gives an eraser with exact constraints; the matrix
determines only how far the distortion exceeds the minimum. The matrix is S + D, with S the
covariance of the sampled rows. D is diagonal: where the variance of a feature in all rows exceeds
that in the sample by more than the sampling error, the entry of D is the difference, and 0
elsewhere. D restores the variance of a feature that comes from a few rows, none of them sampled.

A row is sampled if the hash of its position in the stream is below the fraction `subsample`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import warn
from splince_fast._runtime.rows import Rows, abbreviated, splitmix64
from splince_fast._solve.options import check_moment_options
from splince_fast.exceptions import InputError, NotEnoughDataError, SampledScatterWarning
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.buffer import LabelledRows
from splince_fast.moments.diagonal import DiagonalAccumulator
from splince_fast.moments.parameters import Parameters
from splince_fast.sources.base import Source

Float = NDArray[np.float64]

# Numbers of sampled rows per feature. With fewer than LEAST_ROWS the distortion may far exceed the
# minimum, and an error is raised. With GOOD_ROWS it exceeds the minimum by at most 5 percent.
LEAST_ROWS, GOOD_ROWS = 4, 22
# A warning names the features whose variances in all rows and in the sample differ by more than
# this factor.
_FACTOR = 2.0
# Two variances differ if their difference exceeds this number of Gaussian standard errors.
_STANDARD_ERRORS = 4.0


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

    def _add_to_sample(self, block: LabelledRows, weight: Float | None) -> None:
        start = np.uint64((self._key + self.position) % 2**64)
        hashed = splitmix64(np.arange(len(block), dtype=np.uint64) + start)
        # The 53 highest bits of a hash give a number in [0, 1).
        fraction = self.parameters.subsample
        sampled = np.flatnonzero((hashed >> np.uint64(11)) * 2.0**-53 < fraction)
        weights = (np.ones(len(block)) if weight is None else weight)[sampled] / fraction
        if len(sampled):
            rows = Rows.from_array(block.rows)
            index = sampled if block.index is None else block.index[sampled]
            self.sample.update(rows, weights, {}, in_order=True, checked=True, index=index)
        self.position += len(block)
        self.squares += float(weights @ weights)

    # -- algebra ---------------------------------------------------------------------------

    def add(self, other: Accumulator) -> None:
        self.check_compatible(other)
        if other.state is None:
            return
        theirs = cast(SampledAccumulator, other)
        # Add to a copy: if a MemoryError is raised, the sample is unchanged.
        sample = self.sample.copy()
        sample.add(theirs.sample)
        super().add(other)
        self.sample = sample
        self.position += theirs.position
        self.squares += theirs.squares

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


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """Properties of the sample from which Cov(x) was estimated."""

    n_rows: int
    n_effective: float  # effective number m of sampled rows, (sum w)^2 / sum w^2
    fraction: float  # fraction of all rows that was sampled
    unit_roundoff: float  # unit roundoff of the products in the scatter of the sample

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


def check_sample(sampled: SampledAccumulator, shrunk: bool) -> None:
    """Raise NotEnoughDataError if the sample has fewer than 4 rows per feature that varies."""
    # With shrinkage, 2 rows are enough.
    state, rows = sampled.nonempty_state(), sampled.sample.n_rows
    varying = int(np.count_nonzero(state.second.diagonal()))
    needed = 2 if shrunk else max(2, LEAST_ROWS * varying)
    if rows < needed:
        raise NotEnoughDataError(
            f"the covariance of {state.width} features is estimated from {rows:,} sampled rows of "
            f"{state.n_rows:,} (subsample={sampled.parameters.subsample:g}), and {needed:,} are "
            f"needed: {LEAST_ROWS} for each feature that varies. Accumulate with a larger "
            "subsample= (1 uses all rows), add rows, or pass shrinkage='oas'"
        )


def sampled_covariance(sampled: SampledAccumulator) -> tuple[Float, SampleStatistics]:
    """Return the estimate S + D of Cov(x), and properties of the sample."""
    # The matrix is (d, d), Fortran-ordered; only its lower triangle is valid. No rows may be
    # buffered.
    check_sample(sampled, shrunk=True)
    state, sample = sampled.nonempty_state(), sampled.sample.nonempty_state()
    n_effective = sample.weight**2 / sampled.squares
    matrix = sample.scatter / sample.weight
    diagonal = np.einsum("ii->i", matrix)
    variances = state.second.diagonal() / state.weight
    error = _STANDARD_ERRORS * (2.0 / n_effective) ** 0.5 * diagonal
    _warn_of_variances(variances, diagonal, error, sampled.feature_names)
    # A difference within the sampling error would inflate directions of small variance.
    missing = variances - diagonal
    diagonal += np.where(missing > error, missing, 0.0)
    return matrix, SampleStatistics(
        sample.n_rows, n_effective, sample.n_rows / state.n_rows, sample.unit_roundoff
    )


def _warn_of_variances(
    variances: Float, sample_variances: Float, error: Float, names: Sequence[str] | None
) -> None:
    """Warn of features whose variances differ too much between all rows and the sample."""
    smaller = np.minimum(variances, sample_variances)
    difference = np.abs(variances - sample_variances)
    features = np.flatnonzero((difference > error) & (difference > (_FACTOR - 1.0) * smaller))
    if len(features):
        shown = abbreviated(features, names)
        warn(
            f"the variance of {len(features)} feature(s) ({shown}) in the sampled rows is wrong by "
            f"more than a factor of {_FACTOR:g}, because a few rows contribute most of it. Erasure "
            "is exact, but x may change more than the report expects; pass a larger subsample=",
            SampledScatterWarning,
        )


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
        covariance_type = arguments.get("covariance_type", "full")
        check_moment_options(arguments["subsample"], covariance_type)
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
