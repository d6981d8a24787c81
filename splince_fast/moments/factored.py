"""What a solve reads of moments: live, under their lock, or as a snapshot with its own factor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels import provider
from splince_fast._solve import factor as factors
from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor
from splince_fast._solve.options import Options
from splince_fast._solve.shrinkage import share
from splince_fast.exceptions import InputError, UnknownVariableError
from splince_fast.labels import VariableName
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.metric import Sampled, refuse_few, sampled_covariance
from splince_fast.moments.moments import Moments
from splince_fast.moments.sampled import SampledAccumulator
from splince_fast.moments.variable import Variable

Float = NDArray[np.float64]


class Live:
    """The statistics of moments that nobody changes meanwhile.

    Attributes
    ----------
    n_rows, weight, mean : int, float, (d,) float64
        Of x.
    variable : callable
        The sums of one variable, by name.
    """

    def __init__(self, held: Accumulator) -> None:
        self._held = held
        self.variable = held.variable
        self._state = state = held.seen()
        self.n_rows, self.weight, self.mean = state.n_rows, state.weight, state.mean

    @property
    def variances(self) -> Float:
        """(d,): of the features, ddof = 0."""
        return np.asarray(self._state.second.diagonal() / self.weight)

    def memory(self, whitened: bool) -> AbstractContextManager[Float | None]:
        """Where a factor may live while it is used."""
        return self._held.workspace(len(self.mean) ** 2) if whitened else nullcontext()

    def identity(self) -> Factor:
        """The factor of the identity, for what is not whitened."""
        state = self._state
        provider.ensure_for(state.width)
        return factors.identity(state.second.diagonal(), state.weight)

    def factored(self, options: Options, share: float, memory: Float | None) -> Factor:
        """The factor of Cov(x), of which `share` is isotropic."""
        d = len(self.mean)
        provider.ensure_for(d)
        scatter, weight, n_rows, roundoff = self._scatter(options)
        return factors.dense(
            scatter,
            weight,
            self.mean,
            max_rank=n_rows - 1,
            tolerance=tolerances.eigenvalue(d, roundoff),
            share=share,
            solver=options.solver,
            memory=memory,
        )

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


class Factored:
    """An immutable snapshot of moments, with the covariance of x factored.

    Made by :meth:`splince_fast.Moments.factored`; taken by every method in place of moments.

    Parameters
    ----------
    live : Live
        The statistics that are copied.
    options : Options
        Shrinkage and solver.
    parameters : mapping
        `kinds` and `joint` of the moments, which say how labels are read.
    variables : mapping of VariableName to variable
        Copied.

    Attributes
    ----------
    n_rows, weight, n_features : int, float, int
        Of the data.
    mean : (d,) float64
        Mean of x.
    variances : (d,) float64
        Of the features, ddof = 0.
    shrinkage : float
        Share of the isotropic target in the covariance that was factored.
    factor : Factor
        L with L L^T the covariance; whitens and unwhitens.
    reading : tuple
        `kinds` and `joint` of the moments.
    sample : Sampled or None
        What Cov(x) was estimated from, where that is not all rows.

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

    def __init__(self, live: Live, options: Options, parameters: Mapping[str, Any],
                 variables: Mapping[VariableName, Variable]) -> None:  # fmt: skip
        self.n_rows, self.weight, self.mean = live.n_rows, live.weight, live.mean
        self.variances = live.variances
        self.n_features = len(self.mean)
        self.shrinkage = live.share(options)
        self._requested, self._solver = options.shrinkage, options.solver
        self.factor = live.factored(options, self.shrinkage, None)
        live.remember(self.factor)
        self.sample = live.sample
        self._identity = live.identity()
        self.reading = parameters["kinds"], parameters["joint"]
        self._variables = {name: variable.copy() for name, variable in variables.items()}
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
        if not isinstance(name, str | tuple) or name not in list(self._variables):
            known = ", ".join(map(repr, self._variables)) or "none"
            raise UnknownVariableError(
                f"no variable {name!r} was accumulated; the variables are: {known}"
            )
        return self._variables[name]

    def memory(self, whitened: bool) -> AbstractContextManager[Float | None]:
        """Work memory for `factored`: none is needed, the factor is there.

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
        """The factor that is kept, if `options` ask for no other one.

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
            They ask for other shrinkage, or for another solver.
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
        return self.factor

    def share(self, options: Options) -> float:
        """Share of the isotropic target in what is factored.

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
        product = self.factor.gram(np.ascontiguousarray(rows))
        if self.sample is None:
            return product
        return np.asarray(product - (rows * self.sample.repaired) @ rows.T)

    @property
    def nbytes(self) -> int:
        """Bytes that keeping it costs: the factor and the sums of the variables."""
        matrices = 1 if self.factor.solver == "cholesky" else 2
        tensors = (t for v in self._variables.values() for t in v.tensors().values())
        return 8 * matrices * self.n_features**2 + sum(t.nbytes for t in tensors)

    def __repr__(self) -> str:
        return (
            f"Factored({self.n_rows:,} rows, {self.n_features} features, "
            f"{list(self._variables)}, rank {self.factor.rank}, {self.nbytes / 2**20:.1f} MiB)"
        )


def snapshot(moments: Moments, shrinkage: float | str | None, solver: str) -> Factored:
    """The snapshot behind :meth:`Moments.factored`."""
    options = Options(shrinkage=shrinkage, solver=solver)
    with moments.held() as held:
        for name in held.variables:
            held.variable(name)  # makes room for every class that was named
        return Factored(
            _live(held),
            options,
            {"kinds": moments.parameters.kinds, "joint": moments.parameters.joint},
            held.variables,
        )


def _live(held: Accumulator) -> Live:
    return LiveSample(held) if isinstance(held, SampledAccumulator) else Live(held)


def statistics(source: Moments | Factored) -> AbstractContextManager[Live | Factored]:
    """What a solve reads of `source`, which nobody changes meanwhile.

    Raises
    ------
    InputError
        Neither moments nor a snapshot of them.
    """
    if isinstance(source, Moments):
        return source.held_as(_live)
    if isinstance(source, Factored):
        return nullcontext(source)
    raise InputError(f"moments is {type(source).__name__}; pass sf.Moments().update(X, labels)")
