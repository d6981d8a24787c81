"""Quadratic erasure: a map per class gives all classes equal means and equal covariances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import exceptions as errors
from splince_fast._kernels.spans import class_span
from splince_fast._runtime.arguments import described_type, warn
from splince_fast._runtime.names import listed, names_to_json
from splince_fast._solve import selection, tolerances
from splince_fast._solve.class_maps import SingularClassError, Support, qleace, support_of
from splince_fast._solve.options import Option, Options
from splince_fast._solve.restore import Restoration, inverse_units, largest, restore
from splince_fast.conditional import NEEDS_LABELS, ConditionalEraser, Shift
from splince_fast.labels import ClassName
from splince_fast.methods import label_columns as labels
from splince_fast.moments import Folds, Moments
from splince_fast.moments.statistics import Statistics, statistics
from splince_fast.projection import Projection
from splince_fast.report import Report

Float = NDArray[np.float64]

# The minimised change weights each feature by its deviation, but at least by this fraction of the
# largest deviation. The polar factors then keep 10 digits, and the change exceeds the minimum by at
# most d times the square of the fraction, relative to the variance.
_SMALLEST_WEIGHT = 1e-3

_SHRINKAGE = Option(
    "shrinkage", None, "weight of the pooled covariance in each class covariance", number=float
)


def quadratic(
    moments: Moments | Folds | Mapping[Any, Moments],
    *,
    erase: str,
    keep: selection.Selection | None = None,
    shrinkage: float | None = None,
) -> ConditionalEraser:
    """Give all classes of a concept equal means and covariances, changing x as little as possible.

    The eraser maps the rows of class c, with mean m_c and covariance S_c, to
    r = E x + A_c (x - m_c). The A_c minimise E|r - x|^2 subject to a common covariance of all
    classes (QLEACE), so that no quadratic predictor tells them apart. With `keep`, one linear map
    then restores Cov(r, y) = Cov(x, y) with the least further change
    (:func:`splince_fast.repair`). The optimum depends on the units of the features; those below
    1e-3 of the largest deviation count as if they had this one.

    From few rows, the eraser adds sampling noise to new rows. Shrinkage replaces S_c by
    a S_w + (1 - a) S_c, with the pooled covariance S_w; with a = 1, only the class means become
    equal. Equal means and Cov(r, y) = Cov(x, y) are exact for any a.

    Parameters
    ----------
    moments : Moments, Folds, or mapping of class to Moments
        Moments made with ``by=`` the name of the concept, or the moments of each class.
    erase : str
        Name of the concept, a variable of classes.
    keep : str, tuple or list of them, optional
        Variables whose covariance with x stays exactly as it is.
    shrinkage : float in [0, 1], optional
        Intensity a; None is 0.

    Returns
    -------
    ConditionalEraser
        Eraser with a matrix per class in `maps`, for rows with labels of the concept. The
        `residual` of the erased variable in its report is the largest difference between class
        covariances after erasure, for features scaled to unit deviation within classes.

    Raises
    ------
    InputError
        The moments were made without ``by=``, or with a sample or "diag"; rows have no label of a
        kept variable; or a parameter is out of range.
    LabelError, ConstantVariableError
        The concept is continuous; the concept or a kept variable has a single value.
    InfeasibleError
        A combination of kept labels covaries with x over all rows, but not within the classes.
    NotEnoughDataError
        With a = 0, a class has no more rows than the rank of S_w plus one, or a singular
        covariance.

    Warns
    -----
    PrecisionWarning, UnseenRowsWarning
        The maps amplify deviations from the mean more than 1e4 times, or a residual is above its
        bound; the noise that the eraser adds to new rows exceeds the difference that it removes.

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
    intensity, names = float(shrinkage or 0.0), selection.names_of(erase, "erase")
    name = names[0]
    if len(names) > 1 or not isinstance(name, str):
        raise errors.InputError(
            f"erase is {erase!r}; quadratic erases one variable: make a column of the joint cells"
        )
    parts = _read_classes(moments, name)
    with statistics(reduce(add, parts.values())) as total:
        classes = _classes_of(parts, total, keep)
        support, units = support_of(classes.pooled, classes.roundoff), classes.units
        shrunk = intensity * classes.pooled + (1.0 - intensity) * classes.covariances
        smallest = int(np.argmin(classes.rows))
        if not intensity and classes.rows[smallest] <= support.rank + 1:
            raise errors.NotEnoughDataError(
                f"the class {classes.names[smallest]!r} of {name!r} has "
                f"{classes.rows[smallest]:,} rows; its covariance needs more than "
                f"{support.rank + 1:,} (rank of x, plus 1). Pass shrinkage= above 0"
            )
        weights = np.maximum(units / units.max(), _SMALLEST_WEIGHT)
        try:
            solution = qleace(classes.fractions, shrunk, weights, support)
        except SingularClassError as error:
            raise errors.NotEnoughDataError(
                f"the covariance of the class {classes.names[error.index]!r} of {name!r} is "
                "singular, as of constant features or repeated rows. Pass shrinkage= above 0"
            ) from error
        restoration = labels.unchanged(classes.span.rows)
        if classes.columns:
            # All classes share the coordinates in which G_c whitens class c. There,
            # Cov(t, y) = sum p_c G_c U^T S_cy for the erased rows t = U R (...).
            basis, root = support.basis, solution.root
            whitened = np.einsum(
                "c,crs,sd,cdq->qr", classes.fractions, np.stack(solution.whiteners), basis.T,
                classes.crosses, optimize=True,
            )  # fmt: skip
            span_t = (whitened @ root.T) @ basis.T * units
            solved = np.linalg.solve(root.T, whitened.T).T @ basis.T / units
            restoration = restore(
                whitened, solved, span_t, classes.span.rows, classes.deviations, 1.0
            )
        remedy = "use sf.oracle, which does not make the covariances equal"
        labels.refuse_lost(restoration, "quadratic", classes.columns, remedy)
        label = "QLEACE" if keep is None else "repair @ QLEACE"
        left, right = restoration.left / units, restoration.right * units
        maps = solution.maps - left.T @ (right @ solution.maps)
        noise = "" if intensity else _noise_text(classes, support)
        report = _report(label, name, classes, support, shrunk, maps, restoration, intensity, noise)
        for note in report.warnings[1:]:
            warn(note, errors.UnseenRowsWarning if note == noise else errors.PrecisionWarning)
        empty = np.empty((0, len(units)))
        after = Projection._make(
            empty, empty, total.mean, method=label, feature_names=total.feature_names
        )
    k = len(classes.names)
    shift = Shift(name, tuple(classes.names), np.zeros(k), classes.means - total.mean)
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
            raise errors.InputError("a mapping must hold the Moments of each class")
    elif not isinstance(moments, Moments):
        raise errors.InputError(
            f"moments is {described_type(moments)}; pass Moments(by={name!r}), or a mapping of "
            "classes to moments"
        )
    elif moments.parameters.by == name:  # the key None stands for the rows without a label
        parts = {c: part for c, part in moments.by_class.items() if c is not None}
    elif moments.variables.get(name) == "continuous":
        raise errors.LabelError(
            f"the variable {name!r} is continuous and has no class covariances; bin it into "
            "classes, such as np.digitize(z, np.quantile(z, [0.25, 0.5, 0.75]))"
        )
    else:
        by = moments.parameters.by
        raise errors.InputError(
            f"quadratic needs the covariance of x in each class of {name!r}, and these moments "
            f"keep {'only that of all rows' if by is None else f'those of {by!r}'}; accumulate "
            f"them with sf.Moments(by={name!r})"
        )
    parts = {c: part for c, part in parts.items() if part.n_rows}
    if len(parts) < 2:
        raise errors.ConstantVariableError(
            f"the variable {name!r}, to be erased, has {len(parts)} class with rows"
        )
    if any(p.parameters.is_diagonal or p.parameters.subsample < 1 for p in parts.values()):
        raise errors.InputError(
            "quadratic needs all rows of each class, without covariance_type='diag' or subsample="
        )
    return parts


