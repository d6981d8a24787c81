"""Statistics of moments, from which methods compute erasers, and their public copy `Factored`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import factor as kernels
from splince_fast._kernels.factor import Factor
from splince_fast._runtime.arguments import described_type
from splince_fast._runtime.rows import abbreviated
from splince_fast._solve import oblique as factors
from splince_fast._solve import tolerances
from splince_fast._solve.held_out import Noise, class_noise
from splince_fast._solve.options import Options, check_moment_options
from splince_fast.exceptions import InputError
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.scatters import Sampled, SampleStatistics
from splince_fast.moments.state import FactorInput
from splince_fast.moments.variables import ClassSums, look_up

Float = NDArray[np.float64]

# Number m of random directions from which `Statistics.class_noise` estimates traces of d x d
# matrices. The relative standard error of tr(A) is sqrt(2 / (m g)), with g = tr(A)^2 / |A|^2.
_PROBES = 128


class Statistics:
    """Statistics of locked moments, or an independent copy of them with a factor of Cov(x)."""

    # In a copy: the factor, the requested shrinkage, its intensity, and the noise by class.
    factor: Factor | None = None
    requested: float | str | None = None
    shrinkage = 0.0
    noise: Mapping[VariableName, Noise] = MappingProxyType({})

    def __init__(self, accumulator: Accumulator) -> None:
        state = accumulator.nonempty_state()
        self.accumulator: Accumulator | None = accumulator
        self.parameters = accumulator.parameters
        self.is_diagonal = self.parameters.covariance_type == "diag"
        self.is_sampled = self.parameters.subsample < 1
        self.n_rows, self.weight, self.mean = state.n_rows, state.weight, state.mean
        self.variances = state.second.diagonal() / state.weight
        # machine epsilon of the rows' dtype; 0 for float64 and integers
        self.row_eps = state.row_eps
        self.feature_names = accumulator.feature_names
        self.variables, self.pairs = accumulator.variables, accumulator.label_products
        self.variable = partial(look_up, self.variables)
        if not self.is_sampled:
            self.sample = None
            self.covariance = state.second.factor_input(state, self.feature_names)

    @cached_property
    def covariance(self) -> FactorInput:
        """Cov(x); that of a sample is estimated when it is first read."""
        state = cast(Accumulator, self.accumulator).nonempty_state()
        return state.second.factor_input(state, self.feature_names)

    @cached_property
    def sample(self) -> SampleStatistics | None:
        return cast("SampleStatistics | None", self.covariance.sample)

    def _statistics(self) -> AbstractContextManager[Statistics]:
        return nullcontext(self)

    def intensity(self, options: Options) -> float:
        """Return the weight of the isotropic target in the factored matrix, in [0, 1]."""
        policy = options.shrinkage
        if self.factor is not None:
            return self.shrinkage
        if self.is_diagonal:
            check_moment_options(1.0, "diag", 0, policy, options.solver)
        if not isinstance(policy, str):
            return float(policy or 0.0)
        if policy == "cv":
            raise InputError(
                "shrinkage='cv' is chosen on folds: pass those of Moments.from_blocks(source, "
                "folds=2) to the method, or fit an estimator to all rows at once"
            )
        return factors.oas(self.covariance.scatter, self.covariance.n_effective)

    def factored(self, options: Options, intensity: float, floor: Float | None = None) -> Factor:
        """Return the factor of Cov(x), shrunk with weight `intensity` of the isotropic target."""
        # Features with a standard deviation of at most `floor`, (d,), count as constant.
        if self.factor is not None:
            return self._stored(self.factor, options, floor)
        if floor is None:
            floor = tolerances.floor(self.variances, self.mean, self.row_eps)
        if self.is_diagonal:
            variances = (1 - intensity) * self.variances + intensity * self.variances.mean()
            factor = kernels.diagonal(variances, floor)
        else:
            if self.is_sampled:
                state = cast(Accumulator, self.accumulator).nonempty_state()
                cast(Sampled, state.second).check_rows(state, bool(options.shrinkage))
            covariance = self.covariance
            factor = factors.dense(
                covariance.scatter,
                covariance.weight,
                floor,
                max_rank=covariance.n_rows - 1,
                tolerance=tolerances.eigenvalue(len(floor), covariance.unit_roundoff),
                intensity=intensity,
                solver=options.solver,
            )
        if self.row_eps:
            self._set_rounding(factor)
        return factor

    def _stored(self, factor: Factor, options: Options, floor: Float | None) -> Factor:
        """Return the factor of a copy; raise InputError if the arguments need another factor."""
        for name, value, own in (
            ("shrinkage", options.shrinkage, self.requested),
            ("solver", options.solver, factor.solver),
        ):
            if value not in (None, "auto", own):
                raise InputError(
                    f"{name} is {value!r}, and these moments were factored with {own!r}; pass "
                    f"{name}= to moments.factored(), or pass the moments"
                )
        if floor is not None:
            uses = factor.inverse_scale > 0.0
            wrong = np.flatnonzero(uses != (np.sqrt(self.variances) > floor))
            if len(wrong):
                raise InputError(
                    f"the factor {'uses' if uses[wrong[0]] else 'leaves out'} feature(s) "
                    f"{abbreviated(wrong, self.feature_names)}, which hardly vary beyond rounding "
                    "errors; pass the moments of these rows, not a snapshot"
                )
        return factor

    def identity(self) -> Factor:
        factor = kernels.identity(self.variances, 1.0)
        if self.row_eps:
            self._set_rounding(factor)
        return factor

    def factored_after_erasure(self, deviations: Float) -> Factor:
        """Return the factor of Cov(x), with x the rows after erasure."""
        # Features of rounding errors count as constant. Their level follows from `deviations`, the
        # standard deviations before erasure, (d,).
        floor = tolerances.floor(self.variances, self.mean, self.row_eps)
        rounding = tolerances.erased_rounding(deviations, self.covariance.unit_roundoff)
        return self.factored(Options(), 0.0, np.maximum(floor, rounding))

    def _set_rounding(self, factor: Factor) -> None:
        """Set the rounding level of whitened Cov(x, z) that is due to the dtype of the rows."""
        means, variance = np.square(self.mean), factor.variance
        second_moment = means.sum() + variance
        if factor.solver != "none":
            # The variances are tested, too: after shrinkage, constant features have a scale.
            varies = (factor.inverse_scale > 0) & (self.variances > 0)
            variance = float(np.count_nonzero(varies))
            second_moment = variance + float(np.sum(means[varies] / self.variances[varies]))
        factor.rounding = tolerances.row_rounding(
            self.row_eps * second_moment**0.5, variance**0.5, factor.smallest, self.n_rows
        )

    def gram(self, rows: Float) -> Float:
        """Return b Cov(x) b^T, (r, r), for b = `rows`, (r, d), without shrinkage."""
        if self.is_diagonal:
            return np.asarray((rows * self.variances) @ rows.T)
        if self.factor is not None:
            return self.factor.gram(np.ascontiguousarray(rows))
        return np.asarray(rows @ self.covariance.times(rows).T)

    def class_noise(
        self, names: Sequence[VariableName], factor: Factor | None
    ) -> Mapping[VariableName, Noise]:
        """Return the noise of Cov(x, z), with z the variable `by` of the moments."""
        # Empty without `by`, if z is not in `names`, has one class, or too few rows for the rank of
        # Cov(x). `factor` is of Cov(x) without shrinkage; it is computed if it is None.
        accumulator, by = self.accumulator, self.parameters.by
        if accumulator is None or not accumulator.parts:
            return self.noise
        if by is None or by not in names:
            return {}
        variable, d = cast(ClassSums, self.variable(by)), len(self.mean)
        parts = [accumulator.parts[name] for name in variable.names if name in accumulator.parts]
        inputs = [Statistics(p).covariance for p in parts if p.state and p.state.weight]
        factor = factor or self.factored(Options(), 0.0)
        if len(inputs) < 2 or variable.weight <= factor.rank + 1:
            return {}
        _, s, directions = np.linalg.svd(factor.whiten(variable.span()), full_matrices=False)
        directions = directions[s > d * tolerances.EPS * s.max(initial=0.0)]
        rank, dimension = len(directions), factor.rank - len(directions)
        if dimension <= 0:
            return {}

        def remove_directions(whitened: Float) -> Float:
            return np.ascontiguousarray(whitened - (whitened @ directions.T) @ directions)

        # tr(A), for a class covariance A of whitened x, is the sum of u^T A u over an orthonormal
        # basis, or is estimated by that over m random orthonormal vectors, times dimension / m.
        m = min(_PROBES, dimension)
        random_vectors = np.random.default_rng(0).standard_normal((m, d))
        on_support = remove_directions(factor.whiten(factor.unwhiten(random_vectors)))
        probes = remove_directions(np.linalg.qr(on_support.T)[0].T)
        probes_in_x = factor.solve(factor.unwhiten(probes))  # L^{+T} u
        images = [
            remove_directions(factor.whiten(np.ascontiguousarray(part.times(probes_in_x))))
            for part in inputs
        ]
        weights = np.array([part.weight for part in inputs])
        traces = np.array([np.vdot(probes, image) for image in images]) * dimension / m
        squares = np.array([np.vdot(image, image) for image in images]) * dimension / m
        n_probes = m if m < dimension else None
        return {by: class_noise(weights, traces, squares, factor.rank, rank, n_probes)}

    def copied(self, options: Options) -> Statistics:
        """Return an independent copy with Cov(x) factored; a copy returns itself."""
        if self.factor is not None:
            return self
        result, covariance = copy(self), self.covariance
        result.requested, result.shrinkage = options.shrinkage, self.intensity(options)
        factor = self.factored(options, result.shrinkage)
        if not self.is_diagonal:
            factor.remember(covariance.scatter, 1.0 / covariance.weight)
        result.variables = {name: variable.copy() for name, variable in self.variables.items()}
        result.variable = partial(look_up, result.variables)
        result.noise = self.class_noise(list(self.variables), None if result.shrinkage else factor)
        result.factor = factor
        # The copy neither reads the moments nor keeps their memory.
        result.covariance = covariance._replace(scatter=np.empty((0, 0)))
        result.accumulator = None
        result.mean.flags.writeable = result.variances.flags.writeable = False
        return result


class Factored:
    """An immutable copy of the statistics of moments, with the covariance of x factored.

    :meth:`splince_fast.Moments.factored` returns it; every method accepts it in place of moments.

    Attributes
    ----------
    n_rows, weight, n_features, feature_names, variables
        As those of the moments.
    mean, variances : (d,) float64
        Means and variances of the features, ddof = 0.
    shrinkage : float
        Weight of the isotropic target in the factored covariance.
    factor : Factor
        Factor L of the covariance L L^T; whitens and unwhitens.

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

    def __init__(self, statistics: Statistics, options: Options) -> None:
        self._copy = stats = statistics.copied(options)
        self.n_rows, self.weight, self.n_features = stats.n_rows, stats.weight, len(stats.mean)
        self.mean, self.variances = stats.mean, stats.variances
        self.feature_names, self.shrinkage = stats.feature_names, stats.shrinkage
        self.variables = MappingProxyType({name: v.kind for name, v in stats.variables.items()})
        self.factor = cast(Factor, stats.factor)

    def _statistics(self) -> AbstractContextManager[Statistics]:
        return nullcontext(self._copy)

    @property
    def nbytes(self) -> int:
        """Bytes of the factor and of the sums of the variables."""
        numbers = self.n_features**2 * (1 if self.factor.solver == "cholesky" else 2)
        if self._copy.is_diagonal:  # means, variances and their roots
            numbers = 4 * self.n_features
        arrays = (a for v in self._copy.variables.values() for a in v.tensors().values())
        return 8 * numbers + sum(array.nbytes for array in arrays)

    def __repr__(self) -> str:
        return (
            f"Factored({self.n_rows:,} rows, {self.n_features} features, "
            f"{list(self.variables)}, rank {self.factor.rank}, {self.nbytes / 2**20:.1f} MiB)"
        )


def statistics(source: Any) -> AbstractContextManager[Statistics]:
    """Return a context manager that locks moments and yields their statistics."""
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
