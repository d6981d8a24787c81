"""Cov(x) from a sample: its residual about the labels, and what all rows say exactly.

With v the labels (indicators and columns, centred over the rows that carry them), R R^T =
C_xv C_vv^+ C_vx is the part of Cov(x) that they explain. It is taken from all rows, and only the
rest W = S_m - R_m R_m^T from the m sampled ones::

    M = m / (m - k) W + R R^T + D

with k the rank of v. D is diagonal: the variance of all rows less that of the sample, of features
where chance does not explain the difference; see `_undetermined` for what else it holds.

An eraser depends on M by the regression of the coordinates that it changes on those that it does
not. These residuals have less variance than x, by the squared multiple correlation of x with v: so
many fewer rows do as well. Model-assisted estimation in surveys rests on the same step (Saerndal,
Swensson and Wretman 1992). Rows that a sample misses leave a feature without variance, which its
exact one repairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import abbreviated
from splince_fast._runtime.warn import warn
from splince_fast._solve import tolerances
from splince_fast.exceptions import NotEnoughDataError, SampledScatterWarning
from splince_fast.labels import VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.sampled import LEAST_ROWS, SampledAccumulator
from splince_fast.moments.variable import Variable

Float = NDArray[np.float64]

# Largest number of label columns per sampled row.
_SHARE_OF_LABELS = 0.1
# Ratio between the variances of all rows and of the sample, and Gaussian standard errors of their
# difference, beyond both of which a warning is raised.
_FACTOR, _ERRORS = 2.0, 6.0
# A feature's variance is corrected if it exceeds the estimate by more than this many Gaussian
# standard errors.
_BEYOND_CHANCE = 4.0
# Label correlations below this many unit roundoffs of the rows are rounding.
_ROUNDINGS = 64.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sample behind an estimate of Cov(x).

    Attributes
    ----------
    repaired : ndarray of shape (d,)
        Part of its diagonal that the exact variances have added.
    explained : ndarray of shape (k, d)
        Rows r_i with sum r_i r_i^T = R R^T.
    n_rows : int
        Rows of the sample.
    effective : float
        Rows of equal weight that say as much.
    fraction : float
        Share of all rows that was sampled.
    n_labels : int
        k.
    unit_roundoff : float
        Of the products in the scatter.
    quartic : float or None
        Mean of |x - mean|^4 over the sample, where it was accumulated.
    """

    repaired: Float
    explained: Float
    n_rows: int
    effective: float
    fraction: float
    n_labels: int
    unit_roundoff: float
    quartic: float | None

    def change(
        self, left: Float, right: Float, gram: Float, regressors: int
    ) -> tuple[float, float | None]:
        """Unbiased E|left^T right (x - mean)|^2, and its expected excess over the least value.

        Of the removed coordinates, what the labels do not explain are residuals of a regression
        on p = `regressors` coordinates, fitted to the sample: it understates their variance by
        1 - p / (m - k), and theirs on new rows exceeds the least by p / (m - p - 2). Of all rows
        the sampled ones are a share f::

            excess = (1 - f) p / (m - p - 2)

        relative to the part that the labels do not explain; what is returned is relative to the
        whole of the least. It is None where m is too small for the formula, and the first figure
        is as the sample says then.

        Parameters
        ----------
        left, right : (r, d) float64
            Factors of what is removed.
        gram : (r, r) float64
            right Cov(x) right^T as the sample says.
        """
        square = left @ left.T
        inside = right @ self.explained.T
        explained = float(np.sum(square * (inside @ inside.T)))
        rest = max(0.0, float(np.sum(square * gram)) - explained)
        p, m, k = regressors, self.effective, self.n_labels
        if m - p - 2 <= 0 or m - k - p <= 0:
            return explained + rest, None
        rest /= 1.0 - (1.0 - self.fraction) * p / (m - k)
        excess = (1.0 - self.fraction) * p / (m - p - 2)
        least = explained + rest
        return least + rest * excess, rest * excess / least if least else 0.0


