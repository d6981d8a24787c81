"""A method with its arguments: the solve, its warnings and the contents of its report.

A span is a cross-covariance of x with labels, one row per label column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import STATUS_INFEASIBLE, STATUS_OK
from splince_fast._runtime.rows import abbreviated
from splince_fast._runtime.warn import warn
from splince_fast._solve.factor import Factor
from splince_fast._solve.held_out import Noise, equal_noise
from splince_fast._solve.messages import raise_infeasible, raise_numerical
from splince_fast._solve.oblique import (
    Solution,
    change,
    column_norms,
    oblique,
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
from splince_fast.moments.snapshot import Factored, Statistics, statistics
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

# Thresholds of the warning about sensitivity to rounding. The warning names the features whose
# column norm in P - I is at least _AMPLIFYING times the largest. It advises min_scale if the
# largest standard deviation of the named features is below _SMALL times the root mean square of
# all standard deviations, and centring if |mean| exceeds _OFFSET times the total standard
# deviation.
_AMPLIFYING, _SMALL, _OFFSET = 0.1, 0.1, 100.0
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
    factor: Factor  # factor of Cov(x); it may be stored in the work memory of the solve
    shrinkage: float
    span_z: Span
    span_y: Span
    gain: float | None  # fraction of the distortion that the last extra pass over the rows removed


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

    def solve(
        self, stats: Statistics, memory: Float | None, factor: Factor | None = None
    ) -> Solved:
        """Compute the eraser, without report or warnings."""
        # `memory` is that of a factor (`Snapshot.memory`); with `factor`, the options must not
        # request shrinkage.
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
        elif factor is None:
            factor = stats.factored(options, shrinkage, memory)
        solution = oblique(factor, span_z.rows, span_y.rows, options)
        if whitened and solution.rank_covariance < len(span_z.rows.T):
            _refuse_underflow(stats, span_z)
        if solution.status != STATUS_OK:
            _raise_failure(solution, span_z.names, span_y.names, self.method, options)
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
        options, whitened = self.options, self.whitened
        passes = None if self.refinement is None else self.refinement.passes
        with statistics(moments) as stats, stats.memory(whitened) as memory:
            try:
                solved = self.solve(stats, memory)
            except InfeasibleError as error:
                kept = self.keep if isinstance(self.keep, list) else []
                causes = _quantities(stats, [*self.erase, *kept])
                error.args = (". ".join([*causes.values(), str(error)]),)
                raise
            left, right, mean, solution, factor, shrinkage, span_z, span_y, gain = solved
            sample = stats.sample if whitened else None
            if stats.is_diagonal and passes is None:
                # The distortion is unknown, because the variances alone do not determine it.
                unmeasured = None if solution.rank_z else 0.0
                distortions = _Distortions(unmeasured, unmeasured, None)
            else:
                distortions = _distortions(stats, solved, options)
            admitted = _count_admitted(solved) if solution.admitted else 0
            remaining = 0.0
            if not whitened and solution.rank_z < len(span_z.rows) and options.rank_tol == "auto":
                remaining = _remaining_in_small_features(stats, solution, span_z.rows)
            rank = solution.rank_covariance
            # With a subsample, `solution.variance` is that of the factored estimate of Cov(x);
            # `stats.variances` uses all rows.
            variance = solution.variance if sample is None else float(stats.variances.sum())
            changed = distortions.eraser
            if changed is not None:
                changed = changed / variance if variance else 0.0
            large = 2 * solution.rank_z >= rank or (changed is not None and 2.0 * changed > 1.0)
            notes: tuple[str, ...] = ()
            if solution.rank_z and variance > 0.0 and large:
                notes = self._many_classes_warnings(stats, solution.rank_z, rank, changed)
            notes += _warn(solution, span_z.names, span_y.names, options, admitted, remaining)
            effect, norm = sensitivity(left, right, mean, variance)
            # The Frobenius norm of an orthogonal projection is sqrt(rank).
            if effect > SENSITIVITY and norm > _OBLIQUE * len(left) ** 0.5:
                norms = column_norms(left, right)
                notes += (self._sensitivity_warning(stats, memory, span_z, span_y, norms, effect),)
                warn(notes[-1], PrecisionWarning)
            noises: tuple[Noise, ...] = ()
            if options.rank_tol == "auto":  # a larger rank_tol may leave part of the association
                unshrunk = factor if whitened and not shrinkage else None
                noises = _noises(stats, self.erase, solution, whitened, unshrunk)
            if solution.rank_z:
                notes += warn_of_labels(stats, self.erase, span_z, "erase")
            if isinstance(self.keep, list):
                notes += warn_of_labels(stats, self.keep, span_y, "keep")
            measured = complete is not None or sample is not None or stats.is_diagonal
            few = stats.n_rows < FEW_ROWS * rank or 0 < stats.n_rows - 1 <= rank
            if whitened and not (shrinkage or measured) and few:
                notes += (_few_rows(stats.n_rows, rank),)
                warn(notes[-1], UnseenRowsWarning)
            fit = FitValues(
                self.method, stats.n_rows, stats.weight, shrinkage, whitened, distortions.eraser,
                distortions.leace, notes, variance,
                None if sample is None else Sampling(sample.n_rows, distortions.excess),
                DiagonalCovariance(passes, gain) if stats.is_diagonal else None,
                effect, noises, float(options.strength), stats.feature_names,
            )  # fmt: skip
        report = partial(build_report, fit, solution, span_z, span_y, left, right)
        if complete is not None:
            report = partial(_completed, report, complete)
        return Projection._make(
            left, right, mean, method=self.method, report=report, feature_names=fit.feature_names
        )

    def _sensitivity_warning(
        self, stats: Statistics, memory: Float | None, span_z: Span, span_y: Span,
        norms: Float, effect: float,
    ) -> str:  # fmt: skip
        """Return a warning that names the features that amplify rounding errors, and remedies."""
        variances = stats.variances
        rms_deviation = float(variances.mean()) ** 0.5
        order = np.argsort(-norms)
        amplifying = order[norms[order] >= _AMPLIFYING * norms[order[0]]]
        ratio = float(np.sqrt(variances[amplifying].max())) / rms_deviation
        offset = float(stats.mean @ stats.mean / variances.sum()) ** 0.5
        remedies: list[str] = []
        if self.whitened and self.refinement is None:
            candidates: list[tuple[str, float]] = []
            if 0.0 < ratio < _SMALL:
                candidates.append(("min_scale", 10.0 ** (np.floor(np.log10(ratio)) + 1.0)))
            if not self.options.shrinkage:
                candidates.append(("shrinkage", 1e-6))
            for name, value in candidates:
                changed: dict[str, Any] = {name: value}
                options = replace(self.options, **changed)
                if isinstance(stats, Factored):
                    remedies.append(f"moments.factored({name}={value:.0e})")
                    continue
                shrinkage = stats.intensity(options)
                other = stats.factored(options, shrinkage, memory)
                solution = oblique(other, span_z.rows, span_y.rows, options)
                if solution.status != STATUS_OK:
                    continue
                lower, _ = sensitivity(
                    solution.left, solution.right, stats.mean, float(variances.sum())
                )
                if lower < effect / 2:
                    remedies.append(f"{name}={value:.0e} (sensitivity {lower:.1e})")
        if offset > _OFFSET:
            remedies.append(f"centred rows (the mean is {offset:.0e} standard deviations from 0)")
        advice = " or ".join(remedies) or "rows in float64"
        features = abbreviated(amplifying, stats.feature_names)
        return (
            "the eraser is sensitive to rounding: errors in the rows of the size of float32 "
            f"rounding change erased rows by {effect:.1e} of their standard deviation, mostly "
            f"because of feature(s) {features}, with standard deviations up to {ratio:.1e} times "
            "the root mean square. The fitted rows are erased as the report says; rows that are "
            "recomputed, or rounded in another way, show the errors. Drop these features; if they "
            f"must stay, use {advice}"
        )

    def _many_classes_warnings(
        self, stats: Statistics, rank_z: int, rank: int, changed: float | None
    ) -> tuple[str, ...]:
        """Warn of erased integers with many classes, or if all dimensions of x are removed."""
        kinds = stats.interpretation[0] or {}
        variance = "" if changed is None else f" and {changed:.0%} of its variance"
        effect = f", and erasing takes {rank_z} of {rank} dimensions of x{variance}"
        quantities = {} if self.classes_only else _quantities(stats, self.erase, effect)
        notes = tuple(quantities.values())
        if not notes and rank_z == rank > 1 and any(name not in kinds for name in self.erase):
            notes = (
                f"erasing {listed(map(str, self.erase))} removes all {rank} dimensions in "
                "which x varies: all erased rows are equal. Typical causes: an identifier, with a "
                "class for nearly every row, or too few dimensions of x for the classes. Erase "
                "other variables, or merge classes; kinds= for the variable silences the warning",
            )
        for note in notes:
            warn(note, ManyClassesWarning)
        return notes


def _quantities(
    stats: Statistics, names: Sequence[VariableName], effect: str = ""
) -> dict[VariableName, str]:
    """Return a text on each variable of many integers that are classes without being named so."""
    kinds, texts = stats.interpretation[0] or {}, {}
    for name in names:
        variable = stats.variable(name)
        if (
            not isinstance(variable, ClassSums)
            or name in kinds
            or type(variable.names[0]) is not int
        ):
            continue
        count = int(np.count_nonzero(variable.weights))
        if count > _MAX_CLASSES:
            texts[name] = (
                f"{name!r} was read as {count} classes{effect}. If this is a quantity, pass "
                f"kinds={{{name!r}: 'continuous'}} or cast it to float"
            )
            if effect:
                texts[name] += (
                    f"; if these are classes, pass kinds={{{name!r}: 'classes'}}, which does not "
                    "warn"
                )
            texts[name] += "; Moments, estimators and sf.erase take kinds="
    return texts


def _few_rows(n_rows: int, rank: int) -> str:
    return (
        f"there are only {n_rows / rank:.2g} rows per dimension of x (rank {rank}): the "
        "covariance is mostly noise. Held-out rows may be changed far more than fitted rows, and "
        "linear predictors may find the concept in them. Add rows; shrinkage='oas' or SAL limits "
        "the change"
    )


def _completed(report: Callable[[], Report], complete: Callable[[Report], Report]) -> Report:
    return complete(report())


def _noises(
    stats: Statistics,
    names: Sequence[VariableName],
    solution: Solution,
    whitened: bool,
    factor: Factor | None,
) -> tuple[Noise, ...]:
    """Return the sampling noise of Cov(x, z) for each erased variable z."""
    rank = solution.rank_covariance + len(solution.left_out)
    approximate = stats.sample is not None or stats.is_diagonal
    if not whitened or approximate or rank >= stats.n_rows - 1:
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


class _Distortions(NamedTuple):
    """Distortions E|P x - x|^2; None if not known."""

    eraser: float | None  # distortion of the eraser
    leace: float | None  # distortion of LEACE, which erases the same variables and keeps none
    excess: float | None  # expected relative excess of `eraser` over the minimum, due to sampling


def _distortions(stats: Statistics, solved: Solved, options: Options) -> _Distortions:
    """Return the distortions under Cov(x), even if another matrix than Cov(x) was factored."""
    solution, shrinkage, span_y = solved.solution, solved.shrinkage, solved.span_y
    distortion: float | None = solution.distortion
    distortion_leace: float | None = solution.distortion_leace
    excess = None
    approximate = solution.solver != "none" and stats.sample is not None
    approximate = approximate or solution.uses_left_out
    if solution.solver not in ("cholesky", "refined") or shrinkage or approximate:
        distortion, excess = _measured_distortion(stats, solution, bool(shrinkage))
        if (solution.admitted or approximate) and span_y.names:
            leace = oblique(solved.factor, solved.span_z.rows, span_y.rows[:0], options)
            distortion_leace = _measured_distortion(stats, leace, bool(shrinkage))[0]
    if solution.solver == "refined":  # the minimum over a subspace exceeds that of LEACE
        return _Distortions(distortion, None, excess)
    return _Distortions(distortion, distortion_leace if span_y.names else distortion, excess)


def _count_admitted(solved: Solved) -> int:
    """Return the number of directions that the spans add to the support of Cov(x)."""
    # The result is 0 if the added directions hold at most the fraction `NOISE_FRACTION` of the
    # squared norm of the whitened spans.
    factor, spans = solved.factor, (solved.span_z, solved.span_y)
    # Explicit directions are left out: the caller chose them, and needs no warning if they are off
    # the support.
    rows = np.concatenate([span.rows for span in spans if span.names != ["directions"]])
    full = factor.admit(rows)
    on_support, total = (float(np.sum(f.whiten(rows) ** 2)) for f in (factor, full))
    return full.admitted if total - on_support > NOISE_FRACTION * total else 0


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


def _raise_failure(
    solution: Solution, erased: list[str], kept: list[str], method: str, options: Options
) -> NoReturn:
    """Raise the error that the status of a failed solve stands for."""
    if solution.status == STATUS_INFEASIBLE:
        cosine = float(solution.cosines[0]) if len(solution.cosines) else 1.0
        sine = float(solution.sines.min())
        raise_infeasible(cosine, sine, solution.rank_y, solution.rank_z, erased, kept, method)
    raise_numerical(solution.status, options.solver)


def _warn(
    solution: Solution,
    erased: list[str],
    kept: list[str],
    options: Options,
    admitted: int,
    remaining: float,
) -> tuple[str, ...]:
    """Issue the warnings of a solve, and return their texts."""
    notes = []
    if not (solution.rank_z or (solution.rank_covariance and solution.variance)):
        notes.append(
            "nothing was erased: all features of x are constant, without association with "
            f"{listed(erased)}, so the eraser is the identity. Check the rows that were accumulated"
        )
        warn(notes[-1], NothingErasedWarning)
    elif not solution.rank_z:
        notes.append(
            f"nothing was erased: x has no linear association with {listed(erased)} above the "
            f"rounding level ({solution.noise:.1e} in units of correlation), so the eraser is the "
            "identity. If an association was expected, check that labels and rows "
            "are in the same order"
        )
        warn(notes[-1], NothingErasedWarning)
    if solution.dropped:
        cut = options.max_amplification
        notes.append(
            f"{solution.dropped} of {solution.rank_y} direction(s) of {listed(kept)} were "
            f"dropped: they lie too close to {listed(erased)} "
            + ("(up to rounding)" if cut is None else f"(amplification above {cut:g})")
            + "; the report shows the residual of each variable"
        )
        warn(notes[-1], DroppedDirectionsWarning)
    imprecise = []
    amplification = largest_change(solution.amplification, options.strength)
    bound = solution.bound
    if amplification > AMPLIFICATION:
        imprecise.append(
            f"{listed(kept)} nearly lies in the span of {listed(erased)}: rows are moved up to "
            f"{amplification:.1e} times as far as without kept variables, and errors due to "
            "rounding, noise and new rows grow by the same factor. Limit the factor with "
            "max_amplification= (for example 100), keep fewer variables, or use leace"
        )
    worst = max(solution.residual_z, solution.residual_y)
    if solution.rank_z and (bound >= 1 or worst > bound):
        imprecise.append(
            f"rounding errors may undo the erasure: residual {worst:.1e}, bound {bound:.1e} "
            "(relative to the cross-covariances). Typical causes: variables that nearly determine "
            "each other, or features that are combinations of others; drop such columns, pass "
            "shrinkage=1e-6, or limit max_amplification="
        )
    if admitted:
        imprecise.append(
            f"x varies by less than its rounding level in {admitted} direction(s) that covary with "
            "the labels; their variance was set to that level. The constraints hold exactly, but "
            "x is changed more than necessary, and new rows may be changed far more. Drop features "
            "that are copies of others, accumulate in float64, or pass shrinkage=1e-6"
        )
    if solution.rank_z and remaining**2 > NOISE_FRACTION:
        imprecise.append(
            f"{remaining:.2%} of the covariance with {listed(erased)} is left, for features in "
            "units of their standard deviations: the covariance of some small features is below "
            "the rounding error of the total variance. Scale all features to similar variances, "
            "or use leace, which does not depend on their units"
        )
    for note in imprecise:
        warn(note, PrecisionWarning)
    return (*notes, *imprecise)