@dataclass(frozen=True, slots=True)
class _Classes:
    """Moments of k classes; covariances are in units u, the deviations of x within classes."""

    # Label columns y of kept variables are in units of their standard deviations over all rows.

    total: Statistics  # of the rows of all classes
    columns: list[labels.LabelColumns]  # y
    span: selection.Span  # Cov(x, y) over all rows
    names: list[ClassName]
    rows: Float  # (k,): number of rows
    fractions: Float  # (k,): p_c
    means: Float  # (k, d), in units of x
    units: Float  # (d,): u
    deviations: Float  # (d,): standard deviations over all rows, 0 for constant features
    covariances: Float  # (k, d, d): S_c, ddof = 0
    pooled: Float  # (d, d): S_w = sum p_c S_c
    crosses: Float  # (k, d, q): S_cy
    roundoff: float  # unit roundoff of the products that were summed


def _classes_of(
    classes: dict[ClassName, Moments], total: Statistics, keep: selection.Selection | None
) -> _Classes:
    """Return the moments of each class as arrays, with the label columns to keep."""
    names = [] if keep is None else selection.names_of(keep, "keep")
    span, parts = selection.span_of(total, names or None, "keep", True), list(classes.values())
    kept = [labels.LabelColumns.of(name, total.variable(name)) for name in names]
    for name, variable, *_ in kept:
        if variable.n_rows != total.n_rows:
            raise errors.InputError(
                f"{total.n_rows - variable.n_rows:,} of {total.n_rows:,} rows have no label of "
                f"{name!r}; leave these rows out"
            )
    deviations, constant = np.sqrt(total.variances), tolerances.CONSTANT * np.abs(total.mean)
    deviations[deviations <= constant] = 0.0
    weights = np.array([part.weight for part in parts])
    fractions = weights / weights.sum()
    covariances = np.stack([part.covariance(ddof=0) for part in parts])
    within = np.sqrt(fractions @ np.diagonal(covariances, axis1=1, axis2=2))
    within[within <= constant] = 0.0
    inverse = inverse_units(within)
    crosses = []
    for part in parts:
        columns = [np.zeros((len(within), 0))]
        with statistics(part) as stats:
            columns += [column.within(stats.variable(column.name)) for column in kept]
        crosses.append(np.hstack(columns) * inverse[:, None])
    covariances *= inverse[:, None] * inverse
    return _Classes(
        total, kept, span, list(classes), np.array([part.n_rows for part in parts]), fractions,
        np.stack([part.mean for part in parts]),
        np.where(within > 0, within, np.where(deviations > 0, deviations, 1.0)), deviations,
        covariances, np.tensordot(fractions, covariances, 1), np.stack(crosses),
        max(part._state().second.unit_roundoff for part in parts),
    )  # fmt: skip


