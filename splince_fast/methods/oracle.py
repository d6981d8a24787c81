"""Erasure with a map that uses the concept labels of the rows: o-LEACE and o-SPLINCE.

z are the label columns to erase, and y those to keep. Let S = Cov(x), Sz = Cov(x, z), Szz = Cov(z),
Sy = Cov(x, y) and Szy = Cov(z, y). The residuals of the regression of x on z, plus E x, are

    t = x - Sz Szz^+ (z - E z),    T = Cov(t) = S - Sz Szz^+ Sz^T,
    Ty = Cov(t, y) = Sy - Sz Szz^+ Szy

The rows r = E x + B (t - E x) have Cov(r, z) = 0 for any B. With the strength b, X = Sy - Ty,
K = T^+ Ty and H = Ty^T K, B = I + b X H^+ K^T gives Cov(r, y) = Ty + b X, with the least E|r - x|^2
of all affine maps of (x, z). It exists if and only if the kernel of Sy contains that of Ty. T is
not factored: let S = L L^T, A = L^+ Sz and Szz^{+1/2} A^T A Szz^{+1/2} = V diag(c^2) V^T, with the
canonical correlations c. Then U = A Szz^{+1/2} V / c is orthonormal, and

    T^+ = (L^+)^T (I + U diag(c^2 / (1 - c^2)) U^T) L^+
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import Factor
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import cause_text
from splince_fast._solve import tolerances
from splince_fast._solve.oblique import change, common_text
from splince_fast._solve.options import OPTIONS, Options
from splince_fast._solve.restore import Restoration, inverse_units, largest, restore, shrunk_solves
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.conditional import NEEDS_LABELS, ConditionalEraser, Shift
from splince_fast.exceptions import InfeasibleError, InputError, PrecisionWarning
from splince_fast.labels import VariableName
from splince_fast.methods import label_columns as labels
from splince_fast.methods.fit import MethodCall
from splince_fast.moments import Folds, Moments
from splince_fast.moments.statistics import Factored, Statistics, statistics
from splince_fast.moments.variables import ClassSums
from splince_fast.projection import Projection
from splince_fast.report import OracleFit, Report, Sampling

Float = NDArray[np.float64]
Columns: TypeAlias = list[labels.LabelColumns]


def oracle(
    moments: Moments | Factored | Folds,
    *,
    erase: Selection,
    keep: Selection | None = None,
    strength: float = 1.0,
    missing: str = "splince",
) -> ConditionalEraser:
    """Erase variables by a map that uses their labels, and keep the covariance with others.

    Of the maps r(x, z) that are affine in rows and labels, with Cov(r, z) = 0 and
    Cov(r, y) = Cov(x, y), this one has the least E|r - x|^2. It changes the rows at most as much as
    SPLINCE, and exists in more cases. Without `keep`, it is o-LEACE, which shifts all rows of a
    class by the same vector, and so keeps the covariance with every variable *within* classes.

    Parameters
    ----------
    moments : Moments, Factored or Folds
        Moments of rows that all have labels of all variables, passed in the same update. If they
        are shrunk, the covariance at fixed labels is shrunk towards the variances of the features.
    erase, keep : str or list of str
        Variables to erase, jointly; and, optionally, variables whose covariance with x stays.
    strength : float in [0, 1]
        Fraction of the lost covariance with the kept variables that is restored; 0 is o-LEACE.
    missing : {"splince", "raise"}
        Rows without a label: apply SPLINCE (LEACE without `keep`), fitted to the same moments, or
        raise LabelError. With SPLINCE, the concept is erased over all rows if labels are missing at
        random, or if missingness depends on the concept alone.

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
        for rows without a label, is infeasible.
    UnknownVariableError, ConstantVariableError, NotEnoughDataError
        As :func:`splince`.

    Warns
    -----
    PrecisionWarning
        The map amplifies deviations more than 1e4 times; a residual is above its bound; or
        1 / (1 - c^2) is above 1e4 for a canonical correlation c of x and labels.

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
    with statistics(total) as locked:
        stats = locked.copied(Options())
        span_z = span_of(stats, erased, "erase", True)
        span_y = span_of(stats, kept or None, "keep", True)
        z, y = _label_columns(stats, erased), _label_columns(stats, kept)
        Szz = _correlations(stats, z, z)
        values, vectors = np.linalg.eigh(Szz)
        used = values > len(values) * 8 * tolerances.EPS * values[-1]
        root = vectors[:, used] / np.sqrt(values[used])  # W, with W W^T = Szz^+
        predicted = root @ (root.T @ span_z.rows)  # Szz^+ Sz^T, (k, d)
        fit = _Fit(stats, stats.factored(Options(), 0.0), span_z, span_y, predicted, root)
        restoration, rho, loss = fit.restored(z, y, float(strength))
        residual_z = span_z.rows - Szz @ predicted  # Cov(t, z), transposed: zero up to rounding
        report = fit.report(restoration, rho, loss, residual_z, float(strength))
        shifts, fallback = _shifts(z, predicted), None
        after = Projection._make(
            restoration.left, restoration.right, stats.mean, method="oracle",
            feature_names=stats.feature_names,
        )  # fmt: skip
        if missing == "splince":
            options = Options(strength=strength) if kept else Options()
            call = MethodCall("SPLINCE" if kept else "LEACE", erased, kept or None, options)
            try:
                fallback = call.eraser(stats, factor=fit.factor)
            except InfeasibleError as error:
                raise InfeasibleError(
                    "the map of rows without a label, SPLINCE, is infeasible: "
                    f"{cause_text(error)}. Pass missing='raise'",
                    error.cosine,
                ) from error
    for note in report.warnings[1:]:
        warn(note, PrecisionWarning)
    return ConditionalEraser(shifts, after, fallback, method="oracle", report=report)


