"""Quadratic erasure: a map per class gives all classes equal means and equal covariances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import warn
from splince_fast._solve import tolerances
from splince_fast._solve.class_maps import (
    ClassMaps,
    SingularClassError,
    Support,
    qleace,
    support_of,
)
from splince_fast._solve.options import OPTIONS, Option
from splince_fast._solve.restore import Restoration, inverse_units, largest, restore
from splince_fast._solve.selection import Selection
from splince_fast.conditional import NEEDS_LABELS, ConditionalEraser, Shift
from splince_fast.exceptions import NotEnoughDataError, PrecisionWarning, UnseenRowsWarning
from splince_fast.labels.names import listed
from splince_fast.methods.classes import (
    ClassStatistics,
    class_statistics,
    concept_of,
    read_classes,
)
from splince_fast.methods.repair import precision_notes, refuse_lost
from splince_fast.moments import Folds, Moments
from splince_fast.projection import Projection
from splince_fast.report import Report, VariableReport, correlations_of

Float = NDArray[np.float64]

# In the change of the rows, a feature with a smaller deviation than this fraction of the largest
# counts as if it had this one. The polar factors then keep 10 digits, and the change is within
# d times the square of the fraction, relative to the variance, of the least.
_SMALLEST_WEIGHT = 1e-3
# The report gives the distortion of LEACE only if the variance between class means off the support
# of S_w is at most this fraction of the total variance.
_NEGLIGIBLE = 1e-12

_SHRINKAGE = Option(
    "shrinkage", None, lambda s: s is None or OPTIONS["strength"].accepts(s),
    "None or a number in [0, 1]", "weight of the pooled covariance in each class covariance",
)  # fmt: skip


def quadratic(
    moments: Moments | Folds | Mapping[Any, Moments],
    *,
    erase: str,
    keep: Selection | None = None,
    shrinkage: float | None = None,
) -> ConditionalEraser:
    """Give all classes of a concept equal means and covariances, changing x as little as possible.

    The eraser maps the rows of class c, with mean m_c and covariance S_c, to
    r = mu + A_c (x - m_c), where mu = E x. The A_c minimise E|r - x|^2 subject to a common
    covariance A_c S_c A_c^T of all classes (QLEACE). With `keep`, one linear map, common to all
    classes, then restores Cov(r, y) = Cov(x, y) with the least further change
    (:func:`splince_fast.repair`); linear heads that are trained on the erased rows without penalty
    predict the same with and without `keep`. Without shrinkage, no quadratic predictor tells the
    classes of the fitted rows apart. The optimum depends on the units of the features, unlike that
    of :func:`splince_fast.leace`; features with less than 1e-3 of the largest deviation count as if
    they had this deviation. Every row to erase needs its label of the concept.

    A class covariance has about d^2 / 2 free entries. If it is estimated from few rows, the eraser
    adds its sampling noise to new rows: for two classes of n rows each, a squared difference of
    about d (d + 1) / (2 n) between the whitened class covariances, regardless of the true
    difference. Shrinkage replaces S_c by a S_w + (1 - a) S_c, with the pooled covariance S_w and
    the intensity a. With a = 1, only the class means become equal, with the least change. Equal
    class means and Cov(r, y) = Cov(x, y) hold exactly for any a.

    Parameters
    ----------
    moments : Moments, Folds, or mapping of class to Moments
        Moments made with ``by=`` the name of the concept, or the moments of each class.
    erase : str
        Name of the concept, a variable of classes. To erase several variables, make one column of
        their joint cells.
    keep : str, tuple or list of them, optional
        Variables whose covariance with x stays exactly as it is.
    shrinkage : float in [0, 1], optional
        Intensity a; None is 0.

    Returns
    -------
    ConditionalEraser
        Eraser with a matrix per class in `maps`. In its :attr:`~ConditionalEraser.report`, the
        `residual` of the erased variable is the largest difference between class covariances after
        erasure, with each feature in units of its standard deviation within classes after erasure.

    Raises
    ------
    InputError
        The moments were made without ``by=``, or with a sample or "diag"; rows have no label of a
        kept variable; or a parameter is out of range.
    LabelError
        The concept is continuous.
    ConstantVariableError
        The concept or a kept variable has a single value.
    InfeasibleError
        A combination of kept labels covaries with x over all rows, but not within the classes; or
        more combinations are kept than x has dimensions within the classes.
    NotEnoughDataError
        With a = 0, a class has no more rows than the rank of S_w plus one, or a singular
        covariance.

    Warns
    -----
    PrecisionWarning
        The maps amplify deviations from the mean more than 1e4 times, or a residual is above its
        bound.
    UnseenRowsWarning
        There are few rows, and the noise that the eraser adds to new rows exceeds the difference
        that it removes.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=2000)
    >>> X = rng.normal(size=(2000, 3))
    >>> X[z == 1, 0] *= 2
    >>> y = (X[:, 0] + rng.normal(size=2000) > 0).astype(int)
    >>> moments = sf.Moments(by="z").update(X, {"z": z, "y": y})
    >>> eraser = sf.quadratic(moments, erase="z", keep="y")
    >>> clean = eraser(X, {"z": z})
    >>> bool(np.allclose(np.cov(clean[z == 1].T, ddof=0), np.cov(clean[z == 0].T, ddof=0)))
    True
    """
    _SHRINKAGE.check(shrinkage)
    intensity = float(shrinkage or 0.0)
    name = concept_of(erase, "quadratic")
    classes = read_classes(moments, name, "quadratic")
    stats = class_statistics(classes, keep, "quadratic")
    pooled = stats.pooled
    support = support_of(pooled, stats.roundoff)
    shrunk = intensity * pooled + (1.0 - intensity) * stats.covariances
    smallest = int(np.argmin(stats.rows))
    if not intensity and stats.rows[smallest] <= support.rank + 1:
        raise NotEnoughDataError(
            f"the class {stats.names[smallest]!r} of {name!r} has {int(stats.rows[smallest]):,} "
            f"rows, and its covariance is singular unless there are more than {support.rank + 1:,} "
            "(rank of x, plus 1). Pass shrinkage= above 0, or use fewer principal components"
        )
    weights = stats.units / stats.units.max()
    try:
        solution = qleace(stats.fractions, shrunk, np.maximum(weights, _SMALLEST_WEIGHT), support)
    except SingularClassError as error:
        raise NotEnoughDataError(
            f"the covariance of the class {stats.names[error.index]!r} of {name!r} is singular "
            "where x varies in other classes: features that are constant in that class, or rows "
            "that repeat. Pass shrinkage= above 0"
        ) from error
    scaled_maps, restoration = solution.maps, None
    if keep is not None:
        restoration = _restoration(stats, solution)
        if restoration.lost_combination is not None:
            remedy = "use sf.oracle, which does not make the covariances equal"
            refuse_lost(restoration, "quadratic", stats.columns, remedy)
        left = restoration.left / stats.units
        scaled_maps = scaled_maps - left.T @ (restoration.right * stats.units @ scaled_maps)
    label = "QLEACE" if keep is None else "repair @ QLEACE"
    notes = [] if intensity else _noise_notes(stats, support)
    report = _report(
        label, name, stats, support, shrunk, scaled_maps, restoration, intensity, notes
    )
    for note in report.warnings[1:]:
        warn(note, UnseenRowsWarning if note in notes else PrecisionWarning)
    units, empty = stats.units, np.empty((0, len(stats.units)))
    after = Projection._make(
        empty, empty, stats.mean, method=label, feature_names=stats.total.feature_names
    )
    shift = Shift(name, tuple(stats.names), np.zeros(len(stats.names)), stats.means - stats.mean)
    return ConditionalEraser(
        [shift], after, None, maps=units[:, None] * scaled_maps / units, method=label,
        report=report,
    )  # fmt: skip


def _restoration(stats: ClassStatistics, solution: ClassMaps) -> Restoration:
    """Return the map that restores Cov(x, y) after QLEACE.

    All classes share the coordinates in which G_c whitens class c. There,
    Cov(t, y) = sum p_c G_c U^T S_cy for the erased rows t = U R (...).
    """
    basis, root = solution.support.basis, solution.root
    terms = zip(stats.fractions, solution.whiteners, stats.crosses, strict=True)
    whitened = np.asarray(sum(p * whitener @ (basis.T @ c) for p, whitener, c in terms)).T
    span_t = (whitened @ root.T) @ basis.T * stats.units
    solved = np.linalg.solve(root.T, whitened.T).T @ basis.T / stats.units
    return restore(whitened, solved, span_t, stats.span.rows, stats.deviations, 1.0)


def _noise_notes(stats: ClassStatistics, support: Support) -> list[str]:
    """Return the warning about sampling noise in the class covariances, or an empty list.

    The squared difference of the whitened covariances D_c of k classes is sum |D_c - D|^2 / k, with
    D their mean. Sampling noise adds about (k - 1) / k^2 sum r (r + 1) / n_c, for the rank r of x
    and n_c rows of class c.
    """
    k, r, whitener = len(stats.rows), support.rank, support.whitener
    differences = np.stack([whitener.T @ s @ whitener for s in stats.covariances])
    differences -= differences.mean(axis=0)
    noise = (k - 1) / k**2 * float(np.sum(r * (r + 1) / stats.rows))
    size = float(np.vdot(differences, differences)) / k - noise
    if noise <= size:
        return []
    needed = "" if size <= 0 else f"; about {noise / size:.2g} times as many rows would be needed"
    size_text = f"{size:.3g}" if size > 0 else "not above noise"
    return [
        f"without shrinkage, sampling noise leaves a squared difference of about {noise:.3g} "
        "between the class covariances of new rows; before erasure, the difference is "
        f"{size_text}. The smallest class, {stats.names[int(np.argmin(stats.rows))]!r}, has "
        f"{int(stats.rows.min()):,} rows for a covariance of {r} dimensions{needed}. Pass "
        "shrinkage=, or use fewer principal components"
    ]


def _report(
    label: str, name: str, stats: ClassStatistics, support: Support, shrunk: Float, maps: Float,
    restoration: Restoration | None, intensity: float, notes: list[str],
) -> Report:  # fmt: skip
    """Return the report; `shrunk` and `maps`, (k, d, d), are in the units of `stats`."""
    p, d, units = stats.fractions, len(stats.units), stats.units
    variance = float(np.sum(stats.deviations**2))
    means = np.sqrt(p)[:, None] * stats.offsets
    change = np.sum(means**2, axis=0)  # E(r - x)^2 of each feature, here that of o-LEACE
    erased = [a @ used @ a.T for a, used in zip(maps, shrunk, strict=True)]
    own = inverse_units(np.sqrt(np.diagonal(erased[0]).clip(0.0)))  # 1 / deviations after erasure
    amplification, rounding = 1.0, 1.0
    for q, a, covariance, used, mean in zip(
        p, maps, stats.covariances, shrunk, stats.means, strict=True
    ):
        step = a - np.eye(d)
        change += q * np.einsum("ij,ij->i", step @ covariance, step)
        scaled = a * (units * inverse_units(stats.deviations))[:, None] * (stats.deviations / units)
        amplification = max(amplification, float(np.linalg.norm(scaled, 2)))
        # Rounding of the rows changes S_c by up to eps |x| |x - m_c|, and A_c S_c A_c^T by up to
        # |A_c|^2 times this change.
        deviation = float(np.trace(used)) ** 0.5
        length = deviation + float(np.linalg.norm(mean / units))
        size = float(np.linalg.norm(own[:, None] * a))
        rounding = max(rounding, size**2 * deviation * length)
    residual = max(float(np.abs((c - erased[0]) * own[:, None] * own).max()) for c in erased)
    relative = 8.0 * d * tolerances.EPS / support.smallest**0.5
    # `sizes` are the singular values of the class means, whitened by S_w and weighted by sqrt(p_c).
    # The canonical correlations c of x and the classes have c^2 = sizes^2 / (1 + sizes^2).
    u, sizes, _ = np.linalg.svd(support.whitener.T @ means.T, full_matrices=False)
    canonical = sizes / np.sqrt(1.0 + sizes**2)
    noise = tolerances.noise(d, support.smallest)
    rank = int(np.count_nonzero(canonical > noise))
    variables = [
        VariableReport(
            name, "erased", rank, tuple(map(float, canonical[:rank])), residual,
            relative * rounding,
            f"classes ({len(p)})",
        )
    ]  # fmt: skip
    if restoration is not None:
        terms = zip(p, maps, stats.crosses, strict=True)
        after = np.asarray(sum(q * a @ cross for q, a, cross in terms)).T * units
        error = (after - stats.span.rows) * inverse_units(stats.deviations)
        whitened = support.whitener.T @ (stats.span.rows / units).T
        shrinkage = 1.0 - 1.0 / np.sqrt(1.0 + sizes**2)
        whitened = (whitened - (u * shrinkage) @ (u.T @ whitened)).T  # whitened by Cov(x)
        for text, part, kind, correlations in correlations_of(stats.span, whitened):
            n_correlated = int(np.count_nonzero(np.array(correlations) > noise))
            span_size, bound_kept = largest(restoration.span[part]), restoration.figures(part)[1]
            figures = 0.0, 0.0
            if span_size:
                bound_kept += relative * amplification / span_size
                figures = largest(error[part]) / span_size, bound_kept
            variables.append(
                VariableReport(text, "kept", n_correlated, correlations, *figures, kind)
            )
    cause = f"some direction varies far less in one class of {name!r} than in the others"
    if len(variables) > 1:
        names = listed([v.name for v in variables[1:]])
        cause += f", or little of the covariance with {names} is left within the classes"
    precise = precision_notes(variables, amplification, cause, "pass shrinkage= above 0")
    # If the class means differ only on the support of S_w, LEACE removes the variance
    # |Cov(x) W u|^2 / (1 + size^2) for each left singular vector u with the singular value `size`.
    outside = means - (means @ support.basis) @ support.basis.T
    columns = stats.pooled @ (support.whitener @ u[:, :rank]) * units[:, None]
    leace = None
    if variance and float(np.sum(outside**2)) <= _NEGLIGIBLE * d:
        leace = float(np.sum(columns**2 * (1.0 + sizes[:rank] ** 2))) / variance
    return Report(
        method=label, n_rows=int(stats.rows.sum()), weight=float(stats.total.weight),
        n_features=d, rank_covariance=support.rank, rank=0, variables=tuple(variables), dropped=0,
        cosines=(), amplification=amplification, rho=None,
        distortion=float(change @ units**2) / variance if variance else 0.0,
        distortion_leace=leace, solver="cholesky", tolerance=noise, shrinkage=intensity,
        warnings=(NEEDS_LABELS, *notes, *precise),
    )  # fmt: skip
