"""A method and all that it is told, applied to moments or to folds of them; its warnings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.factor import STATUS_INFEASIBLE, STATUS_OK
from splince_fast._runtime.arrays import abbreviated
from splince_fast._solve.factor import Factor
from splince_fast._solve.held_out import Noise, equal_noise
from splince_fast._solve.messages import raise_infeasible, raise_numerical
from splince_fast._solve.oblique import Solution, oblique, with_null_space, with_strength
from splince_fast._solve.options import Options
from splince_fast._solve.selection import Span, names_of, span_of
from splince_fast._solve.tolerances import AMPLIFICATION, CONSTANT, NOISE_SHARE, SENSITIVITY
from splince_fast._solve.weak_features import column_norms, sensitivity
from splince_fast.exceptions import (
    DroppedDirectionsWarning,
    InputError,
    LabelError,
    ManyClassesWarning,
    NothingErasedWarning,
    PrecisionWarning,
    SplinceError,
)
from splince_fast.labels import VariableName
from splince_fast.labels.names import listed
from splince_fast.methods.refine import Refinement
from splince_fast.methods.unseen import Shrinkage, Unseen, judge, warn
from splince_fast.moments import Folds, Moments
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.factored import Factored, Statistics, statistics
from splince_fast.projection import Projection
from splince_fast.report import Facts, Sampling, SketchedCovariance, build_report

Float = NDArray[np.float64]

# Columns of P - I of at least this fraction of the largest are named; features below this fraction
# of the root mean square deviation can be left out; from so many deviations on the mean counts.
_BLAMED, _SMALL, _OFFSET = 0.1, 0.1, 100.0
# |P - I| over that of an orthogonal projection of the same rank, above which it is told.
_OBLIQUE = 10.0
# Digits, months, hours of a day and most classes have no more values.
_FEW_CLASSES = 24
# Deviations whose squares underflow are below 1e-161; a constant covaries by its rounding alone.
_UNDERFLOW, _ROUNDING = 1e-150, 1e-10


class Recipe(NamedTuple):
    """A method with all that it is told: what it makes of moments, and folds of them.

    Attributes
    ----------
    method : str
        The label of the method.
    whitened : bool
        Whether Cov(x) is factored.
    erase, keep
        As the methods take them.
    options : Options
    refinement : Refinement or None
    names : sequence of str, optional
        Of the features.
    classes_only : bool
        Whether the erased variables must be classes.
    """

    method: str
    whitened: bool
    erase: object
    keep: object
    options: Options
    refinement: Refinement | None = None
    names: Sequence[str] | None = None
    classes_only: bool = False

    def with_shrinkage(self, shrinkage: Shrinkage) -> Recipe:
        """The same with another intensity of shrinkage."""
        return self._replace(options=replace(self.options, shrinkage=shrinkage))

    def judge(self, folds: Sequence[Moments]) -> Unseen:
        """Effect of the erasers of all other folds on each fold."""
        plain = self._replace(method="SAL", whitened=False, classes_only=False, options=Options())
        return judge(
            list(folds),
            lambda source, shrinkage: self.with_shrinkage(shrinkage).fit(source),
            self.erase,
            self.keep,
            self.options,
            whitened=self.whitened,
            plain=lambda source, _: plain.fit(source),
            names=getattr(folds, "feature_names", None),
        )

    def fit(self, moments: Moments | Factored) -> Projection:
        """Factors, warnings and report for any method of the family.

        Parameters
        ----------
        moments : Moments or Factored
            Of the data.
        """
        method, options, whitened = self.method, self.options, self.whitened
        with statistics(moments) as known, known.memory(whitened) as memory:
            if self.classes_only:
                _check_classes(known, self.erase)
            span_z = span_of(known, self.erase, "erase", whitened)
            span_y = span_of(known, self.keep, "keep", whitened)
            share = known.share(options) if whitened else 0.0
            passes, gain = None, None
            if self.refinement is None:
                factor = known.factored(options, share, memory) if whitened else known.identity()
            else:
                passes = self.refinement.passes
                factor, gain = self.refinement.factor(known, span_z.rows, span_y.rows, options)
            solution = oblique(factor, span_z.rows, span_y.rows, options)
            if whitened and solution.rank_covariance < len(span_z.rows.T):
                _refuse_underflow(known, span_z)
            if solution.status != STATUS_OK:
                _refuse(solution, span_z.names, span_y.names, method, options)
            if options.strength != 1:
                solution = with_strength(factor, solution, span_z.rows, span_y.rows, options)
            distortion: float | None = solution.distortion
            unkept: float | None = solution.distortion_unkept
            sampled, excess = known.sample if whitened else None, None
            sketch = None if known.metric is None else known.metric.rank
            # The matrix that was factored is Cov(x) itself: then the solve knows what it changes.
            approximate = sampled is not None or solution.reads_left_out
            if sketch is not None and passes is None:
                # A stand-in may understate Cov(x), and so the change.
                unmeasured = solution.rank_z > 0
                distortion = unkept = None if unmeasured else 0.0
            elif solution.solver not in ("cholesky", "refined") or share or approximate:
                distortion, excess = _change(known, solution, bool(share))
                if (solution.admitted or approximate) and span_y.names:
                    # Nor is LEACE's then what the factor says.
                    plain = oblique(factor, span_z.rows, span_y.rows[:0], options)
                    unkept = _change(known, plain, bool(share))[0]
            if not span_y.names:
                unkept = distortion
            left, right = solution.left, solution.right
            if solution.null_basis is not None:
                left, right = with_null_space(solution, span_y.rows)
            traced = 0
            if solution.admitted:
                # Explicit directions off the support are the caller's choice, and no trace.
                told = np.concatenate(
                    [s.rows for s in (span_z, span_y) if s.names != ["directions"]]
                )
                full = factor.admit(told)
                seen, whole = (float(np.sum(f.whiten(told) ** 2)) for f in (factor, full))
                if whole - seen > NOISE_SHARE * whole:
                    traced = full.admitted
            small = 0.0
            if not whitened and solution.rank_z < len(span_z.rows) and options.rank_tol == "auto":
                small = _left_in_small_features(known, solution, span_z.rows)
            notes = _warn(solution, span_z.names, span_y.names, options, traced, small)
            mean = known.mean
            # All rows know the variance of x, whatever its covariance rests on.
            variance = solution.variance if sampled is None else float(known.variances.sum())
            moved, norm = sensitivity(left, right, mean, variance)
            # An orthogonal projection has norm sqrt(rank): only above it features are to blame.
            if moved > SENSITIVITY and norm > _OBLIQUE * len(left) ** 0.5:
                norms = column_norms(left, right)
                notes += (self._sensitive(known, memory, span_z, span_y, norms, moved),)
                warnings.warn(notes[-1], PrecisionWarning, stacklevel=4)
            noises: tuple[Noise, ...] = ()
            if options.rank_tol == "auto":  # any other tolerance keeps some of the association
                own = factor if whitened and not share else None
                noises = _noises(known, names_of(self.erase, "erase"), solution, whitened, own)
            rank = solution.rank_covariance
            changed = None if distortion is None else distortion / variance if variance else 0.0
            large = 2 * solution.rank_z >= rank or (changed is not None and 2.0 * changed > 1.0)
            if solution.rank_z and variance > 0.0 and large:
                notes += self._quantities(known, solution.rank_z, rank, changed)
            facts = Facts(
                method, known.n_rows, known.weight, share, whitened, distortion, unkept, notes,
                variance, None if sampled is None else Sampling(sampled.n_rows, excess),
                None if sketch is None else SketchedCovariance(sketch, passes, gain),
                moved, noises, float(options.strength),
            )  # fmt: skip
        report = partial(build_report, facts, solution, span_z, span_y, left, right)
        return Projection._make(left, right, mean, method=method, report=report)

    def _sensitive(
        self, known: Statistics, memory: Float | None, span_z: Span, span_y: Span,
        norms: Float, moved: float,
    ) -> str:  # fmt: skip
        """Which features make rounding grow, and what the remedies make of it."""
        variances = known.variances
        unit = float(variances.mean()) ** 0.5
        order = np.argsort(-norms)
        blamed = order[norms[order] >= _BLAMED * norms[order[0]]]
        ratio = float(np.sqrt(variances[blamed].max())) / unit
        offset = float(known.mean @ known.mean / variances.sum()) ** 0.5
        remedies: list[str] = []
        if self.whitened and self.refinement is None:
            tries: list[tuple[str, float]] = []
            if 0.0 < ratio < _SMALL:
                tries.append(("min_scale", 10.0 ** (np.floor(np.log10(ratio)) + 1.0)))
            if not self.options.shrinkage:
                tries.append(("shrinkage", 1e-6))
            for name, value in tries:
                changed: dict[str, Any] = {name: value}
                options = replace(self.options, **changed)
                if isinstance(known, Factored):
                    remedies.append(f"moments.factored({name}={value:.0e})")
                    continue
                share = known.share(options)
                other = known.factored(options, share, memory)
                solution = oblique(other, span_z.rows, span_y.rows, options)
                if solution.status != STATUS_OK:
                    continue
                lower, _ = sensitivity(
                    solution.left, solution.right, known.mean, float(variances.sum())
                )
                if lower < moved / 2:
                    remedies.append(f"{name}={value:.0e} (sensitivity {lower:.1e})")
        if offset > _OFFSET:
            remedies.append(f"rows less their mean, which is {offset:.0e} deviations from 0")
        advice = " or ".join(remedies) or "rows in float64"
        return (
            f"the eraser is sensitive to rounding: rows rounded to float32 move by {moved:.1e} of "
            f"their deviation, most of it from feature(s) {abbreviated(blamed, self.names)}, "
            f"of deviations up to {ratio:.1e} times the root mean square. Drop them, or use "
            f"{advice}"
        )

    def _quantities(
        self, known: Statistics, rank_z: int, rank: int, changed: float | None
    ) -> tuple[str, ...]:
        """Warn of erased integers that were read as classes and take much of x."""
        if self.classes_only:
            return ()
        kinds = known.reading[0] or {}
        counts = {}
        for name in names_of(self.erase, "erase"):
            variable = known.variable(name)
            if isinstance(variable, ClassSums) and name not in kinds:
                count = int(np.count_nonzero(variable.weights))
                if count > _FEW_CLASSES and type(variable.names[0]) is int:
                    counts[name] = count
        variance = "" if changed is None else f" and {changed:.0%} of its variance"
        notes = tuple(
            f"{name!r} was read as {count} classes, and erasing takes {rank_z} of {rank} "
            f"dimensions of x{variance}. If this is a quantity, pass "
            f"kinds={{{name!r}: 'continuous'}} or cast it to float; if these are classes, "
            f"kinds={{{name!r}: 'classes'}} is silent"
            for name, count in counts.items()
        )
        for note in notes:
            warnings.warn(note, ManyClassesWarning, stacklevel=5)
        return notes


def eraser_of(moments: Moments | Factored | Folds, recipe: Recipe) -> Projection:
    """The eraser of all rows; of folds, with what it does to held-out rows."""
    # `Folds` is a Sequence, and so slow to ask for.
    if isinstance(moments, Moments) or not isinstance(moments, Folds):
        return recipe.fit(moments)
    recipe = recipe._replace(names=moments.feature_names)
    unseen = None
    try:
        unseen = recipe.judge(moments)
    except SplinceError as error:
        # A fold may lack what all rows have: then the report says nothing of held-out rows.
        if recipe.options.shrinkage == "cv":
            error.add_note("while shrinkage='cv' was chosen on the folds")
            raise
    if unseen is None:
        return recipe.fit(moments.total)
    warn(unseen.warnings, 3)
    return unseen.told(recipe.with_shrinkage(unseen.shrinkage).fit(moments.total))


def _noises(
    known: Statistics,
    names: Sequence[VariableName],
    solution: Solution,
    whitened: bool,
    factor: Factor | None,
) -> tuple[Noise, ...]:
    """The sampling noise of Cov(x, z) for each erased variable z; `factor` is that of Cov(x)."""
    rank = solution.rank_covariance + len(solution.left_out)
    partial = known.sample is not None or known.metric is not None
    if not whitened or partial or rank >= known.n_rows - 1:
        rank = int(np.count_nonzero(known.variances))  # the rank that Cov(x) of more rows may have
    own = known.class_noise(names, factor)
    found = []
    for name in names:
        variable = known.variable(name)
        columns = variable.n_columns
        if isinstance(variable, ClassSums):
            columns = int(np.count_nonzero(variable.weights))
            columns = 1 if columns == 2 else columns
        found.append(own.get(name) or equal_noise(variable.weight, columns, rank))
    return tuple(found)


def _change(known: Statistics, solution: Solution, shrunk: bool) -> tuple[float, float | None]:
    """E|P x - x|^2, and where Cov(x) is that of a sample, the share of it that is excess."""
    left, right, sample = solution.left, solution.right, known.sample
    gram = known.gram(right)
    if sample is None or shrunk or solution.solver == "none":
        return float(np.vdot(left @ left.T, gram)), None
    kept = solution.rank_y - solution.dropped
    regressors = solution.rank_covariance - solution.rank_z - kept
    return sample.change(left, right, gram, regressors)


def _left_in_small_features(known: Statistics, solution: Solution, span: Float) -> float:
    """|P Cov(x, z)| / |Cov(x, z)|, each feature in units of its deviation.

    Without a factor ranks are judged in the units of x as they are: a direction may be below the
    rounding of large features, and be all that small ones know of the concept.
    """
    deviations = np.sqrt(known.variances)
    varies = deviations > CONSTANT * np.abs(known.mean)
    left = span - (span @ solution.right.T) @ solution.left
    rest, whole = (float(np.linalg.norm(c[:, varies] / deviations[varies])) for c in (left, span))
    return rest / whole if whole else 0.0


def _check_classes(known: Statistics, erase: object) -> None:
    """Raise LabelError for a continuous variable, which has no class means."""
    for name in names_of(erase, "erase"):
        if not isinstance(known.variable(name), ClassSums):
            raise LabelError(
                f"the variable {name!r} is continuous and has no class means; use sal, or "
                f"accumulate it with kinds={{{name!r}: 'classes'}}"
            )


def _refuse_underflow(known: Statistics, span: Span) -> None:
    """Raise InputError for features that vary with a concept, but not by their own variance.

    |Cov(x, z)|^2 <= Var(x) Var(z), so that their squares have left the range of float64. A
    constant has no covariance but its rounding.
    """
    covariance = np.abs(span.rows).max(axis=0, initial=0.0)
    lost = (known.variances == 0.0) & (covariance > _ROUNDING * np.abs(known.mean))
    lost &= covariance < _UNDERFLOW
    found = np.flatnonzero(lost)
    if len(found):
        raise InputError(
            f"the squares of {len(found)} feature(s) ({abbreviated(found)}) underflow: they vary "
            f"with {listed(span.names)}, by less than 1e-161, and float64 holds no variance of "
            "theirs. Multiply them by a power of 10 before they are accumulated, such as X * 1e150"
        )


def _refuse(
    solution: Solution, erased: list[str], kept: list[str], method: str, options: Options
) -> NoReturn:
    """Raise what the status of a solve that failed calls for."""
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
    traced: int,
    small: float,
) -> tuple[str, ...]:
    """Warn of what the caller has to know, and return it for the report."""
    notes = []
    if not solution.rank_z:
        notes.append(
            f"nothing was erased: x has no linear trace of {listed(erased)} above the "
            f"rounding level ({solution.noise:.1e} in units of correlation), so the eraser is the "
            "identity. If a trace was expected, check that labels and rows belong together"
        )
        warnings.warn(notes[-1], NothingErasedWarning, stacklevel=5)
    if solution.dropped:
        cut = options.max_amplification
        notes.append(
            f"{solution.dropped} of {solution.rank_y} direction(s) of {listed(kept)} were "
            f"given up: they lie too close to {listed(erased)} "
            + ("(to rounding)" if cut is None else f"(amplification above {cut:g})")
            + "; the report shows what is left of each variable"
        )
        warnings.warn(notes[-1], DroppedDirectionsWarning, stacklevel=5)
    for note in _imprecise(solution, erased, kept, traced, small):
        notes.append(note)
        warnings.warn(note, PrecisionWarning, stacklevel=5)
    return tuple(notes)


def _imprecise(
    solution: Solution, erased: list[str], kept: list[str], traced: int, small: float
) -> list[str]:
    """Causes of lost digits, in words."""
    notes = []
    amplification, bound = solution.amplification, solution.bound
    if amplification > AMPLIFICATION:
        notes.append(
            f"{listed(kept)} nearly lies in the span of {listed(erased)}: the longest correction "
            f"is {amplification:.1e} times LEACE's, and so is what rounding, noise and new rows "
            "add to it. Cap it with max_amplification= (for example 100), keep fewer variables, "
            "or use leace"
        )
    worst = max(solution.residual_z, solution.residual_y)
    if solution.rank_z and (bound >= 1 or worst > bound):
        notes.append(
            f"rounding may undo what was erased or kept: residual {worst:.1e}, bound {bound:.1e} "
            "(relative to the cross-covariances). Typical causes: variables that nearly determine "
            "each other, or features that are combinations of others; drop such columns, pass "
            "shrinkage=1e-6, or cap max_amplification="
        )
    if traced:
        notes.append(
            f"x varies by less than its rounding level in {traced} direction(s) in "
            "which the labels show a trace; their variance was set to that level. What is erased "
            "and kept is exact, but x is changed more than the least possible, and new rows may "
            "be changed far more: drop features that are copies of others, accumulate in float64, "
            "or pass shrinkage=1e-6"
        )
    if solution.rank_z and small**2 > NOISE_SHARE:
        notes.append(
            f"{small:.2%} of the covariance with {listed(erased)} is left, each feature in units "
            "of its deviation: some features are so small beside others that their covariance is "
            "below the rounding of the total variance. Scale all features alike first, or use "
            "leace, which does not depend on their units"
        )
    return notes
