"""Repair: the least change of erased rows that restores their covariance with a task."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import spans
from splince_fast._kernels.factor import STATUS_OK, Factor
from splince_fast._runtime.arrays import check_feature_names
from splince_fast._runtime.warn import warn
from splince_fast._solve import tolerances
from splince_fast._solve.messages import raise_numerical
from splince_fast._solve.oblique import sensitivity
from splince_fast._solve.options import OPTIONS
from splince_fast._solve.restore import Restoration, restore
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

# Relative difference of means, deviations and weights of the same labels, summed in another order.
_SAME_LABELS = 1e-6


def repair(
    after: Moments | Factored,
    *,
    before: Moments | Factored,
    keep: Selection,
    strength: float = 1,
) -> Projection:
    """Restore the covariance of erased rows with variables, at the least change of the rows.

    The minimiser of E|B t - t|^2 over the maps with B Cov(t, y) = Cov(x, y), t the rows x after any
    eraser: of this library, INLP, R-LACE, a kernel method or a network. Guardedness that is closed
    under one linear map for all rows (zero covariance with the concept, equal class means, equal
    class covariances, independence) holds for B t if it holds for t. With X = Cov(x, y) - Cov(t, y)
    and T = Cov(t)::

        B = I + X H^+ K^T,    K = T^+ Cov(t, y),    H = Cov(t, y)^T K

    Of rows that LEACE has erased it makes those of SPLINCE (proofs_check 8.1); of those of SAL
    others, as the change is measured from the erased rows and not from x.

    Features of a deviation below 5e-7 root mean square deviations before erasing, or of 5e-7 times
    their own, change but are not read: erasers leave such rounding behind.

    Parameters
    ----------
    after : Moments or Factored
        Of the erased rows, with the variables to keep. Rows may be weighted, and the covariance may
        be that of a sample (``subsample=``): B Cov(t, y) = Cov(x, y) stays exact, the change is the
        least for the estimate of T. Moments with ``sketch_size=`` keep no T, and are refused.
    before : Moments or Factored
        Of the same rows before erasing, of the same width, with the same labels; a sketch will do.
    keep : str, tuple or list of them
        Variables whose covariance is restored, jointly. Arrays of directions, which
        :func:`splince` takes, are refused: moments do not say where an eraser sends a direction.
    strength : float in [0, 1]
        Fraction b of X that is given back: B Cov(t, y) = Cov(t, y) + b X, at b^2 times the cost.

    Returns
    -------
    Projection
        B about the mean of the erased rows, which stays; of rank rank(X). Apply it to erased rows,
        or compose: ``B @ eraser``. Of its :attr:`~Projection.report`, `distortion` is the cost as a
        fraction of the variance before erasing, `rank` the number of directions that change, and
        `variables` hold the rank of each variable in the erased rows (the directions that are
        kept) and the residual |B Cov(t, y) - Cov(t, y) - b X| / |Cov(x, y)| beside its bound.

    Raises
    ------
    InfeasibleError
        The eraser has destroyed a combination of the labels that x covaries with: the text names
        it.
    UnknownVariableError
        A variable that is not in both moments.
    ConstantVariableError
        A variable with a single value.
    IncompatibleMomentsError
        A variable is of classes in one of them, and continuous or of other columns in the other.
    InputError
        Rows of different widths or columns; labels that differ in number, classes or moments;
        moments of erased rows without a covariance; snapshots whose factor reads rounding;
        directions for `keep`; `strength` out of range.
    NotEnoughDataError
        No rows.

    Warns
    -----
    PrecisionWarning
        An amplification above 1e4, a residual above its bound, or a sensitivity above 1e-3
        (:class:`Report`): little is left of what is kept, and it is enlarged with its noise.

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
            f"keep is {type(keep).__name__}; repair restores covariances with variables and takes "
            "their names. Where an eraser sends a direction is not in the moments: restore a "
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
        if erased.metric is not None:
            raise InputError(
                "repair takes T^+ of the covariance T of the erased rows, which moments made with "
                "sketch_size= do not keep; accumulate them without it, or with subsample="
            )
        span_t = span_of(erased, names, "keep", True)
        variables = [erased.variable(name) for name in names]
        pairs = zip(names, variables, original, strict=True)
        span_x = np.concatenate([_aligned(*pair) for pair in pairs])
        units = np.sqrt(np.maximum(variances, erased.variances))
        units[units <= tolerances.CONSTANT * np.abs(erased.mean)] = 0.0
        with erased.memory(True) as memory:
            factor = _factor(erased, np.sqrt(variances), memory)
            if factor.status != STATUS_OK:
                raise_numerical(factor.status, "auto")
            rows = np.ascontiguousarray(span_t.rows)
            found = restore(
                factor.whiten(rows), factor.solve(rows), rows, span_x, units, float(strength),
                span_x - rows,
            )  # fmt: skip
            if found.lost is not None:
                refuse_lost(found, "repair", list(map(LabelColumns.of, names, variables)))
            report = _report(
                erased, factor, found, span_t, float(strength), float(variances.sum()),
                feature_names,
            )  # fmt: skip
    for note in report.warnings:
        warn(note, PrecisionWarning)
    return Projection._make(
        found.left, found.right, erased.mean, method="repair", report=report,
        feature_names=feature_names,
    )  # fmt: skip