def refuse_few(sampled: SampledAccumulator) -> None:
    """Raise NotEnoughDataError below 4 sampled rows for each feature that varies."""
    _refuse_below(sampled, LEAST_ROWS * int(np.count_nonzero(sampled.seen().second.diagonal())))


def _refuse_below(sampled: SampledAccumulator, needed: int) -> None:
    rows, state = sampled.sample.rows.n_rows, sampled.seen()
    if rows < needed:
        raise NotEnoughDataError(
            f"the covariance of {state.width} features rests on {rows:,} sampled rows of "
            f"{state.n_rows:,} (subsample={sampled.parameters.subsample:g}), and {needed:,} are "
            f"needed: {LEAST_ROWS} for each feature that varies. Accumulate with a larger "
            "subsample= (1 takes all rows), add rows, or pass shrinkage='oas'"
        )


def sampled_covariance(sampled: SampledAccumulator) -> tuple[Float, Sampled]:
    """M of an accumulator (no rows wait), (d, d) Fortran-ordered, its lower triangle meaningful.

    Raises
    ------
    NotEnoughDataError
        There is nothing to estimate from.

    Warns
    -----
    SampledScatterWarning
        The variance of a feature differs much between all rows and the sample.
    """
    import scipy.linalg.blas

    _refuse_below(sampled, 2)
    state, sample = sampled.seen(), sampled.sample
    inner, effective = sample.rows.seen(), sample.effective
    variances = state.second.diagonal() / state.weight
    covariance = inner.scatter / inner.weight
    names = _explaining(sampled, effective)
    aligned = {
        name: _aligned(sample.rows.variables.get(name), sampled.variables[name]) for name in names
    }
    own = _explained(
        aligned, sample.labels, inner.weight, names, state.width,
    )  # fmt: skip
    explained = _explained(sampled.variables, sample.all_labels, state.weight, names, state.width)
    of_sample = np.diagonal(covariance).copy()
    syrk = scipy.linalg.blas.dsyrk
    degrees = effective / max(1.0, effective - len(own))
    matrix = (
        covariance if not len(own) else syrk(-1.0, own.T, 1.0, covariance, lower=1, overwrite_c=1)
    )
    matrix *= degrees
    chance = _BEYOND_CHANCE * (2.0 / effective) ** 0.5
    undetermined = _undetermined(sampled, matrix, variances, explained)
    if len(explained):
        matrix = syrk(1.0, explained.T, 1.0, matrix, lower=1, overwrite_c=1)
    diagonal = np.einsum("ii->i", matrix)
    # Smaller differences are chance: correcting them would shrink directions of small variance.
    missing = variances - diagonal
    missing[missing <= chance * diagonal] = 0.0
    missing[undetermined] = np.maximum(missing, chance * variances)[undetermined]
    diagonal += missing
    _warn_of(variances, of_sample, effective, sampled.feature_names)
    quartic = None
    if inner.fourth is not None:
        quartic = inner.fourth.centred(inner.weight, inner.deviation, inner.scatter) / inner.weight
    return matrix, Sampled(
        missing, explained, inner.n_rows, effective, inner.n_rows / state.n_rows, len(own),
        inner.unit_roundoff, quartic,
    )  # fmt: skip


