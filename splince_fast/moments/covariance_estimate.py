"""Estimate of Cov(x) from a sample of the rows, and from the labels and variances of all rows.

Let v be the label columns, of rank k: indicators of classes and columns of continuous variables,
centred over the labelled rows. Let C_xv = Cov(x, v) and C_vv = Cov(v). The labels explain the part
R R^T = C_xv C_vv^+ C_vx of Cov(x), which is computed from all rows. Only the residual part
W = S_m - R_m R_m^T is computed from the m sampled rows, where S_m is the covariance of x in the
sample, and R_m R_m^T is the part of S_m that the labels explain. The estimate is::

    M = m / (m - k) W + R R^T + D

D is diagonal. If the variance of a feature in all rows exceeds the estimate by more than the
sampling error, the entry of D is the difference. `_undetermined` describes further entries of D;
all others are 0.

An eraser depends on M through the regression of the coordinates that change on the coordinates
that do not. The residuals of x about the labels have the variance of x times 1 - rho^2, with rho
the multiple correlation of x with v. The number of rows that a given precision requires decreases
by the factor 1 - rho^2, too. Model-assisted estimation in surveys uses the same method (Saerndal,
Swensson and Wretman 1992). D restores the variance of a feature that comes from a few rows, none
of which are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.rows import abbreviated
from splince_fast._runtime.warn import warn
from splince_fast._solve import tolerances
from splince_fast.exceptions import NotEnoughDataError, SampledScatterWarning
from splince_fast.labels import VariableName
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.sampled import LEAST_ROWS, SampledAccumulator
from splince_fast.moments.variable import Variable

Float = NDArray[np.float64]

# x is regressed on label columns, at most this number of them per effective sampled row.
_COLUMNS_PER_ROW = 0.1
# `_warn_of_variances` warns if the variances of a feature in all rows and in the sample differ by
# more than this factor, and by more than this number of Gaussian standard errors.
_FACTOR, _ERRORS = 2.0, 6.0
# The variance of a feature is corrected if the variance in all rows exceeds the estimate by more
# than this number of Gaussian standard errors.
_STANDARD_ERRORS = 4.0
# `_undetermined` regards covariances with labels, below this multiple of the unit roundoff, as
# rounding errors.
_ROUNDINGS = 64.0


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """Properties of the sample from which Cov(x) was estimated, and parts of the estimate."""

    # The module docstring defines the symbols.

    correction: Float  # (d,): diagonal of D
    # (k, d): rows r_i with sum r_i r_i^T = R R^T, the part of Cov(x) that the labels explain
    explained: Float
    n_rows: int
    n_effective: float  # effective number m of sampled rows, (sum w)^2 / sum w^2
    fraction: float  # fraction of all rows that was sampled
    n_labels: int  # rank k of the labels
    unit_roundoff: float  # unit roundoff of the products in the scatter of the sample

    def distortion(
        self, left: Float, right: Float, gram: Float, regressors: int
    ) -> tuple[float, float | None]:
        """Estimate the distortion E|left^T right (x - mean)|^2 and its excess, without bias."""
        # The excess is the distortion minus the least distortion of any eraser with the same
        # constraints. The k label columns explain a part of the distortion. The unexplained part is
        # the residual variance of a regression on p other coordinates, fitted to the m sampled
        # rows. The residual variance is too small in the sample, by the factor 1 - p / (m - k). In
        # other rows it exceeds the minimum by the fraction p / (m - p - 2). If the sample is a
        # fraction f of all rows, p is replaced by (1 - f) p in both numerators, so that the
        # expected excess is the minimum of the unexplained part times:
        #     (1 - f) p / (m - p - 2)
        left_gram = left @ left.T
        coordinates = right @ self.explained.T
        explained = float(np.sum(left_gram * (coordinates @ coordinates.T)))
        residual = max(0.0, float(np.sum(left_gram * gram)) - explained)
        p, m, k = regressors, self.n_effective, self.n_labels
        if m - p - 2 <= 0 or m - k - p <= 0:
            return explained + residual, None
        residual /= 1.0 - (1.0 - self.fraction) * p / (m - k)
        excess = (1.0 - self.fraction) * p / (m - p - 2)
        least = explained + residual
        return least + residual * excess, residual * excess / least if least else 0.0


def refuse_few(sampled: SampledAccumulator) -> None:
    """Raise NotEnoughDataError if the sample has fewer than 4 rows per feature that varies."""
    varies = sampled.nonempty_state().second.diagonal() != 0
    _refuse_below(sampled, LEAST_ROWS * int(np.count_nonzero(varies)))


def _refuse_below(sampled: SampledAccumulator, needed: int) -> None:
    rows, state = sampled.sample.rows.n_rows, sampled.nonempty_state()
    if rows < needed:
        raise NotEnoughDataError(
            f"the covariance of {state.width} features is estimated from {rows:,} sampled rows of "
            f"{state.n_rows:,} (subsample={sampled.parameters.subsample:g}), and {needed:,} are "
            f"needed: {LEAST_ROWS} for each feature that varies. Accumulate with a larger "
            "subsample= (1 uses all rows), add rows, or pass shrinkage='oas'"
        )


def sampled_covariance(sampled: SampledAccumulator) -> tuple[Float, SampleStatistics]:
    """Return the estimate M of Cov(x), and properties of the sample."""
    # M is (d, d), Fortran-ordered; only its lower triangle is valid. No rows may be buffered.
    import scipy.linalg.blas

    _refuse_below(sampled, 2)
    state, sample = sampled.nonempty_state(), sampled.sample
    sample_state, n_effective = sample.rows.nonempty_state(), sample.n_effective
    variances = state.second.diagonal() / state.weight
    covariance = sample_state.scatter / sample_state.weight
    names = _regressors(sampled, n_effective)
    aligned = {
        name: _aligned(sample.rows.variables.get(name), sampled.variables[name]) for name in names
    }
    explained_in_sample = _explained(
        aligned, sample.labels, sample_state.weight, names, state.width,
    )  # fmt: skip
    explained = _explained(sampled.variables, sample.all_labels, state.weight, names, state.width)
    sample_variances = np.diagonal(covariance).copy()
    syrk = scipy.linalg.blas.dsyrk
    matrix = covariance
    if len(explained_in_sample):
        matrix = syrk(-1.0, explained_in_sample.T, 1.0, covariance, lower=1, overwrite_c=1)
    matrix *= n_effective / max(1.0, n_effective - len(explained_in_sample))
    sampling_error = _STANDARD_ERRORS * (2.0 / n_effective) ** 0.5
    undetermined = _undetermined(sampled, matrix, variances, explained)
    if len(explained):
        matrix = syrk(1.0, explained.T, 1.0, matrix, lower=1, overwrite_c=1)
    diagonal = np.einsum("ii->i", matrix)
    # Corrections within the sampling error are set to 0: they would inflate the variance of
    # directions of small variance.
    correction = variances - diagonal
    correction[correction <= sampling_error * diagonal] = 0.0
    correction[undetermined] = np.maximum(correction, sampling_error * variances)[undetermined]
    diagonal += correction
    _warn_of_variances(variances, sample_variances, n_effective, sampled.feature_names)
    return matrix, SampleStatistics(
        correction, explained, sample_state.n_rows, n_effective, sample_state.n_rows / state.n_rows,
        len(explained_in_sample), sample_state.unit_roundoff,
    )  # fmt: skip


def _undetermined(
    sampled: SampledAccumulator, matrix: Float, variances: Float, explained: Float
) -> NDArray[np.intp]:
    """Return the features that depend linearly on others in the sample, but not in all rows."""
    # For example, two words may occur together in every sampled row, but separately in other rows.
    # Then W has variance 0 along the difference of the two features, and M has only the variance
    # that the labels explain. The labels would seem to explain the difference fully, and an eraser
    # could change x along the difference without bound.
    # A feature j is returned if a combination b = e_j - sum_i c_i e_i of features has W b = 0 in
    # the sample, but x varies along b in all rows: R^T b is not zero up to rounding errors. A
    # Cholesky factorisation with pivoting gives b. In the caller, the entry of D for the feature is
    # at least the sampling error of its variance.
    import scipy.linalg

    sample_state, varies = sampled.sample.rows.nonempty_state(), variances > 0
    no_features = np.empty(0, np.intp)
    n_varying = int(np.count_nonzero(varies))
    if not len(explained) or sampled.sample.rows.n_rows < LEAST_ROWS * n_varying:
        return no_features
    scale = 1.0 / np.sqrt(np.where(varies, variances, np.inf))

    def scaled() -> Float:
        """Return `matrix` for features of unit variance, with diagonal 1 for constant features."""
        copy = np.array(matrix, order="F")
        copy *= scale
        copy *= scale[:, None]
        np.einsum("ii->i", copy)[~varies] = 1.0
        return copy

    tolerance = tolerances.eigenvalue(n_varying, sample_state.unit_roundoff)
    lapack = scipy.linalg.lapack
    factor, failed = lapack.dpotrf(scaled(), lower=1, overwrite_a=1)
    if not failed and np.diagonal(factor).min() ** 2 > tolerance:
        return no_features
    factor, order, rank, _ = lapack.dpstrf(scaled(), tol=tolerance, lower=1, overwrite_a=1)
    order -= 1
    projected = (explained * scale)[:, order]
    combinations = scipy.linalg.solve_triangular(
        factor[:rank, :rank], factor[rank:, :rank].T, lower=True, trans=1
    )
    residual = np.linalg.norm(projected[:, rank:] - projected[:, :rank] @ combinations, axis=0)
    largest_mean = 1.0 + np.abs(sampled.nonempty_state().mean * scale).max()
    rounding = (
        _ROUNDINGS
        * sample_state.unit_roundoff
        * largest_mean
        * (1.0 + np.abs(combinations).sum(axis=0))
    )
    return np.asarray(order[rank:][residual > rounding], np.intp)


def _regressors(sampled: SampledAccumulator, n_effective: float) -> list[VariableName]:
    """Return the variables on which x is regressed: those of few columns first, up to a limit."""
    table, n_allowed = sampled.sample.all_labels, _COLUMNS_PER_ROW * n_effective
    columns = {n: table.columns_of(n, v) for n, v in sampled.variables.items() if v.n_rows}
    names: list[VariableName] = []
    for name in sorted(columns, key=lambda n: columns[n]):
        if 0 < columns[name] <= n_allowed:
            names.append(name)
            n_allowed -= columns[name]
    return names


def _aligned(variable: Variable | None, all_rows_variable: Variable) -> Variable:
    """Return a variable of the sample with the classes and class order of `all_rows_variable`."""
    # `all_rows_variable` is the same variable in all rows. None becomes a variable without rows.
    if variable is None:
        variable = all_rows_variable.empty_like()
    if isinstance(variable, ClassSums):
        return variable.in_order(cast(ClassSums, all_rows_variable).names)
    return variable


def _explained(
    variables: Any, table: LabelTable, weight: float, names: list[VariableName], width: int
) -> Float:
    """Return rows r_i, (k, d), with sum r_i r_i^T = C_xv C_vv^+ C_vx, for the variables `names`."""
    parts = [np.zeros((0, width))]
    for name in names:
        variable = variables[name]
        if variable.weight:
            parts.append(variable.cross_covariance(0.0, name).T * (variable.weight / weight))
        else:
            parts.append(np.zeros((variable.n_columns, width)))
    cross = np.concatenate(parts)
    label_covariance = table.covariance(names, variables, weight)
    deviations = np.sqrt(np.maximum(np.diagonal(label_covariance), 0.0))
    scale = np.divide(1.0, deviations, out=np.zeros_like(deviations), where=deviations > 0)
    values, vectors = np.linalg.eigh(label_covariance * scale * scale[:, None])
    tolerance = tolerances.LABELS * len(values)
    kept = values > tolerance
    return np.asarray((vectors[:, kept] / np.sqrt(values[kept])).T @ (cross * scale[:, None]))


def _warn_of_variances(
    variances: Float, sample_variances: Float, n_effective: float, names: Sequence[str] | None
) -> None:
    """Warn of features whose variances differ too much between all rows and the sample."""
    error = _ERRORS * (2.0 / n_effective) ** 0.5 * sample_variances
    low = (variances > _FACTOR * sample_variances) & (variances - sample_variances > error)
    high = (_FACTOR * variances < sample_variances) & (sample_variances - variances > error)
    features = np.flatnonzero(low | high)
    if len(features):
        shown = abbreviated(features, names)
        warn(
            f"the variance of {len(features)} feature(s) ({shown}) in the sampled rows is wrong by "
            f"more than a factor of {_FACTOR:g}, because a few rows contribute most of it. Erasure "
            "is exact, but x may change more than the report expects; pass a larger subsample=",
            SampledScatterWarning,
        )
