"""A factor and two spans in, an oblique projection out: where the methods differ."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as status
from splince_fast._kernels import oblique as kernels
from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor
from splince_fast._solve.options import Options

Float = NDArray[np.float64]


class Solution(NamedTuple):
    """P = I - left^T right (factors transposed), with ranks, angles and residuals.

    Attributes
    ----------
    status : int
        Of :mod:`splince_fast._kernels.factor`; the factors are empty unless it is STATUS_OK.
    left, right : (r, d) float64
    whitened : (k, d) float64
        L^+ Cov(x, v), of what is erased and then of what is kept, one row per column of v.
    rank_z, rank_y : int
        How many singular values of its two parts are above `cut_z` and `cut_y`.
    cut_z, cut_y : float
    dropped : int
        Kept directions that were given up.
    cosines : float64
        Of the principal angles, before any direction was dropped.
    sines : float64
        Of the angles between what is erased and what is kept in the end.
    tolerance_sine : float
        Sines up to it are rounding.
    distortion, distortion_unkept : float
        tr(E S E^T) with E = I - P of this map and of LEACE, S the covariance that was factored.
    size : float
        Spectral norm of I - P in units of deviations.
    residual_z, residual_y : float
        Relative residuals of the constraints, in these units, on the directions that count.
    amplification : float
        1 / sine of the smallest angle.
    spread : float
        The largest condition number of the two parts of `whitened`, within their ranks.
    noise : float
        Rounding level of `whitened`.
    solver, rank_covariance, admitted, variance, inverse_scale
        Of the factor, with what the spans made support of its noise space.
    null_basis : (n, d) float64 or None
        Orthonormal rows off the support, constant features first, where they are asked for.
    left_out : (n,) intp
        Features that vary and were left out of the whitening.
    reads_left_out : bool
        Whether they are read all the same, with S as block diagonal: the others do not tell all
        of what is erased from what is kept.
    outside : (n_erased, d) float64 or None
        Part of the erased spans off the support, which is left alone; None where there is none.
    """

    status: int
    left: Float
    right: Float
    whitened: Float
    rank_z: int
    rank_y: int
    cut_z: float
    cut_y: float
    dropped: int
    cosines: Float
    sines: Float
    tolerance_sine: float
    distortion: float
    distortion_unkept: float
    size: float
    residual_z: float
    residual_y: float
    amplification: float
    spread: float
    noise: float
    solver: str
    rank_covariance: int
    admitted: int
    variance: float
    inverse_scale: Float
    null_basis: Float | None
    left_out: NDArray[np.intp]
    reads_left_out: bool
    outside: Float | None

    @property
    def bound(self) -> float:
        """Bound on the rounding of the residuals, from `tolerances.residual`."""
        return tolerances.residual(self.whitened.shape[1], self.spread, self.size)


def oblique(factor: Factor, span_z: Float, span_y: Float, options: Options) -> Solution:
    """Erase the rows of `span_z`, (kz, d), and keep those of `span_y`, (ky, d).

    The equations stand in the header of the kernel. Directions of the factor's noise space in
    which the spans stand out are admitted to the support first.

    Features that the factor leaves out lose what the others predict of them, and nothing is read
    from them: with right = 0 there, both constraints hold for all features if they hold for the
    others. Where directions of the erased span are in these features alone, or the others do not
    tell them from what is kept, S is taken as block diagonal instead.
    """
    if factor.n_noise and not factor.admitted:
        factor = factor.admit(np.concatenate([span_z, span_y]))
    d, solver = factor.width, factor.solver
    whitened = solver != "none"
    if whitened:
        noise = tolerances.noise(d, factor.smallest)
    else:
        noise = tolerances.noise_unwhitened(factor.variance)
    noise = max(noise, factor.rounding)
    facts = (solver, factor.rank, factor.admitted, factor.variance, factor.inverse_scale)
    if factor.status != status.STATUS_OK:
        none, flat = np.empty((0, d)), np.empty(0)
        return Solution(
            factor.status, none, none, none, 0, 0, noise, noise, 0, flat, flat,
            0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, noise, *facts, None, factor.left_out, False,
            None,
        )  # fmt: skip
    largest = options.max_amplification
    result = kernels.oblique(
        factor,
        span_z,
        span_y,
        noise=noise,
        relative=tolerances.relative(d, options.rank_tol),
        drop_below=1.0 / largest if largest else 0.0,  # sine of the angle
        may_drop=options.on_infeasible == "drop" or largest is not None,
    )
    null = None
    if whitened and options.null_space == "drop":
        still = np.setdiff1d(np.flatnonzero(factor.inverse_scale == 0.0), factor.left_out)
        constants = np.zeros((len(still), d))
        constants[np.arange(len(still)), still] = 1.0
        null = np.concatenate([constants, factor.null_basis.T])
    outside = None
    if factor.n_null:
        outside = span_z - factor.unwhiten(result[3][: len(span_z)])
        outside[:, factor.left_out] = 0.0
    solution = Solution._make((*result, noise, *facts, null, factor.left_out, False, outside))
    if not len(factor.left_out) or solver == "refined":
        return solution
    infeasible = solution.status != status.STATUS_OK
    if infeasible or solution.dropped or solution.rank_z < len(span_z):
        full = oblique(factor.reading_left_out(), span_z, span_y, options)
        if full.status == status.STATUS_OK and (
            infeasible or full.dropped < solution.dropped or full.rank_z > solution.rank_z
        ):
            return full._replace(left_out=factor.left_out, reads_left_out=True)
    return solution


def with_strength(
    factor: Factor, solution: Solution, span_z: Float, span_y: Float, options: Options
) -> Solution:
    """P_b = (1 - b) P_LEACE + b P, b = ``options.strength``: the fraction b of X is given back.

    P = P_LEACE + X H^+ K^T, X = Cov(x, y) - P_LEACE Cov(x, y). Both maps have the same `left`,
    which depends on the erased span alone, and the two changes are orthogonal in every inner
    product: the distortion is that of LEACE and b^2 times the rest.

    Parameters
    ----------
    factor : Factor
        That `solution` was made of by :func:`oblique`.
    solution : Solution
        P.
    span_z, span_y : (kz, d), (ky, d) float64
    options : Options
    """
    if solution.reads_left_out:
        factor = factor.reading_left_out()
    if factor.n_noise:  # same support, same basis of the erased span
        factor = factor.admit(np.concatenate([span_z, span_y]))
    plain, b = oblique(factor, span_z, span_y[:0], options), options.strength
    least = solution.distortion_unkept
    return solution._replace(
        right=(1.0 - b) * plain.right + b * solution.right,
        distortion=least + b**2 * (solution.distortion - least),
    )


def with_null_space(solution: Solution, kept: Float) -> tuple[Float, Float]:
    """Factors of the projection that annihilates the kernel of S, too: left, right transposed.

    With N an orthonormal basis of the kernel it erases colsp[left, N] and keeps Sy.
    ``M = N - D^-1 Qc Qc^T D N``, Qc = orth(D^-1 Sy), has M^T Sy = 0: what is kept stays, also where
    it reaches into the noise space; where it does not, but for rounding, M = N. [right, M] is then
    made dual to [left, N] by elimination: B = right^T N and C = M^T left are small.

    Parameters
    ----------
    solution : Solution
        Solved with ``null_space="drop"``.
    kept : (k, d) float64
        Cross-covariances of what is kept.
    """
    left, right, null = solution.left, solution.right, solution.null_basis
    if null is None or not len(null):
        return left, right
    inverse: Float = solution.inverse_scale
    dual: Float = null
    rank = solution.rank_y - solution.dropped
    if rank:
        basis = np.linalg.svd(kept * inverse, full_matrices=False)[2][:rank]
        scaled = np.divide(null, inverse, out=np.zeros_like(null), where=inverse > 0)
        inside = scaled @ basis.T
        sizes = np.linalg.norm(scaled, axis=1, keepdims=True)
        inside[np.abs(inside) <= 16 * tolerances.EPS * len(inverse) * sizes] = 0.0
        if inside.any():
            dual = null - (inside @ basis) * inverse
            dual = np.asarray(np.linalg.solve(dual @ null.T, dual), np.float64)
    into_null, from_left = right @ null.T, dual @ left.T
    schur = np.eye(len(left)) - into_null @ from_left
    apart: Float = np.asarray(np.linalg.solve(schur, right - into_null @ dual), np.float64)
    return np.concatenate([left, null]), np.concatenate([apart, dual - from_left @ apart])


def column_norms(left: Float, right: Float) -> Float:
    """(d,): norms of the columns of left^T right, from the factors, (r, d) each, in O(d r^2)."""
    if not len(left):
        return np.zeros(left.shape[1])
    sizes = np.abs(left).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        units = np.where(sizes > 0, left / sizes, 0.0)
        weights = right * sizes
        squares = np.einsum("ij,ij->j", weights, (units @ units.T) @ weights)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def sensitivity(left: Float, right: Float, mean: Float, variance: float) -> tuple[float, float]:
    """sqrt E|(P - I) e|^2 over the deviation of x, where e rounds x to float32; and |P - I|_F.

    The entries of e are independent, of deviation eps32 rms(x), with eps32 = 2^-23 and
    rms(x)^2 = E|x|^2 / d. With tr Cov(x) = s^2 the figure is eps32 rms(x) |P - I|_F / s.

    Parameters
    ----------
    left, right : (r, d) float64
    mean : (d,) float64
    variance : float
        tr Cov(x).
    """
    if variance <= 0.0:
        return 0.0, 0.0
    norm, offset = status.amplified(left, right, mean, variance)
    moved: float = tolerances.EPS32 * norm * ((1.0 + offset) / len(mean)) ** 0.5
    return min(moved, float(np.finfo(np.float64).max)), norm
