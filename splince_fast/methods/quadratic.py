"""Quadratic erasure: a map per class gives all classes equal means and equal covariances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.warn import warn
from splince_fast._solve import class_covariances as shrinking
from splince_fast._solve import tolerances
from splince_fast._solve.class_covariances import ClassStatistics, HeldOutEigenvalues
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
# The report gives the distortion of LEACE only if the variance between class means off the range of
# S_w is at most this fraction of the total variance.
_NEGLIGIBLE = 1e-12
# UnseenRowsWarning is issued if 1 - intensity, the fraction of the covariance differences that is
# not noise, is below this value.
_MOSTLY_NOISE = 0.3

_SHRINKAGE = Option(
    "shrinkage",
    "cv",
    lambda s: (
        s is None
        or (s in ("cv", "cv-eig") if isinstance(s, str) else OPTIONS["shrinkage"].accepts(s))
    ),
    "'cv', 'cv-eig', None or a number in [0, 1]",
    "weight of the pooled covariance in each class covariance",
)


def quadratic(
    moments: Moments | Folds | Mapping[Any, Moments] | Mapping[Any, Folds],
    *,
    erase: str,
    keep: Selection | None = None,
    shrinkage: float | str | None = "cv",
    method: str = "optimal",
) -> ConditionalEraser:
    """Give all classes of a concept equal means and covariances, changing x as little as possible.

    The eraser maps the rows of class c, with mean m_c and covariance S_c, to
    r = mu + A_c (x - m_c), where mu = E x. Without `keep`, the A_c minimise E|r - x|^2 subject to a
    common covariance A_c S_c A_c^T of all classes (QLEACE). With `keep`, Cov(r, y) = Cov(x, y) is a
    further constraint (q-SPLINCE). Without shrinkage, no quadratic predictor tells the classes of
    the fitted rows apart. The optimum depends on the units of the features, unlike that of
    :func:`splince_fast.leace`. Every row to erase needs its label of the concept.

    A class covariance has about d^2 / 2 free entries. If it is estimated from few rows, the eraser
    adds its sampling noise to new rows. For two classes of n rows each, the noise adds a squared
    difference of about d (d + 1) / (2 n) between the class covariances, regardless of the true
    difference, in the units of `covariance_difference` of the report. Shrinkage replaces S_c by
    a S_w + (1 - a) S_c, with the pooled covariance S_w and the intensity a. With a = 1, only the
    class means become equal, with the least change. Equal class means and Cov(r, y) = Cov(x, y)
    hold exactly for any a.

    Parameters
    ----------
    moments : Moments, Folds, or mapping of class to Moments or Folds
        Moments made with ``by=`` the name of the concept, or the moments of each class.
        ``shrinkage="cv"`` requires Folds, made with ``groups=`` if rows come in groups.
    erase : str
        Name of the concept, a variable of classes. To erase several variables, make one column of
        their joint cells.
    keep : str, tuple or list of them, optional
        Variables whose covariance with x stays exactly as it is.
    shrinkage : {"cv", "cv-eig"} or float in [0, 1], optional
        Intensity a; None is 0. "cv" estimates 1 - a from folds, as the fraction of S_c - S_w that
        is not noise. "cv-eig", for two classes, estimates each eigenvalue of the whitened S_1 - S_0
        from folds.
    method : {"optimal", "repair"}
        "optimal" changes the rows least. "repair" is QLEACE followed by one linear map, common to
        all classes, that restores Cov(x, y); linear heads trained on the erased rows then predict
        as after QLEACE.

    Returns
    -------
    ConditionalEraser
        Eraser with a matrix per class in `maps`. In its :attr:`~ConditionalEraser.report`, `gap`
        and `determinant` of ``report.quadratic`` show how close to the optimum the maps are, and
        `covariance_difference` and `covariance_difference_left` are expected values for new rows.

    Raises
    ------
    InputError
        The moments were made without ``by=``, or with a sample or sketch; `shrinkage` requires
        folds, and `moments` are not folds; rows have no label of a kept variable; or a parameter is
        out of range.
    LabelError
        The concept is continuous.
    ConstantVariableError
        The concept or a kept variable has a single value.
    InfeasibleError
        A combination of kept labels covaries with x over all rows but within no class; or more
        combinations are kept than x has dimensions within the classes; or the cross-covariances of
        the classes cancel.
    NotEnoughDataError
        With a = 0, a class has no more rows than the rank of S_w plus one, or a singular
        covariance.

    Warns
    -----
    UnseenRowsWarning
        There are few rows, and the noise that the eraser adds to new rows exceeds the difference
        that it removes, or most of the differences between the class covariances is noise.

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
    coding = Coding.of(source.all_rows, keep, "quadratic")
    stats = class_statistics(source.all_rows, coding)
    if shrinkage == "cv-eig" and len(stats.rows) != 2:
        raise InputError(
            f"shrinkage='cv-eig' is for two classes, and {name!r} has {len(stats.rows)}; use 'cv'"
        )
    roundoff = max(part._state().unit_roundoff for part in source.all_rows.values())
    support = support_of(stats.pooled, stats.mean, roundoff)
    # The covariance differences serve the shrinkage from folds, and the warning that is issued
    # without shrinkage.
    differences = np.zeros((1, 0, 0))
    if source.folds or not shrinkage:
        differences = stats.differences(support)
    folds = [class_statistics(part, coding).differences(support) for part in source.folds]
    shrunk = _Shrinkage.of_option(shrinkage, stats.fractions, differences, folds)
    covariances = shrunk.covariances(stats, support)
    names = list(source.all_rows)
    if not shrunk.intensity and (stats.rows <= support.rank + 1).any():
        c = int(np.argmin(stats.rows))
        raise NotEnoughDataError(
            f"the class {names[c]!r} of {name!r} has {int(stats.rows[c]):,} rows, and its "
            f"covariance is singular unless there are more than {support.rank + 1:,} (rank of x, "
            "plus 1). Pass folds with shrinkage='cv', a number above 0, or fewer principal "
            "components"
        )
    optimal = method == "optimal"
    try:
        solution = solve(stats.problem(support, covariances), optimal=optimal)
    except SingularClassError as error:
        raise NotEnoughDataError(
            f"the covariance of the class {names[error.index]!r} of {name!r} is singular where x "
            "varies in other classes: features that are constant in that class, or rows that "
            "repeat. Pass folds with shrinkage='cv', or a number above 0"
        ) from error
    if solution.lost_combination is not None:
        refuse_combination(name, coding, solution.lost_combination, "quadratic")
    if not np.isfinite(solution.cost):
        kept = listed([str(columns.name) for columns in coding.kept])
        raise InfeasibleError(
            f"quadratic found no maps that keep {kept} and give all classes of {name!r} the same "
            f"covariance: {solution.rank} combination(s) of labels are kept, and within the "
            f"classes x varies in {support.rank} dimension(s), or the cross-covariances of the "
            "classes cancel. Keep fewer variables or classes, use more features, or use "
            "sf.oracle(classwise=True), which does not make the covariances equal",
            1.0,
        )
    before = remaining = None
    if folds:
        before = shrinking.unbiased_difference(folds)
        remaining = shrinking.expected_difference(before, differences, *shrunk)
    notes = _noise_warning(
        name, names, stats.rows, differences, support.rank, shrunk.intensity, before, source.groups
    )
    for note in notes:
        warn(note, UnseenRowsWarning)
    label = "QLEACE" if keep is None else "q-SPLINCE" if optimal else "repair @ QLEACE"
    report = _report(
        label, name, stats, support, covariances, solution, coding, (before, remaining),
        shrunk.intensity, notes, optimal=optimal,
    )  # fmt: skip
    empty = np.empty((0, len(stats.mean)))
    feature_names = coding.total.feature_names
    after = Projection._make(empty, empty, stats.mean, method=label, feature_names=feature_names)
    shift = Shift(name, tuple(names), np.zeros(len(names)), stats.means - stats.mean)
    return ConditionalEraser([shift], after, None, maps=solution.maps, method=label, report=report)


