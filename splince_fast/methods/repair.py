"""Repair: restore the covariance of erased rows with a task, changing the rows least."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import spans
from splince_fast._kernels.factor import Factor
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import check_feature_names
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import change, sensitivity
from splince_fast._solve.options import OPTIONS
from splince_fast._solve.restore import Restoration, inverse_units, restore, shrunk_solves
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.exceptions import InputError, PrecisionWarning
from splince_fast.labels import VariableName
from splince_fast.methods import label_columns as labels
from splince_fast.moments import Moments
from splince_fast.moments.statistics import Factored, Statistics, statistics
from splince_fast.moments.variables import ClassSums, ColumnSums, Variable, refuse_other_kind
from splince_fast.projection import Projection
from splince_fast.report import Report, Sampling

Float = NDArray[np.float64]

# Relative tolerance for means, standard deviations and weights of the same labels. These statistics
# differ by rounding error if the labels were summed in another order.
_SAME_LABELS = 1e-6


def repair(
    after: Moments | Factored, *, before: Moments | Factored, keep: Selection, strength: float = 1
) -> Projection:
    """Restore the covariance of erased rows with variables, with the least change of the rows.

    The rows t are the rows x after any eraser: one of this library, INLP, R-LACE, a kernel method
    or a network. The map B minimises E|B t - t|^2 subject to B Cov(t, y) = Cov(x, y), for variables
    y. As B is linear, and common to all rows, erased rows stay erased. With
    X = Cov(x, y) - Cov(t, y) and T = Cov(t)::

        B = I + X H^+ K^T,    K = T^+ Cov(t, y),    H = Cov(t, y)^T K

    Repair after LEACE gives the rows of SPLINCE, unlike repair after SAL, because the change is
    measured from t (proofs_check 8.1). Features of t with a standard deviation below 5e-7 times the
    root mean square of those of x, or that of the same feature of x, are rounding error of the
    eraser, and not read.

    Parameters
    ----------
    after : Moments or Factored
        Moments of the erased rows t and of the variables to keep, with ``covariance_type="full"``.
        With ``subsample=``, the constraint stays exact, and the change is the least under the
        estimate of T; if the moments are shrunk, T is shrunk towards the variances of the features.
    before : Moments or Factored
        Moments of the same rows before erasure, with the same features and labels.
    keep : str, tuple or list of them
        Variables whose covariance is restored, jointly.
    strength : float in [0, 1]
        Fraction b of X that is restored: B Cov(t, y) = Cov(t, y) + b X. The cost E|B t - t|^2 is
        multiplied by b^2.

    Returns
    -------
    Projection
        The map t -> E t + B (t - E t), of erased rows; ``B @ eraser`` composes both. The
        `distortion` of its report is E|B t - t|^2 as a fraction of the variance before erasure.

    Raises
    ------
    InfeasibleError
        A combination of labels covaries with x, but not with the erased rows; the message names it.
    IncompatibleMomentsError, InputError
        Features or labels differ between the moments; the moments of the erased rows have no
        covariance, or a factor with features that are not read; `keep` holds directions.
    UnknownVariableError, ConstantVariableError, NotEnoughDataError
        As :func:`splince`.

    Warns
    -----
    PrecisionWarning
        An amplification above 1e4, a residual above its bound, or a sensitivity above 1e-3
        (:class:`Report`).

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=1000)
    >>> y = np.where(rng.random(1000) < 0.8, z, 1 - z)
    >>> X = rng.normal(size=(1000, 8)) + np.outer(z, np.eye(8)[0]) + np.outer(y, np.eye(8)[1])
    >>> before = sf.Moments().update(X, {"z": z, "y": y})
    >>> eraser = sf.sal(before, erase="z")
    >>> after = sf.Moments().update(eraser(X), {"y": y})
    >>> both = sf.repair(after, before=before, keep="y") @ eraser
    >>> clean = sf.Moments().update(both(X), {"z": z, "y": y})
    >>> bool(np.allclose(clean.cross_covariance("y"), before.cross_covariance("y")))
    True
    """
    OPTIONS["strength"].check(strength)
    names = names_of(keep, "keep")
    with statistics(before) as stats:
        original = [stats.variable(name).copy() for name in names]
        variances, feature_names = stats.variances, stats.feature_names
    with statistics(after) as erased:
        check_feature_names(erased.feature_names, feature_names, "the erased rows")
        if len(erased.mean) != len(variances):
            raise InputError(
                f"the erased rows have {len(erased.mean)} features and those before erasing "
                f"{len(variances)}; pass moments of the same rows"
            )
        if erased.is_diagonal:
            raise InputError(
                "repair needs the covariance of the erased rows, which moments made with "
                "covariance_type='diag' do not keep"
            )
        span_t = span_of(erased, names, "keep", True)
        variables = [erased.variable(name) for name in names]
        span_x = np.concatenate(list(map(_aligned, names, variables, original)))
        units = np.sqrt(np.maximum(variances, erased.variances))
        units[units <= tolerances.CONSTANT * np.abs(erased.mean)] = 0.0
        factor = erased.factored_after_erasure(np.sqrt(variances))
        rows = np.ascontiguousarray(span_t.rows)
        if erased.shrinkage:
            scaled = erased.gram(np.diag(inverse_units(units)))
            whitened, solved = shrunk_solves(scaled, rows, units, erased.shrinkage)
        else:
            whitened, solved = factor.whiten(rows), factor.solve(rows)
        restoration = restore(whitened, solved, rows, span_x, units, float(strength))
        remedy = "use an eraser that keeps part of it, such as splince(keep=)"
        columns = list(map(labels.LabelColumns.of, names, variables))
        labels.refuse_lost(restoration, "repair", columns, remedy)
        total = float(variances.sum())
        report = _report(erased, factor, restoration, span_t, float(strength), total)
    for note in report.warnings:
        warn(note, PrecisionWarning)
    return Projection._make(
        restoration.left, restoration.right, erased.mean, method="repair", report=report,
        feature_names=feature_names,
    )  # fmt: skip


def _aligned(name: VariableName, after: Variable, before: Variable) -> Float:
    """Return Cov(x, y) of a variable, (k', d), with rows in the order of `after.span()`."""
    refuse_other_kind(name, after, before)
    if after.n_rows != before.n_rows:
        cause = (
            f"{after.n_rows:,} erased rows carry a label of {name!r}, and {before.n_rows:,} rows "
            f"before erasing: they differ by {abs(after.n_rows - before.n_rows):,}"
        )
    elif isinstance(after, ClassSums):
        sums, cause = _sums_by_class(name, after, cast(ClassSums, before))
        if not cause:
            # A span has no row for the class of the largest weight, which follows from the others;
            # with the weights of `after`, both spans leave out the same class.
            return spans.class_span(sums, after.weights)
    else:
        before = cast(ColumnSums, before)
        before.merged(after.empty_like(), np.zeros(before.width), 1, name)  # if columns differ
        moments = [np.stack([v.mean(), v.deviations()]) for v in (after, before)]
        scale, difference = np.abs(moments[1]).sum(axis=0), np.abs(moments[0] - moments[1])
        same = bool((difference <= _SAME_LABELS * scale).all())
        if same and np.isclose(after.weight, before.weight):
            return before.span()
        cause = f"the labels of {name!r} have another mean, standard deviation or weight"
    raise InputError(
        f"{cause}; accumulate both from the same rows, with the same labels and weights"
    )


def _sums_by_class(name: VariableName, after: ClassSums, before: ClassSums) -> tuple[Float, str]:
    """Return the sums of `before` in the order of `after`, and the difference of the labels."""
    sums, sides = np.zeros(after.sums.shape), [(v, v.position_by_key) for v in (after, before)]
    for key in dict.fromkeys(key for _, positions in sides for key in positions):
        found = [positions.get(key) for _, positions in sides]
        weights = [
            0.0 if c is None else float(v.weights[c])
            for (v, _), c in zip(sides, found, strict=True)
        ]
        if not math.isclose(*weights, rel_tol=_SAME_LABELS):
            label = next(
                v.names[c] for (v, _), c in zip(sides, found, strict=True) if c is not None
            )
            return sums, (
                f"rows with a label of {name!r} and the class {label!r} ({type(label).__name__}) "
                f"weigh {weights[0]:g} erased, and {weights[1]:g} before"
            )
        if found[0] is not None and found[1] is not None:
            sums[found[0]] = before.sums[found[1]]
    return sums, ""


def _report(
    erased: Statistics, factor: Factor, restoration: Restoration, span: Span, strength: float,
    variance: float,
) -> Report:  # fmt: skip
    """Return the report with its warnings; `variance` is the total variance before erasure."""
    left, right, amplification = restoration.left, restoration.right, restoration.amplification
    cost = change(left, right, erased.gram(right), erased.variances)
    variables = labels.variable_reports(
        "kept", span, restoration.whitened, restoration.cut, restoration.figures
    )
    effect, norm = sensitivity(left, right, erased.mean, variance)
    notes = labels.precision_notes(
        variables, amplification,
        f"little of the covariance with {listed(span.names)} is left in the erased rows",
        "keep fewer variables, or use an eraser that leaves more of them",
    )  # fmt: skip
    if effect > tolerances.SENSITIVITY and norm > tolerances.OBLIQUE * len(left) ** 0.5:
        notes.append(
            "the repair is sensitive to rounding: erased rows rounded to float32 move by "
            f"{effect:.1e} of their deviation; use rows in float64"
        )
    sample = erased.sample
    return Report(
        method="repair", n_rows=erased.n_rows, weight=erased.weight, n_features=len(erased.mean),
        rank_covariance=factor.rank, rank=len(left), variables=tuple(variables),
        dropped=0, cosines=(), amplification=amplification, rho=None,
        distortion=None if cost is None else cost / (variance or np.inf), distortion_leace=None,
        solver=factor.solver, tolerance=restoration.cut,
        shrinkage=erased.shrinkage,
        warnings=tuple(notes), sampling=None if sample is None else Sampling(sample.n_rows, None),
        sensitivity=effect, strength=strength,
    )  # fmt: skip
