"""Linear association of x with a concept: canonical correlations and their chance level."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from splince_fast._solve.options import Options
from splince_fast._solve.selection import span_of
from splince_fast._solve.tolerances import CONSTANT
from splince_fast.exceptions import InputError
from splince_fast.labels import VariableName
from splince_fast.moments import Moments
from splince_fast.moments.statistics import Factored, statistics
from splince_fast.report import as_html, as_text, shortened


@dataclass(frozen=True, slots=True)
class ConceptStrength:
    """Strength of the linear association of x with a concept, and its chance level.

    Attributes
    ----------
    name : str
        Name of the concept.
    correlations : tuple of float
        Sample canonical correlations of x and the concept, descending.
    pillai : float
        Pillai trace V, the sum of their squares; R^2 for a binary concept or a single column.
    chance : float
        Mean of V over all permutations of the labels: rank_x rank_z / (n - 1), exact for any x.
    r2 : float or None
        R^2 of the concept given x without bias, 1 - (1 - V / rank_z) (n - 1) / (n - 1 - rank_x);
        None if x fits any labels.
    p_value : float
        Probability that permuted labels give at least V, for Gaussian x: exact if rank_x or rank_z
        is 1, otherwise an F approximation. 1 if `r2` is None.
    n, rank_x, rank_z : int
        Rounded weight sum; ranks of Cov(x) and Cov(z) at their rounding levels.
    """

    name: str
    correlations: tuple[float, ...]
    pillai: float
    chance: float
    r2: float | None
    p_value: float
    n: int
    rank_x: int
    rank_z: int

    @property
    def conclusion(self) -> str:
        """Conclusion in words, from p-values below 0.01 or, after erasure, above 0.9999."""
        if not self.rank_x:
            return f"no linear association with {self.name!r}: x is constant"
        if self.r2 is None:
            return f"no conclusion about {self.name!r}: x fits any labels; add rows"
        if self.p_value < 0.01:
            return f"a linear association with {self.name!r} beyond chance"
        if self.p_value > 1.0 - 1e-4:
            return f"less association with {self.name!r} than random labels have, as after erasure"
        return f"no linear association with {self.name!r} beyond chance"

    def to_dict(self) -> dict[str, Any]:
        """Return all values and the conclusion, as values that JSON can represent."""
        return {**dataclasses.asdict(self), "conclusion": self.conclusion}

    def _facts(self) -> list[tuple[str, str]]:
        shown = shortened((f"{c:.3g}" for c in self.correlations), 5)
        return [
            ("sample", f"n = {self.n:,}, rank of x {self.rank_x}, of the concept {self.rank_z}"),
            ("canonical correlations", f"[{shown}]"),
            ("Pillai trace", f"{self.pillai:.4g} (chance {self.chance:.4g})"),
            ("R^2 above chance", "undetermined" if self.r2 is None else f"{self.r2:.4g}"),
            ("p-value", f"{self.p_value:.3g}"),
        ]

    def __str__(self) -> str:
        return as_text(self.conclusion, self._facts())

    def _repr_html_(self) -> str:
        return as_html(self.conclusion, self._facts())


def concept_strength(moments: Moments | Factored, name: VariableName) -> ConceptStrength:
    """Compute the canonical correlations of x with a concept and the chance level of their size.

    The Pillai trace V is the sum of the squared canonical correlations, the eigenvalues of
    Cov(z)^+ Cov(z, x) Cov(x)^+ Cov(x, z), with z the class indicators or columns of the concept
    (Pillai, Annals of Mathematical Statistics 26, 1955). The p-value is too small if x has outlying
    rows and the concept has classes with few rows. Missing labels count as rows at the mean of the
    concept; weights count as frequencies.

    Parameters
    ----------
    moments : Moments or Factored
        Moments of the data, of all rows and without shrinkage.
    name : str or tuple of str
        Name of the concept.

    Returns
    -------
    ConceptStrength
        Canonical correlations, chance level, p-value and a conclusion in words.

    Raises
    ------
    UnknownVariableError, ConstantVariableError, NotEnoughDataError
        As :func:`splince`.
    InputError
        `moments` has ``subsample`` below 1 or ``covariance_type="diag"``, was shrunk, or is a
        snapshot whose factor leaves out a feature of very small variance.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, 500)
    >>> X = rng.normal(size=(500, 20)) + z[:, None] / 2
    >>> moments = sf.Moments().update(X, {"z": z})
    >>> print(sf.concept_strength(moments, "z").conclusion)
    a linear association with 'z' beyond chance
    """
    with statistics(moments) as stats:
        if stats.shrinkage:
            raise InputError(
                f"these moments were factored with shrinkage {stats.shrinkage:.3g}, which "
                "changes correlations; pass the moments"
            )
        if stats.parameters.subsample < 1 or stats.is_diagonal:
            raise InputError(
                "the chance level needs covariance_type='full' and subsample=1 in the moments"
            )
        span = span_of(stats, [name], "", True)
        whitener = span.interpretations[0]().whitener
        # `factor.admit` is not used: it would make the rank of x, and so the chance level, depend
        # on the labels.
        factor = stats.factored(Options(), 0.0, CONSTANT * np.abs(stats.mean))
        p, q, n = min(factor.rank, stats.n_rows - 1), min(whitener.shape), round(stats.weight)
        values = np.linalg.svd(whitener @ factor.whiten(span.rows), compute_uv=False)
    correlations = np.minimum(values[: min(p, q)], 1.0)
    pillai = float(np.sum(correlations**2))
    varies = min(p, q) > 0 and max(p, q) < n - 1  # whether V depends on the labels
    return ConceptStrength(
        str(name), tuple(map(float, correlations)), pillai,
        p * q / (n - 1) if varies else float(min(p, q)),
        1.0 - (1.0 - pillai / q) * (n - 1) / (n - 1 - p) if varies else None,
        p_value(pillai, n, p, q) if varies else 1.0, n, p, q,
    )  # fmt: skip


def p_value(pillai: float, n: int, p: int, q: int) -> float:
    """Return P(V >= pillai) of permuted labels, for ranks p and q from 1 to n - 2."""
    from scipy.special import betainc

    # V lies in [lowest, lowest + width]. Permuted labels have E[V] = p q / N, N = n - 1, for any x
    # (Pitman 1937), and for Gaussian x the variance below. The F distribution with this range, mean
    # and variance is that of the F test if p or q is 1; Pillai's (1955) has the same mean.
    N, lowest = n - 1, max(0, p + q - (n - 1))
    width = min(p, q) - lowest
    mean = (p * q / N - lowest) / width
    variance = 2.0 * p * (N - p) * q * (N - q) / (N**2 * (N - 1) * (N + 2)) / width**2
    size = mean * (1.0 - mean) / variance - 1.0  # half the sum of both degrees of freedom
    upper = float(np.clip((min(p, q) - pillai) / width, 0.0, 1.0))
    return float(betainc((1.0 - mean) * size, mean * size, upper))
