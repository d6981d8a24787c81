"""Erasing with the labels of the concept at hand: o-LEACE, and o-SPLINCE, which keeps a task.

With S = Cov(x), Sz = Cov(x, z), Szz = Cov(z), Sy = Cov(x, y), Szy = Cov(z, y), and t the rows
without the part of x that z predicts,

    t = x - Sz Szz^+ (z - E z),    T = Cov(t) = S - Sz Szz^+ Sz^T,    Ty = Sy - Sz Szz^+ Szy

r = E x + B (t - E x) has Cov(r, z) = 0, and B = I + b X H^+ K^T with X = Sy - Ty, K = T^+ Ty,
H = Ty^T K gives Cov(r, y) = Ty + b X: Sy for b = 1. It is the least E|r - x|^2 of all affine maps
of (x, z) with these covariances, feasible iff the kernel of Ty is in that of Sy.

T needs no factorisation of its own. With S = L L^T, A = L^+ Sz and the eigenvectors V of
Szz^{+1/2} A^T A Szz^{+1/2} = V diag(c^2) V^T, U = A Szz^{+1/2} V / c is orthonormal and

    T^+ = (L^+)^T (I + U diag(c^2 / (1 - c^2)) U^T) L^+
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import STATUS_OK
from splince_fast._runtime.warn import warn
from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor
from splince_fast._solve.messages import raise_numerical
from splince_fast._solve.options import OPTIONS, Options
from splince_fast._solve.restore import Restoration, restore
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.conditional import NEEDS_LABELS, ConditionalEraser, Shift
from splince_fast.exceptions import InfeasibleError, InputError, PrecisionWarning, UnseenRowsWarning
from splince_fast.labels import class_key
from splince_fast.labels.names import listed
from splince_fast.methods.classes import Classes, concept_of, read_classes
from splince_fast.methods.closed_forms import leace, splince
from splince_fast.methods.label_columns import LabelColumns
from splince_fast.methods.repair import refuse_lost
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
    classwise: bool = False,
) -> ConditionalEraser:
    """Erase variables with their labels at hand, and keep the covariance with others.

    Of all maps r(x, z) that are affine in the rows and the labels, the one of the least
    E|r - x|^2 with Cov(r, z) = 0 and Cov(r, y) = Cov(x, y). It changes the rows at most as much
    as SPLINCE, and is feasible in more cases, also where Cov(x, z) and Cov(x, y) span the same
    space. Without `keep` it is o-LEACE, which moves whole classes and so keeps the covariance
    with every variable *within* classes exactly, at no cost.

    Parameters
    ----------
    moments : Moments, Factored or Folds
        Of rows that all carry the labels, passed together.
    erase : str or list of str
        Variables to erase, jointly.
    keep : str or list of str, optional
        Variables whose covariance with x stays exactly as it is.
    strength : float in [0, 1]
        Fraction of the covariance with what is kept that is given back; 0 is o-LEACE.
    missing : {"splince", "raise"}
        Map of rows without a label: SPLINCE of the same moments and `strength` (LEACE if nothing
        is kept), or none: such rows raise LabelError. The concept is guarded among all rows if
        labels are missing at random, or missing depends on the concept alone.
    classwise : bool
        Use a map per class, r = mu + A_c (x - m_c) with A_c = I + X H_w^+ B_c^T, B_c = S_c^+ S_cy,
        H_w = sum_c p_c S_cy^T B_c: the least change of all maps that are affine in each class,
        never above that of the one map. It has as many coefficients for each class, so that on
        new rows the kept covariance errs more. For one variable of classes, and moments made with
        ``by=`` it.

    Returns
    -------
    ConditionalEraser
        ``eraser(X, {"gender": z})``.

    Raises
    ------
    InputError
        A parameter out of range; rows without a label in the moments; moments of an older file,
        which do not know how labels go together; `classwise` with moments that were not made with
        ``by=``.
    InfeasibleError
        A kept combination of labels covaries with x through what is erased alone; or SPLINCE, for
        rows without a label, cannot be, which ``missing="raise"`` leaves out.
    UnknownVariableError, ConstantVariableError, NotEnoughDataError
        As :func:`splince`.

    Warns
    -----
    PrecisionWarning
        Kept deviations are enlarged more than 1e4 times, or x nearly determines the labels:
        1 / (1 - c^2) above 1e4 for a canonical correlation c.
    UnseenRowsWarning
        `classwise` with a class of no more rows than dimensions.

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
    total = moments._total() if isinstance(moments, Folds) else moments
    erased = names_of(erase, "erase")
    kept = [] if keep is None else names_of(keep, "keep")
    for name in erased:
        if not isinstance(name, str):
            raise InputError(f"erase names the joint cells {name!r}; name the variables one by one")
    classes = None
    if classwise and kept:
        classes = read_classes(moments, concept_of(erase, "classwise"), "classwise").whole
    with statistics(total) as stats, stats.memory(True) as memory:
        span_z = span_of(stats, erased, "erase", True)
        span_y = span_of(stats, kept, "keep", True) if kept else Span([], span_z.rows[:0], [], [])
        z = [LabelColumns.of(name, stats.variable(name)) for name in erased]
        y = [LabelColumns.of(name, stats.variable(name)) for name in kept]
        _check_rows(stats, [*z, *y])
        factor = stats.factored(Options(), 0.0, memory)
        if factor.status != STATUS_OK:
            raise_numerical(factor.status, "auto")
        # one solve for all spans
        spans = np.concatenate([span_z.rows, span_y.rows])
        both = factor.whiten(spans)
        white = {"erased": both[: len(span_z.rows)], "kept": both[len(span_z.rows) :]}
        Szz = _blocks(stats, z, z)
        inverse, root = _inverses(Szz)
        predicted = inverse @ span_z.rows  # Szz^+ Sz^T, (k, d)
        shifts = tuple(_shifts(z, predicted))
        found = rho = None
        lost = 1.0
        if kept:
            Szy = _blocks(stats, z, y)
            span_t = span_y.rows - Szy.T @ predicted
            change = span_y.rows - span_t
            if classes is None:
                whitened, solved, lost = _at_fixed_labels(
                    both, factor.solve(spans), inverse, root, Szy
                )
            else:
                whitened, solved, span_t = _in_classes(classes, y)
            found = restore(
                whitened, solved, span_t, span_y.rows, np.sqrt(stats.variances), float(strength),
                change,
            )  # fmt: skip
            between = Szy.T @ inverse @ Szy
            if found.lost is not None:
                own = float(np.sum((found.lost @ found.whitened) ** 2))
                share = own / (own + float(found.lost @ between @ found.lost))
                remedy = (
                    "leave keep= out: that keeps the relation within classes. SPLINCE cannot keep "
                    f"it either (1 - rho_o = {share:.1e})"
                )
                refuse_lost(found, "oracle", y, remedy)
            rho = _rho(found.whitened, between, span_y.rows)
        mean, feature_names = stats.mean, stats.feature_names
        report = _report(
            stats, factor, span_z, span_y, white, predicted, found, float(strength), rho, lost,
            span_z.rows - Szz @ predicted,
        )  # fmt: skip
        fallback = None
        if missing == "splince":
            own_factor: Any = _Reused(stats, factor)
            try:
                fallback = (
                    splince(own_factor, erase=erased, keep=kept, strength=strength)
                    if kept
                    else leace(own_factor, erase=erased)
                )
            except InfeasibleError as error:
                raise InfeasibleError(
                    f"rows without a label would get SPLINCE, which cannot be: {error}. With the "
                    "labels it can be: pass missing='raise', and the labels of every row",
                    error.cosine,
                ) from error
    empty = np.empty((0, len(mean)))
    left, right, maps = empty, empty, None
    if found is not None and classes is None:
        left, right = found.left, found.right
    elif found is not None and classes is not None:
        maps = _maps(found, shifts[0], classes)
    after = Projection._make(left, right, mean, method="oracle", feature_names=feature_names)
    for note in report.warnings[1:]:
        warn(note, PrecisionWarning)
    return ConditionalEraser(shifts, after, fallback, maps=maps, method="oracle", report=report)


