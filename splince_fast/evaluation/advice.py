"""Advice from moments alone: the eraser for a frozen head, and the association left in new rows."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve.held_out import adjusted, remaining_trace
from splince_fast._solve.options import is_integer
from splince_fast.exceptions import InfeasibleError, InputError
from splince_fast.labels import VariableName
from splince_fast.methods import leace, splince
from splince_fast.moments import Moments
from splince_fast.moments.snapshot import Factored, statistics
from splince_fast.projection import Projection
from splince_fast.strength import concept_strength

Float = NDArray[np.float64]
Variables: TypeAlias = VariableName | list[VariableName] | list[str]


@dataclass(frozen=True, slots=True)
class FrozenHeadAdvice:
    """Whether a frozen head has the smaller squared error after LEACE or SPLINCE, by theorem.

    Attributes
    ----------
    rho : float
        Largest squared cosine between the kept and the erased space after whitening: the squared
        correlation of the best linear predictions of concept and task.
    threshold : float
        g* = 2 (1 - rho) / (2 - rho). For a frozen head g times the least-squares one SPLINCE has
        the smaller squared error iff g < g*, LEACE iff g > g*. It is no rule of accuracy: with
        two classes of the task the scores of such a head, less their mean, are proportional: those
        after SPLINCE are 1 / (1 - rho) times those after LEACE, so that both decide alike for
        classes of like size.
    """

    rho: float
    threshold: float

    def __str__(self) -> str:
        if self.rho < 1e-6:
            return "concept and task do not overlap: LEACE and SPLINCE are the same map"
        return (
            "a frozen head has the smaller squared error after LEACE, unless regularisation has "
            f"shrunk its weights below {self.threshold:.2f} times those of least squares: then "
            f"after SPLINCE (overlap of concept and task: rho = {self.rho:.3f})"
        )


def frozen_head_advice(
    moments: Moments | Factored, erase: Variables, keep: Variables
) -> FrozenHeadAdvice:
    """The overlap rho of concept and task, and the head-shrinkage threshold 2 (1-rho)/(2-rho).

    rho is 1 for a task in the span of the concept. Variables are those of
    :func:`splince_fast.splince`.
    """
    try:
        report = splince(moments, erase=erase, keep=keep).report
        rho = 0.0 if report is None or report.rho is None else report.rho
    except InfeasibleError as error:
        rho = min(1.0, float(error.cosine) ** 2)
    return FrozenHeadAdvice(rho, 2 * (1 - rho) / (2 - rho))


def frozen_squared_errors(
    moments: Moments | Factored, erase: Variables, keep: str, head: Float, test: Float,
    target: Float, mean: Float,
) -> dict[str, float]:  # fmt: skip
    """Squared error of a frozen least-squares head on test rows after "LEACE" and "SPLINCE".

    The mean over the rows of the squared error, summed over columns; NaN for SPLINCE if it is
    infeasible.

    Parameters
    ----------
    moments : of the training rows
    erase, keep : the concepts and the task
    head : (k, d) weights, which were fitted on unerased rows
    test : (n, d) rows less the mean of the training rows
    target : (n, k) targets of the head
    mean : (k,) mean of the target in the training rows, the prediction for a row at the mean
    """

    def error_of(projection: Projection) -> float:
        erased = test - (test @ projection.right) @ projection.left.T
        rest = target - mean - erased @ head.T
        return float(np.mean(np.sum(rest**2, axis=1)))

    errors = {"LEACE": error_of(leace(moments, erase=erase)), "SPLINCE": math.nan}
    with suppress(InfeasibleError):
        errors["SPLINCE"] = error_of(splince(moments, erase=erase, keep=keep))
    return errors


@dataclass(frozen=True, slots=True)
class HeldOutTrace:
    """Association that an eraser fitted on n rows leaves in new rows of the same distribution.

    Attributes
    ----------
    name : str
    n : int
        Training rows.
    rank_x, rank_z : int
        Ranks of Cov(x) and of Cov(z).
    before : float
        Pillai trace of the concept in x, the sum of the squared canonical correlations, adjusted
        for the chance correlations of n rows.
    expected : float
        Expected Pillai trace after erasing, on new rows and for a probe that knows their
        distribution.
    correlations : tuple of float
        The adjusted squared canonical correlations.
    """

    name: str
    n: int
    rank_x: int
    rank_z: int
    before: float
    expected: float
    correlations: tuple[float, ...]

    @property
    def r2(self) -> float:
        """The expected trace per direction of the concept: R^2 of a binary or single column."""
        return self.expected / max(1, self.rank_z)

    def rows_for(self, r2: float) -> float:
        """Least number of training rows at which the expected R^2 is at most `r2`.

        0 if it is so without erasing; infinity if no number is enough.

        Raises
        ------
        InputError
            `r2` is not positive.
        """
        if not r2 > 0:
            raise InputError(f"r2 is {r2!r}; it must be positive, as is R^2 in new rows")
        target = r2 * max(1, self.rank_z)
        if sum(self.correlations) <= target:
            return 0.0
        low, high = 0.0, float(self.rank_x)
        for _ in range(200):
            middle = (low + high) / 2
            if remaining_trace(self.correlations, middle) > target:
                high = middle
            else:
                low = middle
        return math.ceil((self.rank_x - self.rank_z) / low) if low > 0 else math.inf

    def __str__(self) -> str:
        return (
            f"{self.name}: R2 {self.before / max(1, self.rank_z):.3g} before, about "
            f"{self.r2:.2g} expected after erasing on new rows (rank {self.rank_x}, "
            f"{self.n:,} training rows); half of it needs "
            f"{self.rows_for(max(self.r2 / 2, 1e-12)):,.0f} rows"
        )


def held_out_trace(
    moments: Moments | Factored, name: VariableName, *, n: int | None = None
) -> HeldOutTrace:
    """The expected Pillai trace of a concept on new rows, for an eraser fitted on n rows.

    Take coordinates in which the population has Cov(x) = I_p and Cov(z) = I_r, and let
    B = Cov(x, z), whose singular values are the canonical correlations c_i. An eraser fitted on n
    rows has the kernel span(B'), B' = B + E the covariance in the sample: that of SAL, LEACE and
    SPLINCE alike. Whatever P with this kernel, the best linear prediction of z from P x explains

        |(P P^T)^{+1/2} P B|_F^2 = |(I - Pi') B|_F^2,   Pi' the orthogonal projector on span(B'),

    because P^+ P = I - Pi'. The trace left is the part of B outside the sample's directions;
    neither Cov(x) of the sample nor the choice of P enters. The entries of E orthogonal
    to B have variance 1 / n where the noise in x does not depend on z (exactly for Gaussian x and
    z, and for two balanced classes). For one direction, with m = (p - r) / n,
    |B'|^2 = c^2 + m + O(c / sqrt(n)), hence

        E |(I - Pi') B|^2 = sum_i c_i^2 m / (c_i^2 + m)  (1 + O(1 / p) + O(1 / (n c^2))),

    which is m = (p - r) / n per direction for c^2 >> m, and c^2, as before erasing, for c^2 << m.
    Rows of another distribution, such as one with another association between task and concept,
    show more.

    Parameters
    ----------
    moments : Moments or Factored
        Of the training rows.
    name : str
        The concept.
    n : int, optional
        Training rows with a label; the default is that of `moments`.

    Returns
    -------
    HeldOutTrace
        Of rows with a label. The squared correlations are adjusted:
        c^2 -> 1 - (1 - c^2)(n - 1) / (n - p - 1).

    Raises
    ------
    InputError
        `n` is not positive.
    UnknownVariableError, ConstantVariableError
        As :func:`splince_fast.concept_strength`.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> from splince_fast.evaluation.advice import held_out_trace
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, 2000)
    >>> X = rng.normal(size=(2000, 20)) + z[:, None] / 2
    >>> trace = held_out_trace(sf.Moments().update(X, {"z": z}), "z")
    >>> 0.005 < trace.expected < 0.0096
    True
    """
    if n is not None and not (is_integer(n) and n > 0):
        raise InputError(f"n is {n!r}; it must be a positive number of training rows")
    strength = concept_strength(moments, name)
    with statistics(moments) as stats:
        # `concept_strength` takes rows without a label as rows at the mean of the concept.
        share = min(1.0, stats.variable(name).weight / stats.weight)
    seen, p, r = round(share * strength.n), strength.rank_x, strength.rank_z
    squares = adjusted(np.minimum(1.0, np.square(strength.correlations) / share), seen, p)
    rows = seen if n is None else int(n)
    expected = remaining_trace(squares, max(0, p - r) / rows)
    return HeldOutTrace(str(name), rows, p, r, float(sum(squares)), expected, squares)
