"""The statistics of moments that nobody changes meanwhile, by what stands for Cov(x)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import blas
from splince_fast._solve import factor as factors
from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor
from splince_fast._solve.held_out import Noise, class_ratios
from splince_fast._solve.low_rank import LowRank, nystroem
from splince_fast._solve.options import Options
from splince_fast._solve.shrinkage import share
from splince_fast._solve.weak_features import weak_features
from splince_fast.exceptions import InputError
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.by_class import ClassAccumulator
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.metric import Sampled, refuse_few, sampled_covariance
from splince_fast.moments.sampled import SampledAccumulator
from splince_fast.moments.sketch import Sketch
from splince_fast.moments.sketched import SketchAccumulator

Float = NDArray[np.float64]


class Live:
    """The statistics of moments that nobody changes meanwhile.

    Attributes
    ----------
    n_rows, weight, mean : int, float, (d,) float64
        Of x.
    variable : callable
        The sums of one variable, by name.
    reading : tuple
        `kinds` and `joint` of the moments.
    """

    def __init__(self, held: Accumulator) -> None:
        self._held = held
        self.variable = held.variable
        self.reading = held.parameters.kinds, held.parameters.joint
        self._state = state = held.seen()
        self.n_rows, self.weight, self.mean = state.n_rows, state.weight, state.mean

    @property
    def variances(self) -> Float:
        """(d,): of the features, ddof = 0."""
        return np.asarray(self._state.second.diagonal() / self.weight)

    def memory(self, whitened: bool) -> AbstractContextManager[Float | None]:
        """Where a factor may live while it is used."""
        return self._held.workspace(len(self.mean) ** 2) if whitened else nullcontext()

    def noise(self, name: VariableName, factor: Factor | None) -> Noise:
        """The sampling noise of Cov(x, variable), with the scatters of its classes where known."""
        variable = self.variable(name)
        if not isinstance(variable, ClassSums):
            columns = variable.n_columns
            return Noise(variable.weight, columns, (1.0,) * columns)
        weights = variable.weights[variable.weights > 0]
        traces = None if factor is None or len(weights) < 2 else self._class_traces(name, factor)
        if traces is None:
            ratios: tuple[float, ...] = (1.0,) * len(weights)
        else:
            ratios = class_ratios(weights / weights.sum(), traces, factor.rank)  # type: ignore[union-attr]
        columns = 1 if len(weights) == 2 else len(weights)
        return Noise(float(weights.sum()), columns, ratios[:columns])

    @property
    def pairs(self) -> LabelTable:
        """Products of the labels of all rows."""
        held = self._held
        return held.sample.all_labels if isinstance(held, SampledAccumulator) else held.pairs

    def _class_traces(self, name: VariableName, factor: Factor) -> Float | None:
        """tr(S^+ S_c) of the classes of the variable that the moments were made `by`."""
        held = self._held
        if not isinstance(held, ClassAccumulator) or held.parameters.by != name:
            return None
        names = cast(ClassSums, self.variable(name)).names
        found = []
        for own in names:
            part = held.parts.get(own)
            if part is None or part.state is None or not part.state.weight:
                continue
            scatter = part.state.scatter / part.state.weight
            blas.mirror_lower(scatter)
            half = factor.whiten(np.ascontiguousarray(scatter))
            found.append(float(np.trace(factor.whiten(np.ascontiguousarray(half.T)))))
        return np.array(found)

    def identity(self) -> Factor:
        """The factor of the identity, for what is not whitened."""
        state = self._state
        return factors.identity(state.second.diagonal(), state.weight)

    def factored(self, options: Options, share: float, memory: Float | None) -> Factor:
        """The factor of Cov(x), of which `share` is isotropic."""
        d = len(self.mean)
        scatter, weight, n_rows, roundoff = self._scatter(options)
        left_out = weak_features(self.variances, self.mean, options.min_scale, roundoff, share)
        return factors.dense(
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
        """The matrix to factor, what it is divided by, its rows, and its unit roundoff."""
        second = self._state.second
        return second.matrix, self.weight, self.n_rows, second.unit_roundoff

    def remember(self, factor: Factor) -> None:
        """Let a factor keep Cov(x), for its `gram`."""
        factor.remember(self._state.scatter, 1.0 / self.weight)

    def share(self, options: Options) -> float:
        """Share of the isotropic target in what is factored."""
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

        product = scipy.linalg.blas.dsymm(1.0, self._state.scatter, rows.T, lower=1)
        return np.asarray(rows @ product / self.weight)

    @property
    def sample(self) -> Sampled | None:
        """What Cov(x) was estimated from, where that is not all rows."""
        return None

    @property
    def metric(self) -> LowRank | None:
        """What stands for Cov(x), where no d x d matrix is kept."""
        return None


class LiveSketch(Live):
    """The statistics of moments that keep a sketch of the scatter."""

    def __init__(self, held: SketchAccumulator) -> None:
        super().__init__(held)
        self.accumulator = held
        self.sketch = cast(Sketch, self._state.second)
        self._metric: LowRank | None = None

    @property
    def metric(self) -> LowRank:
        """M, made when it is first asked for."""
        if self._metric is None:
            sketch = self.sketch
            self._metric = nystroem(
                sketch.matrix, sketch.images, sketch.signs, self.weight, self.mean
            )
        return self._metric

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
        return self.metric.factor(share, left_out)

    def remember(self, factor: Factor) -> None:
        """Nothing: the metric is at hand."""

    def share(self, options: Options) -> float:
        if isinstance(options.shrinkage, str):
            raise InputError(
                f"shrinkage={options.shrinkage!r} needs the whole covariance, which moments made "
                "with sketch_size= do not keep; pass a number in [0, 1]"
            )
        return float(options.shrinkage or 0.0)

    def gram(self, rows: Float) -> Float:
        return self.metric.gram(rows)


class LiveSample(Live):
    """The statistics of moments whose scatter is that of a sample."""

    def __init__(self, held: SampledAccumulator) -> None:
        super().__init__(held)
        self._sampled = held
        self._estimate: tuple[Float, Sampled] | None = None

    def _estimated(self) -> tuple[Float, Sampled]:
        """The covariance, estimated when it is first asked for."""
        if self._estimate is None:
            self._estimate = sampled_covariance(self._sampled)
        return self._estimate

    @property
    def sample(self) -> Sampled:
        return self._estimated()[1]

    def _scatter(self, options: Options) -> tuple[Float, float, int, float]:
        if not options.shrinkage:
            refuse_few(self._sampled)
        matrix, known = self._estimated()
        return matrix, 1.0, known.n_rows, known.unit_roundoff

    def remember(self, factor: Factor) -> None:
        factor.remember(self._estimated()[0], 1.0)

    def share(self, options: Options) -> float:
        if options.shrinkage is None:
            return 0.0
        matrix, known = self._estimated()
        # `share` takes a sum over the rows; this is a mean, and so is the matrix.
        quartic = None if known.quartic is None else known.quartic / known.effective
        return share(options.shrinkage, matrix, known.effective, quartic)

    def gram(self, rows: Float) -> Float:
        import scipy.linalg.blas

        matrix, known = self._estimated()
        product = scipy.linalg.blas.dsymm(1.0, matrix, rows.T, lower=1)
        return np.asarray(rows @ product - (rows * known.repaired) @ rows.T)


def live(held: Accumulator) -> Live:
    """The statistics of an accumulator of any kind."""
    if isinstance(held, SketchAccumulator):
        return LiveSketch(held)
    return LiveSample(held) if isinstance(held, SampledAccumulator) else Live(held)
