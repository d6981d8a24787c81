"""Quadratic erasure: one map per class, so that class means and class covariances are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.warn import warn
from splince_fast._solve import class_covariances as shrinking
from splince_fast._solve import tolerances
from splince_fast._solve.class_covariances import ClassStatistics
from splince_fast._solve.class_maps import ClassMaps, SingularClassError, Support, solve, support_of
from splince_fast._solve.options import OPTIONS, Option
from splince_fast._solve.selection import Selection
from splince_fast.conditional import NEEDS_LABELS, ConditionalEraser, Shift
from splince_fast.exceptions import (
    InfeasibleError,
    InputError,
    NotEnoughDataError,
    UnseenRowsWarning,
)
from splince_fast.labels import ClassName, VariableName
from splince_fast.labels.names import listed
from splince_fast.methods.classes import (
    Coding,
    class_statistics,
    concept_of,
    read_classes,
    refuse_combination,
)
from splince_fast.moments import Folds, Moments
from splince_fast.projection import Projection
from splince_fast.report import QuadraticFit, Report, VariableReport, correlations_of

Float = NDArray[np.float64]

METHODS = ("optimal", "repair")
# Fraction of the variance that is negligible in the figures of the report.
_NEGLIGIBLE = 1e-12
# A warning is given if less than this fraction of the covariance differences is beyond noise.
_MOSTLY_NOISE = 0.3

_SHRINKAGE = Option(
    "shrinkage",
    "cv",
    lambda s: (
        s is None
        or (s in ("cv", "cv-eig") if isinstance(s, str) else OPTIONS["shrinkage"].accepts(s))
    ),
    "'cv', 'cv-eig', None or a number in [0, 1]",
    "share of the pooled covariance in that of each class",
)


def quadratic(
    moments: Moments | Folds | Mapping[ClassName, Moments] | Mapping[ClassName, Folds],
    *,
    erase: str,
    keep: Selection | None = None,
    shrinkage: float | str | None = "cv",
    method: str = "optimal",
) -> ConditionalEraser:
    """Give all classes of a concept one mean and one covariance, changing x as little as possible.

    Without `keep` this is QLEACE, with it q-SPLINCE: over the maps r = mu + A_c (x - m_c) of the
    rows of class c the minimiser of E|r - x|^2 subject to A_c S_c A_c^T = Sigma for all c and
    Cov(r, y) = Cov(x, y). No quadratic predictor tells the classes of the fitted rows apart. The
    optimum depends on the units of the features, unlike that of :func:`splince_fast.leace`. The
    label of the concept is needed for every row that is erased.

    Class covariances hold d^2 / 2 numbers each. With few rows the eraser writes their sampling
    noise onto new rows: about d (d + 1) / (2 n) for two classes of n rows, in the units of
    `covariance_difference` of the report, whatever was there before. So S_c is replaced by
    a S_w + (1 - a) S_c, S_w the pooled covariance: a = 1 gives equal class means alone, at the
    least change; the class means and Cov(x, y) are exact for any a.

    Parameters
    ----------
    moments : Moments, Folds, or mapping of class to Moments or Folds
        Made with ``by=`` the concept, or the moments of each class. Folds are needed for
        ``shrinkage="cv"``; rows that come in groups need folds with ``groups=``.
    erase : str
        The concept, of classes. Of several make one column of joint cells.
    keep : str, tuple or list of them, optional
        Variables whose covariance with x stays exactly as it is.
    shrinkage : {"cv", "cv-eig"} or float in [0, 1], optional
        The share a. "cv" takes from products of folds what of the differences of S_c and S_w is
        more than noise. "cv-eig", for two classes, does so for each eigenvalue of S_1 - S_0. None
        is 0.
    method : {"optimal", "repair"}
        The least change; or QLEACE, followed by one common linear map that restores Cov(x, y), so
        that heads that are trained afterwards predict as after QLEACE.

    Returns
    -------
    ConditionalEraser
        With a matrix per class in `maps`. Of its :attr:`~ConditionalEraser.report`, `gap` and
        `determinant` of ``report.quadratic`` say how near the optimum it is; its
        `covariance_difference` and `covariance_difference_left` are expected of new rows.

    Raises
    ------
    InputError
        Moments without ``by=``, or of a sample or sketch; "cv" without folds; rows without a label
        of what is kept; a parameter out of range.
    LabelError
        A continuous concept.
    ConstantVariableError
        A concept or a kept variable with a single value.
    InfeasibleError
        No class relates x to a combination of what is kept, and x covaries with it; or more
        combinations are kept than x has dimensions within the classes.
    NotEnoughDataError
        A class with no more rows than the rank of S_w, plus one, and a = 0.

    Warns
    -----
    UnseenRowsWarning
        Few rows: new rows get more noise than is removed from them, or most of the differences of
        the class covariances is noise.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=2000)
    >>> X = rng.normal(size=(2000, 3))
    >>> X[z == 1, 0] *= 2
    >>> y = (X[:, 0] + rng.normal(size=2000) > 0).astype(int)
    >>> moments = {c: sf.Moments().update(X[z == c], {"y": y[z == c]}) for c in (0, 1)}
    >>> eraser = sf.quadratic(moments, erase="z", keep="y", shrinkage=None)
    >>> clean = eraser(X, {"z": z})
    >>> bool(np.allclose(np.cov(clean[z == 1].T, ddof=0), np.cov(clean[z == 0].T, ddof=0)))
    True
    """
    _SHRINKAGE.check(shrinkage)
    if method not in METHODS:
        raise InputError(f"method is {method!r}; it must be one of {METHODS}")
    name = concept_of(erase, "quadratic")
    source = read_classes(moments, name, "quadratic")
    if isinstance(shrinkage, str) and len(source.folds) < 2:
        raise InputError(
            f"shrinkage={shrinkage!r} is chosen on folds, and these moments are of all rows; pass "
            f"sf.Folds.from_blocks(source, folds=2, by={name!r}), or shrinkage= a number in [0, 1]"
        )
    coding = Coding.of(source.whole, keep, "quadratic")
    whole = class_statistics(source.whole, coding)
    if shrinkage == "cv-eig" and len(whole.rows) != 2:
        raise InputError(
            f"shrinkage='cv-eig' is for two classes, and {name!r} has {len(whole.rows)}; use 'cv'"
        )
    roundoff = max(part._state().unit_roundoff for part in source.whole.values())
    support = support_of(whole.pooled, whole.mean, roundoff)
    # The covariance differences are read by the folds, and by the warning without shrinkage.
    own = whole.differences(support) if source.folds or not shrinkage else np.zeros((1, 0, 0))
    folds = [class_statistics(part, coding).differences(support) for part in source.folds]
    shrunk = _Shrinkage.chosen(shrinkage, whole.fractions, own, folds)
    covariances = shrunk.covariances(whole, support)
    names = list(source.whole)
    if not shrunk.share and (whole.rows <= support.rank + 1).any():
        c = int(np.argmin(whole.rows))
        raise NotEnoughDataError(
            f"the class {names[c]!r} of {name!r} has {int(whole.rows[c]):,} rows, and its "
            f"covariance needs more than {support.rank + 1:,} (rank of x, plus 1): it would "
            "be singular. Pass folds with shrinkage='cv', a number above 0, or fewer principal "
            "components"
        )
    optimal = method == "optimal"
    try:
        solution = solve(whole.problem(support, covariances), optimal=optimal)
    except SingularClassError as error:
        raise NotEnoughDataError(
            f"the covariance of the class {names[error.index]!r} of {name!r} is singular where x "
            "varies in other classes: features that are constant in that class, or rows that "
            "repeat. Pass folds with shrinkage='cv', or a number above 0"
        ) from error
    if solution.lost is not None:
        refuse_combination(name, coding, solution.lost, "quadratic")
    if not np.isfinite(solution.cost):
        kept = listed([str(own.name) for own in coding.kept])
        raise InfeasibleError(
            f"quadratic finds no maps that keep {kept} while they give the classes of {name!r} one "
            f"covariance: {solution.rank} combination(s) of labels are kept, and within the "
            f"classes x varies in {support.rank} dimension(s), or relations of the classes cancel. "
            "Keep fewer variables or classes, use more features, or sf.oracle(classwise=True), "
            "which does not make the covariances equal",
            1.0,
        )
    before = left = None
    if folds:
        before = shrinking.over_folds(folds)
        left = shrinking.left_over(before, own, shrunk.share, shrunk.eigenvalues)
    notes = _notes(name, names, whole.rows, own, support.rank, shrunk.share, before, source.groups)
    for note in notes:
        warn(note, UnseenRowsWarning)
    label = "QLEACE" if keep is None else "q-SPLINCE" if optimal else "repair @ QLEACE"
    report = _report(
        label, name, whole, support, covariances, solution, coding, (before, left), shrunk.share,
        notes, optimal=optimal,
    )  # fmt: skip
    empty = np.empty((0, len(whole.mean)))
    feature_names = coding.total.feature_names
    after = Projection._make(empty, empty, whole.mean, method=label, feature_names=feature_names)
    shift = Shift(name, tuple(names), np.zeros(len(names)), whole.means - whole.mean)
    return ConditionalEraser([shift], after, None, maps=solution.maps, method=label, report=report)


# -- shrinkage, and what is said of it -------------------------------------------------------------


class _Shrinkage(NamedTuple):
    """Shrinkage of the class covariances."""

    share: float  # intensity a; with eigenvalues, 1 - <estimate, raw> / |raw|^2
    eigenvalues: Float | None = None

    @classmethod
    def chosen(
        cls, policy: float | str | None, fractions: Float, own: Float, folds: Sequence[Float]
    ) -> _Shrinkage:
        """The intensity by `policy`, from whitened covariance differences of rows and folds."""
        if not isinstance(policy, str):
            return cls(float(policy or 0.0))
        if policy == "cv":
            return cls(shrinking.intensity(fractions, own, folds))
        values = shrinking.eigenvalues(fractions, folds)
        raw = np.linalg.eigvalsh(own[1] - own[0])
        size = float(raw @ raw)
        return cls(float(np.clip(1.0 - values @ raw / size, 0.0, 1.0)) if size else 1.0, values)

    def covariances(self, whole: ClassStatistics, support: Support) -> Float:
        """(k, d, d): the shrunk covariance of each class."""
        if self.eigenvalues is None:
            return shrinking.shrunk(whole, self.share)
        return shrinking.with_eigenvalues(whole, support, self.eigenvalues)


def _notes(
    name: VariableName, names: list[ClassName], rows: Float, own: Float, r: int, share: float,
    before: float | None, groups: str | None,
) -> tuple[str, ...]:  # fmt: skip
    """Warnings of the expected effect on new rows."""
    k = len(rows)
    split = (
        f"Folds keep the classes of {groups!r} together"
        if groups is not None
        else "Rows that come in groups, such as prompts of one noun, need folds with groups="
    )
    rare = names[int(np.argmin(rows))]
    if share and before is not None and 1.0 - share < _MOSTLY_NOISE:
        return (
            f"{1.0 - share:.2g} of the differences between the class covariances of {name!r} "
            "is more than noise, and the rest is left in the rows: use fewer principal components, "
            f"or more rows. {split}",
        )
    noise = (k - 1) / k**2 * float(np.sum(r * (r + 1) / rows))
    if share:
        return ()
    size = shrinking.product(own, own) - noise if before is None else before
    if noise <= size:
        return ()
    needed = "" if size <= 0 else f"; about {noise / size:.2g} times as many rows would be needed"
    known = f"{max(size, 0.0):.3g}" if size > 0 else "nothing that is more than noise"
    return (
        f"without shrinkage the noise of {int(rows.min()):,} rows (class {rare!r}) in "
        f"covariances of {r} dimensions leaves a squared difference of about {noise:.3g} in new "
        f"rows, where {known} was before{needed}. Pass folds with shrinkage='cv', or fewer "
        f"principal components. {split}",
    )


# -- the report ------------------------------------------------------------------------------------


def _report(
    label: str, name: VariableName, whole: ClassStatistics, support: Support,
    covariances: Float, solution: ClassMaps, coding: Coding,
    differences: tuple[float | None, float | None], share: float, notes: tuple[str, ...], *,
    optimal: bool,
) -> Report:  # fmt: skip
    """Effect of the maps on the fitted rows.

    `differences`: dS2 of new rows, before erasing and after it.
    """
    before, left = differences
    p, d = whole.fractions, len(whole.mean)
    means = np.sqrt(p)[:, None] * (whole.means - whole.mean)
    total = float(np.sum(means**2))  # o-LEACE's change
    variance = total + sum(
        float(q * np.trace(s)) for q, s in zip(p, whole.covariances, strict=True)
    )
    u, sizes, _ = np.linalg.svd(support.whitener.T @ means.T, full_matrices=False)
    changed, size, products, crosses = total, 1.0, 0.0, 0.0
    after_maps = []
    for q, a, true, used, mean in zip(
        p, solution.maps, whole.covariances, covariances, whole.means, strict=True
    ):
        step = a - np.eye(d)
        changed += float(q * np.vdot(step @ true, step))
        norm = 1.0 + float(np.linalg.norm(step))
        size = max(size, norm)
        # Rounded rows change S by eps |x| |deviation|, and A S A^T by |A|^2 times that.
        deviation = float(np.trace(used)) ** 0.5
        length = deviation + float(np.linalg.norm(mean))
        products = max(products, norm**2 * deviation * length)
        crosses += q * norm * length
        after_maps.append(a @ used @ a.T)
    erased = np.stack(after_maps)
    scale = float(np.linalg.norm(erased[0])) or 1.0
    residual = max(float(np.linalg.norm(c - erased[0])) for c in erased) / scale
    rounding = 8.0 * d * tolerances.EPS / support.smallest**0.5
    # sqrt(1 - c^2) of the canonical correlations c of x and the classes: 1 / sqrt(1 + size^2).
    canonical = sizes / np.sqrt(1.0 + sizes**2)
    noise = tolerances.noise(d, support.smallest)
    rank = int(np.count_nonzero(canonical > noise))
    variables = [
        VariableReport(
            str(name), "erased", rank, tuple(map(float, canonical[:rank])), residual,
            rounding * max(size**2, products / scale), f"classes ({len(p)})",
        )
    ]  # fmt: skip
    kept = whole.kept
    after = sum(q * a @ cross for q, a, cross in zip(p, solution.maps, whole.crosses, strict=True))
    white = support.whitener.T @ kept
    shrink = 1.0 - 1.0 / np.sqrt(1.0 + sizes**2)
    white = (white - (u * shrink) @ (u.T @ white)).T  # whitened by Cov(x) of all rows
    for text, part, kind, correlations in correlations_of(coding.span, white):
        norm = float(np.linalg.norm(kept[:, part]))
        miss = float(np.linalg.norm((after - kept)[:, part]))
        variables.append(
            VariableReport(
                text, "kept", int(np.count_nonzero(np.array(correlations) > noise)), correlations,
                miss / norm if norm else 0.0,
                rounding * max(size**2, crosses / norm if norm else 0.0), kind,
            )
        )  # fmt: skip
    # LEACE removes the variance |Cov(x) W u|^2 / (1 + size^2) per direction u, if the means are in
    # the support.
    basis = support.basis
    outside = 0.0 if basis is None else np.linalg.norm(means - (means @ basis) @ basis.T)
    columns = whole.pooled @ (support.whitener @ u[:, :rank])
    leace = None
    if variance and outside**2 <= _NEGLIGIBLE * variance:
        leace = float(np.sum(columns**2 * (1.0 + sizes[:rank] ** 2))) / variance
    return Report(
        method=label, n_rows=int(whole.rows.sum()), weight=float(whole.weights.sum()),
        n_features=d, rank_covariance=support.rank, rank=0, variables=tuple(variables), dropped=0,
        cosines=(), amplification=1.0, rho=None, distortion=changed / variance if variance else 0.0,
        distortion_leace=leace, solver="cholesky",
        tolerance=noise, shrinkage=share, warnings=(NEEDS_LABELS, *notes),
        quadratic=QuadraticFit(
            float(solution.determinants.min()), solution.gap if optimal else None, before, left
        ),
    )  # fmt: skip