class _Reused:
    """Statistics whose `factored` returns a given factor instead of computing one."""

    def __init__(self, stats: Statistics, factor: Factor) -> None:
        self._stats, self._factor = stats, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stats, name)

    def memory(self, whitened: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def factored(self, options: Options, share: float, memory: Float | None) -> Factor:
        return self._factor

    def _statistics(self) -> AbstractContextManager[_Reused]:
        return nullcontext(self)


def _rho(white: Float, between: Float, span: Float) -> float | None:
    """The largest rho_o of the combinations of what is kept that x covaries with; None if none do.

    `white` whitens Cov(x, y given z), `between` is Szy^T Szz^+ Szy, `span` Sy,
    transposed.
    """
    basis, sizes, _ = np.linalg.svd(span, full_matrices=False)
    basis = basis[:, sizes > tolerances.relative(span.shape[1], "auto") * sizes[0]]
    if not basis.shape[1]:
        return None
    within = basis.T @ (white @ white.T) @ basis
    values, vectors = np.linalg.eigh(within + basis.T @ between @ basis)
    root = vectors / np.sqrt(np.maximum(values, tolerances.EPS * values[-1]))
    least = float(np.linalg.eigvalsh(root.T @ within @ root)[0])
    return 1.0 - min(max(least, 0.0), 1.0)


def _at_fixed_labels(
    white: Float, solved: Float, inverse: Float, root: Float, Szy: Float
) -> tuple[Float, Float, float]:
    """Cov(x, y given z), (k, d), whitened by T = Cov(x given z), and T^+ times it.

    From the factor of S = Cov(x): T = S - Sz Szz^+ Sz^T is not factored. The third result is the
    largest 1 / (1 - c^2), c the canonical correlations of x and z, the digits that T^+ loses.

    Parameters
    ----------
    white, solved : (k_z + k_y, d) float64
        L^+ and S^+ times Sz and Sy.
    inverse, root : (k_z, k_z) float64
        Szz^+ and its root.
    Szy : (k_z, k_y) float64
    """
    k, d = len(inverse), solved.shape[1]
    combinations, cosines, basis = np.linalg.svd(root @ white[:k], full_matrices=False)
    some = cosines > tolerances.noise(d, 1.0)
    cosines, basis = np.minimum(cosines[some], 1.0), basis[some]
    # Directions that z determines are outside the range of T: their gain is 0.
    left = 1.0 - cosines**2
    inside = left > d * tolerances.EPS
    gain = np.where(inside, 1.0 / np.where(inside, left, 1.0), 0.0)
    dual = (combinations.T[some] @ root @ solved[:k]) / cosines[:, None]  # S^+ L basis^T
    weights = Szy.T @ inverse
    own, own_solved = white[k:] - weights @ white[:k], solved[k:] - weights @ solved[:k]
    along = own @ basis.T
    whitened = own + (along * (np.sqrt(gain) - 1.0)) @ basis
    return whitened, own_solved + (along * (gain - 1.0)) @ dual, float(gain.max(initial=1.0))


def _in_classes(classes: Classes, columns: list[LabelColumns]) -> tuple[Float, Float, Float]:
    """sqrt(p_c) times S_cy whitened by S_c, S_c^+ S_cy and S_cy, (k, m d): classes side by side.

    Warns of classes of so few rows that their maps fit the noise.
    """
    weights = np.array([part.weight for part in classes.values()])
    parts, few = [], []
    for (name, part), share in zip(classes.items(), np.sqrt(weights / weights.sum()), strict=True):
        with statistics(part) as stats:
            crosses = [own.within(stats.variable(own.name))[0] for own in columns]
            span = np.ascontiguousarray(share * np.hstack(crosses).T)
            factor = stats.factored(Options(), 0.0, None)
            if factor.status != STATUS_OK:
                raise_numerical(factor.status, "auto")
            parts.append((factor.whiten(span), factor.solve(span), span))
            if stats.n_rows <= factor.rank + 1:
                few.append(name)
    if few:
        warn(
            f"class(es) {listed(few)} have no more rows than x has dimensions: their maps fit the "
            "noise of these rows, and change new rows far more; leave classwise=False, or use "
            "fewer features",
            UnseenRowsWarning,
        )
    whitened, solved, spans = (np.hstack(blocks) for blocks in zip(*parts, strict=True))
    return whitened, solved, spans


def _maps(found: Restoration, shift: Shift, classes: Classes) -> Float:
    """(k, d, d): A_c = I - left^T right_c / sqrt(p_c), in the order of the classes of the shift."""
    weights = np.array([part.weight for part in classes.values()])
    rights = np.split(found.right, len(classes), axis=1)
    steps = {
        class_key(name): found.left.T @ right / share
        for name, right, share in zip(
            classes, rights, np.sqrt(weights / weights.sum()), strict=True
        )
    }
    ordered = np.stack([steps[class_key(name)] for name in shift.classes or ()])
    return np.asarray(np.eye(found.left.shape[1]) - ordered)


def _check_rows(stats: Statistics, columns: list[LabelColumns]) -> None:
    """Raise InputError unless every row carries every label."""
    for column in columns:
        weight = column.variable.weight
        if not np.isclose(weight, stats.weight, rtol=1e-9, atol=0.0):
            raise InputError(
                f"rows of weight {weight:g} carry a label of {column.name!r}, of {stats.weight:g} "
                "in all: oracle needs the labels of all rows of the moments; accumulate the "
                "labelled rows alone (rows without a label are erased by eraser.fallback)"
            )


def _blocks(stats: Statistics, first: list[LabelColumns], second: list[LabelColumns]) -> Float:
    """Block matrix of the correlations between the columns of several variables."""
    return np.block([[_pair(stats, a, b) for b in second] for a in first])


def _pair(stats: Statistics, a: LabelColumns, b: LabelColumns) -> Float:
    """(k_a, k_b): correlations of the columns of two variables."""
    if a.name == b.name:
        return a.correlation()
    found = stats.pairs.pair_covariance(a.name, b.name, {a.name: a.variable, b.name: b.variable})
    if found is None or not np.isclose(found[1], stats.weight, rtol=1e-9, atol=0.0):
        raise InputError(
            f"these moments do not know how the labels of {a.name!r} and {b.name!r} go together: "
            "they come from a file of an older version, from rows that carry one label only, or "
            "have a variable of more than 256 classes; accumulate them again, from rows that carry "
            "both labels"
        )
    return np.asarray(found[0][np.ix_(a.used, b.used)] / np.outer(a.deviation, b.deviation))


def _inverses(matrix: Float) -> tuple[Float, Float]:
    """The pseudo-inverse of correlations, and its root."""
    values, vectors = np.linalg.eigh(matrix)
    some = values > len(values) * 8 * np.finfo(np.float64).eps * values[-1]
    vectors, values = vectors[:, some], values[some]
    return (vectors / values) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def _shifts(columns: list[LabelColumns], predicted: Float) -> list[Shift]:
    """The shift of each variable, from its rows of Szz^+ Sz^T, `predicted`."""
    found, start = [], 0
    for own in columns:
        rows = predicted[start : start + len(own.used)] / own.deviation[:, None]
        start += len(own.used)
        if isinstance(own.variable, ClassSums):
            seen = np.flatnonzero(own.variable.weights > 0)
            table = np.zeros((own.variable.n_columns, rows.shape[1]))
            table[own.used] = rows
            table -= own.mean @ rows
            classes = tuple(own.variable.names[c] for c in seen)
            found.append(Shift(str(own.name), classes, np.zeros(len(seen)), table[seen]))
            continue
        assert isinstance(own.variable, ColumnSums)
        whole = np.zeros((own.variable.n_columns, rows.shape[1]))
        whole[own.used] = rows
        mean = own.variable.reference_mean()
        found.append(Shift(str(own.name), None, mean, whole))
    return found


def _report(
    stats: Statistics, factor: Factor, span_z: Span, span_y: Span,
    white: dict[str, Float], predicted: Float,
    found: Restoration | None, strength: float, rho: float | None, lost: float, left: Float,
) -> Report:  # fmt: skip
    """The report: erased and kept variables, and the cost."""
    variance = float(stats.variances.sum())
    least = float(np.sum(span_z.rows * predicted))
    d, variables, notes = len(stats.mean), [], [NEEDS_LABELS]
    cost, amplification = least, 1.0
    if found is not None:
        if stats.sample is None and not stats.share(Options()):
            cost += found.change
        else:  # another matrix than Cov(x) was factored
            inner = stats.gram(found.right) - (found.right @ span_z.rows.T) @ (
                predicted @ found.right.T
            )
            cost += float(np.vdot(found.left @ found.left.T, inner))
        amplification = found.amplification
    bound = tolerances.residual(d, 1.0, amplification)
    for role, span in (("erased", span_z), ("kept", span_y)):
        for name, part, kind, correlations in correlations_of(span, white[role]):
            rank = int(np.count_nonzero(np.array(correlations) > tolerances.noise(d, 1.0)))
            if role == "erased":
                rest, size = left[part], float(np.linalg.norm(span.rows[part]))
                if found is not None and found.right.shape == found.left.shape:
                    rest = rest - (rest @ found.right.T) @ found.left
                errors = float(np.linalg.norm(rest)) / size if size else 0.0, bound
            else:
                assert found is not None
                errors = found.errors(part)
            variables.append(VariableReport(name, role, rank, correlations, *errors, kind))
    if amplification > tolerances.AMPLIFICATION:
        notes.append(
            f"little of the covariance with {listed(span_y.names)} is left at fixed labels: "
            f"keeping it enlarges deviations up to {amplification:.1e} times, with their rounding "
            "and noise; keep fewer variables, or pass strength= below 1"
        )
    if lost > tolerances.AMPLIFICATION:
        notes.append(
            f"x determines the labels of {listed(span_z.names)} nearly: 1 / (1 - c^2) is "
            f"{lost:.1e}, and the relation at fixed labels has lost as many digits; leave out the "
            "features that are copies of the labels"
        )
    sample = stats.sample
    # A sketch may understate Cov(x).
    measured = stats.metric is None or found is None
    fraction = 1.0 / variance if variance else 0.0
    return Report(
        method="oracle", n_rows=stats.n_rows, weight=stats.weight, n_features=d,
        rank_covariance=factor.rank, rank=0 if found is None else len(found.left),
        variables=tuple(variables), dropped=0, cosines=(), amplification=amplification, rho=None,
        distortion=cost * fraction if measured else None, distortion_leace=None,
        solver=factor.solver, tolerance=tolerances.noise(d, 1.0), shrinkage=0.0,
        warnings=tuple(notes), strength=strength,
        sampling=None if sample is None else Sampling(sample.n_rows, None),
        oracle=OracleFit(least * fraction, rho),
    )  # fmt: skip
