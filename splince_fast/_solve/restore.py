"""A factor of T and two spans in, the least change of t with Cov(B t, y) = Sy out.

With T = Cov(t) = L L^T, Ty = Cov(t, y), Sy the covariance wanted, X = Sy - Ty and
L^+ Ty = U s V^T, and a strength b::

    B = I + b X H^+ K^T = I - left^T right,    K = T^+ Ty,    H = Ty^T K = V s^2 V^T
    C = Ty V / s,    R = T^+ C (= (L^+)^T U),    R := R K'^-T,    K' = R^T C (= I but for rounding)
    D^-1 X = Q x W^T,    left = X W / x = D Q,    right = -b R (V / s)^T W x

A map per class, B_c = I + b X H^+ K_c^T with K_c = S_c^+ S_cy and H = sum p_c S_cy^T K_c, is the
same algebra with the classes side by side: (k, m d) rows sqrt(p_c) S_cy, and X given.

K' makes B Ty = Ty + b X hold to rounding, whatever L is; `left` is orthonormal in units D, so that
|D right| is |B - I|. A combination v of the labels has s = |L^+ Ty v|, to the rounding of Ty times
its coefficients R: below that it is absent, and Sy v has to be, too. No rank is judged relative to
H or Ty themselves, which are nothing but rounding where the eraser left nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve import tolerances

Float = NDArray[np.float64]


class Restoration(NamedTuple):
    """B = I - left^T right, with its ranks and residuals.

    Attributes
    ----------
    left, right : (r, d), (r, m d) float64
    whitened : (k, d) float64
        L^+ Ty, one row per column of y.
    change : float
        E|(B - I)(t - E t)|^2 = tr(left^T left right T right^T).
    cut : float
        Its smallest singular value that counts is above it.
    lost : (k,) float64 or None
        The combination of the labels that Sy has and Ty has not; `left` is empty then.
    wanted : float
        |Sy v| of this combination, in units D.
    residuals, bounds : (k,) float64
        |B Ty - Ty - b X| of each column in units D, and its rounding.
    sizes : (k,) float64
        |Sy| of each column in units D.
    amplification : float
        Spectral norm of B in units D.
    """

    left: Float
    right: Float
    whitened: Float
    change: float
    cut: float
    lost: Float | None
    wanted: float
    residuals: Float
    bounds: Float
    sizes: Float
    amplification: float

    def errors(self, part: slice) -> tuple[float, float]:
        """Residual and bound of some columns together, relative to their |Sy|."""
        size, residual, bound = (
            float(np.linalg.norm(v[part])) for v in (self.sizes, self.residuals, self.bounds)
        )
        return (residual / size, bound / size) if size else (0.0, 0.0)


def restore(
    whitened: Float, solved: Float, span_t: Float, span_x: Float, units: Float, strength: float,
    change: Float,
) -> Restoration:  # fmt: skip
    """The map of least change that sends the rows of `span_t` to those of `span_x`.

    Parameters
    ----------
    whitened, solved : (k, p), (k, m d) float64
        L^+ Ty and T^+ Ty, transposed.
    span_t, span_x : (k, m d), (k, d) float64
        Ty and Sy, transposed, y in units of its deviations.
    units : (d,) float64
        D: deviations that the rounding of both is relative to; 0 where a feature is constant.
    strength : float
        Fraction b of X that is added to Ty.
    change : (k, d) float64
        X, transposed.
    """
    k, d = span_x.shape
    n_maps = span_t.shape[1] // d
    wide = np.tile(units, n_maps)
    inverse = np.divide(1.0, units, out=np.zeros(d), where=units > 0)
    noise, relative = tolerances.noise(d, 1.0), tolerances.relative(d, "auto")
    sizes = np.linalg.norm(span_x * inverse, axis=1)
    # Zero columns pad the matrix to at least k columns, so that the SVD returns k singular values.
    short = k - whitened.shape[1]
    padded = np.pad(whitened, ((0, 0), (0, short))) if short > 0 else whitened
    combinations, values, _ = np.linalg.svd(padded, full_matrices=False)
    cuts = np.full(k, np.inf)
    some = np.flatnonzero(values > relative * values[0])
    weights = combinations[:, some].T / values[some, None]  # (V / s)^T
    dual, right = weights @ span_t, weights @ solved
    cuts[some] = np.maximum(noise * np.linalg.norm(right * wide, axis=1), relative * values[0])
    known = values > cuts
    chosen = known[some]
    weights, dual, right = weights[chosen], dual[chosen], right[chosen]
    cut = float(cuts[known].max(initial=noise))
    parts = np.linalg.norm((combinations.T @ span_x) * inverse, axis=1)
    # Rounding mixes the other combinations into the absent ones: the limit allows for that.
    mixed = float(np.sum(parts[known] * cuts[known] / values[known]))
    limit = noise + mixed + relative * float(np.linalg.norm(sizes))
    absent = np.where(known, 0.0, parts)
    if absent.max() > limit:
        worst, none = int(np.argmax(absent)), np.empty((0, d))
        return Restoration(
            none, none, whitened, 0.0, cut, combinations[:, worst], float(absent[worst]),
            sizes, sizes, sizes, np.inf,
        )  # fmt: skip
    corrected = np.linalg.solve(right @ dual.T, weights)
    basis, lengths, _ = np.linalg.svd(change * inverse, full_matrices=False)
    moved = strength * lengths > 2.0 * noise * max(1.0, float(np.linalg.norm(sizes)))
    basis, lengths = basis[:, moved], lengths[moved, None]
    left = (basis.T @ change) / lengths
    weights = -strength * lengths * (basis.T @ weights.T) @ corrected
    right, inner = weights @ solved, weights @ whitened
    size = float(np.linalg.norm(right * wide, 2)) if len(right) else 0.0
    spread = float(values[known][0] / values[known][-1]) if known.any() else 1.0
    error = (strength * change + (span_t @ right.T) @ left) * inverse
    reach = sizes + np.linalg.norm(span_t * np.tile(inverse, n_maps), axis=1)
    return Restoration(
        left, right, whitened, float(np.vdot(left @ left.T, inner @ inner.T)), cut, None, 0.0,
        np.linalg.norm(error, axis=1),
        tolerances.residual(d, spread, size) * reach + 4.0 * noise,
        sizes,
        max(_norm(left * inverse, part * units) for part in np.split(right, n_maps, axis=1)),
    )  # fmt: skip


def _norm(left: Float, right: Float) -> float:
    """|I - left^T right|_2 of (r, d) factors: on their span, and 1 elsewhere."""
    basis = np.linalg.qr(np.concatenate([left, right]).T).Q
    inner = np.eye(basis.shape[1]) - (left @ basis).T @ (right @ basis)
    return max(1.0, float(np.linalg.norm(inner, 2))) if inner.size else 1.0
