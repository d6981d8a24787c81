"""Statistics that a solve reads: of locked moments, or of a copy with its own factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve import factor as factors
from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor, weak_features
from splince_fast._solve.held_out import Noise, class_noise
from splince_fast._solve.low_rank import LowRank, nystroem
from splince_fast._solve.options import Options
from splince_fast._solve.shrinkage import share
from splince_fast._solve.tolerances import EPS
from splince_fast.exceptions import InputError
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.by_class import ClassAccumulator
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.covariance_estimate import Sampled, refuse_few, sampled_covariance
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.sampled import SampledAccumulator
from splince_fast.moments.sketch import Sketch, SketchAccumulator
from splince_fast.moments.variable import Variable, look_up

if TYPE_CHECKING:
    from splince_fast.moments.moments import Moments

Float = NDArray[np.float64]

# Random directions for the trace of p x p matrices: relative error sqrt(2 / (128 g)) for g degrees
# of freedom at O(k d^2), where the exact trace costs O(k d^3).
_PROBES = 128


class Snapshot:
    """The statistics of moments that are locked against changes.

    Attributes
    ----------
    n_rows, weight, mean, variances : int, float, (d,) float64, (d,) float64
        Of x, ddof = 0.
    variables : dict of VariableName to Variable
    variable : callable
        The sums of one variable, by name.
    reading : tuple
        `kinds` and `joint` of the moments.
    feature_names : tuple of str or None
    row_eps : float
        Machine epsilon of the rows' dtype; 0 for float64 and integers.
    sample : Sampled or None
        The sample that Cov(x) was estimated from; None for all rows.
    metric : LowRank or None
        Low-rank stand-in for Cov(x), where no d x d matrix is kept.
    """

    sample: Sampled | None = None
    metric: LowRank | None = None

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self.variables = accumulator.variables
        self.variable = partial(look_up, self.variables)
        self.reading = accumulator.parameters.kinds, accumulator.parameters.joint
        self._state = state = accumulator.seen()
        self.n_rows, self.weight, self.mean = state.n_rows, state.weight, state.mean
        self.variances = state.second.diagonal() / state.weight
        self.feature_names = accumulator.feature_names
        self.row_eps = state.row_eps

    def memory(self, whitened: bool) -> AbstractContextManager[Float | None]:
        """Work memory for a factor, for the duration of a solve."""
        return self._accumulator.workspace(len(self.mean) ** 2) if whitened else nullcontext()

    def class_noise(
        self, names: Sequence[VariableName], factor: Factor | None
    ) -> dict[VariableName, Noise]:
        """The noise of Cov(x, z) for the variable z that the moments were made `by`.

        Parameters
        ----------
        names : sequence of VariableName
            Those that it is asked of.
        factor : Factor or None
            Of Cov(x) without shrinkage, where the solve has it.

        Returns
        -------
        dict
            Empty where z is none of them, has one class, or not more rows than x dimensions.
        """
        import scipy.linalg.blas

        accumulator, by = self._accumulator, self._accumulator.parameters.by
        if not isinstance(accumulator, ClassAccumulator) or by is None or by not in names:
            return {}
        variable = cast(ClassSums, self.variable(by))
        parts = [accumulator.parts[name] for name in variable.names if name in accumulator.parts]
        states = [part.state for part in parts if part.state is not None and part.state.weight > 0]
        if factor is None or len(factor.left_out):
            factor = self.factored(Options(min_scale=0.0), 0.0, None)
        if len(states) < 2 or variable.weight <= factor.rank + 1:
            return {}
        _, sizes, directions = np.linalg.svd(factor.whiten(variable.span()), full_matrices=False)
        directions = directions[sizes > len(self.mean) * EPS * sizes.max(initial=0.0)]
        if factor.rank <= len(directions):
            return {}

        def across(white: Float) -> Float:
            return np.asarray(white - (white @ directions.T) @ directions)

        # Orthonormal rows u, a basis or random: sum u^T A u is tr(A) or an estimate.
        shape = max(1, factor.rank - len(directions))
        probes, exact = np.eye(len(self.mean)), shape <= _PROBES
        if not exact:
            drawn = np.random.default_rng(0).standard_normal((_PROBES, len(self.mean)))
            on_support = factor.whiten(factor.unwhiten(drawn))
            probes = np.ascontiguousarray(np.linalg.qr(across(on_support).T)[0].T)
        probes = across(probes)
        half = factor.solve(factor.unwhiten(np.ascontiguousarray(probes)))  # L^{+T} u
        share = 1.0 if exact else len(probes) / shape
        traces, squares = np.empty(len(states)), np.empty(len(states))
        for i, state in enumerate(states):
            images = scipy.linalg.blas.dsymm(1.0 / state.weight, state.scatter, half.T, lower=1)
            images = across(factor.whiten(np.ascontiguousarray(images.T)))
            traces[i] = np.vdot(probes, images) / share
            squares[i] = np.vdot(images, images) / share
        weights = np.array([state.weight for state in states])
        count = None if exact else len(probes)
        return {by: class_noise(weights, traces, squares, factor.rank, len(directions), count)}

    @property
    def pairs(self) -> LabelTable:
        """Products of the labels of all rows."""
        return self._accumulator.pairs

    def identity(self) -> Factor:
        """The factor of the identity, for what is not whitened."""
        state = self._state
        return self._with_rounding(factors.identity(state.second.diagonal(), state.weight))

    def factored(self, options: Options, share: float, memory: Float | None) -> Factor:
        """The factor of Cov(x), of which `share` is isotropic."""
        d = len(self.mean)
        scatter, weight, n_rows, roundoff = self._scatter(options)
        left_out = weak_features(self.variances, self.mean, options.min_scale, roundoff, share)
        factor = factors.dense(
            scatter,
            weight,
            self.mean,
            max_rank=n_rows - 1,
            tolerance=tolerances.eigenvalue(d, roundoff),
            share=share,
            solver=options.solver,
            memory=memory,
            left_out=left_out,
        )
        return self._with_rounding(factor)

    def _with_rounding(self, factor: Factor) -> Factor:
        """The factor, with the level of whitened spans that is rounding of the rows."""
        if self.row_eps:
            means = np.square(self.mean)
            if factor.solver == "none":
                x, deviation = means.sum() + factor.variance, factor.variance
            else:
                # Shrinkage gives constant features a scale.
                varies = (factor.inverse_scale > 0) & (self.variances > 0)
                deviation = float(np.count_nonzero(varies))
                x = deviation + float(np.sum(means[varies] / self.variances[varies]))
            factor.rounding = tolerances.row_rounding(
                self.row_eps * x**0.5, deviation**0.5, factor.smallest, self.n_rows
            )
        return factor

    def factored_above(self, deviations: Float, memory: Float | None) -> Factor:
        """The factor of Cov(x) of erased rows; features that are rounding count as constant.

        `deviations`, (d,), are those of the rows before erasing (`tolerances.computed`).
        """
        roundoff = self._state.second.unit_roundoff
        own = max(tolerances.CONSTANT, roundoff) * np.abs(self.mean)
        other = copy(self)
        other.mean = np.maximum(tolerances.computed(deviations, roundoff), own)
        other.mean /= tolerances.CONSTANT
        return other.factored(Options(min_scale=tolerances.MIN_SCALE), 0.0, memory)

    def _scatter(self, options: Options) -> tuple[Float, float, int, float]:
        """The matrix to factor, its divisor, its number of rows, and its unit roundoff."""
        second = self._state.second
        return second.matrix, self.weight, self.n_rows, second.unit_roundoff

    def remember(self, factor: Factor) -> None:
        """Let a factor keep Cov(x), for its `gram`."""
        factor.remember(self._state.scatter, 1.0 / self.weight)

    def share(self, options: Options) -> float:
        """Fraction of the isotropic target in the factored matrix."""
        state, policy = self._state, options.shrinkage
        if policy is None:
            return 0.0
        quartic = None
        if policy == "ledoit-wolf" and state.fourth is not None:
            quartic = state.fourth.centred(state.weight, state.deviation, state.scatter)
        return share(policy, state.scatter, state.weight, quartic)

    def gram(self, rows: Float) -> Float:
        """b Cov(x) b^T for b = `rows`, (r, d)."""
        import scipy.linalg.blas

        product = scipy.linalg.blas.dsymm(1.0, self._state.second.matrix, rows.T, lower=1)
        return np.asarray(rows @ product / self.weight)


class SketchSnapshot(Snapshot):
    """The statistics of moments that keep a sketch of the scatter."""

    def __init__(self, accumulator: SketchAccumulator) -> None:
        super().__init__(accumulator)
        self.accumulator = accumulator
        self.sketch = cast(Sketch, self._state.second)

    @cached_property
    def metric(self) -> LowRank:  # type: ignore[override]
        """M, computed on first use."""
        sketch = self.sketch
        return nystroem(sketch.matrix, sketch.images, sketch.signs, self.weight, self.mean)

    def memory(self, whitened: bool) -> AbstractContextManager[Float | None]:
        return nullcontext()

    def factored(self, options: Options, share: float, memory: Float | None) -> Factor:
        if options.solver != "auto":
            raise InputError(
                f"solver={options.solver!r} factors a d x d matrix, which moments made with "
                "sketch_size= do not keep; leave it at 'auto'"
            )
        sketch = self.sketch
        left_out = weak_features(
            self.variances, self.mean, options.min_scale, sketch.unit_roundoff, share
        )
        return self._with_rounding(self.metric.factor(share, left_out))

    def remember(self, factor: Factor) -> None:
        """Do nothing: `gram` uses the metric."""

    def share(self, options: Options) -> float:
        if isinstance(options.shrinkage, str):
            raise InputError(
                f"shrinkage={options.shrinkage!r} needs the whole covariance, which moments made "
                "with sketch_size= do not keep; pass a number in [0, 1]"
            )
        return float(options.shrinkage or 0.0)

    def gram(self, rows: Float) -> Float:
        return self.metric.gram(rows)


class SampleSnapshot(Snapshot):
    """The statistics of moments whose scatter is that of a sample."""

    def __init__(self, accumulator: SampledAccumulator) -> None:
        super().__init__(accumulator)
        self._sampled = accumulator

    @property
    def pairs(self) -> LabelTable:
        return self._sampled.sample.all_labels

    @cached_property
    def _estimate(self) -> tuple[Float, Sampled]:
        """The covariance, estimated on first use."""
        return sampled_covariance(self._sampled)

    @cached_property
    def sample(self) -> Sampled:  # type: ignore[override]
        return self._estimate[1]

    def _scatter(self, options: Options) -> tuple[Float, float, int, float]:
        if not options.shrinkage:
            refuse_few(self._sampled)
        matrix, estimate = self._estimate
        return matrix, 1.0, estimate.n_rows, estimate.unit_roundoff

    def remember(self, factor: Factor) -> None:
        factor.remember(self._estimate[0], 1.0)

    def share(self, options: Options) -> float:
        if options.shrinkage is None:
            return 0.0
        matrix, estimate = self._estimate
        # For a normalised matrix `share` expects the sum of quartics over n^2; this is their mean.
        quartic = None if estimate.quartic is None else estimate.quartic / estimate.effective
        return share(options.shrinkage, matrix, estimate.effective, quartic)

    def gram(self, rows: Float) -> Float:
        import scipy.linalg.blas

        matrix, estimate = self._estimate
        product = scipy.linalg.blas.dsymm(1.0, matrix, rows.T, lower=1)
        return np.asarray(rows @ product - (rows * estimate.repaired) @ rows.T)


def snapshot_of(accumulator: Accumulator) -> Snapshot:
    """The statistics of an accumulator of any kind."""
    if isinstance(accumulator, SketchAccumulator):
        return SketchSnapshot(accumulator)
    return (
        SampleSnapshot(accumulator)
        if isinstance(accumulator, SampledAccumulator)
        else Snapshot(accumulator)
    )


class Factored:
    """An immutable snapshot of moments, with the covariance of x factored.

    Made by :meth:`splince_fast.Moments.factored`; taken by every method in place of moments.

    Parameters
    ----------
    snapshot : Snapshot
        The statistics that are copied.
    options : Options
        Shrinkage, solver and least deviation.

    Attributes
    ----------
    n_rows, weight, n_features : int, float, int
        Of the data.
    mean : (d,) float64
        Mean of x.
    variances : (d,) float64
        Of the features, ddof = 0.
    feature_names : tuple of str or None
        Of the data.
    row_eps : float
        Machine epsilon of the rows' dtype; 0 for float64 and integers.
    shrinkage : float
        Fraction of the isotropic target in the covariance that was factored.
    factor : Factor
        L with L L^T the covariance; whitens and unwhitens.
    reading : tuple
        `kinds` and `joint` of the moments.
    pairs : LabelTable
        Products of the labels.
    sample : Sampled or None
        What Cov(x) was estimated from, where that is not all rows.
    metric : LowRank or None
        Low-rank stand-in for Cov(x), where the moments keep no d x d matrix.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 3, size=200)
    >>> kept = sf.Moments().update(rng.normal(size=(200, 4)) + z[:, None], {"z": z}).factored()
    >>> kept.factor.solver, kept.factor.rank
    ('cholesky', 4)
    >>> sf.sal(kept, erase="z").rank
    2
    """

    def __init__(self, snapshot: Snapshot, options: Options) -> None:
        self.n_rows, self.weight, self.mean = snapshot.n_rows, snapshot.weight, snapshot.mean
        self.variances = snapshot.variances
        self.n_features, self.feature_names = len(self.mean), snapshot.feature_names
        self.row_eps = snapshot.row_eps
        self.shrinkage = snapshot.share(options)
        self._requested, self._solver = options.shrinkage, options.solver
        self._min_scale = options.min_scale
        self.factor = snapshot.factored(options, self.shrinkage, None)
        snapshot.remember(self.factor)
        self.sample, self.metric = snapshot.sample, snapshot.metric
        self._identity = snapshot.identity()
        self.reading = snapshot.reading
        self._variables = {name: v.copy() for name, v in snapshot.variables.items()}
        self.pairs = snapshot.pairs.copy()
        self._class_noise = snapshot.class_noise(
            list(self._variables), None if self.shrinkage else self.factor
        )
        self.mean.flags.writeable = self.variances.flags.writeable = False

    @property
    def variables(self) -> Mapping[VariableName, str]:
        """Variables, each with its kind: "classes" or "continuous"."""
        return MappingProxyType({name: v.kind for name, v in self._variables.items()})

    def variable(self, name: VariableName) -> Variable:
        """The sums of one variable.

        Parameters
        ----------
        name : str or tuple of str
            The variable.

        Raises
        ------
        UnknownVariableError
            No such variable was accumulated.
        """
        return look_up(self._variables, name)

    def class_noise(
        self, names: Sequence[VariableName], factor: Factor | None
    ) -> dict[VariableName, Noise]:
        """The noise of Cov(x, z) for the variable z that the moments were made ``by``.

        Parameters
        ----------
        names : sequence of VariableName
            Not read: the noise was computed when the snapshot was taken.
        factor : Factor or None
            Nor is this.
        """
        return self._class_noise

    def memory(self, whitened: bool) -> AbstractContextManager[Float | None]:
        """An empty context: `factored` needs no work memory.

        Parameters
        ----------
        whitened : bool
            Whether Cov(x) is factored at all.
        """
        return nullcontext()

    def identity(self) -> Factor:
        """The factor of the identity, for what is not whitened."""
        return self._identity

    def factored(self, options: Options, share: float, memory: Float | None) -> Factor:
        """The stored factor, if it is the one that `options` ask for.

        Parameters
        ----------
        options : Options
            Of the solve.
        share : float
            As :meth:`share` gives it.
        memory : None
            As :meth:`memory` gives it.

        Raises
        ------
        InputError
            They ask for other shrinkage, another solver, or another least deviation.
        """
        if options.shrinkage is not None and options.shrinkage != self._requested:
            raise InputError(
                f"shrinkage is {options.shrinkage!r}, and these moments were factored with "
                f"{self._requested!r}; pass it to moments.factored(), or pass the moments"
            )
        if options.solver not in ("auto", self.factor.solver):
            raise InputError(
                f"solver is {options.solver!r}, and these moments were factored by "
                f"{self.factor.solver!r}; pass it to moments.factored(), or pass the moments"
            )
        if options.min_scale not in ("auto", self._min_scale):
            raise InputError(
                f"min_scale is {options.min_scale!r}, and these moments were factored with "
                f"{self._min_scale!r}; pass it to moments.factored(), or pass the moments"
            )
        return self.factor

    def share(self, options: Options) -> float:
        """Fraction of the isotropic target in the factored matrix.

        Parameters
        ----------
        options : Options
            Of the solve; they say nothing new.
        """
        return self.shrinkage

    def gram(self, rows: Float) -> Float:
        """The matrix b Cov(x) b^T, without shrinkage and with ddof = 0.

        Parameters
        ----------
        rows : ndarray of shape (r, d)
            The rows b.
        """
        if self.metric is not None:
            return self.metric.gram(rows)
        product = self.factor.gram(np.ascontiguousarray(rows))
        if self.sample is None:
            return product
        return np.asarray(product - (rows * self.sample.repaired) @ rows.T)

    def _statistics(self) -> AbstractContextManager[Factored]:
        return nullcontext(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the factor and of the sums of the variables."""
        numbers = self.n_features**2 * (1 if self.factor.solver == "cholesky" else 2)
        if self.metric is not None:  # U and Q; deviations and weights
            numbers = self.n_features * (2 * self.metric.rank + 4)
        tensors = (t for v in self._variables.values() for t in v.tensors().values())
        return 8 * numbers + sum(t.nbytes for t in tensors)

    def __repr__(self) -> str:
        return (
            f"Factored({self.n_rows:,} rows, {self.n_features} features, "
            f"{list(self._variables)}, rank {self.factor.rank}, {self.nbytes / 2**20:.1f} MiB)"
        )


# Input of a solve: statistics of locked moments, or of a copy with its own factor.
Statistics = Snapshot | Factored


def statistics(source: Moments | Factored) -> AbstractContextManager[Statistics]:
    """The statistics of moments, locked, or of a snapshot of them.

    Raises
    ------
    InputError
        Neither moments nor a snapshot of them.
    """
    if not hasattr(source, "_statistics"):
        raise InputError(f"moments is {type(source).__name__}; pass sf.Moments().update(X, labels)")
    return source._statistics()
