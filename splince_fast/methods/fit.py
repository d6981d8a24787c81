"""A method with its arguments: selection, solve, checks and report.

A span is a cross-covariance of x with labels, one row per label column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast import exceptions as errors
from splince_fast import report as reports
from splince_fast._kernels.factor import STATUS_OK, Factor
from splince_fast._kernels.spans import largest_correlation
from splince_fast._runtime.arguments import warn
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import abbreviated
from splince_fast._solve import oblique as projections
from splince_fast._solve import tolerances
from splince_fast._solve.held_out import Noise, equal_noise
from splince_fast._solve.oblique import Solution, oblique
from splince_fast._solve.options import Options
from splince_fast._solve.selection import Kept, Span, span_of
from splince_fast.labels import VariableName
from splince_fast.methods.label_columns import LEAST_CORRELATION, texts_on_labels
from splince_fast.methods.refine import Refinement
from splince_fast.moments import Moments
from splince_fast.moments.statistics import Factored, Statistics
from splince_fast.moments.variables import ClassSums
from splince_fast.projection import Projection

Float = NDArray[np.float64]
# E|P x - x|^2 of the eraser and of LEACE, and the expected excess over the minimum due to sampling,
# relative to the minimum; None if unknown.
Distortions: TypeAlias = tuple[float | None, float | None, float | None]
Completion: TypeAlias = Callable[[reports.Report], reports.Report] | None
NoiseValues: TypeAlias = tuple[Noise | None, tuple[float, int, int]]

# The warning about sensitivity to rounding names the features whose column norm in P - I is at
# least _AMPLIFYING times the largest. It advises the intensity _SHRINKAGE, and centring if |mean|
# exceeds _OFFSET times the total standard deviation.
_AMPLIFYING, _SHRINKAGE, _OFFSET = 0.1, 1e-6, 100.0
# Below this number of fitted rows per dimension of x, the covariance is mostly noise.
FEW_ROWS = 2.0
# Integer labels with more distinct values than digits, months and hours may be quantities.
_MAX_CLASSES = 24
# A variance of 0 has underflowed if the largest covariance of the feature with a label is below
# _UNDERFLOW, but above _ROUNDING * |mean|; otherwise the feature is constant.
_UNDERFLOW, _ROUNDING = 1e-150, 1e-10


class Solved(NamedTuple):
    """The eraser x - left^T right (x - mean), with the intermediate results of its solve."""

    left: Float  # (r, d): factors of I - P = left^T right
    right: Float
    mean: Float
    solution: Solution  # before extension to the null space, with ranks, angles and residuals
    factor: Factor  # of Cov(x)
    shrinkage: float
    span_z: Span
    span_y: Span
    gain: float | None  # fraction of the distortion that the last extra pass over the rows removed


class MethodCall(NamedTuple):
    """A method with its arguments; it computes an eraser from moments."""

    method: str  # label of the method, such as "SPLINCE"
    erase: list[VariableName]
    keep: Kept  # variables or directions to keep
    options: Options
    whitened: bool = True  # whether x is whitened, so that Cov(x) is factored
    classes_only: bool = False  # whether the method refuses continuous variables
    refinement: Refinement | None = None
    # Returns further orthonormal directions to remove, (r', d), orthogonal to those that an
    # orthogonal projection removes, (r, d).
    discard: Callable[[Statistics, Float], Float] | None = None

    def with_shrinkage(self, shrinkage: float | str | None) -> MethodCall:
        return self._replace(options=self.options._replace(shrinkage=shrinkage))

    def solve(self, stats: Statistics, factor: Factor | None = None) -> Solved:
        """Compute the eraser, without report or warnings, from a factor of Cov(x) if passed."""
        options, whitened = self.options, self.whitened
        for name in self.erase if self.classes_only else ():
            if not isinstance(stats.variable(name), ClassSums):
                raise errors.LabelError(
                    f"the variable {name!r} is continuous and has no class means; use sal, or "
                    f"accumulate it with kinds={{{name!r}: 'classes'}}"
                )
        span_z = span_of(stats, self.erase, "erase", whitened)
        span_y = span_of(stats, self.keep, "keep", whitened)
        shrinkage, gain = stats.shrinkage if whitened else 0.0, None
        if whitened and (options.shrinkage is not None or stats.is_diagonal):
            shrinkage = stats.intensity(options)
        if self.refinement is not None:
            factor, gain = self.refinement.factor(stats, span_z.rows, span_y.rows, options)
        elif factor is None:
            factor = stats.factored(options, shrinkage) if whitened else stats.identity()
        solution = oblique(factor, span_z.rows, span_y.rows, options)
        if whitened and solution.rank_covariance < len(stats.mean):
            _refuse_underflow(stats, span_z)
        if solution.status != STATUS_OK:
            projections.raise_failure(
                solution, span_z.names, span_y.names, self.method, options.solver
            )
        if options.strength != 1:
            solution = projections.with_strength(
                factor, solution, span_z.rows, span_y.rows, options
            )
        left, right = solution.left, solution.right
        if self.discard is not None:
            further = self.discard(stats, left)
            left, right = np.concatenate([left, further]), np.concatenate([right, further])
            solution = solution._replace(left=left, right=right)
        if solution.null_basis is not None:
            left, right = projections.with_null_space(solution, span_y.rows)
        return Solved(left, right, stats.mean, solution, factor, shrinkage, span_z, span_y, gain)

    def fit(self, moments: Moments | Factored, complete: Completion = None) -> Projection:
        """Return the eraser with its report; warnings are issued and included in the report."""
        # `complete` is applied to the report when the report is first read.
        if self.refinement is not None and isinstance(moments, Moments):
            moments = moments._merged_copy()  # extra passes over the rows hold no lock
        with moments._statistics() as stats:
            return self.eraser(stats, complete)

    def eraser(
        self, stats: Statistics, complete: Completion = None, factor: Factor | None = None
    ) -> Projection:
        """Return the eraser as `fit` does, with a factor of Cov(x) if passed."""
        try:
            solved = self.solve(stats, factor)
        except errors.InfeasibleError as error:
            kept = self.keep if isinstance(self.keep, list) else []
            causes = _quantities(stats, [*self.erase, *kept], "")
            error.args = (". ".join([*causes, str(error)]),)
            raise
        left, right, mean, solution, _, shrinkage, *_, gain = solved
        sample = stats.sample if self.whitened else None
        distortions: Distortions = solution.distortion, solution.distortion_leace, None
        if shrinkage or solution.solver != "cholesky" or stats.sample is not None:
            distortions = _distortions(stats, solved, self.options)
        distortion, distortion_leace, excess = distortions
        # With a subsample, `solution.variance` is that of the factored estimate of Cov(x);
        # `stats.variances` uses all rows.
        variance = solution.variance if sample is None else float(stats.variances.sum())
        effect, norm = projections.sensitivity(left, right, mean, variance)
        found = list(self._checks(stats, solved, variance, distortion, complete is not None))
        if effect > tolerances.SENSITIVITY and norm > tolerances.OBLIQUE * len(left) ** 0.5:
            text = self._sensitivity_text(stats, solved, effect, refit=factor is None)
            found.append((errors.PrecisionWarning, text))
        for category, text in found:
            warn(text, category)
        passes = None if self.refinement is None else self.refinement.passes
        fit = reports.FitValues(
            self.method, stats.n_rows, stats.weight, shrinkage, self.whitened,
            distortion, distortion_leace, tuple(text for _, text in found), variance,
            None if sample is None else reports.Sampling(sample.n_rows, excess),
            reports.DiagonalCovariance(passes, gain) if stats.is_diagonal else None,
            effect, float(self.options.strength),
        )  # fmt: skip
        report = partial(_report, fit, solved, self._noises(stats, solved), complete)
        return Projection._make(
            left, right, mean, method=self.method, report=report, feature_names=stats.feature_names
        )

    def _noises(self, stats: Statistics, solved: Solved) -> list[NoiseValues]:
        """Return the noise of each erased variable or None, and the arguments of `equal_noise`."""
        if self.options.rank_tol != "auto":  # part of the association may be left
            return []
        rank, solver = solved.solution.rank_covariance, solved.solution.solver
        approximate = stats.sample is not None or stats.is_diagonal
        if solver == "none" or approximate or rank >= stats.n_rows - 1:
            rank = int(np.count_nonzero(stats.variances))  # rank of Cov(x) with enough rows
        by_class, values = stats.noise, []
        if stats.parameters.by is not None:
            unshrunk = solved.factor if self.whitened and not solved.shrinkage else None
            by_class = stats.class_noise(self.erase, unshrunk)
        for name in self.erase:
            variable = stats.variable(name)
            columns = variable.n_columns
            if isinstance(variable, ClassSums):
                columns = int(np.count_nonzero(variable.weights))
                columns = 1 if columns == 2 else columns
            values.append((by_class.get(name), (variable.weight, columns, rank)))
        return values

    def _checks(
        self, stats: Statistics, solved: Solved, variance: float, distortion: float | None,
        held_out: bool,
    ) -> Iterator[tuple[type[Warning], str]]:  # fmt: skip
        """Yield warnings of labels, empty or incomplete erasure, dropped directions, few rows."""
        _, _, _, solution, _, _, span_z, span_y, _ = solved
        options = self.options
        rank, rank_z, bound = solution.rank_covariance, solution.rank_z, solution.bound
        changed = 0.0 if distortion is None or not variance > 0.0 else distortion / variance
        if rank_z and variance > 0.0 and (2 * rank_z >= rank or changed > 0.5):
            fraction = "" if distortion is None else f" and {changed:.0%} of its variance"
            effect = f", and erasing takes {rank_z} of {rank} dimensions of x{fraction}"
            texts = [] if self.classes_only else _quantities(stats, self.erase, effect)
            kinds = stats.parameters.kinds
            if not texts and rank_z == rank > 1 and any(name not in kinds for name in self.erase):
                texts.append(
                    f"erasing {listed(map(str, self.erase))} removes all {rank} dimensions in "
                    "which x varies; erase other variables than identifiers, merge classes, or "
                    "silence this warning by kinds="
                )
            for text in texts:
                yield errors.ManyClassesWarning, text
        erased, kept = span_z.names, span_y.names
        if not rank_z:
            text = f"all features of x are constant, without association with {listed(erased)}"
            remedy = "check the rows"
            if rank and solution.variance:
                text = (
                    f"x has no linear association with {listed(erased)} above rounding "
                    f"({solution.noise:.1e} in units of correlation)"
                )
                remedy = "check that labels and rows are in the same order"
            yield errors.NothingErasedWarning, f"nothing was erased: {text}; {remedy}"
        if solution.dropped:
            cut = options.max_amplification
            why = "up to rounding" if cut is None else f"amplification above {cut:g}"
            text = (
                f"{solution.dropped} of {solution.rank_y} direction(s) of {listed(kept)} were "
                f"dropped, too close to {listed(erased)} ({why}); the report shows the residual of "
                "each variable"
            )
            yield errors.DroppedDirectionsWarning, text
        amplification = 1.0
        if solution.amplification > tolerances.AMPLIFICATION:
            amplification = reports.largest_change(solution.amplification, options.strength)
        if amplification > tolerances.AMPLIFICATION:
            text = (
                f"{listed(kept)} nearly lies in the span of {listed(erased)}: rows are moved up to "
                f"{amplification:.1e} times as far as without kept variables; pass "
                "max_amplification= (for example 100), keep fewer variables, or use leace"
            )
            yield errors.PrecisionWarning, text
        residual = max(solution.residual_z, solution.residual_y)
        if rank_z and (bound >= 1 or residual > bound):
            text = (
                f"rounding errors may undo the erasure: residual {residual:.1e}, bound "
                f"{bound:.1e}; pass shrinkage=1e-6, or limit max_amplification="
            )
            yield errors.PrecisionWarning, text
        squares = np.zeros((1, 0))
        if solution.admitted:  # the first coordinates; explicit directions may lie off the support
            rows = len(span_z.rows) if isinstance(self.keep, np.ndarray) else None
            squares = solution.whitened[:rows] ** 2
        if squares[:, : solution.admitted].sum() > tolerances.NOISE_FRACTION * squares.sum():
            text = (
                f"x varies by less than its rounding level in {solution.admitted} direction(s) "
                "that covary with the labels; drop copies of features, or pass shrinkage=1e-6"
            )
            yield errors.PrecisionWarning, text
        remaining = 0.0
        if not self.whitened and rank_z and options.rank_tol == "auto":
            remaining = _remaining_in_small_features(stats, solution, span_z.rows)
        if remaining**2 > tolerances.NOISE_FRACTION:
            text = (
                f"{remaining:.2%} of the covariance with {listed(erased)} is left, in features far "
                "smaller than others; scale all features to similar variances, or use leace, which "
                "does not depend on their units"
            )
            yield errors.PrecisionWarning, text
        few_rows = stats.n_rows < FEW_ROWS * rank or 0 < stats.n_rows - 1 <= rank
        approximate = solved.shrinkage or stats.sample is not None or stats.is_diagonal
        if few_rows and self.whitened and not approximate and not held_out:
            text = (
                f"there are only {stats.n_rows / max(rank, 1):.2g} rows per dimension of x (rank "
                f"{rank}): the eraser may change held-out rows far more than the fitted rows, and "
                "leave part of the concept in them; add rows, pass shrinkage='oas', or use SAL"
            )
            yield errors.UnseenRowsWarning, text
        for role, names, span in (("erase", self.erase, span_z), ("keep", self.keep, span_y)):
            # A feature that numbers three or more classes may correlate with no single indicator.
            if isinstance(names, list) and (role == "keep" or rank_z):
                largest = largest_correlation(span.rows, stats.variances)
                if largest > LEAST_CORRELATION or max(span.counts) > 1:
                    for text in texts_on_labels(stats, names, largest, role):
                        yield errors.LabelFeatureWarning, text

    def _sensitivity_text(
        self, stats: Statistics, solved: Solved, effect: float, *, refit: bool
    ) -> str:
        """Return a warning that names the features that amplify rounding errors, and remedies."""
        norms, remedies = projections.column_norms(solved.left, solved.right), []
        order = np.argsort(-norms)
        amplifying = order[norms[order] >= _AMPLIFYING * norms[order[0]]]
        variance = float(stats.variances.sum())
        ratio = float(stats.variances[amplifying].max() * len(stats.mean) / variance) ** 0.5
        if self.whitened and refit and self.refinement is None and not self.options.shrinkage:
            if stats.factor is not None:  # a copy
                remedies.append(f"moments.factored({_SHRINKAGE:g})")
            else:
                with suppress(errors.SplinceError):
                    other = self.with_shrinkage(_SHRINKAGE).solve(stats)
                    lower, _ = projections.sensitivity(
                        other.left, other.right, other.mean, variance
                    )
                    if lower < effect / 2:
                        remedies.append(f"shrinkage={_SHRINKAGE:g} (sensitivity {lower:.1e})")
        offset = float(stats.mean @ stats.mean / variance) ** 0.5
        if offset > _OFFSET:
            remedies.append(f"centred rows (the mean is {offset:.0e} standard deviations from 0)")
        return (
            "the eraser is sensitive to rounding: rounding the rows to float32 changes erased rows "
            f"by {effect:.1e} of their deviation, because of feature(s) "
            f"{abbreviated(amplifying, stats.feature_names)}, with standard deviations up to "
            f"{ratio:.1e} times the root mean square; drop these, or use "
            f"{' or '.join(remedies) or 'rows in float64'}"
        )


def _report(
    fit: reports.FitValues, solved: Solved, noises: list[NoiseValues], complete: Completion
) -> reports.Report:
    left, right, _, solution, _, _, span_z, span_y, _ = solved
    fit = fit._replace(noises=tuple(n or equal_noise(*values) for n, values in noises))
    report = reports.build_report(fit, solution, span_z, span_y, left, right)
    return report if complete is None else complete(report)


def _quantities(stats: Statistics, names: Sequence[VariableName], effect: str) -> list[str]:
    """Return a text on each variable of many integers that are classes without being named so."""
    kinds, texts = stats.parameters.kinds, []
    for name in dict.fromkeys(names):
        variable = stats.variable(name)
        if name in kinds or not isinstance(variable, ClassSums):
            continue
        count = int(np.count_nonzero(variable.weights))
        if count > _MAX_CLASSES and type(variable.names[0]) is int:
            silent = f", or kinds={{{name!r}: 'classes'}} if these are classes" if effect else ""
            texts.append(
                f"{name!r} was read as {count} classes{effect}; if this is a quantity, pass "
                f"kinds={{{name!r}: 'continuous'}} or cast it to float{silent}; Moments, "
                "estimators and sf.erase take kinds="
            )
    return texts


def _distortions(stats: Statistics, solved: Solved, options: Options) -> Distortions:
    """Return the figures of `Distortions` under Cov(x), whatever matrix was factored."""
    solution, sample = solved.solution, stats.sample
    if solution.solver == "refined":  # its LEACE is the minimum over a subspace, not over all maps
        return solution.distortion, None, None
    if stats.is_diagonal:  # the variances do not determine it
        unknown = None if solution.rank_z else 0.0
        return unknown, unknown, None

    def measured(solution: Solution) -> tuple[float | None, float | None]:
        gram = stats.gram(solution.right)
        if sample is None or solved.shrinkage or solution.solver == "none":
            return projections.change(solution.left, solution.right, gram, stats.variances), None
        kept = solution.rank_y - solution.dropped
        regressors = solution.rank_covariance - solution.rank_z - kept
        return sample.distortion(solution.left, gram, regressors)

    distortion, excess = measured(solution)
    if not solved.span_y.names:
        return distortion, distortion, excess
    leace = oblique(solved.factor, solved.span_z.rows, solved.span_y.rows[:0], options)
    return distortion, measured(leace)[0], excess


def _remaining_in_small_features(stats: Statistics, solution: Solution, span: Float) -> float:
    """Return the part |P Cov(x, z)| / |Cov(x, z)| that is left, for features of unit variance."""
    # Without whitening, a direction that counts as rounding error beside large features may hold
    # the complete association of small features with the concept.
    if solution.rank_z == len(span):
        return 0.0
    deviations = np.sqrt(stats.variances)
    varies = deviations > tolerances.CONSTANT * np.abs(stats.mean)
    remaining = span - (span @ solution.right.T) @ solution.left
    part, total = (
        float(np.linalg.norm(c[:, varies] / deviations[varies])) for c in (remaining, span)
    )
    return part / total if total else 0.0


def _refuse_underflow(stats: Statistics, span: Span) -> None:
    """Raise InputError if the variance of a feature underflowed, but not its covariance with z."""
    covariance = np.abs(span.rows).max(axis=0, initial=0.0)
    varies = (stats.variances == 0.0) & (covariance > _ROUNDING * np.abs(stats.mean))
    features = np.flatnonzero(varies & (covariance < _UNDERFLOW))
    if len(features):
        raise errors.InputError(
            f"the squares of {len(features)} feature(s) "
            f"({abbreviated(features, stats.feature_names)}) underflow, but they vary with "
            f"{listed(span.names)}. Multiply these features by a power of 10, such as 1e150"
        )