def _aligned(name: VariableName, after: Variable, before: Variable) -> Float:
    """(k', d): rows that span Cov(x, y), of the same labels and in the same order as those of t.

    Raises
    ------
    IncompatibleMomentsError
        Other kinds or columns.
    InputError
        Other labels.
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
        there = order >= 0
        weights = np.where(there, before.weights[order], 0.0)
        ours, theirs = after.weights.sum(), before.weights.sum()
        close = np.isclose(weights, after.weights, rtol=_SAME_LABELS, atol=0.0)
        if close.all() and np.isclose(ours, theirs, rtol=_SAME_LABELS):
            sums = np.where(there[:, None], before.sums[order], 0.0)
            # The weights decide which class is left out: use the same for both spans.
            return spans.class_span(sums, after.weights)
        text = f"weigh {ours:g} and {theirs:g} in total"
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
    gap = np.maximum(*(np.abs(a - b) for a, b in (means, deviations)))
    if (gap > _SAME_LABELS * scale).any() or not np.isclose(after.weight, before.weight):
        raise InputError(
            f"the labels of {name!r} have another mean, deviation or weight in the erased rows "
            f"than before erasing; {remedy}"
        )
    return before.span()


def _factor(erased: Statistics, deviations: Float, memory: Float | None) -> Factor:
    """The factor of T without the features that vary only by rounding of the original rows."""
    if isinstance(erased, Snapshot):
        return erased.factored_above(deviations, memory)
    factor, least = erased.factor, tolerances.computed(deviations, 0.0)
    noise = (factor.inverse_scale > 0.0) & (np.sqrt(erased.variances) <= least)
    noise[factor.left_out] = False
    if noise.any():
        raise InputError(
            f"{int(noise.sum())} feature(s) of the erased rows vary by the rounding of the "
            "original ones, and the factor of the snapshot reads them; pass the moments of the "
            "erased rows, from which repair leaves such features out"
        )
    return factor


def refuse_lost(
    found: Restoration, method: str, columns: list[LabelColumns],
    remedy: str = "use an eraser that keeps part of it, such as splince(keep=)",
) -> NoReturn:  # fmt: skip
    """Raise InfeasibleError with the combination of labels that the erased rows have lost."""
    assert found.lost is not None
    kept = listed([str(column.name) for column in columns])
    raise InfeasibleError(
        f"{method} cannot restore the covariance with {kept}: the rows "
        f"covaried with the combination {combination(found.lost, columns)} before erasing (|Cov| "
        f"{found.wanted:.2g} in units of deviations), and the erased rows do not, above rounding. "
        "Nothing linear of it is left to enlarge: typically the concept determines it. Keep fewer "
        f"variables, or {remedy}",
        1.0,
    )


def _report(
    erased: Statistics, factor: Factor, found: Restoration, span: Span, strength: float,
    variance: float, names: tuple[str, ...] | None,
) -> Report:  # fmt: skip
    """The report, warnings included."""
    left, right = found.left, found.right
    cost = float(np.vdot(left @ left.T, erased.gram(right)))
    variables = []
    for name, part, kind, correlations in correlations_of(span, found.whitened):
        values = np.linalg.svd(found.whitened[part], compute_uv=False)
        rank = int(np.count_nonzero(values > found.cut))
        variables.append(
            VariableReport(name, "kept", rank, correlations, *found.errors(part), kind)
        )
    moved, norm = sensitivity(left, right, erased.mean, variance)
    kept, notes = listed(span.names), []
    if found.amplification > tolerances.AMPLIFICATION:
        notes.append(
            f"little of the covariance with {kept} is left in the erased rows: restoring it "
            f"enlarges deviations up to {found.amplification:.1e} times, with their rounding and "
            "noise. Keep fewer variables, or use an eraser that leaves more of them"
        )
    worst = max(variables, key=lambda v: v.residual - v.bound)
    if worst.bound >= 1 or worst.residual > worst.bound:
        notes.append(
            f"rounding may undo what was restored of {worst.name!r}: residual "
            f"{worst.residual:.1e}, bound {worst.bound:.1e} (relative to the covariance)"
        )
    if moved > tolerances.SENSITIVITY and norm > 10.0 * len(left) ** 0.5:
        notes.append(
            f"the repair is sensitive to rounding: erased rows rounded to float32 move by "
            f"{moved:.1e} of their deviation; use rows in float64, or keep fewer variables"
        )
    sample = erased.sample
    return Report(
        method="repair", n_rows=erased.n_rows, weight=erased.weight, n_features=len(erased.mean),
        rank_covariance=factor.rank, rank=len(left), variables=tuple(variables),
        dropped=0, cosines=(), amplification=found.amplification, rho=None,
        distortion=cost / variance if variance else 0.0, distortion_leace=None,
        solver=factor.solver, tolerance=found.cut,
        shrinkage=erased.shrinkage if isinstance(erased, Factored) else 0.0,
        warnings=tuple(notes), sampling=None if sample is None else Sampling(sample.n_rows, None),
        sensitivity=moved, left_out=tuple(map(int, factor.left_out)), strength=strength,
        left_out_names=tuple(names[i] for i in factor.left_out) if names else (),
    )  # fmt: skip
