"""Linear map B of erased rows t with the least change E|B t - t|^2 such that Cov(B t, y) = Sy.

Sy is the covariance to restore, Cov(x, y) of the rows x before erasure. Let T = Cov(t) = L L^T,
Ty = Cov(t, y), X = Sy - Ty, and let D be the standard deviations of the features. The strength b
scales X. With the singular value decompositions L^+ Ty = U s V^T and D^-1 X = Q x W^T::

    B = I + b X H^+ K^T = I - left right^T,    K = T^+ Ty,    H = Ty^T K = V s^2 V^T
    C = Ty V / s,    R = T^+ C (= (L^+)^T U),    R := R K'^-T,    K' = R^T C (= I up to rounding)
    left = X W / x = D Q,    right = -b R (V / s)^T W x

Functions and results hold the transposed matrices. The correction by K' makes B Ty = Ty + b X hold
up to rounding for any positive definite matrix in place of T. As `left` is orthonormal in units of
D, |D right| = |B - I|. For a combination v of label columns, the rounding error of s = |L^+ Ty v|
is the rounding error of Ty times the norm of the corresponding column of R. If s is below this
rounding error, Ty v counts as zero, and a map exists only if Sy v is zero, too. The largest s alone
is no scale for ranks: it is rounding error if the eraser removed all of Ty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve import tolerances
from splince_fast._solve.oblique import dense

Float = NDArray[np.float64]


class Restoration(NamedTuple):
    """Map B = I - left^T right, with its cost, ranks and residuals."""

    whitened: Float  # (k, p): L^+ Ty, transposed
    cut: float  # rounding level of the singular values of `whitened`
    span: Float  # (k, d): Sy, transposed, in units of D
    left: Float  # (r, d)
    right: Float  # (r, d)
    # Combination v of label columns, (k,), with Sy v != 0 and Ty v = 0: then no map exists, and the
    # factors are empty. None otherwise.
    lost_combination: Float | None
    lost_size: float = 0.0  # |Sy v| of `lost_combination`, in units of D
    change: float = 0.0  # E|(B - I)(t - E t)|^2 = tr(left left^T right T right^T)
    amplification: float = 1.0  # spectral norm of B, in units of D
    # (k, d): Ty + b X - B Ty and Sy - B Ty, transposed, in units of D
    error: Float = np.empty((0, 0))
    lost: Float = np.empty((0, 0))
    bounds: Float = np.empty(0)  # (k,): bound of the rounding error |error| of each label column

    def figures(self, part: slice, *, lost: bool = False) -> tuple[float, float]:
        """Return the `residual` of the label columns `part`, and its bound."""
        size = largest(self.span[part])
        rows = (self.lost if lost else self.error)[part]
        bound = float(np.linalg.norm(self.bounds[part]))
        return (largest(rows) / size, bound / size) if size else (0.0, 0.0)


def largest(rows: Float) -> float:
    """Return the largest norm of a column of `rows`, (k, d): one column per feature."""
    return float(np.linalg.norm(rows, axis=0).max(initial=0.0))


def inverse_units(units: Float) -> Float:
    """Return 1 / `units`, with 0 for a unit of 0."""
    return np.divide(1.0, units, out=np.zeros(len(units)), where=units > 0)


def shrunk_solves(
    scaled: Float, rows: Float, units: Float, intensity: float
) -> tuple[Float, Float]:
    """Return Ty, `rows` (k, d), whitened and solved by T, shrunk towards D^2 by `intensity`."""
    # `scaled` is D^-1 T D^-1, not shrunk. Shrinkage towards one variance for all features would
    # hide the label columns that covary with small features only.
    d, inverse = len(units), inverse_units(units)
    fitted = dense(
        np.asfortranarray(scaled), 1.0, np.zeros(d), max_rank=d,
        tolerance=tolerances.eigenvalue(d, tolerances.EPS), intensity=intensity,
    )  # fmt: skip
    columns = np.ascontiguousarray(rows * inverse)
    return fitted.whiten(columns), fitted.solve(columns) * inverse


def restore(
    whitened: Float, solved: Float, span_t: Float, span_x: Float, units: Float, strength: float
) -> Restoration:
    """Return the map B of the least change, from L^+ Ty, T^+ Ty, Ty and Sy, transposed, D, and b.

    Label columns are in units of their deviations; D is 0 for constant features. Rounding errors
    of Ty and Sy are relative to D.
    """
    k, d = span_x.shape
    inverse, noise = inverse_units(units), tolerances.noise(d, 1.0)
    relative = tolerances.relative(d, "auto")
    span, change = span_x * inverse, span_x - span_t
    sizes = np.linalg.norm(span, axis=1)
    # Pad with zero columns to at least k columns, so that the SVD returns k singular values.
    padded = np.pad(whitened, ((0, 0), (0, max(0, k - whitened.shape[1]))))
    combinations, values, _ = np.linalg.svd(padded, full_matrices=False)
    nonzero = values > relative * values[0]
    weights = combinations[:, nonzero].T / values[nonzero, None]  # (V / s)^T
    right, cuts = weights @ solved, np.full(k, np.inf)
    cuts[nonzero] = np.maximum(noise * np.linalg.norm(right * units, axis=1), relative * values[0])
    present = values > cuts
    cut = float(cuts[present].max(initial=noise))
    # A combination v counts as absent from the erased rows if Ty v is rounding error. `mixed`
    # bounds the part of |Sy v| that rounding adds to an absent combination from present ones.
    parts = np.linalg.norm(combinations.T @ span, axis=1)
    mixed = float(np.sum(parts[present] * cuts[present] / values[present]))
    absent = np.where(present, 0.0, parts)
    if absent.max() > noise + mixed + relative * float(np.linalg.norm(sizes)):
        worst, empty = int(np.argmax(absent)), np.empty((0, d))
        return Restoration(
            whitened, cut, span, empty, empty, combinations[:, worst], float(absent[worst])
        )
    weights, right = weights[present[nonzero]], right[present[nonzero]]
    dual, inner = weights @ span_t, weights @ whitened  # U^T
    for _ in range(2):  # the second step removes the rounding errors of the first
        correction = right @ dual.T
        right, inner = np.linalg.solve(correction, right), np.linalg.solve(correction, inner)
    basis, lengths, _ = np.linalg.svd(change * inverse, full_matrices=False)
    changed = strength * lengths > 2.0 * noise * max(1.0, float(np.linalg.norm(sizes)))
    basis, lengths = basis[:, changed], lengths[changed, None]
    left = (basis.T @ change) / lengths
    weights = -strength * lengths * (basis.T @ weights.T)
    right, inner = weights @ right, weights @ inner
    size = float(np.linalg.norm(right * units, 2)) if len(right) else 0.0
    condition = float(values[present][0] / values[present][-1]) if present.any() else 1.0
    restored = -(span_t @ right.T) @ left  # b X
    both_sizes = sizes + np.linalg.norm(span_t * inverse, axis=1)
    return Restoration(
        whitened, cut, span, left, right, None,
        change=float(np.vdot(left @ left.T, inner @ inner.T)),
        amplification=_norm(left * inverse, right * units),
        error=(strength * change - restored) * inverse, lost=(change - restored) * inverse,
        bounds=tolerances.residual(d, condition, size) * both_sizes + 4.0 * noise,
    )  # fmt: skip


def _norm(left: Float, right: Float) -> float:
    """Return the larger of 1 and the spectral norm of I - left^T right, for factors (r, d)."""
    basis = np.linalg.qr(np.concatenate([left, right]).T).Q
    inner = np.eye(basis.shape[1]) - (left @ basis).T @ (right @ basis)
    return max(1.0, float(np.linalg.norm(inner, 2))) if inner.size else 1.0