# -- shrinkage and its warnings --------------------------------------------------------------------


class _Shrinkage(NamedTuple):
    """Shrinkage of the class covariances.

    Attributes
    ----------
    intensity : float
        Weight a of the pooled covariance. For "cv-eig", a = 1 - <eigenvalues, raw> / |raw|^2,
        where `raw` are the eigenvalues of the unshrunk difference.
    eigenvalues : HeldOutEigenvalues or None
        Estimated eigenvalues of the whitened difference of two classes, for "cv-eig".
    """

    intensity: float
    eigenvalues: HeldOutEigenvalues | None = None

    @classmethod
    def of_option(
        cls, policy: float | str | None, fractions: Float, differences: Float,
        folds: Sequence[Float],
    ) -> _Shrinkage:  # fmt: skip
        """Return the shrinkage for a value of the option `shrinkage`.

        Parameters
        ----------
        policy : {"cv", "cv-eig"}, float or None
            Value of the option.
        fractions : (k,) float64
            Fraction of the weight in each class.
        differences : (k, r, r) float64
            Whitened covariance differences of the classes over all rows.
        folds : sequence of (k, r, r) float64
            Whitened covariance differences of each fold.
        """
        if not isinstance(policy, str):
            return cls(float(policy or 0.0))
        if policy == "cv":
            return cls(shrinking.intensity(fractions, differences, folds))
        eigenvalues = shrinking.held_out_eigenvalues(fractions, folds)
        raw = np.linalg.eigvalsh(differences[1] - differences[0])
        size = float(raw @ raw)
        share = float(eigenvalues.values @ raw) / size if size else 0.0
        return cls(float(np.clip(1.0 - share, 0.0, 1.0)), eigenvalues)

    def covariances(self, stats: ClassStatistics, support: Support) -> Float:
        """Return the shrunk covariance of each class, (k, d, d)."""
        if self.eigenvalues is None:
            return shrinking.shrunk(stats, self.intensity)
        return shrinking.with_eigenvalues(stats, support, self.eigenvalues.values)


