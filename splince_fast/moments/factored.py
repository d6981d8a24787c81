"""Statistics that a solve reads: of locked moments, or a snapshot with its own factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve.factor import Factor
from splince_fast._solve.held_out import Noise
from splince_fast._solve.options import Options
from splince_fast.exceptions import InputError, UnknownVariableError
from splince_fast.labels import VariableName
from splince_fast.moments.snapshot import Snapshot
from splince_fast.moments.variable import Variable

if TYPE_CHECKING:
    from splince_fast.moments.moments import Moments

Float = NDArray[np.float64]


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
        self.n_features = len(self.mean)
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
        if not isinstance(name, str | tuple) or name not in list(self._variables):
            names = ", ".join(map(repr, self._variables)) or "none"
            raise UnknownVariableError(
                f"no variable {name!r} was accumulated, or none of its labels is present; the "
                f"variables are: {names}"
            )
        return self._variables[name]

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