class _Fit(NamedTuple):
    """Spans and factors of one fit; Sz and Sy are in units of the deviations of the labels."""

    stats: Statistics
    factor: Factor  # of S
    span_z: Span  # Sz^T
    span_y: Span  # Sy^T
    predicted: Float  # Szz^+ Sz^T
    root: Float  # W, with W W^T = Szz^+

    def restored(
        self, z: Columns, y: Columns, strength: float
    ) -> tuple[Restoration, float | None, float]:
        """Return B = I - left^T right of the rows t, rho_o, and the largest 1 / (1 - c^2)."""
        stats, span_z, span_y = self.stats, self.span_z.rows, self.span_y.rows
        if not y:
            return labels.unchanged(span_y), None, 1.0
        Szy = _correlations(stats, z, y)
        span_t, units = span_y - Szy.T @ self.predicted, np.sqrt(stats.variances)
        loss = 1.0
        if stats.shrinkage and not stats.is_diagonal:
            scales = inverse_units(units)
            T = stats.gram(np.diag(scales)) - (span_z * scales).T @ (self.predicted * scales)
            whitened, solved = shrunk_solves(T, span_t, units, stats.shrinkage)
        else:
            whitened, solved, loss = self._at_fixed_labels(Szy)
        restoration = restore(whitened, solved, span_t, span_y, units, strength)
        between = Szy.T @ self.root @ (self.root.T @ Szy)

        remedy, lost = "", restoration.lost_combination
        if lost is not None:
            within = float(np.sum((lost @ whitened) ** 2))
            fraction = within / (within + float(lost @ between @ lost))
            remedy = (
                "leave keep= out, which keeps the relation within classes; SPLINCE cannot keep it "
                f"either (1 - rho_o = {fraction:.1e})"
            )
        labels.refuse_lost(restoration, "oracle", y, remedy)
        return restoration, _rho(whitened, between, span_y), loss

    def _at_fixed_labels(self, Szy: Float) -> tuple[Float, Float, float]:
        """Return Ty whitened by T, T^+ Ty, and the largest 1 / (1 - c^2), from the factor of S."""
        spans = np.concatenate([self.span_z.rows, self.span_y.rows])
        k, d = self.span_z.rows.shape
        white, solved = self.factor.whiten(spans), self.factor.solve(spans)
        combinations, cosines, basis = np.linalg.svd(self.root.T @ white[:k], full_matrices=False)
        noise = tolerances.noise(d, 1.0)
        correlated = cosines > noise
        cosines, basis = np.minimum(cosines[correlated], 1.0), basis[correlated]
        # The ratio of T^+ to S^+ in each direction is 0 for those that z determines, up to the
        # rounding error of c, because they are not in the range of T.
        squared_sines = 1.0 - cosines**2
        inside = squared_sines > 2.0 * noise
        gain = np.where(inside, 1.0 / np.where(inside, squared_sines, 1.0), 0.0)
        dual = combinations.T[correlated] @ self.root.T @ solved[:k]
        dual /= cosines[:, None]  # S^+ L basis^T
        weights = Szy.T @ self.root @ self.root.T
        residual = white[k:] - weights @ white[:k]  # L^+ Ty, transposed
        along = residual @ basis.T
        whitened = residual + (along * (np.sqrt(gain) - 1.0)) @ basis
        solved_residual = solved[k:] - weights @ solved[:k] + (along * (gain - 1.0)) @ dual
        return whitened, solved_residual, float(gain.max(initial=1.0))

    def report(
        self, restoration: Restoration, rho: float | None, loss: float, residual_z: Float,
        strength: float,
    ) -> Report:  # fmt: skip
        stats, factor, span_z, predicted = self.stats, self.factor, self.span_z, self.predicted
        left, right, rows = restoration.left, restoration.right, span_z.rows
        d, total = len(stats.mean), float(stats.variances.sum()) or np.inf
        minimum, amplification = float(np.sum(rows * predicted)), restoration.amplification
        noise, scales = tolerances.noise(d, 1.0), inverse_units(np.sqrt(stats.variances))
        residual_z = residual_z - (residual_z @ right.T) @ left
        distortion: float | None = minimum + restoration.change
        if stats.sample is not None or stats.shrinkage:  # another matrix than Cov(x) was factored
            gram = stats.gram(right) - (right @ rows.T) @ (predicted @ right.T)
            measured = change(left, right, gram, stats.variances)
            distortion = None if measured is None else minimum + measured
        if stats.is_diagonal and self.span_y.names:  # the variances do not determine it
            distortion = None
        bound = tolerances.residual(d, 1.0, amplification)

        def figures(part: slice) -> tuple[float, float]:
            size = largest(rows[part] * scales)
            return (largest(residual_z[part] * scales) / size if size else 0.0), bound

        erased = labels.variable_reports("erased", span_z, factor.whiten(rows), noise, figures)
        kept = "kept", self.span_y, factor.whiten(self.span_y.rows), noise
        # The residual includes the part that `strength` leaves out; the check does not.
        lost = labels.variable_reports(*kept, partial(restoration.figures, lost=True))
        notes = labels.precision_notes(
            erased + labels.variable_reports(*kept, restoration.figures), amplification,
            f"little of the covariance with {listed(self.span_y.names)} is left at fixed labels",
            "keep fewer variables, or pass strength= below 1",
        )  # fmt: skip
        if loss > tolerances.AMPLIFICATION:
            notes.append(
                f"x nearly determines the labels of {listed(span_z.names)}: 1 / (1 - c^2) is "
                f"{loss:.1e}, and rounding errors grow by this factor; leave out the features that "
                "are copies of the labels"
            )
        sample = stats.sample
        return Report(
            method="oracle", n_rows=stats.n_rows, weight=stats.weight, n_features=d,
            rank_covariance=factor.rank, rank=len(left), variables=(*erased, *lost), dropped=0,
            cosines=(), amplification=amplification, rho=None,
            distortion=None if distortion is None else distortion / total, distortion_leace=None,
            solver=factor.solver, tolerance=noise, shrinkage=stats.shrinkage,
            warnings=(NEEDS_LABELS, *notes), strength=strength,
            sampling=None if sample is None else Sampling(sample.n_rows, None),
            oracle=OracleFit(minimum / total, None if stats.shrinkage else rho),
        )  # fmt: skip