def _noise_warning(
    name: VariableName, names: list[ClassName], rows: Float, differences: Float, r: int,
    intensity: float, before: float | None, groups: str | None,
) -> tuple[str, ...]:  # fmt: skip
    """Return the warning about sampling noise in the class covariances, or an empty tuple.

    Parameters
    ----------
    name : VariableName
        Concept.
    names : list of ClassName
        Classes of the concept.
    rows : (k,) ndarray
        Number of rows of each class.
    differences : (k, r, r) float64
        Whitened covariance differences of the classes.
    r : int
        Rank of the pooled covariance.
    intensity : float
        Shrinkage intensity.
    before : float or None
        Estimate of dS2, the squared difference between the class covariances, from folds; None
        without folds.
    groups : str or None
        Variable that defines the clusters of rows kept in one fold.
    """
    k = len(rows)
    split = (
        f"Folds keep the classes of {groups!r} together"
        if groups is not None
        else "Rows that come in groups, such as prompts of one noun, need folds with groups="
    )
    rare = names[int(np.argmin(rows))]
    if intensity and before is not None and 1.0 - intensity < _MOSTLY_NOISE:
        return (
            f"only the fraction {1.0 - intensity:.2g} of the differences between the class "
            f"covariances of {name!r} exceeds sampling noise and is removed; the rest remains in "
            f"the rows. Use fewer principal components, or more rows. {split}",
        )
    noise = (k - 1) / k**2 * float(np.sum(r * (r + 1) / rows))
    if intensity:
        return ()
    size = before
    if size is None:
        size = shrinking.inner_product(differences, differences) - noise
    if noise <= size:
        return ()
    needed = "" if size <= 0 else f"; about {noise / size:.2g} times as many rows would be needed"
    size_text = f"{size:.3g}" if size > 0 else "not above noise"
    return (
        f"without shrinkage, sampling noise leaves a squared difference of about {noise:.3g} "
        "between the class covariances of new rows; before erasure, the difference is "
        f"{size_text}. The smallest class, {rare!r}, has {int(rows.min()):,} rows for a covariance "
        f"of {r} dimensions{needed}. Pass folds with shrinkage='cv', or fewer "
        f"principal components. {split}",
    )


# -- the report ------------------------------------------------------------------------------------


