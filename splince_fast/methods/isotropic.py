"""Erasure that hides two classes from quadratic predictors, by one affine map without labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.warn import warn
from splince_fast._solve import tolerances
from splince_fast._solve.class_covariances import ClassStatistics
from splince_fast._solve.class_maps import Support, support_of
from splince_fast._solve.held_out import Noise, equal_noise
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
    "eraser is the identity. If a difference was expected, check that labels and rows are in "
    "the same order"
)


def isotropic(
    moments: Moments | Folds,
    *,
    erase: str,
    keep: Selection | None = None,
    neutral: float = 0.0,
) -> Projection:
    """Give two classes equal means and covariances by one affine map, applied without labels.

    Class c has the fraction p_c of the weight, the mean m_c and the covariance S_c; mu = E x, and
    S_w = sum p_c S_c = L L^T is the pooled covariance. On the orthogonal complement of
    L^+ (m_1 - m_0), let D = L^+ (S_1 - S_0) (L^+)^T = sum w_i u_i u_i^T be the eigendecomposition
    of the whitened difference. The projection

        r = mu + L C C^T L^+ (x - mu),    C^T D C = 0,

    with orthonormal columns C in that complement, makes the means and the covariances of the
    classes equal. The columns of C are the u_i with w_i = 0 and, for each pair w_i > 0 > w_j,

        (sqrt(-w_j) u_i + s sqrt(w_i) u_j) / sqrt(w_i - w_j),    s = sign(u_i^T L^T L u_j).

    Of the two signs, s changes the rows less. With n_0, n_+ and n_- the numbers of zero, positive
    and negative w_i, C has n_0 + min(n_+, n_-) columns, the maximum (Sylvester's law of inertia).
    About half of the dimensions are kept; the projection onto the kernel of D would keep n_0. If
    the means differ off the range of S_w (a feature that holds the label, or fewer rows than
    features), the direction of this difference is removed as well. With `keep`, a common linear map
    restores Cov(x, y) with the least further change (:func:`splince_fast.repair`).

    Parameters
    ----------
    moments : Moments or Folds
        Moments made with ``by=`` the name of the concept.
    erase : str
        Name of the concept, a variable of two classes.
    keep : str, tuple or list of them, optional
        Variables whose covariance with x stays exactly as it is.
    neutral : float in [0, 1]
        Directions u_i with abs(w_i) up to this fraction of the largest abs(w_i) count as w_i = 0
        and are kept. A larger value keeps more dimensions, but the class covariances differ in
        these dimensions.

    Returns
    -------
    Projection
        Map that is applied without labels; the identity in directions in which x does not vary.

    Raises
    ------
    InputError
        The moments were made without ``by=``, or with a sample or sketch; the concept has more than
        two classes; rows have no label of a kept variable; a parameter is out of range.
    LabelError
        The concept is continuous.
    ConstantVariableError
        The concept or a kept variable has a single value.
    InfeasibleError
        A combination of kept labels that covaries with x does not covary with the kept directions.

    Warns
    -----
    NothingErasedWarning
        The classes differ by rounding error only: the eraser is the identity.
    UnseenRowsWarning
        Most of the difference between the class covariances is sampling noise, because there are
        few rows.

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
    >>> eraser.n_features - eraser.rank  # number of kept dimensions, of 6
    2
    """
    if not OPTIONS["strength"].accepts(neutral):
        raise InputError(f"neutral is {neutral!r}; it must be a number in [0, 1]")
    name = concept_of(erase, "isotropic")
    classes = read_classes(moments, name, "isotropic").all_rows
    if len(classes) != 2:
        raise InputError(
            f"isotropic is for two classes, and {name!r} has {len(classes)}: common isotropic "
            "directions of several differences have no closed form. Join classes to two, or use "
            "sf.quadratic, which takes the labels of the rows"
        )
    coding = Coding.of(classes, keep, "isotropic")
    stats = class_statistics(classes, coding)
    roundoff = max(part._state().unit_roundoff for part in classes.values())
    support = support_of(stats.pooled, stats.mean, roundoff)
    first, second = stats.differences(support)
    # `inside` is the component of m_1 - m_0 in the range of S_w. The whitener is projected onto the
    # range, which makes it (L^+)^T.
    row_eps = max(part._state().row_eps for part in classes.values())
    n_rows = stats.rows.astype(np.float64)
    mean_rounding = 4.0 * row_eps / float(n_rows.min()) ** 0.5
    off_range, inside = _off_range(support, stats.means, mean_rounding)
    whitener = support.whitener
    if support.basis is not None:
        whitener = support.basis @ (support.basis.T @ whitener)
    # Rounding error of the whitened covariance of x with the class indicator. Divided by
    # sqrt(p_0 p_1), it is the rounding error of the whitened m_1 - m_0.
    varies = stats.variances > 0
    ratio = float(np.sum(stats.mean[varies] ** 2 / stats.variances[varies]))
    rounding = tolerances.row_rounding(
        row_eps * (support.rank + ratio) ** 0.5, support.rank**0.5, support.smallest,
        int(n_rows.sum()),
    )  # fmt: skip
    p = stats.fractions
    root = stats.pooled @ whitener  # L, (d, r)
    kept, removed = _directions(
        whitener.T @ inside, second - first, root, float(neutral),
        max(tolerances.noise(support.rank, support.smallest), rounding / float(np.prod(p)) ** 0.5),
        tolerances.eigenvalue(len(whitener), roundoff) * float(np.sum(1 / p)) / support.smallest,
    )  # fmt: skip
    left, right = (root @ removed).T, (whitener @ removed).T
    if len(left):
        # Make the first row of `left` parallel to m_1 - m_0, and right @ left.T = I. The map is
        # then a projection that removes m_1 - m_0, regardless of the rounding error of L.
        along = inside @ right.T
        if np.linalg.norm(along) > 0:
            q = np.linalg.qr(along[:, None], mode="complete").Q
            left, right = q.T @ left, q.T @ right
            left[0] = inside / (along @ q[:, 0])
        right = np.asarray(np.linalg.solve(right @ left.T, right), np.float64)
    inner = Projection._make(
        np.ascontiguousarray(left), np.ascontiguousarray(right), stats.mean, method="isotropic"
    )
    if len(off_range):
        inner = inner @ Projection._make(off_range, off_range, stats.mean, method="isotropic")
    restoration = None
    if keep is not None:
        span = stats.kept.T
        whitened = (span @ whitener) @ kept
        span_t = span - (span @ inner.right) @ inner.left.T
        units = np.sqrt(stats.variances)
        solved = whitened @ (whitener @ kept).T
        restoration = restore(whitened, solved, span_t, span, units, 1.0, span - span_t)
        if restoration.lost_combination is not None:
            names = listed([str(columns.name) for columns in coding.kept])
            raise InfeasibleError(
                f"isotropic cannot keep {names} while it erases {name!r}: {kept.shape[1]} of "
                f"{support.rank} dimensions remain, and in none does x covary with the combination "
                f"{combination(restoration.lost_combination, coding.kept)}. Keep fewer variables, "
                "pass neutral= above 0, or use sf.quadratic with the labels of the rows",
                1.0,
            )
    eraser = inner
    if restoration is not None:
        eraser = (
            Projection._make(restoration.left, restoration.right, stats.mean, method="isotropic")
            @ inner
        )
    if eraser.rank:
        notes = _few_rows(name, classes, first, second, support.rank)
        category: type[SplinceWarning] = UnseenRowsWarning
    else:
        notes, category = (_NOTHING.format(name),), NothingErasedWarning
    for note in notes:
        warn(note, category)
    with statistics(moments._total() if isinstance(moments, Folds) else moments) as total:
        noise = total.class_noise([name], None).get(name) or equal_noise(
            total.variable(name).weight, 1, int(np.count_nonzero(total.variances))
        )
    # `distance` is |L^+ (m_1 - m_0)|^2, or infinite if the means differ off the range of S_w.
    distance = float(np.sum((whitener.T @ inside) ** 2))
    if len(off_range) > support.tiny.shape[1]:
        distance = np.inf
    report = _report(
        name, stats, support, coding, eraser, restoration, noise, notes, distance, kept.shape[1]
    )
    return Projection._make(
        eraser.left.T, eraser.right.T, stats.mean, method="isotropic", report=report,
        feature_names=coding.total.feature_names,
    )  # fmt: skip


def _directions(
    shift: Float, difference: Float, root: Float, neutral: float, shift_noise: float, noise: float
) -> tuple[Float, Float]:
    """Return orthonormal bases C of the kept, (r, q), and of the removed directions, (r, r - q).

    The eigenvectors with w_i > 0 and those with w_j < 0 are paired in descending order of the
    absolute eigenvalues.

    Parameters
    ----------
    shift : (r,) float64
        Whitened m_1 - m_0.
    difference : (r, r) float64
        Whitened S_1 - S_0.
    root : (d, r) float64
        L.
    neutral : float
        Eigenvectors with an absolute eigenvalue up to this fraction of the largest are kept.
    shift_noise, noise : float
        Rounding levels of |shift| and of the eigenvalues of `difference`.
    """
    r = len(difference)
    size = float(np.linalg.norm(shift))
    means_differ = size > shift_noise
    complement = (
        np.linalg.qr(shift[:, None], mode="complete").Q[:, 1:] if means_differ else np.eye(r)
    )
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
    norms = np.hypot(up, down)
    # The sign of `inner_products` makes the eraser independent of the signs of the eigenvectors,
    # which are arbitrary.
    inner_products = np.einsum("ij,ij->j", root @ vectors[:, i], root @ vectors[:, j])
    first, second = vectors[:, i], vectors[:, j] * np.copysign(1.0, inner_products)
    kept = np.hstack([vectors[:, zero], (first * down + second * up) / norms])
    unpaired = np.concatenate([plus[count:], minus[count:]])
    removed = [vectors[:, unpaired], (first * up - second * down) / norms]
    if means_differ:
        removed.append(shift[:, None] / size)
    return kept, np.hstack(removed)


def _off_range(support: Support, means: Float, rounding: float) -> tuple[Float, Float]:
    """Return orthonormal rows off the range of S_w, (t, d), and m_1 - m_0 without its part in them.

    The rows are the directions of `support.tiny`, whose variance is too small to whiten, and the
    direction of the component of m_1 - m_0 off the range, if the component exceeds rounding error.
    `rounding` is the rounding error of a mean relative to its size.
    """
    rows, inside = [support.tiny.T], means[1] - means[0]
    if support.basis is not None:
        off = inside - support.tiny @ (support.tiny.T @ inside)
        off -= support.basis @ (support.basis.T @ off)
        off -= support.basis @ (support.basis.T @ off)  # again, to remove rounding error
        size = float(np.linalg.norm(off))
        # Relative rounding error of `off`: that of the range of S_w, or that of the means.
        noise = max(tolerances.noise(len(off), support.smallest), rounding)
        if size > noise * float(np.linalg.norm(means)):
            rows.append(off[None] / size)
    off_range = np.ascontiguousarray(np.vstack(rows))
    return off_range, inside - (inside @ off_range.T) @ off_range


def _few_rows(
    name: str, classes: Classes, first: Float, second: Float, rank: int
) -> tuple[str, ...]:
    """Return a warning if most of the whitened |S_1 - S_0|^2 is sampling noise, else ()."""
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
    name: str, stats: ClassStatistics, support: Support, coding: Coding, eraser: Projection,
    restoration: Restoration | None, noise: Noise | None, notes: tuple[str, ...], distance: float,
    n_kept: int,
) -> Report:  # fmt: skip
    """Return the report of the effect of the map on the fitted rows.

    `noise` is the sampling noise of Cov(x, z) for the concept z, `distance` is
    |L^+ (m_1 - m_0)|^2, and `n_kept` is the number of kept directions.
    """
    left, right = eraser.left, eraser.right  # (d, r)
    d, scale = len(left), float(stats.variances.sum())

    def erased(rows: Float) -> Float:
        return np.asarray(rows - (rows @ right) @ left.T)

    def residual(matrix: Float) -> float:
        """Return |P S P^T| / |S| in the Frobenius norm, for a symmetric `matrix` S; 0 for S = 0."""
        size = float(np.linalg.norm(matrix))
        return float(np.linalg.norm(erased(erased(matrix).T))) / size if size else 0.0

    shift = stats.means[1] - stats.means[0]
    between = float(np.prod(stats.fractions))
    cosine = (between / (1.0 / distance + between)) ** 0.5 if distance else 0.0
    # For features of unit standard deviation, L^+ has the norm 1 / sqrt(support.smallest), by which
    # whitening amplifies rounding errors.
    amplification = 1.0 if restoration is None else restoration.amplification
    bound = tolerances.residual(d, support.smallest**-0.5, amplification)
    size = float(np.linalg.norm(shift))
    rank = int(cosine > tolerances.noise(d, support.smallest))
    mean_residual = float(np.linalg.norm(erased(shift))) / size if rank else 0.0
    variables = [
        VariableReport(
            name, "erased", rank, (cosine,) * rank, mean_residual, bound, "classes (2)", noise=noise
        )
    ]
    if restoration is not None:
        for text, part, kind, correlations in correlations_of(coding.span, restoration.whitened):
            kept_rank = int(np.count_nonzero(np.array(correlations) > restoration.cut))
            variables.append(
                VariableReport(
                    text, "kept", kept_rank, correlations, *restoration.errors(part), kind
                )
            )
    images = right.T @ stats.pooled @ right + between * np.outer(shift @ right, shift @ right)
    distortion = float(np.vdot(left.T @ left, images))
    # The distortion of LEACE is |m_1 - m_0|^2 / (m_1 - m_0)^T Cov(x)^+ (m_1 - m_0).
    leace = size**2 * (1.0 / distance + between) if distance else 0.0
    return Report(
        method="isotropic", n_rows=int(stats.rows.sum()), weight=float(stats.weights.sum()),
        n_features=d, rank_covariance=support.rank, rank=eraser.rank, variables=tuple(variables),
        dropped=0, cosines=(), amplification=amplification, rho=None,
        distortion=distortion / scale if scale else 0.0,
        distortion_leace=leace / scale if scale else 0.0, solver="eigh",
        tolerance=tolerances.noise(d, support.smallest), shrinkage=0.0, warnings=notes,
        isotropic=IsotropicFit(
            residual(stats.covariances[1] - stats.covariances[0]), n_kept
        ),
    )  # fmt: skip
