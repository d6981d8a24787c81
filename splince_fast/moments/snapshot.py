"""Statistics from which erasers are computed.

`Snapshot` has the statistics of moments that are locked; `Factored` is an immutable copy with a
factor of Cov(x).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import described_type
from splince_fast._solve import factor as factors
from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor
from splince_fast._solve.held_out import Noise, class_noise
from splince_fast._solve.options import Options
from splince_fast._solve.shrinkage import intensity
from splince_fast._solve.tolerances import EPS
from splince_fast.exceptions import InputError
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.by_class import ClassAccumulator
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.sampled import (
    SampledAccumulator,
    SampleStatistics,
    check_sample,
    sampled_covariance,
)
from splince_fast.moments.variable import Variable, look_up

Float = NDArray[np.float64]

# Number m of random directions from which `Snapshot.class_noise` estimates the traces of k d x d
# matrices, for k classes, in O(k d^2) operations instead of O(k d^3). The relative standard error
# of tr(A) is sqrt(2 / (m g)), with g = tr(A)^2 / |A|^2.
_PROBES = 128


class Snapshot:
    """Statistics of moments that are locked against changes."""

    # sample from which Cov(x) was estimated; None if it was computed from all rows
    sample: SampleStatistics | None = None
    # whether the variances replace Cov(x)
    is_diagonal = False

    def __init__(self, accumulator: Accumulator) -> None:
        self.accumulator = accumulator
        self.variables = accumulator.variables
        self.variable = partial(look_up, self.variables)
        # `kinds` and `joint` of the moments
        self.interpretation = accumulator.parameters.kinds, accumulator.parameters.joint
        self._state = state = accumulator.nonempty_state()
        self.n_rows, self.weight, self.mean = state.n_rows, state.weight, state.mean
        self.variances = state.second.diagonal() / state.weight
        self.feature_names = accumulator.feature_names
        # machine epsilon of the rows' dtype; 0 for float64 and integers
        self.row_eps = state.row_eps

    def class_noise(
        self, names: Sequence[VariableName], factor: Factor | None
    ) -> dict[VariableName, Noise]:
        """Return the noise of Cov(x, z), with z the variable `by` of the moments."""
        # The result is empty for moments without `by`, if z is not in `names`, has one class, or
        # has too few rows for the rank of Cov(x). `factor` is of Cov(x) without shrinkage; it is
        # computed if it is None.
        import scipy.linalg.blas

        accumulator, by = self.accumulator, self.accumulator.parameters.by
        if not isinstance(accumulator, ClassAccumulator) or by is None or by not in names:
            return {}
        variable = cast(ClassSums, self.variable(by))
        parts = [accumulator.parts[name] for name in variable.names if name in accumulator.parts]
        states = [part.state for part in parts if part.state is not None and part.state.weight > 0]
        if factor is None:
            factor = self.factored(Options(), 0.0)
        if len(states) < 2 or variable.weight <= factor.rank + 1:
            return {}
        _, s, directions = np.linalg.svd(factor.whiten(variable.span()), full_matrices=False)
        directions = directions[s > len(self.mean) * EPS * s.max(initial=0.0)]
        if factor.rank <= len(directions):
            return {}

        def remove_directions(whitened: Float) -> Float:
            return np.asarray(whitened - (whitened @ directions.T) @ directions)

        # For a class covariance A of whitened x, tr(A) is the sum of u^T A u over an orthonormal
        # basis. In a high dimension, tr(A) is estimated by the sum over m random orthonormal
        # vectors u, divided by m / dimension.
        dimension = max(1, factor.rank - len(directions))
        probes, exact = np.eye(len(self.mean)), dimension <= _PROBES
        if not exact:
            random_vectors = np.random.default_rng(0).standard_normal((_PROBES, len(self.mean)))
            on_support = factor.whiten(factor.unwhiten(random_vectors))
            probes = np.ascontiguousarray(np.linalg.qr(remove_directions(on_support).T)[0].T)
        probes = remove_directions(probes)
        probes_in_x = factor.solve(factor.unwhiten(np.ascontiguousarray(probes)))  # L^{+T} u
        fraction = 1.0 if exact else len(probes) / dimension
        traces, squares = np.empty(len(states)), np.empty(len(states))
        for i, state in enumerate(states):
            images = scipy.linalg.blas.dsymm(
                1.0 / state.weight, state.scatter, probes_in_x.T, lower=1
            )
            images = remove_directions(factor.whiten(np.ascontiguousarray(images.T)))
            traces[i] = np.vdot(probes, images) / fraction
            squares[i] = np.vdot(images, images) / fraction
        weights = np.array([state.weight for state in states])
        n_probes = None if exact else len(probes)
        return {by: class_noise(weights, traces, squares, factor.rank, len(directions), n_probes)}

    @property
    def pairs(self) -> LabelTable:
        """Products of the label features of different variables, over all rows."""
        return self.accumulator.label_products

    def identity(self) -> Factor:
        state = self._state
        return self._with_rounding(factors.identity(state.second.diagonal(), state.weight))

    def _floor(self) -> Float:
        return tolerances.floor(self.variances, self.mean, self.row_eps)

    def factored(self, options: Options, intensity: float, floor: Float | None = None) -> Factor:
        """Return the factor of Cov(x), shrunk with weight `intensity` of the isotropic target."""
        # `floor`, (d,), replaces `tolerances.floor`.
        scatter, weight, n_rows, roundoff = self._scatter(options)
        factor = factors.dense(
            scatter,
            weight,
            self._floor() if floor is None else floor,
            max_rank=n_rows - 1,
            tolerance=tolerances.eigenvalue(len(self.mean), roundoff),
            intensity=intensity,
            solver=options.solver,
        )
        return self._with_rounding(factor)

    def _with_rounding(self, factor: Factor) -> Factor:
        """Set `factor.rounding`, the rounding level of whitened Cov(x, z); return the factor."""
        if self.row_eps:
            means = np.square(self.mean)
            if factor.solver == "none":
                second_moment, variance = means.sum() + factor.variance, factor.variance
            else:
                # The variances are tested, too: after shrinkage, constant features have a nonzero
                # scale.
                varies = (factor.inverse_scale > 0) & (self.variances > 0)
                variance = float(np.count_nonzero(varies))
                second_moment = variance + float(np.sum(means[varies] / self.variances[varies]))
            factor.rounding = tolerances.row_rounding(
                self.row_eps * second_moment**0.5, variance**0.5, factor.smallest, self.n_rows
            )
        return factor

    def factored_after_erasure(self, deviations: Float) -> Factor:
        """Return the factor of Cov(x), with x the rows after erasure."""
        # Features that hold rounding errors only count as constant. Their level is computed from
        # `deviations`, (d,), the standard deviations of the features before erasure.
        roundoff = self._state.second.unit_roundoff
        of_mean = max(tolerances.CONSTANT, roundoff) * np.abs(self.mean)
        floor = np.maximum(tolerances.erased_rounding(deviations, roundoff), of_mean)
        return self.factored(Options(), 0.0, floor)

    def _scatter(self, options: Options) -> tuple[Float, float, int, float]:
        """Return the matrix to factor, its divisor, the number of rows and the unit roundoff."""
        second = self._state.second
        return second.matrix, self.weight, self.n_rows, second.unit_roundoff

    def store_covariance(self, factor: Factor) -> None:
        """Store Cov(x) in a factor, for `Factor.gram`."""
        factor.remember(self._state.scatter, 1.0 / self.weight)

    def intensity(self, options: Options) -> float:
        """Return the weight of the isotropic target in the factored matrix, in [0, 1]."""
        if options.shrinkage is None:
            return 0.0
        return intensity(options.shrinkage, self._state.scatter, self._state.weight)

    def gram(self, rows: Float) -> Float:
        """Return b Cov(x) b^T, (r, r), for b = `rows`, (r, d)."""
        import scipy.linalg.blas

        product = scipy.linalg.blas.dsymm(1.0, self._state.second.matrix, rows.T, lower=1)
        return np.asarray(rows @ product / self.weight)


class DiagonalSnapshot(Snapshot):
    """Statistics of moments with the diagonal of the scatter."""

    is_diagonal = True

    def factored(self, options: Options, intensity: float, floor: Float | None = None) -> Factor:
        if options.solver != "auto":
            raise InputError(
                f"solver={options.solver!r} factors a d x d matrix, which moments made with "
                "covariance_type='diag' do not store; leave solver at 'auto'"
            )
        variances = (1 - intensity) * self.variances + intensity * self.variances.mean()
        floor = self._floor() if floor is None else floor
        return self._with_rounding(factors.diagonal(variances, floor))

    def store_covariance(self, factor: Factor) -> None:
        """Do nothing, since `gram` uses the variances."""

    def intensity(self, options: Options) -> float:
        if isinstance(options.shrinkage, str):
            raise InputError(
                f"shrinkage={options.shrinkage!r} needs the whole covariance, which moments made "
                "with covariance_type='diag' do not store; pass a number in [0, 1]"
            )
        return float(options.shrinkage or 0.0)

    def gram(self, rows: Float) -> Float:
        return np.asarray((rows * self.variances) @ rows.T)


class SampleSnapshot(Snapshot):
    """Statistics of moments with the scatter of a sample of the rows."""

    def __init__(self, accumulator: SampledAccumulator) -> None:
        super().__init__(accumulator)
        self._sampled = accumulator

    @cached_property
    def _estimate(self) -> tuple[Float, SampleStatistics]:
        """Estimate of Cov(x) and its sample, computed on first use."""
        return sampled_covariance(self._sampled)

    @cached_property
    def sample(self) -> SampleStatistics:  # type: ignore[override]
        return self._estimate[1]

    def _scatter(self, options: Options) -> tuple[Float, float, int, float]:
        check_sample(self._sampled, bool(options.shrinkage))
        matrix, estimate = self._estimate
        return matrix, 1.0, estimate.n_rows, estimate.unit_roundoff

    def store_covariance(self, factor: Factor) -> None:
        factor.remember(self._estimate[0], 1.0)

    def intensity(self, options: Options) -> float:
        if options.shrinkage is None:
            return 0.0
        matrix, estimate = self._estimate
        return intensity(options.shrinkage, matrix, estimate.n_effective)

    def gram(self, rows: Float) -> Float:
        import scipy.linalg.blas

        product = scipy.linalg.blas.dsymm(1.0, self._estimate[0], rows.T, lower=1)
        return np.asarray(rows @ product)


def snapshot_of(accumulator: Accumulator) -> Snapshot:
    """Return the snapshot of an accumulator, in the class for its kind of scatter."""
    if isinstance(accumulator, SampledAccumulator):
        return SampleSnapshot(accumulator)
    return (DiagonalSnapshot if accumulator.parameters.is_diagonal else Snapshot)(accumulator)


class Factored:
    """An immutable snapshot of moments, with the covariance of x factored.

    :meth:`splince_fast.Moments.factored` returns it; every method accepts it in place of moments.

    Parameters
    ----------
    snapshot : Snapshot
        Statistics to copy.
    options : Options
        Shrinkage and solver.

    Attributes
    ----------
    n_rows, weight, n_features : int, float, int
        Number of rows, weight sum, and number of features.
    mean : (d,) float64
        Mean of x.
    variances : (d,) float64
        Variances of the features, ddof = 0.
    feature_names : tuple of str or None
        Names of the features, if rows came as a data frame.
    row_eps : float
        Machine epsilon of the rows' dtype; 0 for float64 and integers.
    shrinkage : float
        Weight of the isotropic target in the factored covariance.
    factor : Factor
        Factor L of the covariance L L^T; whitens and unwhitens.
    interpretation : tuple
        `kinds` and `joint` of the moments.
    pairs : LabelTable
        Products of the label features of different variables.
    sample : SampleStatistics or None
        Sample from which Cov(x) was estimated; None if it was computed from all rows.
    is_diagonal : bool
        Whether the variances replace Cov(x).

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
        self.shrinkage = snapshot.intensity(options)
        self._requested = options.shrinkage
        self.factor = snapshot.factored(options, self.shrinkage)
        snapshot.store_covariance(self.factor)
        self.sample, self.is_diagonal = snapshot.sample, snapshot.is_diagonal
        self._identity = snapshot.identity()
        self.interpretation = snapshot.interpretation
        self._variables = {name: v.copy() for name, v in snapshot.variables.items()}
        self.pairs = snapshot.pairs.copy()
        self._class_noise = snapshot.class_noise(
            list(self._variables), None if self.shrinkage else self.factor
        )
        self.mean.flags.writeable = self.variances.flags.writeable = False

    @property
    def variables(self) -> Mapping[VariableName, str]:
        """Kind of each variable: "classes" or "continuous"."""
        return MappingProxyType({name: v.kind for name, v in self._variables.items()})

    def variable(self, name: VariableName) -> Variable:
        """Return the sums of one variable.

        Parameters
        ----------
        name : str or tuple of str
            Name of the variable.

        Raises
        ------
        UnknownVariableError
            There is no such variable.
        """
        return look_up(self._variables, name)

    def class_noise(
        self, names: Sequence[VariableName], factor: Factor | None
    ) -> dict[VariableName, Noise]:
        """Return the noise of Cov(x, z), with z the variable `by` of the moments.

        Parameters
        ----------
        names : sequence of VariableName
            Ignored: the snapshot has the noise of z.
        factor : Factor or None
            Ignored.
        """
        return self._class_noise

    def identity(self) -> Factor:
        """Return the factor of the identity matrix, for methods that do not whiten."""
        return self._identity

    def factored(self, options: Options, intensity: float, floor: Float | None = None) -> Factor:
        """Return the stored factor, if it was computed with these options.

        Parameters
        ----------
        options : Options
            Options of the solve.
        intensity : float
            Result of :meth:`intensity`.
        floor : None
            Ignored.

        Raises
        ------
        InputError
            `options` differ in shrinkage or solver.
        """
        if options.shrinkage is not None and options.shrinkage != self._requested:
            raise InputError(
                f"shrinkage is {options.shrinkage!r}, and these moments were factored with "
                f"{self._requested!r}; pass shrinkage= to moments.factored(), or pass the moments"
            )
        if options.solver not in ("auto", self.factor.solver):
            raise InputError(
                f"solver is {options.solver!r}, and these moments were factored by "
                f"{self.factor.solver!r}; pass solver= to moments.factored(), or pass the moments"
            )
        return self.factor

    def intensity(self, options: Options) -> float:
        """Return the weight of the isotropic target in the factored matrix, in [0, 1].

        Parameters
        ----------
        options : Options
            Ignored.
        """
        return self.shrinkage

    def gram(self, rows: Float) -> Float:
        """Return b Cov(x) b^T, (r, r), without shrinkage and with ddof = 0.

        Parameters
        ----------
        rows : ndarray of shape (r, d)
            The rows b.
        """
        if self.is_diagonal:
            return np.asarray((rows * self.variances) @ rows.T)
        return self.factor.gram(np.ascontiguousarray(rows))

    def _statistics(self) -> AbstractContextManager[Factored]:
        return nullcontext(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the factor and of the sums of the variables."""
        numbers = self.n_features**2 * (1 if self.factor.solver == "cholesky" else 2)
        if self.is_diagonal:  # means, variances and their roots
            numbers = 4 * self.n_features
        tensors = (t for v in self._variables.values() for t in v.tensors().values())
        return 8 * numbers + sum(t.nbytes for t in tensors)

    def __repr__(self) -> str:
        return (
            f"Factored({self.n_rows:,} rows, {self.n_features} features, "
            f"{list(self._variables)}, rank {self.factor.rank}, {self.nbytes / 2**20:.1f} MiB)"
        )


# Statistics from which an eraser is computed.
Statistics = Snapshot | Factored


def statistics(source: Any) -> AbstractContextManager[Statistics]:
    """Return a context manager that locks moments and yields their statistics."""
    # A `Factored` needs no lock, and is yielded itself.
    check_moments(source)
    context: AbstractContextManager[Statistics] = source._statistics()
    return context


def check_moments(source: object) -> None:
    if not hasattr(source, "_statistics") and not hasattr(source, "total"):
        text = described_type(source)
        if hasattr(source, "shape"):
            text += "; for arrays, call sf.erase(X, concept=z, keep=y)"
        raise InputError(
            f'moments is {text}; pass sf.Moments().update(X, {{"z": z}}), and names such as "z" as '
            "erase= and keep="
        )
