"""Linear map B of erased rows t with the least change E|B t - t|^2 such that Cov(B t, y) = Sy.

Sy is the covariance to restore, Cov(x, y) of the rows x before erasure. Let T = Cov(t) = L L^T,
Ty = Cov(t, y), X = Sy - Ty, and let D be the standard deviations of the features. The strength b
scales X. With the singular value decompositions L^+ Ty = U s V^T and D^-1 X = Q x W^T::

    B = I + b X H^+ K^T = I - left right^T,    K = T^+ Ty,    H = Ty^T K = V s^2 V^T
    C = Ty V / s,    R = T^+ C (= (L^+)^T U),    R := R K'^-T,    K' = R^T C (= I up to rounding)
    left = X W / x = D Q,    right = -b R (V / s)^T W x

Functions and results hold the transposed matrices. Maps of m classes, B_c = I + b X H^+ K_c^T with
K_c = S_c^+ S_cy and H = sum p_c S_cy^T K_c, follow by the same algebra: the rows sqrt(p_c) S_cy of
the classes are concatenated, (k, m d), and X is an argument.

The correction by K' makes B Ty = Ty + b X hold up to rounding for any L. As `left` is orthonormal
in units of D, |D right| = |B - I|. For a combination v of label columns, the rounding error of
s = |L^+ Ty v| is the rounding error of Ty times the norm of the corresponding column of R. If s is
below this rounding error, Ty v counts as zero, and a map exists only if Sy v is zero, too. The
largest s alone is no scale for ranks: it is rounding error if the eraser removed all of Ty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve import tolerances

Float = NDArray[np.float64]


class Restoration(NamedTuple):
    """Map B = I - left^T right, with its cost, ranks and residuals.

    Attributes
    ----------
    left, right : (r, d), (r, m d) float64
        Transposed factors of I - B; the right factors of m maps are side by side.
    whitened : (k, p) float64
        L^+ Ty, one row per label column of y.
    change : float
        E|(B - I)(t - E t)|^2 = tr(left left^T right T right^T).
    cut : float
        Rounding level of the singular values of `whitened`.
    lost_combination : (k,) float64 or None
        Combination v of label columns with Sy v != 0 and Ty v = 0, if there is one: then no map
        exists, and the factors are empty. None otherwise.
    lost_size : float
        |Sy v| of `lost_combination`, in units of D.
    residuals, bounds : (k,) float64
        |B Ty - Ty - b X| of each label column, in units of D, and the bound of its rounding error.
    sizes : (k,) float64
        |Sy| of each label column, in units of D.
    lost : (k, d) float64
        Sy - B Ty, transposed: (1 - b) X up to rounding error.
    amplification : float
        Spectral norm of B, in units of D; for m maps, the largest norm.
    """

    left: Float
    right: Float
    whitened: Float
    change: float
    cut: float
    lost_combination: Float | None
    lost_size: float
    residuals: Float
    bounds: Float
    sizes: Float
    lost: Float
    amplification: float

    def errors(self, part: slice) -> tuple[float, float]:
        """Return `residuals` and `bounds` of the label columns `part`, relative to their |Sy|."""
        size, residual, bound = (
            float(np.linalg.norm(v[part])) for v in (self.sizes, self.residuals, self.bounds)
        )
        return (residual / size, bound / size) if size else (0.0, 0.0)


def restore(
    whitened: Float, solved: Float, span_t: Float, span_x: Float, units: Float, strength: float,
    change: Float,
) -> Restoration:  # fmt: skip
    """Return the map B of the least change E|B t - t|^2 with B Ty = Ty + b X, for Ty = Cov(t, y).

    T = Cov(t) = L L^T, X = Sy - Ty, and Sy is the covariance to restore.

    Parameters
    ----------
    whitened, solved : (k, p), (k, m d) float64
        L^+ Ty and T^+ Ty, transposed.
    span_t, span_x : (k, m d), (k, d) float64
        Ty and Sy, transposed, with label columns in units of their standard deviations.
    units : (d,) float64
        Standard deviations D of the features; 0 for constant features. Rounding errors of Ty and
        Sy are relative to D.
    strength : float
        Fraction b of X that is added to Ty.
    change : (k, d) float64
        X, transposed.
    """
    k, d = span_x.shape
    n_maps = span_t.shape[1] // d
    tiled_units = np.tile(units, n_maps)
    inverse = np.divide(1.0, units, out=np.zeros(d), where=units > 0)
    noise, relative = tolerances.noise(d, 1.0), tolerances.relative(d, "auto")
    sizes = np.linalg.norm(span_x * inverse, axis=1)
    # Pad with zero columns to at least k columns, so that the SVD returns k singular values.
    n_missing = k - whitened.shape[1]
    padded = np.pad(whitened, ((0, 0), (0, n_missing))) if n_missing > 0 else whitened
    combinations, values, _ = np.linalg.svd(padded, full_matrices=False)
    cuts = np.full(k, np.inf)
    nonzero = np.flatnonzero(values > relative * values[0])
    weights = combinations[:, nonzero].T / values[nonzero, None]  # (V / s)^T
    dual, right = weights @ span_t, weights @ solved
    cuts[nonzero] = np.maximum(
        noise * np.linalg.norm(right * tiled_units, axis=1), relative * values[0]
    )
    present = values > cuts
    chosen = present[nonzero]
    weights, dual, right = weights[chosen], dual[chosen], right[chosen]
    cut = float(cuts[present].max(initial=noise))
    parts = np.linalg.norm((combinations.T @ span_x) * inverse, axis=1)
    # A combination v counts as absent from the erased rows if Ty v is rounding error. `mixed`
    # bounds the part of |Sy v| that rounding adds to an absent combination from present ones.
    mixed = float(np.sum(parts[present] * cuts[present] / values[present]))
    limit = noise + mixed + relative * float(np.linalg.norm(sizes))
    absent = np.where(present, 0.0, parts)
    if absent.max() > limit:
        worst, empty = int(np.argmax(absent)), np.empty((0, d))
        return Restoration(
            empty, empty, whitened, 0.0, cut, combinations[:, worst], float(absent[worst]),
            sizes, sizes, sizes, change, np.inf,
        )  # fmt: skip
    corrected = np.linalg.solve(right @ dual.T, weights)
    basis, lengths, _ = np.linalg.svd(change * inverse, full_matrices=False)
    changed = strength * lengths > 2.0 * noise * max(1.0, float(np.linalg.norm(sizes)))
    basis, lengths = basis[:, changed], lengths[changed, None]
    left = (basis.T @ change) / lengths
    weights = -strength * lengths * (basis.T @ weights.T) @ corrected
    right, inner = weights @ solved, weights @ whitened
    size = float(np.linalg.norm(right * tiled_units, 2)) if len(right) else 0.0
    condition = float(values[present][0] / values[present][-1]) if present.any() else 1.0
    restored = -(span_t @ right.T) @ left  # b X
    error = (strength * change - restored) * inverse
    both_sizes = sizes + np.linalg.norm(span_t * np.tile(inverse, n_maps), axis=1)
    return Restoration(
        left, right, whitened, float(np.vdot(left @ left.T, inner @ inner.T)), cut, None, 0.0,
        np.linalg.norm(error, axis=1),
        tolerances.residual(d, condition, size) * both_sizes + 4.0 * noise,
        sizes,
        change - restored,
        max(_norm(left * inverse, part * units) for part in np.split(right, n_maps, axis=1)),
    )  # fmt: skip


def _norm(left: Float, right: Float) -> float:
    """Return the larger of 1 and the spectral norm of I - left^T right, for factors (r, d)."""
    basis = np.linalg.qr(np.concatenate([left, right]).T).Q
    inner = np.eye(basis.shape[1]) - (left @ basis).T @ (right @ basis)
    return max(1.0, float(np.linalg.norm(inner, 2))) if inner.size else 1.0
