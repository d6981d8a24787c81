"""Erasure with a map that uses the concept labels of the rows: o-LEACE and o-SPLINCE.

z are the label columns to erase, and y those to keep. Let S = Cov(x), Sz = Cov(x, z), Szz = Cov(z),
Sy = Cov(x, y) and Szy = Cov(z, y). The residuals of the regression of x on z, plus E x, are

    t = x - Sz Szz^+ (z - E z),    T = Cov(t) = S - Sz Szz^+ Sz^T,
    Ty = Cov(t, y) = Sy - Sz Szz^+ Szy

The erased rows r = E x + B (t - E x) have Cov(r, z) = 0 for any matrix B. With the strength b,
X = Sy - Ty, K = T^+ Ty and H = Ty^T K, the matrix B = I + b X H^+ K^T gives Cov(r, y) = Ty + b X,
which is Sy for b = 1. No affine map of (x, z) with the same Cov(r, z) and Cov(r, y) has a smaller
E|r - x|^2. A map with Cov(r, y) = Sy exists if and only if the kernel of Sy contains that of Ty.

T is not factored. Let S = L L^T, A = L^+ Sz and Szz^{+1/2} A^T A Szz^{+1/2} = V diag(c^2) V^T, with
eigenvectors V and canonical correlations c. Then U = A Szz^{+1/2} V / c is orthonormal, and

    T^+ = (L^+)^T (I + U diag(c^2 / (1 - c^2)) U^T) L^+
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import warn
from splince_fast._runtime.rows import cause_text
from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor
from splince_fast._solve.messages import common_text
from splince_fast._solve.oblique import change
from splince_fast._solve.options import OPTIONS, Options
from splince_fast._solve.restore import (
    Restoration,
    inverse_units,
    largest,
    restore,
    shrunk_solves,
)
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.conditional import NEEDS_LABELS, ConditionalEraser, Shift
from splince_fast.exceptions import InfeasibleError, InputError, PrecisionWarning
from splince_fast.labels.names import listed
from splince_fast.methods.closed_forms import leace, splince
from splince_fast.methods.label_columns import LabelColumns
from splince_fast.methods.repair import precision_notes, refuse_lost
from splince_fast.moments import Folds, Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.snapshot import Factored, Statistics, statistics
from splince_fast.projection import Projection
from splince_fast.report import OracleFit, Report, Sampling, VariableReport, correlations_of

Float = NDArray[np.float64]


def oracle(
    moments: Moments | Factored | Folds,
    *,
    erase: Selection,
    keep: Selection | None = None,
    strength: float = 1.0,
    missing: str = "splince",
) -> ConditionalEraser:
    """Erase variables by a map that uses their labels, and keep the covariance with others.

    Among the maps r(x, z) that are affine in rows and labels, with Cov(r, z) = 0 and
    Cov(r, y) = Cov(x, y), the returned map has the least E|r - x|^2. The map changes the rows at
    most as much as SPLINCE, and it exists in more cases, for example if Cov(x, z) and Cov(x, y)
    span the same space. Without `keep`, the map is o-LEACE, which shifts all rows of a class by the
    same vector. o-LEACE therefore keeps the covariance with every variable *within* classes
    exactly.

    Parameters
    ----------
    moments : Moments, Factored or Folds
        Moments of rows that all have labels of all variables in `erase` and `keep`, passed in the
        same update. If the moments are shrunk, the covariance at fixed labels is shrunk towards the
        variances of the features.
    erase : str or list of str
        Variables to erase, jointly.
    keep : str or list of str, optional
        Variables whose covariance with x stays exactly as it is.
    strength : float in [0, 1]
        Fraction of the lost covariance with the kept variables that is restored; 0 is o-LEACE.
    missing : {"splince", "raise"}
        Treatment of rows without a label: apply SPLINCE, fitted to the same moments with the same
        `strength` (LEACE without `keep`), or raise LabelError. With SPLINCE, the concept is erased
        over all rows if labels are missing at random, or if missingness depends on the concept
        alone.

    Returns
    -------
    ConditionalEraser
        Map of rows and labels, called as ``eraser(X, {"gender": z})``.

    Raises
    ------
    InputError
        A parameter is out of range; rows of the moments have no label; or the moments hold no
        covariances between the labels.
    InfeasibleError
        A combination of kept labels covaries with x through the erased variables only; or SPLINCE,
        for rows without a label, is infeasible (``missing="raise"`` does not fit it).
    UnknownVariableError, ConstantVariableError, NotEnoughDataError
        As :func:`splince`.

    Warns
    -----
    PrecisionWarning
        The map amplifies deviations from the mean more than 1e4 times; a residual is above its
        bound; or x nearly determines the labels: 1 / (1 - c^2) is above 1e4 for a canonical
        correlation c of x and labels.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=1000)
    >>> y = np.where(rng.random(1000) < 0.8, z, 1 - z)
    >>> X = rng.normal(size=(1000, 8)) + z[:, None] * np.eye(8)[0] + y[:, None] * np.eye(8)[1]
    >>> moments = sf.Moments().update(X, {"z": z, "y": y})
    >>> eraser = sf.oracle(moments, erase="z", keep="y")
    >>> after = sf.Moments().update(eraser(X, {"z": z}), {"z": z, "y": y})
    >>> bool(np.abs(after.cross_covariance("z")).max() < 1e-12)
    True
    >>> bool(np.allclose(after.cross_covariance("y"), moments.cross_covariance("y")))
    True
    """
    OPTIONS["strength"].check(strength)
    if missing not in ("splince", "raise"):
        raise InputError(f"missing is {missing!r}; it must be 'splince' or 'raise'")
    total = moments.total if isinstance(moments, Folds) else moments
    erased = names_of(erase, "erase")
    kept = [] if keep is None else names_of(keep, "keep")
    for name in erased:
        if not isinstance(name, str):
            raise InputError(f"erase names the joint cells {name!r}; name the variables one by one")
    if text := common_text(erased, kept):
        raise InfeasibleError(text.rstrip(". "), 1.0)
    with statistics(total) as stats:
        span_z = span_of(stats, erased, "erase", True)
        span_y = span_of(stats, kept, "keep", True) if kept else Span([], span_z.rows[:0], [], [])
        z = [LabelColumns.of(name, stats.variable(name)) for name in erased]
        y = [LabelColumns.of(name, stats.variable(name)) for name in kept]
        _check_rows(stats, [*z, *y])
        factor = stats.factored(Options(), 0.0)
        # Whiten both spans in one call.
        spans = np.concatenate([span_z.rows, span_y.rows])
        whitened_spans = factor.whiten(spans)
        k = len(span_z.rows)
        whitened_by_role = {"erased": whitened_spans[:k], "kept": whitened_spans[k:]}
        Szz = _correlations(stats, z, z)
        inverse, root = _inverses(Szz)
        predicted = inverse @ span_z.rows  # Szz^+ Sz^T, (k, d)
        shifts = tuple(_shifts(z, predicted))
        units = np.sqrt(stats.variances)
        restoration = rho = None
        precision_loss = 1.0
        if kept:
            Szy = _correlations(stats, z, y)
            span_t = span_y.rows - Szy.T @ predicted
            intensity = stats.intensity(Options())
            if intensity and not stats.is_diagonal:
                scales = inverse_units(units)
                T = stats.gram(np.diag(scales)) - (span_z.rows * scales).T @ (predicted * scales)
                whitened, solved = shrunk_solves(T, span_t, units, intensity)
            else:
                whitened, solved, precision_loss = _at_fixed_labels(
                    whitened_spans, factor.solve(spans), inverse, root, Szy
                )
            restoration = restore(whitened, solved, span_t, span_y.rows, units, float(strength))
            between = Szy.T @ inverse @ Szy
            if restoration.lost_combination is not None:
                v = restoration.lost_combination
                within = float(np.sum((v @ restoration.whitened) ** 2))
                fraction = within / (within + float(v @ between @ v))
                remedy = (
                    "leave keep= out, which keeps the relation within classes. SPLINCE cannot keep "
                    f"the combination either (1 - rho_o = {fraction:.1e})"
                )
                refuse_lost(restoration, "oracle", y, remedy)
            rho = _rho(restoration.whitened, between, span_y.rows)
        mean, feature_names = stats.mean, stats.feature_names
        report = _report(
            stats, factor, span_z, span_y, whitened_by_role, predicted, restoration,
            float(strength), rho, precision_loss, span_z.rows - Szz @ predicted,
        )  # fmt: skip
        fallback = None
        if missing == "splince":
            factored: Any = _Reused(stats, factor)
            try:
                fallback = (
                    splince(factored, erase=erased, keep=kept, strength=strength)
                    if kept
                    else leace(factored, erase=erased)
                )
            except InfeasibleError as error:
                raise InfeasibleError(
                    "the map of rows without a label, SPLINCE, is infeasible: "
                    f"{cause_text(error)}. The map that uses labels exists: pass missing='raise', "
                    "and labels of every row",
                    error.cosine,
                ) from error
    empty = np.empty((0, len(mean)))
    left, right = empty, empty
    if restoration is not None:
        left, right = restoration.left, restoration.right
    after = Projection._make(left, right, mean, method="oracle", feature_names=feature_names)
    for note in report.warnings[1:]:
        warn(note, PrecisionWarning)
    return ConditionalEraser(shifts, after, fallback, method="oracle", report=report)


class _Reused:
    """Moments whose method `factored` returns an existing factor of Cov(x)."""

    def __init__(self, stats: Statistics, factor: Factor) -> None:
        self._stats, self._factor = stats, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stats, name)

    def factored(self, options: Options, intensity: float) -> Factor:
        return self._factor

    def _statistics(self) -> AbstractContextManager[_Reused]:
        return nullcontext(self)


def _rho(whitened: Float, between: Float, span: Float) -> float | None:
    """Return the largest rho_o over the combinations v of kept labels that covary with x, or None.

    rho_o = v^T between v / (v^T between v + |v^T whitened|^2) is the variance of the combination
    that z predicts, divided by the variance that x and z together predict. `whitened` is Ty,
    transposed and whitened by T; `between` is Szy^T Szz^+ Szy; `span` is Sy, transposed.
    """
    basis, sizes, _ = np.linalg.svd(span, full_matrices=False)
    basis = basis[:, sizes > tolerances.relative(span.shape[1], "auto") * sizes[0]]
    if not basis.shape[1]:
        return None
    within = basis.T @ (whitened @ whitened.T) @ basis
    values, vectors = np.linalg.eigh(within + basis.T @ between @ basis)
    root = vectors / np.sqrt(np.maximum(values, tolerances.EPS * values[-1]))
    smallest = float(np.linalg.eigvalsh(root.T @ within @ root)[0])
    return 1.0 - min(max(smallest, 0.0), 1.0)


def _at_fixed_labels(
    whitened_spans: Float, solved_spans: Float, inverse: Float, root: Float, Szy: Float
) -> tuple[Float, Float, float]:
    """Return Ty whitened by T, T^+ Ty, and the largest 1 / (1 - c^2), from a factor of S.

    The spans hold L^+ and S^+ times Sz and Sy, transposed; `inverse` is Szz^+, and `root` its
    symmetric root.
    """
    k, d = len(inverse), solved_spans.shape[1]
    combinations, cosines, basis = np.linalg.svd(root @ whitened_spans[:k], full_matrices=False)
    correlated = cosines > tolerances.noise(d, 1.0)
    cosines, basis = np.minimum(cosines[correlated], 1.0), basis[correlated]
    # `gain` is the ratio of T^+ to S^+ in each direction. The gain is 0 in directions that z
    # determines, because they are not in the range of T.
    squared_sines = 1.0 - cosines**2
    inside = squared_sines > d * tolerances.EPS
    gain = np.where(inside, 1.0 / np.where(inside, squared_sines, 1.0), 0.0)
    dual = (combinations.T[correlated] @ root @ solved_spans[:k]) / cosines[
        :, None
    ]  # S^+ L basis^T
    weights = Szy.T @ inverse
    residual = whitened_spans[k:] - weights @ whitened_spans[:k]  # L^+ Ty, transposed
    solved_residual = solved_spans[k:] - weights @ solved_spans[:k]
    along = residual @ basis.T
    whitened = residual + (along * (np.sqrt(gain) - 1.0)) @ basis
    return whitened, solved_residual + (along * (gain - 1.0)) @ dual, float(gain.max(initial=1.0))


def _check_rows(stats: Statistics, columns: list[LabelColumns]) -> None:
    """Raise InputError unless every row has a label of every variable in `columns`."""
    for column in columns:
        weight = column.variable.weight
        if not np.isclose(weight, stats.weight, rtol=1e-9, atol=0.0):
            raise InputError(
                f"rows of weight {weight:g} carry a label of {column.name!r}, of {stats.weight:g} "
                "in all: oracle needs the labels of all rows of the moments; accumulate the "
                "labelled rows alone (rows without a label are erased by eraser.fallback)"
            )


def _correlations(
    stats: Statistics, first: list[LabelColumns], second: list[LabelColumns]
) -> Float:
    """Return the correlations of the label columns `first` with `second`, (k_1, k_2)."""
    return np.block([[_pair_correlations(stats, a, b) for b in second] for a in first])


def _pair_correlations(stats: Statistics, a: LabelColumns, b: LabelColumns) -> Float:
    """Return the correlations of two variables, (k_a, k_b); InputError if the moments lack them."""
    if a.name == b.name:
        return a.correlation()
    pair = stats.pairs.pair_covariance(a.name, b.name, {a.name: a.variable, b.name: b.variable})
    if pair is None or not np.isclose(pair[1], stats.weight, rtol=1e-9, atol=0.0):
        raise InputError(
            f"these moments hold no covariances between the labels of {a.name!r} and {b.name!r}: "
            "they come from a file of an older version, from rows with only one of the labels, or "
            "have a variable of more than 256 classes; accumulate them again, from rows with both "
            "labels"
        )
    return np.asarray(pair[0][np.ix_(a.used, b.used)] / np.outer(a.deviation, b.deviation))


def _inverses(matrix: Float) -> tuple[Float, Float]:
    """Return the pseudo-inverse of a correlation matrix, and the symmetric root of this inverse."""
    values, vectors = np.linalg.eigh(matrix)
    positive = values > len(values) * 8 * np.finfo(np.float64).eps * values[-1]
    vectors, values = vectors[:, positive], values[positive]
    return (vectors / values) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def _shifts(columns: list[LabelColumns], predicted: Float) -> list[Shift]:
    """Return the shifts of each variable, from the coefficients Szz^+ Sz^T, `predicted`."""
    shifts, start = [], 0
    for column in columns:
        rows = predicted[start : start + len(column.used)] / column.deviation[:, None]
        start += len(column.used)
        matrix = np.zeros((column.variable.n_columns, rows.shape[1]))
        matrix[column.used] = rows
        if isinstance(column.variable, ClassSums):
            occurring = np.flatnonzero(column.variable.weights > 0)
            matrix -= column.mean @ rows
            classes = tuple(column.variable.names[c] for c in occurring)
            mean = np.zeros(len(occurring))
            shifts.append(Shift(str(column.name), classes, mean, matrix[occurring]))
            continue
        assert isinstance(column.variable, ColumnSums)
        mean = column.variable.mean()
        shifts.append(Shift(str(column.name), None, mean, matrix))
    return shifts


def _report(
    stats: Statistics, factor: Factor, span_z: Span, span_y: Span,
    whitened: dict[str, Float], predicted: Float,
    restoration: Restoration | None, strength: float, rho: float | None,
    precision_loss: float, residual_z: Float,
) -> Report:  # fmt: skip
    """Return the report; `residual_z` is Cov(t, z), transposed, which is zero up to rounding."""
    variance = float(stats.variances.sum())
    minimum = float(np.sum(span_z.rows * predicted))
    d, variables, checked, notes = len(stats.mean), [], [], [NEEDS_LABELS]
    added: float | None = 0.0
    amplification, shrinkage = 1.0, stats.intensity(Options())
    if restoration is not None:
        if stats.sample is None and not shrinkage:
            added = restoration.change
        else:  # another matrix than Cov(x) was factored
            inner = stats.gram(restoration.right) - (restoration.right @ span_z.rows.T) @ (
                predicted @ restoration.right.T
            )
            added = change(restoration.left, restoration.right, inner, stats.variances)
        amplification = restoration.amplification
    bound = tolerances.residual(d, 1.0, amplification)
    scales = inverse_units(np.sqrt(stats.variances))
    for role, span in (("erased", span_z), ("kept", span_y)):
        for name, part, kind, correlations in correlations_of(span, whitened[role]):
            rank = int(np.count_nonzero(np.array(correlations) > tolerances.noise(d, 1.0)))
            if role == "erased":
                residual, size = residual_z[part], largest(span.rows[part] * scales)
                if restoration is not None:
                    residual = residual - (residual @ restoration.right.T) @ restoration.left
                figures = largest(residual * scales) / size if size else 0.0, bound
            else:
                assert restoration is not None
                figures = restoration.figures(part, lost=True)
            variables.append(VariableReport(name, role, rank, correlations, *figures, kind))
            if role == "kept" and restoration is not None:  # without what `strength` leaves out
                figures = restoration.figures(part)
            checked.append(VariableReport(name, role, rank, correlations, *figures, kind))
    notes += precision_notes(
        checked, amplification,
        f"little of the covariance with {listed(span_y.names)} is left at fixed labels",
        "keep fewer variables, or pass strength= below 1",
    )  # fmt: skip
    if precision_loss > tolerances.AMPLIFICATION:
        notes.append(
            f"x nearly determines the labels of {listed(span_z.names)}: 1 / (1 - c^2) is "
            f"{precision_loss:.1e}, and rounding errors of the relation at fixed labels grow by "
            "this factor; leave out the features that are copies of the labels"
        )
    sample = stats.sample
    # The distortion is unknown if the variances replace Cov(x).
    measured = added is not None and (not stats.is_diagonal or restoration is None)
    fraction = 1.0 / variance if variance else 0.0
    return Report(
        method="oracle", n_rows=stats.n_rows, weight=stats.weight, n_features=d,
        rank_covariance=factor.rank, rank=0 if restoration is None else len(restoration.left),
        variables=tuple(variables), dropped=0, cosines=(), amplification=amplification, rho=None,
        distortion=(minimum + (added or 0.0)) * fraction if measured else None,
        distortion_leace=None,
        solver=factor.solver, tolerance=tolerances.noise(d, 1.0), shrinkage=shrinkage,
        warnings=tuple(notes), strength=strength,
        sampling=None if sample is None else Sampling(sample.n_rows, None),
        oracle=OracleFit(minimum * fraction, None if shrinkage else rho),
    )  # fmt: skip
