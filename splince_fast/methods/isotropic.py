"""Quadratic erasure by one affine map of the rows: no quadratic predictor, no labels at use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.warn import warn
from splince_fast._solve import tolerances
from splince_fast._solve.class_covariances import ClassStatistics
from splince_fast._solve.class_maps import Support, support_of
from splince_fast._solve.held_out import Noise
from splince_fast._solve.options import OPTIONS
from splince_fast._solve.restore import Restoration, restore
from splince_fast._solve.selection import Selection
from splince_fast.exceptions import (
    InfeasibleError,
    InputError,
    NothingErasedWarning,
    SplinceWarning,
    UnseenRowsWarning,
)
from splince_fast.labels.names import listed
from splince_fast.methods.classes import (
    Classes,
    Coding,
    class_statistics,
    concept_of,
    read_classes,
)
from splince_fast.methods.label_columns import combination
from splince_fast.moments import Folds, Moments
from splince_fast.moments.snapshot import statistics
from splince_fast.projection import Projection
from splince_fast.report import IsotropicFit, Report, VariableReport, correlations_of

Float = NDArray[np.float64]

_NOTHING = (
    "nothing was erased: the class means and covariances of {!r} differ by rounding only, so the "
    "eraser is the identity. If a difference was expected, check that labels and rows belong "
    "together"
)


def isotropic(
    moments: Moments | Folds,
    *,
    erase: str,
    keep: Selection | None = None,
    neutral: float = 0.0,
) -> Projection:
    """Give two classes one mean and one covariance by one affine map, without labels at use.

    With S_w = sum p_c S_c = L L^T the pooled covariance, D = L^+ (S_1 - S_0) (L^+)^T =
    sum w_i u_i u_i^T on the complement of L^+ (m_1 - m_0). A projection that keeps the columns of
    C, orthonormal in these coordinates,

        r = mu + L C C^T L^+ (x - mu),    C^T D C = 0,

    leaves no difference. C has the u_i with w_i = 0, and for pairs w_i > 0 > w_j

        (sqrt(-w_j) u_i + s sqrt(w_i) u_j) / sqrt(w_i - w_j),    s = sign(u_i^T L^T L u_j),

    where s is the one of the two signs that changes the rows less. C has n_0 + min(n_+, n_-)
    columns, the most there can be (Sylvester's law of inertia): about half of the dimensions
    survive, where a projection off the range of D leaves n_0. If the means differ off the range of
    S_w, too (a feature that holds the label, fewer rows than features), that direction is removed
    as well. With `keep`, a common linear map restores Cov(x, y) at the least further change
    (:func:`splince_fast.repair`).

    Parameters
    ----------
    moments : Moments or Folds
        Made with ``by=`` the concept.
    erase : str
        The concept, of two classes.
    keep : str, tuple or list of them, optional
        Variables whose covariance with x stays exactly as it is.
    neutral : float in [0, 1]
        Directions with abs(w_i) of at most this times the largest are kept as they are. More
        dimensions survive, and the class covariances differ there.

    Returns
    -------
    Projection
        Of rows without labels. Off the support of x it is the identity.

    Raises
    ------
    InputError
        Moments without ``by=``, or of a sample or sketch; more than two classes; rows without a
        label of what is kept; a parameter out of range.
    LabelError
        A continuous concept.
    ConstantVariableError
        A concept or a kept variable with a single value.
    InfeasibleError
        x covaries with a combination of what is kept in no direction that survives.

    Warns
    -----
    NothingErasedWarning
        The classes differ by rounding only: the eraser is the identity.
    UnseenRowsWarning
        Few rows: most of the differences of the class covariances is noise, which the map fits.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=4000)
    >>> wide = np.where(z == 1, 2.0, 1.0)[:, None]
    >>> X = rng.normal(size=(4000, 6)) * wide ** [1, 1, 1, -1, -1, -1]
    >>> eraser = sf.isotropic(sf.Moments(by="z").update(X, {"z": z}), erase="z")
    >>> clean = eraser(X)
    >>> bool(np.allclose(np.cov(clean[z == 1].T, ddof=0), np.cov(clean[z == 0].T, ddof=0)))
    True
    >>> eraser.n_features - eraser.rank  # of 5 directions without the means
    2
    """
    if not OPTIONS["strength"].accepts(neutral):
        raise InputError(f"neutral is {neutral!r}; it must be a number in [0, 1]")
    name = concept_of(erase, "isotropic")
    classes = read_classes(moments, name, "isotropic").whole
    if len(classes) != 2:
        raise InputError(
            f"isotropic is for two classes, and {name!r} has {len(classes)}: common isotropic "
            "directions of several differences have no closed form. Join classes to two, or use "
            "sf.quadratic, which takes the labels of the rows"
        )
    coding = Coding.of(classes, keep, "isotropic")
    whole = class_statistics(classes, coding)
    roundoff = max(part._state().unit_roundoff for part in classes.values())
    support = support_of(whole.pooled, whole.mean, roundoff)
    first, second = whole.differences(support)
    # The part of m_1 - m_0 in the range of S_w, and L^+, which is zero off that range.
    row_eps = max(part._state().row_eps for part in classes.values())
    n_rows = whole.rows.astype(np.float64)
    outside, inside = _outside(support, whole.means, 4.0 * row_eps / float(n_rows.min()) ** 0.5)
    whitener = support.whitener
    if support.basis is not None:
        whitener = support.basis @ (support.basis.T @ whitener)
    # Rounding of the means in units of deviations, and of the products in the class covariances.
    varies = whole.variances > 0
    ratio = float(np.sum(whole.mean[varies] ** 2 / whole.variances[varies]))
    rounding = tolerances.row_rounding(
        row_eps * (support.rank + ratio) ** 0.5, support.rank**0.5, support.smallest,
        int(n_rows.sum()),
    )  # fmt: skip
    p = whole.fractions
    sides = whole.pooled @ whitener  # L, (d, r)
    kept, removed = _directions(
        whitener.T @ inside, second - first, sides, float(neutral),
        max(tolerances.noise(support.rank, support.smallest), rounding / float(np.prod(p)) ** 0.5),
        tolerances.eigenvalue(len(whitener), roundoff) * float(np.sum(1 / p)) / support.smallest,
    )  # fmt: skip
    left, right = (sides @ removed).T, (whitener @ removed).T
    if len(left):
        # An exact projection that removes the difference of means, independent of the rounding of
        # L.
        along = inside @ right.T
        if np.linalg.norm(along) > 0:
            q = np.linalg.qr(along[:, None], mode="complete").Q
            left, right = q.T @ left, q.T @ right
            left[0] = inside / (along @ q[:, 0])
        right = np.asarray(np.linalg.solve(right @ left.T, right), np.float64)
    inner = Projection._make(
        np.ascontiguousarray(left), np.ascontiguousarray(right), whole.mean, method="isotropic"
    )
    if len(outside):
        inner = inner @ Projection._make(outside, outside, whole.mean, method="isotropic")
    found = None
    if keep is not None:
        span = whole.kept.T
        white = (span @ whitener) @ kept
        span_t = span - (span @ inner.right) @ inner.left.T
        units = np.sqrt(whole.variances)
        solved = white @ (whitener @ kept).T
        found = restore(white, solved, span_t, span, units, 1.0, span - span_t)
        if found.lost is not None:
            names = listed([str(own.name) for own in coding.kept])
            raise InfeasibleError(
                f"isotropic cannot keep {names} while it erases {name!r}: {kept.shape[1]} of "
                f"{support.rank} dimensions survive, and in none does x covary with the "
                f"combination {combination(found.lost, coding.kept)}. Keep fewer variables, "
                "pass neutral= above 0, or use sf.quadratic with the labels of the rows",
                1.0,
            )
    eraser = inner
    if found is not None:
        eraser = Projection._make(found.left, found.right, whole.mean, method="isotropic") @ inner
    if eraser.rank:
        notes = _few_rows(name, classes, first, second, support.rank)
        category: type[SplinceWarning] = UnseenRowsWarning
    else:
        notes, category = (_NOTHING.format(name),), NothingErasedWarning
    for note in notes:
        warn(note, category)
    with statistics(moments._total() if isinstance(moments, Folds) else moments) as stats:
        noise = stats.class_noise([name], None).get(name)
    # |L^+ (m_1 - m_0)|^2; no bound where the means differ off the range of S_w.
    spread = float(np.sum((whitener.T @ inside) ** 2))
    distance = spread if len(outside) == support.tiny.shape[1] else np.inf
    report = _report(
        name, whole, support, coding, eraser, found, noise, notes, distance, kept.shape[1]
    )
    return Projection._make(
        eraser.left.T, eraser.right.T, whole.mean, method="isotropic", report=report,
        feature_names=coding.total.feature_names,
    )  # fmt: skip


def _directions(
    apart: Float, difference: Float, sides: Float, neutral: float, apart_noise: float, noise: float
) -> tuple[Float, Float]:
    """Orthonormal columns C that are kept, (r, q), and the complement, (r, r - q).

    `apart` and `difference` are m_1 - m_0 and S_1 - S_0, white, with their rounding levels, and
    `sides` is L, (d, r); pairs are made in the order of size.
    """
    r = len(difference)
    size = float(np.linalg.norm(apart))
    moved = size > apart_noise  # the means differ
    complement = np.linalg.qr(apart[:, None], mode="complete").Q[:, 1:] if moved else np.eye(r)
    inner = complement.T @ difference @ complement
    values, vectors = np.linalg.eigh(inner)
    vectors = complement @ vectors
    relative = max(neutral, 8 * r * tolerances.EPS)
    limit = max(relative * float(np.abs(values).max(initial=0.0)), noise)
    zero, plus = np.flatnonzero(np.abs(values) <= limit), np.flatnonzero(values > limit)[::-1]
    minus = np.flatnonzero(values < -limit)
    count = min(len(plus), len(minus))
    i, j = plus[:count], minus[:count]
    up, down = np.sqrt(values[i]), np.sqrt(-values[j])
    both = np.hypot(up, down)
    # The sign of an eigenvector is arbitrary, and the eraser must not depend on it.
    along = np.einsum("ij,ij->j", sides @ vectors[:, i], sides @ vectors[:, j])
    first, second = vectors[:, i], vectors[:, j] * np.copysign(1.0, along)
    kept = np.hstack([vectors[:, zero], (first * down + second * up) / both])
    rest = np.concatenate([plus[count:], minus[count:]])
    removed = [vectors[:, rest], (first * up - second * down) / both]
    if moved:
        removed.append(apart[:, None] / size)
    return kept, np.hstack(removed)


def _outside(support: Support, means: Float, rounding: float) -> tuple[Float, Float]:
    """Orthonormal rows off the range of S_w, (t, d), and m_1 - m_0 without them.

    Directions too small to read, and that of the means if it is above `rounding` times their size,
    the rounding of the rows.
    """
    rows, inside = [support.tiny.T], means[1] - means[0]
    if support.basis is not None:
        off = inside - support.tiny @ (support.tiny.T @ inside)
        off -= support.basis @ (support.basis.T @ off)
        off -= support.basis @ (support.basis.T @ off)  # a second pass, to rounding
        size = float(np.linalg.norm(off))
        # The error of the range is the rounding of S_w over its least eigenvalue there.
        noise = max(tolerances.noise(len(off), support.smallest), rounding)
        if size > noise * float(np.linalg.norm(means)):
            rows.append(off[None] / size)
    outside = np.ascontiguousarray(np.vstack(rows))
    return outside, inside - (inside @ outside.T) @ outside


def _few_rows(
    name: str, classes: Classes, first: Float, second: Float, rank: int
) -> tuple[str, ...]:
    """The warning that most of |S_1 - S_0|^2, in white units, is sampling noise."""
    noise = sum(rank * (rank + 1) / part.n_rows for part in classes.values())
    size = float(np.sum((second - first) ** 2))
    if 2.0 * noise <= size:
        return ()
    rows = min(part.n_rows for part in classes.values())
    return (
        f"more than half of the difference between the class covariances of {name!r} is the noise "
        f"of {rows:,} rows in {rank} dimensions: about as much is left in new rows. Use fewer "
        "principal components, or more rows",
    )


def _report(
    name: str, whole: ClassStatistics, support: Support, coding: Coding, eraser: Projection,
    found: Restoration | None, noise: Noise | None, notes: tuple[str, ...], distance: float,
    n_kept: int,
) -> Report:  # fmt: skip
    """Effect of the map on the fitted rows."""
    left, right = eraser.left, eraser.right  # (d, r)
    d, scale = len(left), float(whole.variances.sum())

    def erased(rows: Float) -> Float:
        return np.asarray(rows - (rows @ right) @ left.T)

    def rest(matrix: Float) -> float:
        """Frobenius norm of P S P^T, relative to that of S."""
        size = float(np.linalg.norm(matrix))
        return float(np.linalg.norm(erased(erased(matrix).T))) / size if size else 0.0

    apart = whole.means[1] - whole.means[0]
    between = float(np.prod(whole.fractions))
    cosine = (between / (1.0 / distance + between)) ** 0.5 if distance else 0.0
    # Rows of L^+ grow as 1 / sqrt(smallest eigenvalue).
    amplification = 1.0 if found is None else found.amplification
    bound = tolerances.residual(d, support.smallest**-0.5, amplification)
    size = float(np.linalg.norm(apart))
    rank = int(cosine > tolerances.noise(d, support.smallest))
    left_over = float(np.linalg.norm(erased(apart))) / size if rank else 0.0
    variables = [
        VariableReport(
            name, "erased", rank, (cosine,) * rank, left_over, bound, "classes (2)", noise=noise
        )
    ]
    if found is not None:
        for text, part, kind, correlations in correlations_of(coding.span, found.whitened):
            own = int(np.count_nonzero(np.array(correlations) > found.cut))
            variables.append(
                VariableReport(text, "kept", own, correlations, *found.errors(part), kind)
            )
    images = right.T @ whole.pooled @ right + between * np.outer(apart @ right, apart @ right)
    distortion = float(np.vdot(left.T @ left, images))
    # LEACE: |m_1 - m_0|^2 / (m_1 - m_0)^T Cov(x)^+ (m_1 - m_0).
    leace = size**2 * (1.0 / distance + between) if distance else 0.0
    return Report(
        method="isotropic", n_rows=int(whole.rows.sum()), weight=float(whole.weights.sum()),
        n_features=d, rank_covariance=support.rank, rank=eraser.rank, variables=tuple(variables),
        dropped=0, cosines=(), amplification=amplification, rho=None,
        distortion=distortion / scale if scale else 0.0,
        distortion_leace=leace / scale if scale else 0.0, solver="eigh",
        tolerance=tolerances.noise(d, support.smallest), shrinkage=0.0, warnings=notes,
        isotropic=IsotropicFit(
            rest(whole.covariances[1] - whole.covariances[0]), n_kept
        ),
    )  # fmt: skip