def _report(
    label: str, name: VariableName, stats: ClassStatistics, support: Support,
    covariances: Float, solution: ClassMaps, coding: Coding,
    dS2: tuple[float | None, float | None], intensity: float, notes: tuple[str, ...], *,
    optimal: bool,
) -> Report:  # fmt: skip
    """Return the report of the effect of the maps on the fitted rows.

    `dS2` holds the squared differences between the class covariances that are expected for new
    rows, before and after erasure (:class:`~splince_fast.report.QuadraticFit`); both are None
    without folds.
    """
    before, remaining = dS2
    p, d = stats.fractions, len(stats.mean)
    means = np.sqrt(p)[:, None] * (stats.means - stats.mean)
    total = float(np.sum(means**2))  # E|r - x|^2 of o-LEACE
    variance = total + sum(
        float(q * np.trace(s)) for q, s in zip(p, stats.covariances, strict=True)
    )
    u, sizes, _ = np.linalg.svd(support.whitener.T @ means.T, full_matrices=False)
    cost, size, product_size, cross_size = total, 1.0, 0.0, 0.0
    after_maps = []
    for q, a, covariance, shrunk, mean in zip(
        p, solution.maps, stats.covariances, covariances, stats.means, strict=True
    ):
        step = a - np.eye(d)
        cost += float(q * np.vdot(step @ covariance, step))
        norm = 1.0 + float(np.linalg.norm(step))
        size = max(size, norm)
        # Rounding of the rows changes S_c by up to eps |x| |x - m_c|, and A_c S_c A_c^T by up to
        # |A_c|^2 times this change.
        deviation = float(np.trace(shrunk)) ** 0.5
        length = deviation + float(np.linalg.norm(mean))
        product_size = max(product_size, norm**2 * deviation * length)
        cross_size += q * norm * length
        after_maps.append(a @ shrunk @ a.T)
    erased = np.stack(after_maps)
    scale = float(np.linalg.norm(erased[0])) or 1.0
    residual = max(float(np.linalg.norm(c - erased[0])) for c in erased) / scale
    rounding = 8.0 * d * tolerances.EPS / support.smallest**0.5
    # `sizes` are the singular values of the class means, whitened by S_w and weighted by sqrt(p_c).
    # The canonical correlations c of x and the classes have c^2 = sizes^2 / (1 + sizes^2).
    canonical = sizes / np.sqrt(1.0 + sizes**2)
    noise = tolerances.noise(d, support.smallest)
    rank = int(np.count_nonzero(canonical > noise))
    variables = [
        VariableReport(
            str(name), "erased", rank, tuple(map(float, canonical[:rank])), residual,
            rounding * max(size**2, product_size / scale), f"classes ({len(p)})",
        )
    ]  # fmt: skip
    kept = stats.kept
    after = sum(q * a @ cross for q, a, cross in zip(p, solution.maps, stats.crosses, strict=True))
    whitened = support.whitener.T @ kept
    shrinkage = 1.0 - 1.0 / np.sqrt(1.0 + sizes**2)
    whitened = (whitened - (u * shrinkage) @ (u.T @ whitened)).T  # whitened by Cov(x)
    for text, part, kind, correlations in correlations_of(coding.span, whitened):
        norm = float(np.linalg.norm(kept[:, part]))
        error = float(np.linalg.norm((after - kept)[:, part]))
        variables.append(
            VariableReport(
                text, "kept", int(np.count_nonzero(np.array(correlations) > noise)), correlations,
                error / norm if norm else 0.0,
                rounding * max(size**2, cross_size / norm if norm else 0.0), kind,
            )
        )  # fmt: skip
    # If the class means differ only in the range of S_w, LEACE removes the variance
    # |Cov(x) W u|^2 / (1 + size^2) for each left singular vector u with the singular value `size`.
    basis = support.basis
    outside = 0.0 if basis is None else np.linalg.norm(means - (means @ basis) @ basis.T)
    columns = stats.pooled @ (support.whitener @ u[:, :rank])
    leace = None
    if variance and outside**2 <= _NEGLIGIBLE * variance:
        leace = float(np.sum(columns**2 * (1.0 + sizes[:rank] ** 2))) / variance
    return Report(
        method=label, n_rows=int(stats.rows.sum()), weight=float(stats.weights.sum()),
        n_features=d, rank_covariance=support.rank, rank=0, variables=tuple(variables), dropped=0,
        cosines=(), amplification=1.0, rho=None, distortion=cost / variance if variance else 0.0,
        distortion_leace=leace, solver="cholesky",
        tolerance=noise, shrinkage=intensity, warnings=(NEEDS_LABELS, *notes),
        quadratic=QuadraticFit(
            float(solution.determinants.min()), solution.gap if optimal else None, before, remaining
        ),
    )  # fmt: skip