def _undetermined(
    sampled: SampledAccumulator, matrix: Float, variances: Float, explained: Float
) -> NDArray[np.intp]:
    """Features that are combinations of others in the sample, but not in all rows.

    Two words may have come together in every sampled row, and apart in others. W has no variance
    along their difference then, and R R^T as much as the labels say of it: the labels would seem
    to explain it wholly, and an eraser would change x along it without measure. What such a
    feature j has of its own is b = e_j - sum_i c_i e_i, W b = 0, from a Cholesky factorisation
    with pivots, and all rows vary along it where R^T b is not zero to rounding. So much variance
    as chance can hide is given to them.

    Returns
    -------
    (q,) intp
        Empty where rows of x are too few to say so, as a solve with shrinkage allows.
    """
    import scipy.linalg

    inner, alive = sampled.sample.rows.seen(), variances > 0
    nothing = np.empty(0, np.intp)
    n_alive = int(np.count_nonzero(alive))
    if not len(explained) or sampled.sample.rows.n_rows < LEAST_ROWS * n_alive:
        return nothing
    units = 1.0 / np.sqrt(np.where(alive, variances, np.inf))

    def scaled() -> Float:
        """(new) W in units of deviations; the unit of a constant feature is 1."""
        own = np.array(matrix, order="F")
        own *= units
        own *= units[:, None]
        np.einsum("ii->i", own)[~alive] = 1.0
        return own

    tolerance = tolerances.eigenvalue(n_alive, inner.unit_roundoff)
    lapack = scipy.linalg.lapack
    factor, failed = lapack.dpotrf(scaled(), lower=1, overwrite_a=1)
    if not failed and np.diagonal(factor).min() ** 2 > tolerance:
        return nothing
    factor, order, rank, _ = lapack.dpstrf(scaled(), tol=tolerance, lower=1, overwrite_a=1)
    order -= 1
    projected = (explained * units)[:, order]
    shares = scipy.linalg.solve_triangular(
        factor[:rank, :rank], factor[rank:, :rank].T, lower=True, trans=1
    )
    residual = np.linalg.norm(projected[:, rank:] - projected[:, :rank] @ shares, axis=0)
    offset = 1.0 + np.abs(sampled.seen().mean * units).max()
    noise = _ROUNDINGS * inner.unit_roundoff * offset * (1.0 + np.abs(shares).sum(axis=0))
    return np.asarray(order[rank:][residual > noise], np.intp)


def _explaining(sampled: SampledAccumulator, effective: float) -> list[VariableName]:
    """The variables that x is regressed on: those of fewest columns first, up to a limit."""
    table, n_left = sampled.sample.all_labels, _SHARE_OF_LABELS * effective
    columns = {n: table.columns_of(n, v) for n, v in sampled.variables.items() if v.n_rows}
    names: list[VariableName] = []
    for name in sorted(columns, key=lambda n: columns[n]):
        if 0 < columns[name] <= n_left:
            names.append(name)
            n_left -= columns[name]
    return names


def _aligned(variable: Variable | None, of_all: Variable) -> Variable:
    """A variable of the sample with the classes of the whole, in their order."""
    if variable is None:
        variable = of_all.empty_like()
    if isinstance(variable, ClassSums):
        return variable.in_order(cast(ClassSums, of_all).names)
    return variable


def _explained(
    variables: Any, table: LabelTable, weight: float, names: list[VariableName], width: int
) -> Float:
    """(k, d): rows r_i with sum r_i r_i^T = C_xv C_vv^+ C_vx."""
    parts = [np.zeros((0, width))]
    for name in names:
        variable = variables[name]
        if variable.weight:
            parts.append(variable.cross_covariance(0.0, name).T * (variable.weight / weight))
        else:
            parts.append(np.zeros((variable.n_columns, width)))
    cross = np.concatenate(parts)
    square = table.covariance(names, variables, weight)
    deviations = np.sqrt(np.maximum(np.diagonal(square), 0.0))
    units = np.divide(1.0, deviations, out=np.zeros_like(deviations), where=deviations > 0)
    values, vectors = np.linalg.eigh(square * units * units[:, None])
    least = tolerances.LABELS * len(values)
    kept = values > least
    return np.asarray((vectors[:, kept] / np.sqrt(values[kept])).T @ (cross * units[:, None]))


def _warn_of(
    variances: Float, sampled: Float, effective: float, names: Sequence[str] | None
) -> None:
    """Warn of features whose variance in the sample is far from that in all rows."""
    error = _ERRORS * (2.0 / effective) ** 0.5 * sampled
    low = (variances > _FACTOR * sampled) & (variances - sampled > error)
    high = (_FACTOR * variances < sampled) & (sampled - variances > error)
    features = np.flatnonzero(low | high)
    if len(features):
        shown = abbreviated(features, names)
        warn(
            f"the sampled rows misstate the variance of {len(features)} feature(s) ({shown}) by "
            f"more than a factor of {_FACTOR:g}: rare rows carry them. What is erased and kept is "
            "exact, but x may be changed more than the report expects; take a larger subsample=",
            SampledScatterWarning,
        )
