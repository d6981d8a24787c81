"""Repair: restore the covariance of erased rows with a task, changing the rows least."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import spans
from splince_fast._kernels.factor import Factor
from splince_fast._runtime.arguments import described_type, warn
from splince_fast._runtime.rows import check_feature_names
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import change, sensitivity
from splince_fast._solve.options import OPTIONS, Options
from splince_fast._solve.restore import Restoration, inverse_units, restore, shrunk_solves
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.exceptions import InfeasibleError, InputError, PrecisionWarning
from splince_fast.labels import VariableName
from splince_fast.labels.names import listed
from splince_fast.methods.label_columns import LabelColumns, combination
from splince_fast.moments import Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.snapshot import Factored, Snapshot, Statistics, statistics
from splince_fast.moments.variable import Variable, refuse_other_kind
from splince_fast.projection import Projection
from splince_fast.report import Report, Sampling, VariableReport, correlations_of

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
    because the change is measured from t and not from x.

    B may change every feature. The change does not depend on features of t with a standard
    deviation below 5e-7 times the root mean square standard deviation of x, or below 5e-7 times the
    standard deviation of the same feature of x, because such a variation is rounding error of the
    eraser.

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
    UnknownVariableError
        A variable is missing in one of the moments.
    ConstantVariableError
        A variable has a single value.
    IncompatibleMomentsError
        The kind or the columns of a variable differ between the moments.
    InputError
        The number or names of features differ; the number, classes, means or standard deviations of
        labels differ; the moments of the erased rows have no covariance; the factor of a snapshot
        uses features that are rounding error; `keep` holds directions; `strength` is out of range.
    NotEnoughDataError
        The moments have no rows.

    Warns
    -----
    PrecisionWarning
        An amplification above 1e4, a residual above its bound, or a sensitivity above 1e-3
        (:class:`Report`): little covariance with the variables is left in the erased rows, and the
        map amplifies its noise.

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
            f"keep is {described_type(keep)}; repair restores covariances with variables and takes "
            "their names. Moments do not hold the image of a direction under an eraser: restore a "
            "variable, or pass the direction to splince(keep=)"
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
                f"{len(variances)}; repair compares covariances feature by feature: pass "
                "moments of the same rows in the same coordinates"
            )
        if erased.is_diagonal:
            raise InputError(
                "repair takes T^+ of the covariance T of the erased rows, which moments made with "
                "covariance_type='diag' do not keep; accumulate them with 'full', or with "
                "subsample="
            )
        span_t = span_of(erased, names, "keep", True)
        variables = [erased.variable(name) for name in names]
        pairs = zip(names, variables, original, strict=True)
        span_x = np.concatenate([_aligned(*pair) for pair in pairs])
        units = np.sqrt(np.maximum(variances, erased.variances))
        units[units <= tolerances.CONSTANT * np.abs(erased.mean)] = 0.0
        factor = _factor(erased, np.sqrt(variances))
        rows, intensity = np.ascontiguousarray(span_t.rows), erased.intensity(Options())
        if intensity:
            scaled = erased.gram(np.diag(inverse_units(units)))
            whitened, solved = shrunk_solves(scaled, rows, units, intensity)
        else:
            whitened, solved = factor.whiten(rows), factor.solve(rows)
        restoration = restore(whitened, solved, rows, span_x, units, float(strength))
        if restoration.lost_combination is not None:
            refuse_lost(restoration, "repair", list(map(LabelColumns.of, names, variables)))
        report = _report(
            erased, factor, restoration, span_t, float(strength), float(variances.sum())
        )
    for note in report.warnings:
        warn(note, PrecisionWarning)
    return Projection._make(
        restoration.left, restoration.right, erased.mean, method="repair", report=report,
        feature_names=feature_names,
    )  # fmt: skip


def _aligned(name: VariableName, after: Variable, before: Variable) -> Float:
    """Return Cov(x, y) of a variable, (k', d), with rows in the order of `after.span()`.

    Raises IncompatibleMomentsError if its kind or columns differ, and InputError if its labels do.
    """
    refuse_other_kind(name, after, before)
    remedy = "accumulate both from the same rows, with the same labels and weights"
    if after.n_rows != before.n_rows:
        raise InputError(
            f"{after.n_rows:,} erased rows carry a label of {name!r}, and {before.n_rows:,} rows "
            f"before erasing: they differ by {abs(after.n_rows - before.n_rows):,}; {remedy}"
        )
    if isinstance(after, ClassSums) and isinstance(before, ClassSums):
        order = np.array(
            [before.position_by_key.get(key, -1) for key in after.position_by_key], np.intp
        )
        in_before = order >= 0
        weights = np.where(in_before, before.weights[order], 0.0)
        total_after, total_before = after.weights.sum(), before.weights.sum()
        close = np.isclose(weights, after.weights, rtol=_SAME_LABELS, atol=0.0)
        if close.all() and np.isclose(total_after, total_before, rtol=_SAME_LABELS):
            sums = np.where(in_before[:, None], before.sums[order], 0.0)
            # A span has no row for the class of the largest weight, which follows from the other
            # rows. Both spans use the weights of `after`, so that both leave out the same class.
            return spans.class_span(sums, after.weights)
        text = f"weigh {total_after:g} and {total_before:g} in total"
        if not in_before.all():
            c = int(np.argmin(in_before))
            raise InputError(
                f"the class {after.names[c]!r} ({type(after.names[c]).__name__}) of {name!r} "
                f"occurs only after erasing; the classes before are {listed(before.names)}; "
                f"{remedy}"
            )
        if not close.all():
            c = int(np.argmin(close))
            text = f"of class {after.names[c]!r} weigh {after.weights[c]:g} and {weights[c]:g}"
        raise InputError(
            f"rows with a label of {name!r} {text}, erased and before erasing; {remedy}"
        )
    assert isinstance(after, ColumnSums)
    assert isinstance(before, ColumnSums)
    before.merged(after.empty_like(), np.zeros(before.width), 1, name)  # raises if columns differ
    means, deviations = zip(
        *((v.reference + v.z_sum / v.weight, v.deviations()) for v in (after, before)), strict=True
    )
    scale = deviations[1] + np.abs(means[1])
    difference = np.maximum(*(np.abs(a - b) for a, b in (means, deviations)))
    if (difference > _SAME_LABELS * scale).any() or not np.isclose(after.weight, before.weight):
        raise InputError(
            f"the labels of {name!r} have another mean, standard deviation or weight in the erased "
            f"rows than before erasing; {remedy}"
        )
    return before.span()


def _factor(erased: Statistics, deviations: Float) -> Factor:
    """Return the factor of T = Cov(t), without features whose variation is rounding error.

    `deviations` are those before erasure. Raises InputError for a `Factored` that uses such
    features.
    """
    if isinstance(erased, Snapshot):
        return erased.factored_after_erasure(deviations)
    factor, rounding = erased.factor, tolerances.erased_rounding(deviations, 0.0)
    is_noise = (factor.inverse_scale > 0.0) & (np.sqrt(erased.variances) <= rounding)
    if is_noise.any():
        raise InputError(
            f"{int(is_noise.sum())} feature(s) of the erased rows vary by rounding error only, and "
            "the factor of the snapshot uses them; pass the moments of the erased rows, from which "
            "repair leaves such features out"
        )
    return factor


def refuse_lost(
    restoration: Restoration, method: str, columns: list[LabelColumns],
    remedy: str = "use an eraser that keeps part of it, such as splince(keep=)",
) -> NoReturn:  # fmt: skip
    """Raise InfeasibleError that names the combination of labels that cannot be restored."""
    assert restoration.lost_combination is not None
    kept = listed([str(v.name) for v in columns])
    text = combination(restoration.lost_combination, columns)
    raise InfeasibleError(
        f"{method} cannot restore the covariance with {kept}: the rows "
        f"covaried with the combination {text} before erasing (|Cov| {restoration.lost_size:.2g} "
        "in units of standard deviations), and the erased rows do not, above rounding. Typically "
        f"the concept determines the combination. Keep fewer variables, or {remedy}",
        1.0,
    )


def precision_notes(
    variables: list[VariableReport], amplification: float, cause: str, remedy: str
) -> list[str]:
    """Return warnings of a large amplification, and of a residual that is not rounding error."""
    notes = []
    if amplification > tolerances.AMPLIFICATION:
        notes.append(
            f"{cause}: the map enlarges deviations up to {amplification:.1e} times, with their "
            f"rounding errors and noise; {remedy}"
        )
    worst = max(variables, key=lambda v: v.residual - v.bound)
    if worst.bound >= 1 or worst.residual > worst.bound:
        notes.append(
            f"rounding errors may undo the constraint on {worst.name!r}: residual "
            f"{worst.residual:.1e}, bound {worst.bound:.1e} (relative to the covariance)"
        )
    return notes


def _report(
    erased: Statistics, factor: Factor, restoration: Restoration, span: Span, strength: float,
    variance: float,
) -> Report:  # fmt: skip
    """Return the report with its warnings; `variance` is the total variance before erasure."""
    left, right = restoration.left, restoration.right
    cost = change(left, right, erased.gram(right), erased.variances)
    if cost is not None:
        cost = cost / variance if variance else 0.0
    variables = []
    for name, part, kind, correlations in correlations_of(span, restoration.whitened):
        values = np.linalg.svd(restoration.whitened[part], compute_uv=False)
        rank = int(np.count_nonzero(values > restoration.cut))
        variables.append(
            VariableReport(name, "kept", rank, correlations, *restoration.figures(part), kind)
        )
    effect, norm = sensitivity(left, right, erased.mean, variance)
    notes = precision_notes(
        variables, restoration.amplification,
        f"little of the covariance with {listed(span.names)} is left in the erased rows",
        "keep fewer variables, or use an eraser that leaves more of them",
    )  # fmt: skip
    if effect > tolerances.SENSITIVITY and norm > 10.0 * len(left) ** 0.5:
        notes.append(
            "the repair is sensitive to rounding: erased rows rounded to float32 move by "
            f"{effect:.1e} of their standard deviation; use rows in float64, or keep fewer "
            "variables"
        )
    sample = erased.sample
    return Report(
        method="repair", n_rows=erased.n_rows, weight=erased.weight, n_features=len(erased.mean),
        rank_covariance=factor.rank, rank=len(left), variables=tuple(variables),
        dropped=0, cosines=(), amplification=restoration.amplification, rho=None,
        distortion=cost, distortion_leace=None,
        solver=factor.solver, tolerance=restoration.cut,
        shrinkage=erased.shrinkage if isinstance(erased, Factored) else 0.0,
        warnings=tuple(notes), sampling=None if sample is None else Sampling(sample.n_rows, None),
        sensitivity=effect, strength=strength,
    )  # fmt: skip