def _rho(whitened: Float, between: Float, span: Float) -> float | None:
    """Return the largest rho_o over combinations v of kept labels that covary with x, or None."""
    # rho_o = v^T between v / (v^T between v + |v^T whitened|^2) is the variance of the combination
    # that z predicts, divided by the variance that x and z together predict. `whitened` is Ty,
    # transposed and whitened by T; `between` is Szy^T Szz^+ Szy; `span` is Sy, transposed.
    basis, sizes, _ = np.linalg.svd(span, full_matrices=False)
    basis = basis[:, sizes > tolerances.relative(span.shape[1], "auto") * sizes[0]]
    if not basis.shape[1]:
        return None
    within = basis.T @ (whitened @ whitened.T) @ basis
    values, vectors = np.linalg.eigh(within + basis.T @ between @ basis)
    root = vectors / np.sqrt(np.maximum(values, tolerances.EPS * values[-1]))
    smallest = float(np.linalg.eigvalsh(root.T @ within @ root)[0])
    return 1.0 - min(max(smallest, 0.0), 1.0)


def _label_columns(stats: Statistics, names: list[VariableName]) -> Columns:
    """Return the label columns; raise InputError unless every row has a label of each variable."""
    columns = [labels.LabelColumns.of(name, stats.variable(name)) for name in names]
    for name, variable, *_ in columns:
        if not np.isclose(variable.weight, stats.weight, rtol=1e-9, atol=0.0):
            raise InputError(
                f"rows of weight {variable.weight:g} carry a label of {name!r}, of "
                f"{stats.weight:g} in all; accumulate the labelled rows alone"
            )
    return columns


