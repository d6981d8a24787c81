"""Quadratic erasure: a map per class gives all classes equal means and equal covariances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type, warn
from splince_fast._runtime.names import listed, names_to_json
from splince_fast._solve import tolerances
from splince_fast._solve.class_maps import (
    ClassMaps,
    SingularClassError,
    Support,
    qleace,
    support_of,
)
from splince_fast._solve.options import Option
from splince_fast._solve.restore import Restoration, inverse_units, largest, restore
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.conditional import NEEDS_LABELS, ConditionalEraser, Shift
from splince_fast.exceptions import (
    ConstantVariableError,
    InputError,
    LabelError,
    NotEnoughDataError,
    PrecisionWarning,
    UnseenRowsWarning,
)
from splince_fast.labels import ClassName
from splince_fast.methods.label_columns import (
    LabelColumns,
    precision_notes,
    refuse_lost,
    unchanged,
    variable_reports,
)
from splince_fast.moments import Folds, Moments
from splince_fast.moments.statistics import statistics
from splince_fast.projection import Projection
from splince_fast.report import Report, VariableReport

Float = NDArray[np.float64]

# The minimised change weights each feature by its deviation, but at least by this fraction of the
# largest deviation. The polar factors then keep 10 digits, and the change exceeds the minimum by at
# most d times the square of the fraction, relative to the variance.
_SMALLEST_WEIGHT = 1e-3
# The report gives the distortion of LEACE only if the variance between class means off the support
# of S_w is at most this fraction of the total variance.
_NEGLIGIBLE = 1e-12

_SHRINKAGE = Option(
    "shrinkage", None, "weight of the pooled covariance in each class covariance", number=float
)


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
    LabelError, ConstantVariableError
        The concept is continuous; the concept or a kept variable has a single value.
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
    intensity, names = float(shrinkage or 0.0), names_of(erase, "erase")
    name = names[0]
    if len(names) > 1 or not isinstance(name, str):
        raise InputError(
            f"erase is {erase!r}; quadratic erases the classes of one variable: make a column of "
            "the joint cells, and pass its name"
        )
    stats = _classes_of(_read_classes(moments, name), keep)
    support, units = support_of(stats.pooled, stats.roundoff), stats.units
    shrunk = intensity * stats.pooled + (1.0 - intensity) * stats.covariances
    smallest = int(np.argmin(stats.rows))
    if not intensity and stats.rows[smallest] <= support.rank + 1:
        raise NotEnoughDataError(
            f"the class {stats.names[smallest]!r} of {name!r} has {int(stats.rows[smallest]):,} "
            f"rows; its covariance needs more than {support.rank + 1:,} (rank of x, plus 1). Pass "
            "shrinkage= above 0, or use fewer principal components"
        )
    weights = np.maximum(units / units.max(), _SMALLEST_WEIGHT)
    try:
        solution = qleace(stats.fractions, shrunk, weights, support)
    except SingularClassError as error:
        raise NotEnoughDataError(
            f"the covariance of the class {stats.names[error.index]!r} of {name!r} is singular: "
            "features that are constant in that class alone, or rows that repeat. Pass shrinkage= "
            "above 0"
        ) from error
    label = "QLEACE" if keep is None else "repair @ QLEACE"
    restoration = _restoration(stats, solution)
    remedy = "use sf.oracle, which does not make the covariances equal"
    refuse_lost(restoration, "quadratic", stats.columns, lambda _: remedy)
    left, right = restoration.left / units, restoration.right * units
    maps = solution.maps - left.T @ (right @ solution.maps)
    noise = "" if intensity else _noise_text(stats, support)
    report = _report(label, name, stats, support, shrunk, maps, restoration, intensity, noise)
    for note in report.warnings[1:]:
        warn(note, UnseenRowsWarning if note == noise else PrecisionWarning)
    empty, feature_names = np.empty((0, len(units))), stats.total.feature_names
    after = Projection._make(empty, empty, stats.mean, method=label, feature_names=feature_names)
    shift = Shift(name, tuple(stats.names), np.zeros(len(stats.names)), stats.means - stats.mean)
    maps = units[:, None] * maps / units
    return ConditionalEraser([shift], after, None, maps=maps, method=label, report=report)


def _read_classes(moments: object, name: str) -> dict[ClassName, Moments]:
    """Return the moments of each class of the variable `name` that has rows."""
    if isinstance(moments, Folds):
        moments = moments.total
    if isinstance(moments, Mapping):
        parts = {c.item() if isinstance(c, np.generic) else c: m for c, m in moments.items()}
        names_to_json(parts)  # raises LabelError if a key cannot name a class
        parts = {c: m.total if isinstance(m, Folds) else m for c, m in parts.items()}
        if not all(isinstance(part, Moments) for part in parts.values()):
            raise InputError("a mapping must hold the Moments of each class")
    elif not isinstance(moments, Moments):
        raise InputError(
            f"moments is {described_type(moments)}; pass Moments(by={name!r}), or a mapping of "
            "classes to moments"
        )
    elif moments.parameters.by == name:  # the key None stands for the rows without a label
        parts = {c: part for c, part in moments.by_class.items() if c is not None}
    elif moments.variables.get(name) == "continuous":
        raise LabelError(
            f"the variable {name!r} is continuous and has no class covariances; bin it into "
            "classes, such as np.digitize(z, np.quantile(z, [0.25, 0.5, 0.75]))"
        )
    else:
        by = moments.parameters.by
        raise InputError(
            f"quadratic needs the covariance of x in each class of {name!r}, and these moments "
            f"keep {'only that of all rows' if by is None else f'those of {by!r}'}; accumulate "
            f"them with sf.Moments(by={name!r})"
        )
    parts = {c: part for c, part in parts.items() if part.n_rows}
    if len(parts) < 2:
        raise ConstantVariableError(
            f"the variable {name!r}, to be erased, has {len(parts)} class with rows; check the "
            "labels"
        )
    if any(p.parameters.is_diagonal or p.parameters.subsample < 1 for p in parts.values()):
        raise InputError(
            "quadratic needs the covariance of each class from all rows; accumulate without "
            "covariance_type='diag' or subsample="
        )
    return parts


@dataclass(frozen=True, slots=True)
class _Classes:
    """Moments of k classes; covariances are in units u, the deviations of x within classes."""

    # Features that are constant within classes have the covariance 0. Label columns y are those of
    # the kept variables, in units of their standard deviations over all rows.

    total: Moments  # of the rows of all classes
    columns: list[LabelColumns]  # y
    span: Span  # Cov(x, y) over all rows, for the report
    names: list[ClassName]
    rows: Float  # (k,): number of rows
    fractions: Float  # (k,): p_c
    means: Float  # (k, d), in units of x
    units: Float  # (d,): u
    deviations: Float  # (d,): standard deviations over all rows, 0 for constant features
    covariances: Float  # (k, d, d): S_c, ddof = 0
    crosses: Float  # (k, d, q): S_cy
    roundoff: float  # unit roundoff of the products that were summed

    @property
    def mean(self) -> Float:
        """Mean of x over all rows, (d,), in units of x."""
        return np.asarray(self.fractions @ self.means)

    @property
    def pooled(self) -> Float:
        """S_w = sum p_c S_c, (d, d)."""
        return np.asarray(np.tensordot(self.fractions, self.covariances, 1))


def _classes_of(classes: dict[ClassName, Moments], keep: Selection | None) -> _Classes:
    """Return the moments of each class as arrays, with the label columns to keep."""
    if keep is not None and not isinstance(keep, str | tuple | list):
        raise InputError(
            "keep holds directions; quadratic keeps the covariance with variables, by name"
        )
    names = None if keep is None else names_of(keep, "keep")
    total, kept, parts = reduce(add, classes.values()), [], list(classes.values())
    with statistics(total) as stats:
        span = span_of(stats, names, "keep", True)
        for name in names or ():
            variable = stats.variable(name)
            if variable.n_rows != stats.n_rows:
                raise InputError(
                    f"{stats.n_rows - variable.n_rows:,} of {stats.n_rows:,} rows have no "
                    f"label of {name!r}; leave these rows out"
                )
            kept.append(LabelColumns.of(name, variable.copy()))
        deviations = np.sqrt(stats.variances)
        constant = tolerances.CONSTANT * np.abs(stats.mean)
    deviations[deviations <= constant] = 0.0
    weights = np.array([part.weight for part in parts])
    fractions, covariances = weights / weights.sum(), [part.covariance(ddof=0) for part in parts]
    within = np.sqrt(sum(p * np.diagonal(s) for p, s in zip(fractions, covariances, strict=True)))
    within[within <= constant] = 0.0
    inverse = inverse_units(within)
    crosses = []
    for part in parts:
        columns = [np.zeros((len(within), 0))]
        with statistics(part) as stats:
            columns += [column.within(stats.variable(column.name)) for column in kept]
        crosses.append(np.hstack(columns) * inverse[:, None])
    return _Classes(
        total, kept, span, list(classes), np.array([part.n_rows for part in parts]),
        fractions, np.stack([part.mean for part in parts]),
        np.where(within > 0, within, np.where(deviations > 0, deviations, 1.0)), deviations,
        np.stack([s * inverse[:, None] * inverse for s in covariances]), np.stack(crosses),
        max(part._state().second.unit_roundoff for part in parts),
    )  # fmt: skip


def _restoration(stats: _Classes, solution: ClassMaps) -> Restoration:
    """Return the map that restores Cov(x, y) after QLEACE."""
    if not stats.columns:
        return unchanged(stats.span.rows)
    # All classes share the coordinates in which G_c whitens class c. There,
    # Cov(t, y) = sum p_c G_c U^T S_cy for the erased rows t = U R (...).
    basis, root = solution.support.basis, solution.root
    terms = zip(stats.fractions, solution.whiteners, stats.crosses, strict=True)
    whitened = np.asarray(sum(p * whitener @ (basis.T @ c) for p, whitener, c in terms)).T
    span_t = (whitened @ root.T) @ basis.T * stats.units
    solved = np.linalg.solve(root.T, whitened.T).T @ basis.T / stats.units
    return restore(whitened, solved, span_t, stats.span.rows, stats.deviations, 1.0)


def _noise_text(stats: _Classes, support: Support) -> str:
    """Return the warning about sampling noise in the class covariances, or ""."""
    # The squared difference of the whitened covariances D_c of k classes is sum |D_c - D|^2 / k,
    # with D their mean. Sampling noise adds about (k - 1) / k^2 sum r (r + 1) / n_c, for the rank r
    # of x and n_c rows of class c.
    k, r, whitener = len(stats.rows), support.rank, support.whitener
    differences = np.stack([whitener.T @ s @ whitener for s in stats.covariances])
    differences -= differences.mean(axis=0)
    noise = (k - 1) / k**2 * float(np.sum(r * (r + 1) / stats.rows))
    size = float(np.vdot(differences, differences)) / k - noise
    if noise <= size:
        return ""
    before = f"{size:.3g}" if size > 0 else "not above noise"
    return (
        f"without shrinkage, sampling noise leaves a squared difference of about {noise:.3g} "
        f"between the class covariances of new rows (before erasure: {before}); pass shrinkage=, "
        "add rows, or use fewer principal components"
    )


def _report(
    label: str, name: str, stats: _Classes, support: Support, shrunk: Float, maps: Float,
    restoration: Restoration, intensity: float, noise_text: str,
) -> Report:  # fmt: skip
    """Return the report; `shrunk` and `maps`, (k, d, d), are in the units of `stats`."""
    p, d, units = stats.fractions, len(stats.units), stats.units
    variance, eye = float(np.sum(stats.deviations**2)), np.eye(d)
    means = np.sqrt(p)[:, None] * (stats.means - stats.mean) / units
    steps = maps - eye
    change = np.sum(means**2, axis=0)  # E(r - x)^2 of each feature, here that of o-LEACE
    change += np.einsum("c,cij,cjk,cik->i", p, steps, stats.covariances, steps, optimize=True)
    erased = maps @ shrunk @ maps.transpose(0, 2, 1)
    own = inverse_units(np.sqrt(np.diagonal(erased[0]).clip(0.0)))  # 1 / deviations after erasure
    residual = float(np.abs((erased - erased[0]) * own[:, None] * own).max())
    scaled = maps * (units * inverse_units(stats.deviations))[:, None] * (stats.deviations / units)
    amplification = max(1.0, float(np.linalg.norm(scaled, 2, axis=(1, 2)).max()))
    # Rounding of the rows changes S_c by up to eps |x| |x - m_c|, and A_c S_c A_c^T by up to
    # |A_c|^2 times this change.
    within = np.sqrt(np.trace(shrunk, axis1=1, axis2=2))
    lengths = within + np.linalg.norm(stats.means / units, axis=1)
    sizes_of_maps = np.linalg.norm(own[:, None] * maps, axis=(1, 2))
    rounding = max(1.0, float((sizes_of_maps**2 * within * lengths).max()))
    relative = 8.0 * d * tolerances.EPS / support.smallest**0.5
    # `sizes` are the singular values of the class means, whitened by S_w and weighted by sqrt(p_c).
    # The canonical correlations c of x and the classes have c^2 = sizes^2 / (1 + sizes^2).
    u, sizes, _ = np.linalg.svd(support.whitener.T @ means.T, full_matrices=False)
    canonical = sizes / np.sqrt(1.0 + sizes**2)
    noise = tolerances.noise(d, support.smallest)
    # k weighted class means about the mean of all rows span at most k - 1 directions.
    rank = min(len(p) - 1, int(np.count_nonzero(canonical > noise)))
    correlations, kind = tuple(map(float, canonical[:rank])), f"classes ({len(p)})"
    variables = [
        VariableReport(name, "erased", rank, correlations, residual, relative * rounding, kind)
    ]
    after = np.einsum("c,cij,cjq->qi", p, maps, stats.crosses, optimize=True) * units
    error = (after - stats.span.rows) * inverse_units(stats.deviations)
    whitened = support.whitener.T @ (stats.span.rows / units).T
    shrinkage = 1.0 - 1.0 / np.sqrt(1.0 + sizes**2)
    whitened = (whitened - (u * shrinkage) @ (u.T @ whitened)).T  # whitened by Cov(x)

    def figures(part: slice) -> tuple[float, float]:
        size, (_, bound) = largest(restoration.span[part]), restoration.figures(part)
        if not size:
            return 0.0, 0.0
        return largest(error[part]) / size, bound + relative * amplification / size

    variables += variable_reports("kept", stats.span, whitened, noise, figures)
    cause = f"some direction varies far less in one class of {name!r} than in the others"
    if kept := listed(stats.span.names):
        cause += f", or little of the covariance with {kept} is left within the classes"
    precise = precision_notes(variables, amplification, cause, "pass shrinkage= above 0")
    # If the class means differ only on the support of S_w, LEACE removes the variance
    # |Cov(x) W u|^2 / (1 + size^2) for each left singular vector u with the singular value `size`.
    outside, leace = means - (means @ support.basis) @ support.basis.T, None
    if variance and float(np.sum(outside**2)) <= _NEGLIGIBLE * d:
        columns = stats.pooled @ (support.whitener @ u[:, :rank]) * units[:, None]
        leace = float(np.sum(columns**2 * (1.0 + sizes[:rank] ** 2))) / variance
    return Report(
        method=label, n_rows=int(stats.rows.sum()), weight=float(stats.total.weight),
        n_features=d, rank_covariance=support.rank, rank=0, variables=tuple(variables), dropped=0,
        cosines=(), amplification=amplification, rho=None,
        distortion=float(change @ units**2) / variance if variance else 0.0,
        distortion_leace=leace, solver="cholesky", tolerance=noise, shrinkage=intensity,
        warnings=(NEEDS_LABELS, *([noise_text] if noise_text else []), *precise),
    )  # fmt: skip
