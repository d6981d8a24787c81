"""Quadratic erasure: one map per class, so that class means and class covariances are equal."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve import class_covariances as shrinking
from splince_fast._solve import tolerances
from splince_fast._solve.class_covariances import ClassStatistics
from splince_fast._solve.messages import combination
from splince_fast._solve.options import OPTIONS, Option
from splince_fast._solve.quadratic import SingularClassError, Solution, Support, solve, support_of
from splince_fast._solve.selection import Selection, Span, names_of, span_of
from splince_fast.conditional import NEEDS_LABELS, ConditionalEraser, Shift
from splince_fast.exceptions import (
    ConstantVariableError,
    InfeasibleError,
    InputError,
    LabelError,
    NotEnoughDataError,
    UnseenRowsWarning,
)
from splince_fast.labels import ClassName, VariableName, class_key
from splince_fast.labels.names import listed
from splince_fast.moments import Folds, Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.factored import statistics
from splince_fast.moments.variable import Variable
from splince_fast.projection import Projection
from splince_fast.report import QuadraticFit, Report, VariableReport

Float = NDArray[np.float64]
Classes: TypeAlias = Mapping[ClassName, Moments]

METHODS = ("optimal", "repair")
# Fraction of the variance that moves no figure of the report.
_NEGLIGIBLE = 1e-12
# Below this fraction of the differences between class covariances that is more than noise.
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
        No class relates x to a combination of what is kept, and x covaries with it.
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
    name = _concept(erase)
    source = _read(moments, name)
    if isinstance(shrinkage, str) and len(source.folds) < 2:
        raise InputError(
            f"shrinkage={shrinkage!r} is chosen on folds, and these moments are of all rows; pass "
            f"sf.Folds.from_blocks(source, folds=2, by={name!r}), or shrinkage= a number in [0, 1]"
        )
    coding = _Coding.of(source.whole, keep)
    whole = _statistics(source.whole, coding)
    if shrinkage == "cv-eig" and len(whole.rows) != 2:
        raise InputError(
            f"shrinkage='cv-eig' is for two classes, and {name!r} has {len(whole.rows)}; use 'cv'"
        )
    roundoff = max(part._state().unit_roundoff for part in source.whole.values())
    support = support_of(whole.pooled, whole.mean, roundoff)
    # Only folds, and the warning of an eraser without shrinkage, need the differences.
    own = whole.differences(support) if source.folds or not shrinkage else np.zeros((1, 0, 0))
    folds = [_statistics(part, coding).differences(support) for part in source.folds]
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
        _refuse(name, coding, solution.lost)
    before = left = None
    if folds:
        before = shrinking.over_folds(folds)
        left = shrinking.left_over(before, own, shrunk.share, shrunk.eigenvalues)
    notes = _notes(name, names, whole.rows, own, support.rank, shrunk.share, before, source.groups)
    for note in notes:
        warnings.warn(note, UnseenRowsWarning, stacklevel=2)
    label = "QLEACE" if keep is None else "q-SPLINCE" if optimal else "repair @ QLEACE"
    report = _report(
        label, name, whole, support, covariances, solution, coding, (before, left), optimal=optimal
    )
    report = dataclasses.replace(report, shrinkage=shrunk.share, warnings=(NEEDS_LABELS, *notes))
    empty = np.empty((0, len(whole.mean)))
    after = Projection._make(empty, empty, whole.mean, method=label)
    shift = Shift(name, tuple(names), np.zeros(len(names)), whole.means - whole.mean)
    return ConditionalEraser([shift], after, None, maps=solution.maps, method=label, report=report)


# -- reading the moments -----------------------------------------------------------------------


class _Source(NamedTuple):
    """Moments of each class: of all rows, and of each fold."""

    whole: dict[ClassName, Moments]
    folds: list[dict[ClassName, Moments]]
    groups: str | None


def _concept(erase: object) -> str:
    """The one variable to erase."""
    names = names_of(erase, "erase")
    if len(names) > 1 or not isinstance(names[0], str):
        raise InputError(
            f"erase is {erase!r}; quadratic erases the classes of one variable: make a column of "
            "the joint cells, and pass its name"
        )
    return names[0]


def _read(moments: object, name: str) -> _Source:
    """The moments of each class, however they are passed.

    Raises
    ------
    InputError
        No moments of classes, or of a sketch or sample.
    """
    groups: str | None = None
    if isinstance(moments, Mapping):
        kinds = {type(part) for part in moments.values()}
        if kinds == {Folds}:
            counts = {len(part) for part in moments.values()}
            if len(counts) > 1:
                raise InputError("the classes have different numbers of folds; make them alike")
            groups = next(iter(moments.values()))._groups
            count = counts.pop()
            folds = [{c: part[i] for c, part in moments.items()} for i in range(count)]
        elif kinds == {Moments}:
            folds = [dict(moments)]
        else:
            raise InputError(
                "a mapping must hold the Moments of each class, or the Folds of each class"
            )
    elif isinstance(moments, Folds):
        groups = moments._groups
        folds = [_by_class(part, name) for part in moments]
    elif isinstance(moments, Moments):
        folds = [_by_class(moments, name)]
    else:
        raise InputError(
            f"moments is {type(moments).__name__}; pass Moments(by={name!r}), Folds of them, or a "
            "mapping of classes to moments"
        )
    classes: dict[Any, ClassName] = {}
    for fold in folds:
        classes |= {class_key(c): c for c, part in fold.items() if part.n_rows}
    for part in (part for fold in folds for part in fold.values()):
        parameters = part.parameters
        if parameters.sketch_size is not None or parameters.subsample < 1:
            raise InputError(
                "quadratic needs the covariance of each class from all rows, and these moments "
                "were made with sketch_size= or subsample=; accumulate without them"
            )
    if len(classes) < 2:
        raise ConstantVariableError(
            f"the variable {name!r}, to be erased, has {len(classes)} class with rows: there is "
            "no difference to remove; check the labels"
        )
    own = []
    for fold in folds:
        by_key = {class_key(c): part for c, part in fold.items() if part.n_rows}
        for key, c in classes.items():
            if key not in by_key:
                raise NotEnoughDataError(
                    f"a fold has no row of the class {c!r} of {name!r}; use fewer folds, or leave "
                    "the class out"
                )
        own.append({c: by_key[key] for key, c in classes.items()})
    whole = own[0] if len(own) == 1 else {c: reduce(add, (f[c] for f in own)) for c in own[0]}
    return _Source(whole, own if len(own) > 1 else [], groups)


def _by_class(moments: Moments, name: str) -> dict[ClassName, Moments]:
    """Moments of each class of a state that keeps them.

    Raises
    ------
    LabelError
        The concept is continuous.
    InputError
        The state keeps no moments of these classes.
    """
    by = moments.parameters.by
    if by != name:
        if moments.variables.get(name) == "continuous":
            raise LabelError(
                f"the variable {name!r} is continuous and has no class covariances; bin it into "
                "classes, such as np.digitize(z, np.quantile(z, [0.25, 0.5, 0.75]))"
            )
        raise InputError(
            f"quadratic needs the covariance of x in each class of {name!r}, and these moments "
            f"keep {'that of all rows alone' if by is None else f'those of {by!r}'}; accumulate "
            f"them with sf.Moments(by={name!r})"
        )
    # Rows without a label of the concept are in no class.
    return {c: part for c, part in moments.by_class.items() if c is not None}


class _Kept(NamedTuple):
    """A kept variable: which of its columns are read, and their deviations over all rows."""

    name: VariableName
    keys: list[Any] | None  # of the classes; None of columns
    columns: NDArray[np.intp]
    deviations: Float
    terms: list[str]  # in words


class _Coding(NamedTuple):
    """Columns of what is kept, in units of deviations; the same for every class and fold."""

    kept: list[_Kept]
    span: Span  # of all rows, for the report
    total: Moments

    @classmethod
    def of(cls, classes: Classes, keep: Selection | None) -> _Coding:
        """Decide the columns from all rows.

        Raises
        ------
        InputError
            Directions, or rows without a label.
        ConstantVariableError
            A variable with a single value.
        """
        total = reduce(add, classes.values())
        if keep is None:
            return cls([], Span([], np.empty((0, total.n_features or 0)), [], []), total)
        if not isinstance(keep, str | tuple | list):
            raise InputError(
                "keep holds directions; quadratic keeps the covariance with variables, by name"
            )
        kept = []
        with statistics(total) as known:
            span = span_of(known, keep, "keep", True)
            for name in names_of(keep, "keep"):
                variable = known.variable(name)
                if variable.n_rows != known.n_rows:
                    raise InputError(
                        f"{known.n_rows - variable.n_rows:,} of {known.n_rows:,} rows have no "
                        f"label of {name!r}; the covariances of x and with {name!r} must be of "
                        "the same rows: leave the others out"
                    )
                kept.append(_columns_of(name, variable))
        return cls(kept, span, total)


def _columns_of(name: VariableName, variable: Variable) -> _Kept:
    """Columns that span the covariance with a variable: of classes all but the most frequent."""
    if isinstance(variable, ClassSums):
        p = variable.weights / variable.weights.sum()
        index = np.flatnonzero((p > 0) & (np.arange(len(p)) != np.argmax(p)))
        keys = list(variable.places)
        terms = [f"[{name} = {variable.names[i]}]" for i in index]
        return _Kept(name, keys, index, np.sqrt(p[index] * (1 - p[index])), terms)
    assert isinstance(variable, ColumnSums)
    deviations = variable.deviations()
    index = np.flatnonzero(deviations > 0)
    single = variable.n_columns == 1
    terms = [str(name) if single else f"{name}[{variable.names[i]}]" for i in index]
    return _Kept(name, None, index, deviations[index], terms)


def _statistics(classes: Classes, coding: _Coding) -> ClassStatistics:
    """Arrays of the moments of each class."""
    crosses, task_means = [], []
    for part in classes.values():
        columns, means = [np.zeros((part.n_features or 0, 0))], [np.zeros(0)]
        with statistics(part) as known:
            for kept in coding.kept:
                cross, mean = _task(known.variable(kept.name), kept)
                columns.append(cross)
                means.append(mean)
        crosses.append(np.hstack(columns))
        task_means.append(np.concatenate(means))
    parts = list(classes.values())
    return ClassStatistics(
        np.array([part.weight for part in parts]), np.array([part.n_rows for part in parts]),
        np.stack([part.mean for part in parts]),
        np.stack([part.covariance(ddof=0) for part in parts]),
        np.stack(crosses), np.stack(task_means),
    )  # fmt: skip


def _task(variable: Variable, kept: _Kept) -> tuple[Float, Float]:
    """(d, q) covariance with the columns of a kept variable in one class, and their (q,) means."""
    cross = variable.cross_covariance(0, kept.name)
    if isinstance(variable, ClassSums):
        assert kept.keys is not None
        # A class of y that does not occur in a class of z has the indicator 0 there.
        places = [variable.places.get(kept.keys[i], -1) for i in kept.columns]
        own = variable.weights / variable.weights.sum()
        columns = np.hstack([cross, np.zeros((len(cross), 1))])[:, places]
        means = np.append(own, 0.0)[places]
    else:
        assert isinstance(variable, ColumnSums)
        columns = cross[:, kept.columns]
        means = variable.reference_mean()[kept.columns]
    return columns / kept.deviations, means / kept.deviations


# -- shrinkage, and what is said of it -------------------------------------------------------------


class _Shrinkage(NamedTuple):
    """How covariances of classes are shrunk."""

    share: float  # a; with eigenvalues, 1 - <est, raw> / |raw|^2
    eigenvalues: Float | None = None

    @classmethod
    def chosen(
        cls, policy: float | str | None, fractions: Float, own: Float, folds: Sequence[Float]
    ) -> _Shrinkage:
        """The intensity that `policy` asks for, from white differences of all rows and of folds."""
        if not isinstance(policy, str):
            return cls(float(policy or 0.0))
        if policy == "cv":
            return cls(shrinking.intensity(fractions, own, folds))
        values = shrinking.eigenvalues(fractions, folds)
        raw = np.linalg.eigvalsh(own[1] - own[0])
        size = float(raw @ raw)
        return cls(float(np.clip(1.0 - values @ raw / size, 0.0, 1.0)) if size else 1.0, values)

    def covariances(self, whole: ClassStatistics, support: Support) -> Float:
        """(k, d, d): S_c(a)."""
        if self.eigenvalues is None:
            return shrinking.shrunk(whole, self.share)
        return shrinking.with_eigenvalues(whole, support, self.eigenvalues)


def _notes(
    name: VariableName, names: list[ClassName], rows: Float, own: Float, r: int, share: float,
    before: float | None, groups: str | None,
) -> tuple[str, ...]:  # fmt: skip
    """Warnings of what the eraser does to new rows."""
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


def _refuse(name: VariableName, coding: _Coding, weights: Float) -> NoReturn:
    """Raise InfeasibleError with the combination of labels that no class relates to x."""
    terms = [
        (term, deviation**2)
        for kept in coding.kept
        for term, deviation in zip(kept.terms, kept.deviations, strict=True)
    ]
    kept = listed([str(one.name) for one in coding.kept])
    raise InfeasibleError(
        f"quadratic cannot keep {kept} while it erases {name!r}: in no class of {name!r} does x "
        f"covary with the combination {combination(weights, terms)}, and over all rows it does. "
        "Typically it is a function of the concept. Keep fewer variables, or leave keep= out",
        1.0,
    )


# -- the report ------------------------------------------------------------------------------------


def _report(
    label: str, name: VariableName, whole: ClassStatistics, support: Support,
    covariances: Float, solution: Solution, coding: _Coding,
    differences: tuple[float | None, float | None], *, optimal: bool,
) -> Report:  # fmt: skip
    """Effect of the maps on the fitted rows; `differences` of class covariances in new rows."""
    before, left = differences
    p, d = whole.fractions, len(whole.mean)
    means = np.sqrt(p)[:, None] * (whole.means - whole.mean)
    total = float(np.sum(means**2))  # o-LEACE's change
    variance = total + sum(
        float(q * np.trace(s)) for q, s in zip(p, whole.covariances, strict=True)
    )
    u, sizes, _ = np.linalg.svd(support.whitener.T @ means.T, full_matrices=False)
    changed, size = total, 1.0
    after_maps = []
    for q, a, true, used in zip(p, solution.maps, whole.covariances, covariances, strict=True):
        step = a - np.eye(d)
        changed += float(q * np.vdot(step @ true, step))
        size = max(size, 1.0 + float(np.linalg.norm(step)))
        after_maps.append(a @ used @ a.T)
    erased = np.stack(after_maps)
    scale = float(np.linalg.norm(erased[0])) or 1.0
    residual = max(float(np.linalg.norm(c - erased[0])) for c in erased) / scale
    rounding = 8.0 * d * tolerances.EPS
    # sqrt(1 - c^2) of the canonical correlations c of x and the classes: 1 / sqrt(1 + size^2).
    canonical = sizes / np.sqrt(1.0 + sizes**2)
    rank = int(np.count_nonzero(canonical > tolerances.noise(d, support.smallest)))
    variables = [
        VariableReport(
            str(name), "erased", rank, tuple(map(float, canonical[:rank])), residual,
            rounding * size**2, f"classes ({len(p)})",
        )
    ]  # fmt: skip
    kept = whole.kept
    after = sum(q * a @ cross for q, a, cross in zip(p, solution.maps, whole.crosses, strict=True))
    white = support.whitener.T @ kept
    shrink = 1.0 - 1.0 / np.sqrt(1.0 + sizes**2)
    white = (white - (u * shrink) @ (u.T @ white)).T  # by the covariance of all rows
    start = 0
    for text, count, reading in zip(
        coding.span.names, coding.span.counts, coding.span.readings, strict=True
    ):
        part = slice(start, start + count)
        kind, metric, _ = reading()
        shown = np.linalg.svd(metric @ white[part], compute_uv=False)[:count]
        norm = float(np.linalg.norm(kept[:, part]))
        miss = float(np.linalg.norm((after - kept)[:, part]))
        variables.append(
            VariableReport(
                text, "kept",
                int(np.count_nonzero(shown > tolerances.noise(d, support.smallest))),
                tuple(map(float, np.minimum(shown, 1.0))), miss / norm if norm else 0.0,
                rounding * size**2, kind,
            )
        )  # fmt: skip
        start += count
    # LEACE removes u of these: Cov(x) W u / sqrt(1 + size^2), if the means are in the support.
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
        tolerance=tolerances.noise(d, support.smallest), shrinkage=0.0, warnings=(),
        quadratic=QuadraticFit(
            float(solution.determinants.min()), solution.gap if optimal else None, before, left
        ),
    )  # fmt: skip
