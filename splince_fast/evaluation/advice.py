"""Advice from moments: eraser for a frozen head, and association left in erased held-out rows."""

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
    """Rule that decides whether a frozen head has the smaller squared error after LEACE or SPLINCE.

    Attributes
    ----------
    rho : float
        Largest squared cosine between the kept and the erased subspace after whitening. For a
        concept and a task of one direction each, rho is the squared correlation between their best
        linear predictions.
    threshold : float
        g* = 2 (1 - rho) / (2 - rho). If the frozen head is g times the least-squares head, the
        squared error is smaller after SPLINCE iff g < g*, and smaller after LEACE iff g > g*. The
        threshold does not apply to accuracy: for a binary task, the centred scores after SPLINCE
        are 1 / (1 - rho) times the centred scores after LEACE, and so the predictions are the same
        for balanced classes.
    """

    rho: float
    threshold: float

    def __str__(self) -> str:
        if self.rho < 1e-6:
            return "concept and task do not overlap: LEACE and SPLINCE are the same map"
        return (
            "the squared error of a frozen head is smaller after LEACE than after SPLINCE, unless "
            f"regularisation has shrunk the weights below {self.threshold:.2f} times those of "
            f"least squares (overlap of concept and task: rho = {self.rho:.3f})"
        )


def frozen_head_advice(
    moments: Moments | Factored, erase: Variables, keep: Variables
) -> FrozenHeadAdvice:
    """Compute the overlap rho of concept and task, and the threshold 2 (1 - rho) / (2 - rho).

    `erase` and `keep` are as in :func:`splince_fast.splince`. If a direction of Cov(x, task) lies
    in the range of Cov(x, concept), rho is 1 and SPLINCE is infeasible.
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
    """Return the squared error of a frozen linear head on test rows, by eraser.

    The keys are "LEACE" and "SPLINCE". The squared error is summed over label columns and averaged
    over rows; it is NaN for SPLINCE if SPLINCE is infeasible.

    Parameters
    ----------
    moments : moments of the training rows
    erase, keep : names of the concepts and of the task
    head : (k, d) weights, fitted on unerased rows
    test : (n, d) test rows minus the mean of the training rows
    target : (n, k) label columns of the task
    mean : (k,) mean of the label columns over the training rows, which is the intercept of the head
    """

    def error_of(projection: Projection) -> float:
        erased = test - (test @ projection.right) @ projection.left.T
        residuals = target - mean - erased @ head.T
        return float(np.mean(np.sum(residuals**2, axis=1)))

    errors = {"LEACE": error_of(leace(moments, erase=erase)), "SPLINCE": math.nan}
    with suppress(InfeasibleError):
        errors["SPLINCE"] = error_of(splince(moments, erase=erase, keep=keep))
    return errors


@dataclass(frozen=True, slots=True)
class HeldOutTrace:
    """Association of a concept with held-out rows, before and after erasure.

    The eraser is fitted to n rows, and the held-out rows have the same distribution. The
    association of rows x and concept z is measured by the Pillai trace, the sum of their squared
    canonical correlations.

    Attributes
    ----------
    name : str
        Name of the concept.
    n : int
        Number of training rows with a label.
    rank_x, rank_z : int
        Ranks of Cov(x) and of Cov(z).
    before : float
        Pillai trace before erasure, adjusted for the sampling error of n rows.
    expected : float
        Expected Pillai trace after erasure, for the best linear predictor in the population.
    correlations : tuple of float
        Adjusted squared canonical correlations before erasure.
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
        """`expected` divided by the rank of Cov(z), which is R^2 for a concept of rank 1."""
        return self.expected / max(1, self.rank_z)

    def rows_for(self, r2: float) -> float:
        """Return the smallest number of training rows for which the expected R^2 is at most `r2`.

        The number is 0 if R^2 is at most `r2` before erasure, and infinity if no number of rows is
        enough.

        Raises
        ------
        InputError
            `r2` is not positive.
        """
        if not r2 > 0:
            raise InputError(f"r2 is {r2!r}; it must be positive")
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
        if round(self.before, 3) == 0:
            return (
                f"{self.name}: no linear association with the {self.n:,} training rows before "
                "erasing; are they erased already?"
            )
        return (
            f"{self.name}: R2 {self.before / max(1, self.rank_z):.3g} before, about "
            f"{self.r2:.2g} expected after erasing on new rows (rank {self.rank_x}, "
            f"{self.n:,} training rows); "
            f"{self.rows_for(max(self.r2 / 2, 1e-12)):,.0f} training rows would halve this R2"
        )


def held_out_trace(
    moments: Moments | Factored, name: VariableName, *, n: int | None = None
) -> HeldOutTrace:
    """Return the expected Pillai trace of a concept in held-out rows after erasure.

    The eraser P is fitted to n rows x with labels z of the concept. Let p and r be the ranks of
    Cov(x) and Cov(z). Take coordinates in which the population has Cov(x) = I_p and Cov(z) = I_r.
    The singular values of B = Cov(x, z) are then the canonical correlations c_i. SAL, LEACE and
    SPLINCE have the kernel span(B'), where B' = B + E is the sample covariance and E its sampling
    error. For every P with this kernel, the best linear prediction of z from P x explains

        |(P P^T)^{+1/2} P B|_F^2 = |(I - Pi') B|_F^2,   Pi' the orthogonal projector on span(B'),

    because P^+ P = I - Pi'. The remaining trace is therefore the part of B outside span(B'). It
    depends neither on the sample covariance of x nor on the choice of P. The entries of E
    orthogonal to B have variance 1 / n if the noise in x does not depend on z (exactly for Gaussian
    x and z, and for two balanced classes). For one direction, |B'|^2 = c^2 + m + O(c / sqrt(n))
    with m = (p - r) / n. Hence

        E |(I - Pi') B|^2 = sum_i c_i^2 m / (c_i^2 + m)  (1 + O(1 / p) + O(1 / (n c^2))).

    A direction contributes m if c^2 >> m, and c^2, as before erasure, if c^2 << m. The trace is
    larger in rows of another distribution, such as rows with another association of task and
    concept.

    Parameters
    ----------
    moments : Moments or Factored
        Moments of the training rows.
    name : str
        Name of the concept.
    n : int, optional
        Number of training rows with a label; the default is the number in `moments`.

    Returns
    -------
    HeldOutTrace
        Trace before and after erasure, for rows with a label. The squared correlations are
        adjusted: c^2 -> 1 - (1 - c^2)(n - 1) / (n - p - 1).

    Raises
    ------
    InputError
        `n` is not a positive integer.
    UnknownVariableError, ConstantVariableError
        As for :func:`splince_fast.concept_strength`.

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
        # `concept_strength` counts rows without a label as rows at the mean of the concept; divide
        # its squared correlations by the fraction of labelled rows.
        labelled = min(1.0, stats.variable(name).weight / stats.weight)
    n_labelled, p, r = round(labelled * strength.n), strength.rank_x, strength.rank_z
    squares = adjusted(np.minimum(1.0, np.square(strength.correlations) / labelled), n_labelled, p)
    n_rows = n_labelled if n is None else int(n)
    expected = remaining_trace(squares, max(0, p - r) / n_rows)
    return HeldOutTrace(str(name), n_rows, p, r, float(sum(squares)), expected, squares)