def _noise_text(classes: _Classes, support: Support) -> str:
    """Return the warning about sampling noise in the class covariances, or ""."""
    # The squared difference of the whitened covariances D_c of k classes is sum |D_c - D|^2 / k,
    # with D their mean. Sampling noise adds about (k - 1) / k^2 sum r (r + 1) / n_c, for the rank r
    # of x and n_c rows of class c.
    k, r, whitener = len(classes.rows), support.rank, support.whitener
    differences = np.stack([whitener.T @ s @ whitener for s in classes.covariances])
    differences -= differences.mean(axis=0)
    noise = (k - 1) / k**2 * float(np.sum(r * (r + 1) / classes.rows))
    size = float(np.vdot(differences, differences)) / k - noise
    if noise <= size:
        return ""
    before = f"{size:.3g}" if size > 0 else "not above noise"
    return (
        f"without shrinkage, sampling noise leaves a squared difference of about {noise:.3g} "
        f"between the class covariances of new rows (before erasure: {before}); pass shrinkage="
    )


def _report(
    label: str, name: str, classes: _Classes, support: Support, shrunk: Float, maps: Float,
    restoration: Restoration, intensity: float, noise_text: str,
) -> Report:  # fmt: skip
    """Return the report; `shrunk` and `maps`, (k, d, d), are in the units of `classes`."""
    total, p, units, span = classes.total, classes.fractions, classes.units, classes.span
    d, inverse = len(units), inverse_units(classes.deviations)
    variance = float(np.sum(classes.deviations**2))
    means = np.sqrt(p)[:, None] * (classes.means - total.mean) / units
    steps = maps - np.eye(d)
    change = np.sum(means**2, axis=0)  # E(r - x)^2 of each feature, here that of o-LEACE
    change += np.einsum("c,cij,cjk,cik->i", p, steps, classes.covariances, steps, optimize=True)
    erased = maps @ shrunk @ maps.transpose(0, 2, 1)
    own = inverse_units(np.sqrt(np.diagonal(erased[0]).clip(0.0)))  # 1 / deviations after erasure
    residual = float(np.abs((erased - erased[0]) * own[:, None] * own).max())
    scaled = maps * (units * inverse)[:, None] * (classes.deviations / units)
    amplification = max(1.0, float(np.linalg.norm(scaled, 2, axis=(1, 2)).max()))
    # Rounding of the rows changes S_c by up to eps |x| |x - m_c|, and A_c S_c A_c^T by up to
    # |A_c|^2 times this change.
    within = np.sqrt(np.trace(shrunk, axis1=1, axis2=2))
    lengths = within + np.linalg.norm(classes.means / units, axis=1)
    sizes_of_maps = np.linalg.norm(own[:, None] * maps, axis=(1, 2))
    rounding = max(1.0, float((sizes_of_maps**2 * within * lengths).max()))
    relative = 8.0 * d * tolerances.EPS / support.smallest**0.5
    weights = p * total.weight
    span_z = selection.Span(
        [name], class_span(weights[:, None] * (classes.means - total.mean), weights), [len(p) - 1],
        [partial(selection.interpretation_of_classes, weights, total.weight)],
    )  # fmt: skip
    factor = total.factored(Options(), 0.0)
    white, noise = factor.whiten(span_z.rows), tolerances.noise(d, factor.smallest)
    bound = relative * rounding
    variables = labels.variable_reports("erased", span_z, white, noise, lambda _: (residual, bound))
    # LEACE removes the variance |Cov(x, z) v / s|^2 for each right singular vector v of the
    # whitened Cov(x, z) with the singular value s.
    combinations, sizes, _ = np.linalg.svd(white, full_matrices=False)
    used = sizes > noise
    leace = float(np.sum(((combinations[:, used] / sizes[used]).T @ span_z.rows) ** 2))
    after = np.einsum("c,cij,cjq->qi", p, maps, classes.crosses, optimize=True) * units
    error = (after - span.rows) * inverse

    def figures(part: slice) -> tuple[float, float]:
        size, (_, bound) = largest(restoration.span[part]), restoration.figures(part)
        if not size:
            return 0.0, 0.0
        return largest(error[part]) / size, bound + relative * amplification / size

    variables += labels.variable_reports("kept", span, factor.whiten(span.rows), noise, figures)
    cause = f"some direction varies far less in one class of {name!r} than in the others"
    if kept := listed(span.names):
        cause += f", or little of the covariance with {kept} is left within the classes"
    precise = labels.precision_notes(variables, amplification, cause, "pass shrinkage= above 0")
    return Report(
        method=label, n_rows=int(classes.rows.sum()), weight=total.weight, n_features=d,
        rank_covariance=support.rank, rank=0, variables=tuple(variables), dropped=0, cosines=(),
        amplification=amplification, rho=None,
        distortion=float(change @ units**2) / (variance or np.inf),
        distortion_leace=leace / (variance or np.inf), solver="cholesky", tolerance=noise,
        shrinkage=intensity, warnings=(NEEDS_LABELS, *filter(None, [noise_text]), *precise),
    )  # fmt: skip