def _correlations(stats: Statistics, first: Columns, second: Columns) -> Float:
    """Return the correlations of label columns, (k_1, k_2)."""

    def block(a: labels.LabelColumns, b: labels.LabelColumns) -> Float:
        if a.name == b.name:
            return a.correlation()
        pair = stats.pairs.pair_covariance(a.name, b.name, {a.name: a.variable, b.name: b.variable})
        if pair is None or not np.isclose(pair[1], stats.weight, rtol=1e-9, atol=0.0):
            raise InputError(
                f"these moments hold no covariances between the labels of {a.name!r} and "
                f"{b.name!r}: they are of an older version, of rows with only one of them, or of "
                "more than 256 classes"
            )
        return np.asarray(pair[0][np.ix_(a.used, b.used)] / np.outer(a.deviation, b.deviation))

    return np.block([[block(a, b) for b in second] for a in first])


def _shifts(columns: Columns, predicted: Float) -> list[Shift]:
    """Return the shifts of each variable, from the coefficients Szz^+ Sz^T, `predicted`."""
    shifts, start = [], 0
    for name, variable, used, mean, deviation in columns:
        rows = predicted[start : start + len(used)] / deviation[:, None]
        start += len(used)
        matrix = np.zeros((variable.n_columns, rows.shape[1]))
        matrix[used] = rows
        if isinstance(variable, ClassSums):
            occurring = np.flatnonzero(variable.weights > 0)
            matrix = (matrix - mean @ rows)[occurring]
            classes = tuple(variable.names[c] for c in occurring)
            shifts.append(Shift(str(name), classes, np.zeros(len(occurring)), matrix))
        else:
            shifts.append(Shift(str(name), None, variable.mean(), matrix))
    return shifts
