"""Repair: restore the covariance of erased rows with a task, changing the rows least."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import spans
from splince_fast._kernels.factor import Factor
from splince_fast._runtime.arguments import described_type, warn
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import check_feature_names
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import change, sensitivity
from splince_fast._solve.options import OPTIONS, Options
from splince_fast._solve.restore import Restoration, inverse_units, restore, shrunk_solves
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.exceptions import InputError, PrecisionWarning
from splince_fast.labels import VariableName
from splince_fast.methods.label_columns import (
    LabelColumns,
    precision_notes,
    refuse_lost,
    variable_reports,
)
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
    after: Moments | Factored,
    *,
    before: Moments | Factored,
    keep: Selection,
    strength: float = 1,
) -> Projection:
    """Restore the covariance of erased rows with variables, with the least change of the rows.

    The rows t are the rows x after any eraser: one of this library, INLP, R-LACE, a kernel method
    or a network. The map B minimises E|B t - t|^2 subject to B Cov(t, y) = Cov(x, y), for variables
    y. Zero covariance with the concept, equal class means, equal class covariances and independence
    of the concept hold for B t if they hold for t, because a linear map that is common to all rows
    preserves these properties. With X = Cov(x, y) - Cov(t, y) and T = Cov(t)::

        B = I + X H^+ K^T,    K = T^+ Cov(t, y),    H = Cov(t, y)^T K

    Repair after LEACE gives the rows of SPLINCE (proofs_check 8.1). Repair after SAL does not,
    because the change is measured from t and not from x. The change does not depend on features of
    t with a standard deviation below 5e-7 times the root mean square of those of x, or below 5e-7
    times that of the same feature of x, because such a variation is rounding error of the eraser.

    Parameters
    ----------
    after : Moments or Factored
        Moments of the erased rows t and of the variables to keep. Rows may be weighted. With
        ``subsample=``, B Cov(t, y) = Cov(x, y) remains exact, and the change is the least under the
        estimate of T. If the moments are shrunk, T is shrunk towards the variances of the features.
        Moments with ``covariance_type="diag"``, which have no T, raise InputError.
    before : Moments or Factored
        Moments of the same rows before erasure, with the same features and labels; "diag"
        is allowed.
    keep : str, tuple or list of them
        Variables whose covariance is restored, jointly. Unlike for :func:`splince`, arrays of
        directions raise InputError, because moments do not hold the images of directions under the
        eraser.
    strength : float in [0, 1]
        Fraction b of X that is restored: B Cov(t, y) = Cov(t, y) + b X. The cost E|B t - t|^2 is
        multiplied by b^2.

    Returns
    -------
    Projection
        The map t -> E t + B (t - E t), which keeps the mean of the erased rows; I - B has the rank
        of X. Apply the map to erased rows, or compose it with the eraser: ``B @ eraser``. In its
        :attr:`~Projection.report`, `distortion` is the cost E|B t - t|^2 as a fraction of the
        variance before erasure, `rank` is the number of directions that change, and `variables`
        hold, for each variable, its rank in the erased rows and the residual
        |B Cov(t, y) - Cov(t, y) - b X| / |Cov(x, y)| with its bound.

    Raises
    ------
    InfeasibleError
        A combination of labels covaries with x, but not with the erased rows; the message names it.
    UnknownVariableError, ConstantVariableError, NotEnoughDataError
        A variable is missing in one of the moments, or has a single value; there are no rows.
    IncompatibleMomentsError, InputError
        Features or labels differ between the moments; the moments of the erased rows have no
        covariance, or a factor that uses features that are rounding error; `keep` holds directions;
        `strength` is out of range.

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
    >>> X = rng.normal(size=(1000, 8)) + z[:, None] * np.eye(8)[0] + y[:, None] * np.eye(8)[1]
    >>> before = sf.Moments().update(X, {"z": z, "y": y})
    >>> eraser = sf.sal(before, erase="z")
    >>> after = sf.Moments().update(eraser(X), {"y": y})
    >>> both = sf.repair(after, before=before, keep="y") @ eraser
    >>> clean = sf.Moments().update(both(X), {"z": z, "y": y})
    >>> bool(np.abs(clean.cross_covariance("z")).max() < 1e-12)
    True
    >>> bool(np.allclose(clean.cross_covariance("y"), before.cross_covariance("y")))
    True
    """
    OPTIONS["strength"].check(strength)
    if keep is None or not isinstance(keep, (str, tuple, list)):
        raise InputError(
            f"keep is {described_type(keep)}; repair restores covariances with variables, by name. "
            "Pass directions to splince(keep=)"
        )
    names = names_of(keep, "keep")
    with statistics(before) as stats:
        original = [stats.variable(name).copy() for name in names]
        variances, feature_names = stats.variances, stats.feature_names
    with statistics(after) as erased:
        check_feature_names(erased.feature_names, feature_names, "the erased rows")
        if len(erased.mean) != len(variances):
            raise InputError(
                f"the erased rows have {len(erased.mean)} features and those before erasing "
                f"{len(variances)}; pass moments of the same rows in the same coordinates"
            )
        if erased.is_diagonal:
            raise InputError(
                "repair needs the covariance of the erased rows, which moments made with "
                "covariance_type='diag' do not keep; accumulate them with 'full', or subsample="
            )
        span_t = span_of(erased, names, "keep", True)
        variables = [erased.variable(name) for name in names]
        span_x = np.concatenate(list(map(_aligned, names, variables, original)))
        units = np.sqrt(np.maximum(variances, erased.variances))
        units[units <= tolerances.CONSTANT * np.abs(erased.mean)] = 0.0
        factor = erased.factored_after_erasure(np.sqrt(variances))
        rows, intensity = np.ascontiguousarray(span_t.rows), erased.intensity(Options())
        if intensity:
            scaled = erased.gram(np.diag(inverse_units(units)))
            whitened, solved = shrunk_solves(scaled, rows, units, intensity)
        else:
            whitened, solved = factor.whiten(rows), factor.solve(rows)
        restoration = restore(whitened, solved, rows, span_x, units, float(strength))
        remedy = "use an eraser that keeps part of it, such as splince(keep=)"
        columns = list(map(LabelColumns.of, names, variables))
        refuse_lost(restoration, "repair", columns, lambda _: remedy)
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
    rows, remedy = None, "accumulate both from the same rows, with the same labels and weights"
    if after.n_rows != before.n_rows:
        cause = (
            f"{after.n_rows:,} erased rows carry a label of {name!r}, and {before.n_rows:,} rows "
            f"before erasing: they differ by {abs(after.n_rows - before.n_rows):,}"
        )
    elif isinstance(after, ClassSums):
        rows, cause = _aligned_classes(name, after, cast(ClassSums, before))
    else:
        before = cast(ColumnSums, before)
        before.merged(after.empty_like(), np.zeros(before.width), 1, name)  # if columns differ
        moments = [np.stack([v.mean(), v.deviations()]) for v in (after, before)]
        scale, difference = np.abs(moments[1]).sum(axis=0), np.abs(moments[0] - moments[1])
        same = bool((difference <= _SAME_LABELS * scale).all())
        if same and np.isclose(after.weight, before.weight):
            return before.span()
        cause = (
            f"the labels of {name!r} have another mean, standard deviation or weight in the erased "
            "rows than before erasing"
        )
    if rows is None:
        raise InputError(f"{cause}; {remedy}")
    return rows


def _aligned_classes(
    name: VariableName, after: ClassSums, before: ClassSums
) -> tuple[Float | None, str]:
    """Return the rows of `_aligned`, or None and the difference between the labels."""
    keys = list(after.position_by_key)
    order = np.array([before.position_by_key.get(key, -1) for key in keys], np.intp)
    weights, sums = before.weights[order], before.sums[order]
    weights[order < 0], sums[order < 0] = 0.0, 0.0
    close = np.isclose(weights, after.weights, rtol=_SAME_LABELS, atol=0.0)
    total_after, total_before = after.weights.sum(), before.weights.sum()
    if close.all() and np.isclose(total_after, total_before, rtol=_SAME_LABELS):
        # A span has no row for the class of the largest weight, which follows from the other rows.
        # Both spans use the weights of `after`, so that both leave out the same class.
        return spans.class_span(sums, after.weights), ""
    if (order < 0).any():
        new = after.names[int(np.argmax(order < 0))]
        return None, (
            f"the class {new!r} ({type(new).__name__}) of {name!r} occurs only after erasing; the "
            f"classes before are {listed(before.names)}"
        )
    text = f"weigh {total_after:g} and {total_before:g} in total"
    if not close.all():
        c = int(np.argmin(close))
        text = f"of class {after.names[c]!r} weigh {after.weights[c]:g} and {weights[c]:g}"
    return None, f"rows with a label of {name!r} {text}, erased and before erasing"


def _report(
    erased: Statistics, factor: Factor, restoration: Restoration, span: Span, strength: float,
    variance: float,
) -> Report:  # fmt: skip
    """Return the report with its warnings; `variance` is the total variance before erasure."""
    left, right, amplification = restoration.left, restoration.right, restoration.amplification
    cost = change(left, right, erased.gram(right), erased.variances)
    variables = variable_reports(
        "kept", span, restoration.whitened, restoration.cut, restoration.figures,
        restoration.whitened,
    )  # fmt: skip
    effect, norm = sensitivity(left, right, erased.mean, variance)
    notes = precision_notes(
        variables, amplification,
        f"little of the covariance with {listed(span.names)} is left in the erased rows",
        "keep fewer variables, or use an eraser that leaves more of them",
    )  # fmt: skip
    if effect > tolerances.SENSITIVITY and norm > tolerances.OBLIQUE * len(left) ** 0.5:
        notes.append(
            "the repair is sensitive to rounding: erased rows rounded to float32 move by "
            f"{effect:.1e} of their deviation; use rows in float64, or keep fewer variables"
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
