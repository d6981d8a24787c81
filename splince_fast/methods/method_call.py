"""A method with its arguments: the solve, its warnings and the contents of its report.

A span is a cross-covariance of x with labels, one row per label column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import STATUS_OK
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.rows import abbreviated
from splince_fast._solve.factor import Factor
from splince_fast._solve.held_out import Noise, equal_noise
from splince_fast._solve.oblique import (
    Solution,
    change,
    column_norms,
    oblique,
    raise_failure,
    sensitivity,
    with_null_space,
    with_strength,
)
from splince_fast._solve.options import Options
from splince_fast._solve.selection import Kept, Span, span_of
from splince_fast._solve.tolerances import AMPLIFICATION, CONSTANT, NOISE_FRACTION, SENSITIVITY
from splince_fast.exceptions import (
    DroppedDirectionsWarning,
    InfeasibleError,
    InputError,
    LabelError,
    ManyClassesWarning,
    NothingErasedWarning,
    PrecisionWarning,
    UnseenRowsWarning,
)
from splince_fast.labels import VariableName
from splince_fast.labels.names import listed
from splince_fast.methods.label_features import warn_of_labels
from splince_fast.methods.refine import Refinement
from splince_fast.moments import Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.snapshot import Factored, Statistics
from splince_fast.projection import Projection
from splince_fast.report import (
    DiagonalCovariance,
    FitValues,
    Report,
    Sampling,
    build_report,
    largest_change,
)

Float = NDArray[np.float64]
Warnings: TypeAlias = Iterator[tuple[type[Warning], str]]  # class and text

# Thresholds of the warning about sensitivity to rounding. The warning names the features whose
# column norm in P - I is at least _AMPLIFYING times the largest. It advises centring if |mean|
# exceeds _OFFSET times the total standard deviation.
_AMPLIFYING, _OFFSET = 0.1, 100.0
_SHRINKAGE = 1e-6  # intensity that the warning advises
# The warning about sensitivity to rounding requires that |P - I| exceeds this multiple of
# sqrt(rank), the norm of an orthogonal projection.
_OBLIQUE = 10.0
# Below this number of fitted rows per dimension of x, the covariance is mostly noise; a warning is
# issued unless the covariance is shrunk.
FEW_ROWS = 2.0
# Integer labels with more distinct values may be quantities; digits, months and hours have at most
# this number.
_MAX_CLASSES = 24
# A computed variance of 0 has two causes. Let c be the largest covariance of the feature with a
# label. The feature is constant if c is at most _ROUNDING * |mean|; otherwise, the variance
# underflowed if c is below _UNDERFLOW.
_UNDERFLOW, _ROUNDING = 1e-150, 1e-10


class Solved(NamedTuple):
    """The eraser x - left^T right (x - mean), with the intermediate results of its solve."""

    left: Float  # (r, d): factors of I - P = left^T right
    right: Float
    mean: Float
    # projection before extension to the null space, with ranks, angles and residuals
    solution: Solution
    factor: Factor  # factor of Cov(x)
    shrinkage: float
    span_z: Span
    span_y: Span
    gain: float | None  # fraction of the distortion that the last extra pass over the rows removed


class _Distortions(NamedTuple):
    """Distortions E|P x - x|^2; None if not known."""

    eraser: float | None  # distortion of the eraser
    leace: float | None  # distortion of LEACE, which erases the same variables and keeps none
    excess: float | None = None  # expected relative excess of `eraser` over the minimum (sampling)


class MethodCall(NamedTuple):
    """A method with its arguments; it computes an eraser from moments."""

    method: str  # label of the method, such as "SPLINCE"
    whitened: bool  # whether x is whitened, so that Cov(x) is factored
    erase: list[VariableName]
    keep: Kept  # variables or directions to keep
    options: Options
    refinement: Refinement | None = None
    classes_only: bool = False  # whether the method refuses continuous variables

    def with_shrinkage(self, shrinkage: float | str | None) -> MethodCall:
        if shrinkage == self.options.shrinkage:
            return self
        return self._replace(options=replace(self.options, shrinkage=shrinkage))

    def solve(self, stats: Statistics) -> Solved:
        """Compute the eraser, without report or warnings."""
        options, whitened = self.options, self.whitened
        if self.classes_only:
            _check_classes(stats, self.erase)
        span_z = span_of(stats, self.erase, "erase", whitened)
        span_y = span_of(stats, self.keep, "keep", whitened)
        shrinkage, gain = stats.intensity(options) if whitened else 0.0, None
        if self.refinement is not None:
            factor, gain = self.refinement.factor(stats, span_z.rows, span_y.rows, options)
        elif not whitened:
            factor = stats.identity()
        else:
            factor = stats.factored(options, shrinkage)
        solution = oblique(factor, span_z.rows, span_y.rows, options)
        if whitened and solution.rank_covariance < len(stats.mean):
            _refuse_underflow(stats, span_z)
        if solution.status != STATUS_OK:
            raise_failure(solution, span_z.names, span_y.names, self.method, options.solver)
        if options.strength != 1:
            solution = with_strength(factor, solution, span_z.rows, span_y.rows, options)
        left, right = solution.left, solution.right
        if solution.null_basis is not None:
            left, right = with_null_space(solution, span_y.rows)
        return Solved(left, right, stats.mean, solution, factor, shrinkage, span_z, span_y, gain)

    def fit(
        self,
        moments: Moments | Factored,
        complete: Callable[[Report], Report] | None = None,
    ) -> Projection:
        """Return the eraser with its report; warnings are issued and included in the report."""
        # `complete` is applied to the report when the report is first read.
        if self.refinement is not None and isinstance(moments, Moments):
            moments = moments._merged_copy()  # extra passes over the rows hold no lock
        with moments._statistics() as stats:
            try:
                solved = self.solve(stats)
            except InfeasibleError as error:
                kept = self.keep if isinstance(self.keep, list) else []
                causes = _quantities(stats, [*self.erase, *kept], "")
                error.args = (". ".join([*causes, str(error)]),)
                raise
            left, right, mean, solution, factor, shrinkage, span_z, span_y, gain = solved
            sample = stats.sample if self.whitened else None
            distortions = _distortions(stats, solved, self.options)
            # With a subsample, `solution.variance` is that of the factored estimate of Cov(x);
            # `stats.variances` uses all rows.
            variance = solution.variance if sample is None else float(stats.variances.sum())
            effect, norm = sensitivity(left, right, mean, variance)
            notes = []
            for category, text in chain(
                self._many_classes(stats, solution, variance, distortions.eraser),
                self._warnings(stats, solved),
                self._sensitivity(stats, solved, effect, norm),
                () if complete is not None else _few_rows(stats, solved),
            ):
                notes.append(text)
                warn(text, category)
            noises: tuple[Noise, ...] = ()
            if self.options.rank_tol == "auto":  # a larger one may leave part of the association
                unshrunk = factor if self.whitened and not shrinkage else None
                noises = _noises(stats, self.erase, solution, unshrunk)
            if solution.rank_z:
                notes += warn_of_labels(stats, self.erase, span_z, "erase")
            if isinstance(self.keep, list):
                notes += warn_of_labels(stats, self.keep, span_y, "keep")
            passes = None if self.refinement is None else self.refinement.passes
            fit = FitValues(
                self.method, stats.n_rows, stats.weight, shrinkage, self.whitened,
                distortions.eraser, distortions.leace, tuple(notes), variance,
                None if sample is None else Sampling(sample.n_rows, distortions.excess),
                DiagonalCovariance(passes, gain) if stats.is_diagonal else None,
                effect, noises, float(self.options.strength), stats.feature_names,
            )  # fmt: skip
        report = partial(build_report, fit, solution, span_z, span_y, left, right)
        if complete is not None:
            report = partial(_completed, report, complete)
        return Projection._make(
            left, right, mean, method=self.method, report=report, feature_names=fit.feature_names
        )

    def _many_classes(
        self, stats: Statistics, solution: Solution, variance: float, distortion: float | None
    ) -> Warnings:
        """Yield warnings of erased integers with many classes, or of the loss of all of x."""
        rank, rank_z = solution.rank_covariance, solution.rank_z
        if not rank_z or variance <= 0.0:
            return
        changed = 0.0 if distortion is None else distortion / variance
        if 2 * rank_z < rank and changed <= 0.5:
            return
        fraction = "" if distortion is None else f" and {changed:.0%} of its variance"
        effect = f", and erasing takes {rank_z} of {rank} dimensions of x{fraction}"
        texts = [] if self.classes_only else _quantities(stats, self.erase, effect)
        kinds = stats.interpretation[0] or {}
        if not texts and rank_z == rank > 1 and any(name not in kinds for name in self.erase):
            texts.append(
                f"erasing {listed(map(str, self.erase))} removes all {rank} dimensions in "
                "which x varies: all erased rows are equal. Typical causes: an identifier, with a "
                "class for nearly every row, or too few dimensions of x for the classes. Erase "
                "other variables, or merge classes; kinds= for the variable silences the warning"
            )
        for text in texts:
            yield ManyClassesWarning, text

    def _warnings(self, stats: Statistics, solved: Solved) -> Warnings:
        """Yield the warnings about what the solve erased, dropped, and left."""
        solution, options = solved.solution, self.options
        erased, kept = listed(solved.span_z.names), listed(solved.span_y.names)
        if not (solution.rank_z or (solution.rank_covariance and solution.variance)):
            text = (
                "nothing was erased: all features of x are constant, without association with "
                f"{erased}, so the eraser is the identity. Check the rows that were accumulated"
            )
            yield NothingErasedWarning, text
        elif not solution.rank_z:
            text = (
                f"nothing was erased: x has no linear association with {erased} above the rounding "
                f"level ({solution.noise:.1e} in units of correlation), so the eraser is the "
                "identity. If an association was expected, check that labels and rows are in the "
                "same order"
            )
            yield NothingErasedWarning, text
        if solution.dropped:
            cut = options.max_amplification
            cause = "up to rounding" if cut is None else f"amplification above {cut:g}"
            text = (
                f"{solution.dropped} of {solution.rank_y} direction(s) of {kept} were dropped: "
                f"they lie too close to {erased} ({cause}); the report shows the residual of each "
                "variable"
            )
            yield DroppedDirectionsWarning, text
        amplification = largest_change(solution.amplification, options.strength)
        if amplification > AMPLIFICATION:
            text = (
                f"{kept} nearly lies in the span of {erased}: rows are moved up to "
                f"{amplification:.1e} times as far as without kept variables, and errors due to "
                "rounding, noise and new rows grow by the same factor. Limit the factor with "
                "max_amplification= (for example 100), keep fewer variables, or use leace"
            )
            yield PrecisionWarning, text
        residual, bound = max(solution.residual_z, solution.residual_y), solution.bound
        if solution.rank_z and (bound >= 1 or residual > bound):
            text = (
                f"rounding errors may undo the erasure: residual {residual:.1e}, bound "
                f"{bound:.1e} (relative to the cross-covariances). Typical causes: variables that "
                "nearly determine each other, or features that are combinations of others; drop "
                "such columns, pass shrinkage=1e-6, or limit max_amplification="
            )
            yield PrecisionWarning, text
        if solution.admitted:
            # The caller chose explicit directions, and needs no warning if they are off the
            # support. The first coordinates of the whitened spans are the admitted directions.
            directions = solved.span_y.names == ["directions"]
            erased_rows = solved.span_z.rows
            squares = solution.whitened[: len(erased_rows) if directions else None] ** 2
            is_large = squares[:, : solution.admitted].sum() > NOISE_FRACTION * squares.sum()
            if is_large and (not directions or solved.factor.admit(erased_rows).admitted):
                text = (
                    f"x varies by less than its rounding level in {solution.admitted} direction(s) "
                    "that covary with the labels; their variance was set to that level. The "
                    "constraints hold exactly, but x is changed more than necessary, and new rows "
                    "may be changed far more. Drop features that are copies of others, accumulate "
                    "in float64, or pass shrinkage=1e-6"
                )
                yield PrecisionWarning, text
        if not self.whitened and solution.rank_z and options.rank_tol == "auto":
            remaining = _remaining_in_small_features(stats, solution, solved.span_z.rows)
            if remaining**2 > NOISE_FRACTION:
                text = (
                    f"{remaining:.2%} of the covariance with {erased} is left, for features in "
                    "units of their standard deviations: the covariance of some small features is "
                    "below the rounding error of the total variance. Scale all features to similar "
                    "variances, or use leace, which does not depend on their units"
                )
                yield PrecisionWarning, text

    def _sensitivity(
        self, stats: Statistics, solved: Solved, effect: float, norm: float
    ) -> Warnings:
        """Yield a warning that names the features that amplify rounding errors, and remedies."""
        # The Frobenius norm of an orthogonal projection is sqrt(rank).
        if effect <= SENSITIVITY or norm <= _OBLIQUE * len(solved.left) ** 0.5:
            return
        variances, norms = stats.variances, column_norms(solved.left, solved.right)
        order = np.argsort(-norms)
        amplifying = order[norms[order] >= _AMPLIFYING * norms[order[0]]]
        ratio = float(np.sqrt(variances[amplifying].max() / variances.mean()))
        remedies = []
        if self.whitened and self.refinement is None and not self.options.shrinkage:
            if isinstance(stats, Factored):
                remedies.append(f"moments.factored({_SHRINKAGE:g})")
            else:
                options = replace(self.options, shrinkage=_SHRINKAGE)
                factor = stats.factored(options, _SHRINKAGE)
                other = oblique(factor, solved.span_z.rows, solved.span_y.rows, options)
                lower, _ = sensitivity(other.left, other.right, stats.mean, float(variances.sum()))
                if other.status == STATUS_OK and lower < effect / 2:
                    remedies.append(f"shrinkage={_SHRINKAGE:g} (sensitivity {lower:.1e})")
        offset = float(stats.mean @ stats.mean / variances.sum()) ** 0.5
        if offset > _OFFSET:
            remedies.append(f"centred rows (the mean is {offset:.0e} standard deviations from 0)")
        text = (
            "the eraser is sensitive to rounding: errors in the rows of the size of float32 "
            f"rounding change erased rows by {effect:.1e} of their standard deviation, mostly "
            f"because of feature(s) {abbreviated(amplifying, stats.feature_names)}, with standard "
            f"deviations up to {ratio:.1e} times the root mean square. The fitted rows are erased "
            "as the report says; rows that are recomputed, or rounded in another way, show the "
            "errors. Drop these features; if they must stay, use "
            + (" or ".join(remedies) or "rows in float64")
        )
        yield PrecisionWarning, text


def _few_rows(stats: Statistics, solved: Solved) -> Warnings:
    """Yield a warning if the covariance, without shrinkage, is mostly noise."""
    n_rows, rank = stats.n_rows, solved.solution.rank_covariance
    approximate = stats.sample is not None or stats.is_diagonal
    if solved.shrinkage or approximate or solved.solution.solver == "none":
        return
    if n_rows < FEW_ROWS * rank or 0 < n_rows - 1 <= rank:
        text = (
            f"there are only {n_rows / rank:.2g} rows per dimension of x (rank {rank}): the "
            "covariance is mostly noise. Held-out rows may be changed far more than fitted rows, "
            "and linear predictors may find the concept in them. Add rows; shrinkage='oas' or SAL "
            "limits the change"
        )
        yield UnseenRowsWarning, text


def _quantities(stats: Statistics, names: Sequence[VariableName], effect: str) -> list[str]:
    """Return a text on each variable of many integers that are classes without being named so."""
    kinds, texts = stats.interpretation[0] or {}, []
    for name in dict.fromkeys(names):
        variable = stats.variable(name)
        if name in kinds or not isinstance(variable, ClassSums):
            continue
        count = int(np.count_nonzero(variable.weights))
        if count > _MAX_CLASSES and type(variable.names[0]) is int:
            silent = f"if these are classes, pass kinds={{{name!r}: 'classes'}}, which does not "
            texts.append(
                f"{name!r} was read as {count} classes{effect}. If this is a quantity, pass "
                f"kinds={{{name!r}: 'continuous'}} or cast it to float; "
                + (f"{silent}warn; " if effect else "")
                + "Moments, estimators and sf.erase take kinds="
            )
    return texts


def _completed(report: Callable[[], Report], complete: Callable[[Report], Report]) -> Report:
    return complete(report())


def _noises(
    stats: Statistics, names: Sequence[VariableName], solution: Solution, factor: Factor | None
) -> tuple[Noise, ...]:
    """Return the sampling noise of Cov(x, z) for each erased variable z."""
    rank = solution.rank_covariance
    approximate = stats.sample is not None or stats.is_diagonal
    if solution.solver == "none" or approximate or rank >= stats.n_rows - 1:
        rank = int(np.count_nonzero(stats.variances))  # rank of Cov(x) with enough rows
    by_class = stats.class_noise(names, factor)
    noises = []
    for name in names:
        variable = stats.variable(name)
        if isinstance(variable, ClassSums):
            columns = int(np.count_nonzero(variable.weights))
            columns = 1 if columns == 2 else columns
        else:
            columns = variable.n_columns
        noises.append(by_class.get(name) or equal_noise(variable.weight, columns, rank))
    return tuple(noises)


def _distortions(stats: Statistics, solved: Solved, options: Options) -> _Distortions:
    """Return the distortions under Cov(x), even if another matrix than Cov(x) was factored."""
    solution, shrunk = solved.solution, bool(solved.shrinkage)
    if solution.solver == "refined":  # its LEACE is the minimum over a subspace, not over all maps
        return _Distortions(solution.distortion, None)
    if stats.is_diagonal:  # the variances do not determine it
        unknown = None if solution.rank_z else 0.0
        return _Distortions(unknown, unknown)
    if solution.solver == "cholesky" and not (shrunk or stats.sample):
        return _Distortions(solution.distortion, solution.distortion_leace)
    distortion, excess = _measured_distortion(stats, solution, shrunk)
    if not solved.span_y.names:
        return _Distortions(distortion, distortion, excess)
    leace = oblique(solved.factor, solved.span_z.rows, solved.span_y.rows[:0], options)
    return _Distortions(distortion, _measured_distortion(stats, leace, shrunk)[0], excess)


def _measured_distortion(
    stats: Statistics, solution: Solution, shrunk: bool
) -> tuple[float | None, float | None]:
    """Return the distortion E|P x - x|^2, and its expected relative excess if Cov(x) is sampled."""
    sample, gram = stats.sample, stats.gram(solution.right)
    if sample is None or shrunk or solution.solver == "none":
        return change(solution.left, solution.right, gram, stats.variances), None
    kept = solution.rank_y - solution.dropped
    regressors = solution.rank_covariance - solution.rank_z - kept
    return sample.distortion(solution.left, gram, regressors)


def _remaining_in_small_features(stats: Statistics, solution: Solution, span: Float) -> float:
    """Return the part |P Cov(x, z)| / |Cov(x, z)| that is left, for features of unit variance."""
    # Without whitening, ranks depend on the units of x. A direction that counts as rounding error
    # beside large features may hold the complete association of small features with the concept.
    if solution.rank_z == len(span):
        return 0.0
    deviations = np.sqrt(stats.variances)
    varies = deviations > CONSTANT * np.abs(stats.mean)
    remaining = span - (span @ solution.right.T) @ solution.left
    part, total = (
        float(np.linalg.norm(c[:, varies] / deviations[varies])) for c in (remaining, span)
    )
    return part / total if total else 0.0


def _check_classes(stats: Statistics, erase: Sequence[VariableName]) -> None:
    """Raise LabelError if a variable to erase is continuous, and therefore has no class means."""
    for name in erase:
        if not isinstance(stats.variable(name), ClassSums):
            raise LabelError(
                f"the variable {name!r} is continuous and has no class means; use sal, or "
                f"accumulate it with kinds={{{name!r}: 'classes'}}"
            )


def _refuse_underflow(stats: Statistics, span: Span) -> None:
    """Raise InputError if the variance of a feature underflowed, but not its covariance with z."""
    # As |Cov(x, z)|^2 <= Var(x) Var(z), a variance of 0 has underflowed if the covariance is
    # nonzero. A constant feature has no covariance above rounding error.
    covariance = np.abs(span.rows).max(axis=0, initial=0.0)
    varies = (stats.variances == 0.0) & (covariance > _ROUNDING * np.abs(stats.mean))
    features = np.flatnonzero(varies & (covariance < _UNDERFLOW))
    if len(features):
        raise InputError(
            f"the squares of {len(features)} feature(s) "
            f"({abbreviated(features, stats.feature_names)}) underflow: "
            f"they vary with {listed(span.names)}, by less than 1e-161, and their variances are 0 "
            "in float64. Multiply these features by a power of 10 before they are accumulated, "
            "such as X * 1e150"
        )
