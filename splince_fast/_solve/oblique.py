"""Factors of a covariance, and the oblique projection that erases one span and keeps another.

A span is a cross-covariance of x with labels, one row per label column. S = L L^T is the covariance
that is factored, and P is the projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._kernels import oblique as oblique_kernels
from splince_fast._kernels.factor import Factor
from splince_fast._runtime.names import VariableName, listed
from splince_fast._solve import tolerances
from splince_fast._solve.options import Options
from splince_fast.exceptions import InfeasibleError, SplinceError

Float = NDArray[np.float64]


# --- factors --------------------------------------------------------------------------------------


def dense(
    scatter: Float, weight: float, floor: Float, *, max_rank: int, tolerance: float,
    intensity: float = 0.0, solver: str = "auto",
) -> Factor:  # fmt: skip
    """Return the factor L of the shrunk covariance, L L^T = (1 - a) S + a (tr S / d) I."""
    # S = scatter / weight; the upper triangle of `scatter`, in Fortran order, is not used. A
    # feature counts as constant if its standard deviation is at most `floor`. `tolerance` is the
    # rounding error of the eigenvalues of S scaled to unit diagonal.
    d = len(floor)
    ridge = intensity * float(np.einsum("ii->", scatter)) / (weight * d) if intensity else 0.0
    factor = kernels.dense(
        scatter,
        floor,
        per_weight=(1.0 - intensity) / weight,
        ridge=ridge,
        max_rank=d if intensity else max_rank,
        tolerance=tolerance,
        force_eigh=solver == "eigh",
        allow_eigh=solver != "cholesky",
    )
    if factor.status != kernels.STATUS_OK:
        _raise_numerical(factor.status, solver)
    return factor


def oas(scatter: Float, weight: float) -> float:
    """Return the intensity a in [0, 1] for S = scatter / weight, of which one triangle is read."""
    # Oracle approximating shrinkage (Chen, Wiesel, Eldar and Hero 2010), for S scaled to tr(S) = d,
    # so that the target is I: a = (tr S^2 / d + d) / ((n + 1) |S - I|^2 / d).
    d = len(scatter)
    diagonal = np.einsum("ii->i", scatter)
    scale = float(diagonal.sum()) / d
    if scale == 0.0:
        return 1.0
    squares = sum(float(np.sum((scatter[j + 1 :, j] / scale) ** 2)) for j in range(d))
    frobenius = 2 * squares + float(np.sum((diagonal / scale) ** 2))  # tr(S^2)
    distance = frobenius - d  # |S - I|^2
    return min(1.0, (frobenius / d + d) / ((weight + 1) * distance / d)) if distance > 0 else 1.0


def _raise_numerical(code: int, solver: str) -> NoReturn:
    """Raise SplinceError for the status `code` of a factorisation, with cause and remedy."""
    if code == kernels.STATUS_RANK_DEFICIENT:
        raise SplinceError(
            "the covariance of x is rank deficient (fewer rows than features, or copies of "
            "features), which solver='cholesky' cannot factor; use solver='auto', or shrinkage="
        )
    event = "did not converge" if code == kernels.STATUS_NO_CONVERGENCE else "met a singular matrix"
    raise SplinceError(
        f"the solver ({solver}) {event}; check that moments.covariance() is finite and positive "
        "semi-definite, or pass shrinkage=1e-6"
    )


# --- the projection -------------------------------------------------------------------------------


class Solution(NamedTuple):
    """The projection P = I - left^T right, with ranks, angles and residuals."""

    status: int  # of `splince_fast._kernels.factor`; the arrays are empty unless STATUS_OK
    left: Float  # (r, d): transposed factors of I - P
    right: Float
    whitened: Float  # (k, d): whitened spans of the erased, then of the kept variables
    rank_z: int  # ranks of the two parts of `whitened`: numbers of singular values above the cuts
    rank_y: int
    cut_z: float
    cut_y: float
    dropped: int
    cosines: Float  # of the principal angles, before any direction was dropped
    sines: Float  # of the angles between the erased span and the kept directions that remain
    distortion: float  # tr((I - P) S (I - P)^T) for P, and for LEACE in place of P
    distortion_leace: float
    size: float  # spectral norm of I - P for features scaled to unit standard deviation
    residual_z: float  # |P Sz| / |Sz| on directions above the cuts, for features of unit deviation
    residual_y: float  # |P Sy - Sy| / |Sy|, likewise
    amplification: float  # 1 / sine of the smallest principal angle
    spread: float  # the larger condition number of the parts of `whitened`, above the cuts
    noise: float  # rounding level of `whitened`
    solver: str
    rank_covariance: int
    admitted: int
    variance: float
    inverse_scale: Float
    null_basis: Float | None  # (n, d): orthonormal, of the null space, for ``null_space="drop"``
    off_support: Float | None  # component of the erased span off the support; None at full rank

    @property
    def bound(self) -> float:
        """Bound of the rounding error in `residual_z` and `residual_y`."""
        return tolerances.residual(self.whitened.shape[1], self.spread, self.size)


def oblique(factor: Factor, span_z: Float, span_y: Float, options: Options) -> Solution:
    """Solve for the projection that erases `span_z`, (kz, d), and keeps `span_y`, (ky, d)."""
    # The equations are those of the kernel. `Factor.admit` extends the support of S by directions
    # of rounding-level variance in which a span exceeds rounding error. P changes constant
    # features, but the change does not depend on them: `right` is 0 for them.
    if factor.n_noise:
        factor = factor.admit(np.concatenate([span_z, span_y]))
    d, solver = factor.width, factor.solver
    whitened = solver != "none"
    variance = d if whitened else factor.variance
    noise = max(tolerances.noise(variance, factor.smallest), factor.rounding)
    fields = (solver, factor.rank, factor.admitted, factor.variance, factor.inverse_scale)
    max_amplification = options.max_amplification
    result = oblique_kernels.oblique(
        factor,
        span_z,
        span_y,
        noise=noise,
        relative=tolerances.relative(d, options.rank_tol),
        drop_below=1.0 / max_amplification if max_amplification else 0.0,  # smallest allowed sine
        may_drop=options.on_infeasible == "drop" or max_amplification is not None,
    )
    null_basis = off_support = None
    if whitened and options.null_space == "drop":
        constants = np.flatnonzero(factor.inverse_scale == 0.0)
        null_basis = np.zeros((len(constants) + factor.n_null, d))
        null_basis[range(len(constants)), constants] = 1.0
        null_basis[len(constants) :] = factor.null_basis.T
    if factor.n_null:
        off_support = span_z - factor.unwhiten(result[3][: len(span_z)])
    return Solution._make((*result, noise, *fields, null_basis, off_support))


def common_text(erased: Sequence[VariableName], kept: Sequence[VariableName]) -> str:
    """Return the sentence that names variables both erased and kept; "" without such variables."""
    both = [name for name in kept if name in erased]
    if not both:
        return ""
    return f"{listed(both)} is to be erased and to be kept: name it in one of erase= and keep=. "


def raise_failure(
    solution: Solution, erased: list[str], kept: list[str], method: str, solver: str
) -> NoReturn:
    """Raise the error for the status of a failed solve, with cause and remedy."""
    if solution.status != kernels.STATUS_INFEASIBLE:
        _raise_numerical(solution.status, solver)
    cosine = float(solution.cosines[0]) if len(solution.cosines) else 1.0
    raise InfeasibleError(
        f"{common_text(erased, kept)}{method} cannot keep {listed(kept)} while it erases "
        f"{listed(erased)}: a direction to keep lies in the span to erase (largest principal "
        f"cosine {cosine:.12g}, amplification {solution.amplification:.1e}). Keep fewer variables, "
        "pass on_infeasible='drop' or max_amplification=, or use leace, which keeps no variable",
        cosine,
    )


def with_strength(
    factor: Factor, solution: Solution, span_z: Float, span_y: Float, options: Options
) -> Solution:
    """Interpolate between LEACE and P: P_b = (1 - b) P_LEACE + b P, b = ``options.strength``."""
    # P_b restores the fraction b of X = Cov(x, y) - P_LEACE Cov(x, y). Both have the same `left`,
    # which depends only on the erased span. The distortion is D_LEACE + b^2 (D_P - D_LEACE): with
    # K = S^+ (Cov(x, y) - X) and H = K^T Cov(x, y), P - P_LEACE = X H^+ K^T is orthogonal to the
    # change by P_LEACE.
    if factor.n_noise:  # `left` of LEACE and of P agree only on the same support
        factor = factor.admit(np.concatenate([span_z, span_y]))
    leace, b = oblique(factor, span_z, span_y[:0], options), options.strength
    minimum = solution.distortion_leace
    return solution._replace(
        right=(1.0 - b) * leace.right + b * solution.right,
        distortion=minimum + b**2 * (solution.distortion - minimum),
    )


def with_null_space(solution: Solution, kept: Float) -> tuple[Float, Float]:
    """Return factors (left, right) of the projection that also maps the null space to 0."""
    # Let N be an orthonormal basis of the null space of S, and D the standard deviations, 1 for
    # constant features. The projection erases colsp[left, N] and keeps the span Sy. With
    # Qc = orth(D^-1 Sy), M = N - D^-1 Qc Qc^T D N satisfies M^T Sy = 0, so that Sy is kept even if
    # it has a component in the null space; if that is rounding error, M = N. Block elimination then
    # replaces [right, M] by a matrix with [right, M]^T [left, N] = I; its off-diagonal blocks
    # right^T N and M^T left are small.
    left, right = solution.left, solution.right
    null = np.asarray(solution.null_basis)
    if not len(null):
        return left, right
    inverse: Float = np.where(solution.inverse_scale == 0.0, 1.0, solution.inverse_scale)
    dual: Float = null
    rank = solution.rank_y - solution.dropped
    if rank:
        basis = np.linalg.svd(kept * inverse, full_matrices=False)[2][:rank]
        scaled = null / inverse
        inside = scaled @ basis.T
        sizes = np.linalg.norm(scaled, axis=1, keepdims=True)
        inside[np.abs(inside) <= 16 * tolerances.EPS * len(inverse) * sizes] = 0.0
        if inside.any():
            dual = null - (inside @ basis) * inverse
            dual = np.asarray(np.linalg.solve(dual @ null.T, dual), np.float64)
    into_null, from_left = right @ null.T, dual @ left.T
    schur = np.eye(len(left)) - into_null @ from_left
    dual_right: Float = np.asarray(np.linalg.solve(schur, right - into_null @ dual), np.float64)
    return np.concatenate([left, null]), np.concatenate([dual_right, dual - from_left @ dual_right])


@np.errstate(over="ignore", invalid="ignore")
def column_norms(left: Float, right: Float) -> Float:
    """Return the norms of the columns of left^T right, (d,), for factors (r, d), in O(d r^2)."""
    scale = np.abs(left).max(initial=np.finfo(np.float64).tiny)  # no square overflows
    units, weights = left / scale, right * scale
    squares = (weights * (units @ units.T @ weights)).sum(axis=0)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


@np.errstate(over="ignore")
def sensitivity(left: Float, right: Float, mean: Float, variance: float) -> tuple[float, float]:
    """Return the sensitivity to float32 rounding, sqrt(E|(P - I) e|^2) / s, and |P - I|_F."""
    # The entries of e, the error of rounding x to float32, are taken as independent, with the
    # deviation eps32 rms(x), eps32 = 2^-23 and rms(x)^2 = E|x|^2 / d; s^2 = tr Cov(x).
    if variance <= 0.0:
        return 0.0, 0.0
    norms = column_norms(left, right)
    norm, deviations = float(norms @ norms) ** 0.5, mean / variance**0.5
    offset = float(deviations @ deviations)
    effect: float = tolerances.EPS32 * norm * ((1.0 + offset) / len(mean)) ** 0.5
    return min(effect, float(np.finfo(np.float64).max)), norm


def change(left: Float, right: Float, gram: Float, variances: Float) -> float | None:
    """Return E|left^T right (x - E x)|^2, or None if it is below its rounding error."""
    # `gram` is right Cov(x) right^T. Large terms of it cancel, for example, for a map of the
    # difference of two nearly equal features.
    value = float(np.vdot(left @ left.T, gram))
    terms = (np.linalg.norm(left) * (np.abs(right) @ np.sqrt(variances)).max(initial=0.0)) ** 2
    return None if value < 4.0 * tolerances.EPS * terms else value
