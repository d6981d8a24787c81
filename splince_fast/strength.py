"""Linear association of x with a concept: canonical correlations and their chance level."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import as_rows, check_feature_names, check_values, feature_names
from splince_fast._solve import factor as factors
from splince_fast._solve import tolerances
from splince_fast._solve.factor import Factor
from splince_fast._solve.options import Options, is_integer
from splince_fast.exceptions import ConstantVariableError, InputError, UnknownVariableError
from splince_fast.labels import ClassCodes, Encoded, VariableName, encode
from splince_fast.moments import Moments
from splince_fast.moments.accumulator import check_column
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.snapshot import Factored, Statistics, statistics
from splince_fast.moments.variable import Variable
from splince_fast.report import as_html, as_text, shortened

Float = NDArray[np.float64]

# `conclusion` states an association for p-values below the first threshold, and less association
# than random labels have for p-values above the second.
_ASSOCIATED = 0.01
_LESS_THAN_CHANCE = 1.0 - 1e-4


@dataclass(frozen=True, slots=True)
class ConceptStrength:
    """Strength of the linear association of x with a concept, and its chance level.

    Attributes
    ----------
    name : str
        Name of the concept.
    correlations : tuple of float
        The min(rank_x, rank_z) sample canonical correlations between x and the concept,
        descending. They are positive even without an association.
    pillai : float
        Pillai trace V, the sum of the squared canonical correlations; for a binary concept or a
        single column V is R^2.
    chance : float
        Mean of V over all permutations of the labels: rank_x rank_z / (n - 1), exact for any x.
    chance_deviation : float
        Standard deviation of V for Gaussian x and randomly permuted labels. It equals the standard
        deviation over random rotations of any x.
    p_value : float
        Probability that randomly permuted labels give at least the observed V. Exact for Gaussian x
        if rank_x or rank_z is 1; otherwise an approximation, which can be too small for classes
        with few rows.
    bound : float
        Upper bound of the p-value of the test over all n! permutations, rigorous for any
        distribution of x, but loose.
    p_value_permutation : float or None
        p-value of the permutation test, valid for any x; None if no data were passed.
    n : int
        Sample size: weight sum of the rows of x, rounded to an integer.
    rank_x, rank_z : int
        Ranks of Cov(x) and Cov(z) at their rounding levels.
    informative : bool
        False if rank_x, rank_z and n determine V for all labels, for example with at most
        rank_x + 1 rows. V is then no evidence, and the p-values and the bound are 1.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> z = rng.integers(0, 2, size=400)
    >>> X = rng.normal(size=(400, 4)) + np.outer(z, np.eye(4)[0])
    >>> result = sf.concept_strength(sf.Moments().update(X, {"z": z}), "z")
    >>> result.name, len(result.correlations), result.pillai > result.chance, result.p_value < 1e-6
    ('z', 1, True, True)
    """

    name: str
    correlations: tuple[float, ...]
    pillai: float
    chance: float
    chance_deviation: float
    p_value: float
    bound: float
    p_value_permutation: float | None
    n: int
    rank_x: int
    rank_z: int
    informative: bool

    @property
    def conclusion(self) -> str:
        """Conclusion in words: there is an association if the p-value is below 0.01.

        The p-value is `p_value_permutation` unless it is None. A `p_value` above 0.9999, "less
        association than random labels have", is typical of rows to which the eraser was fitted.
        """
        if not self.rank_x:
            return f"no linear association with {self.name!r}: x is constant"
        if not self.informative:
            return (
                f"no conclusion about {self.name!r}: on {self.n:,} rows, x of rank {self.rank_x} "
                f"fits any labels of rank {self.rank_z} equally well; add rows or drop features"
            )
        p_permutation = self.p_value_permutation
        p_value = self.p_value if p_permutation is None else p_permutation
        if p_value < _ASSOCIATED:
            return f"a linear association with {self.name!r} beyond chance"
        if self.p_value > _LESS_THAN_CHANCE:
            return f"less association with {self.name!r} than random labels have, as after erasure"
        return f"no linear association with {self.name!r} beyond chance"

    def to_dict(self) -> dict[str, Any]:
        """Return all values and the conclusion as numbers, strings and lists, ready for JSON."""
        fields = dataclasses.asdict(self)
        return {**fields, "correlations": list(self.correlations), "conclusion": self.conclusion}

    def _facts(self) -> list[tuple[str, str]]:
        """Return the label and the text of each line of the summary."""
        shown = shortened((f"{c:.3g}" for c in self.correlations), 5)
        facts = [
            ("sample", f"n = {self.n:,}, rank of x {self.rank_x}, of the concept {self.rank_z}"),
            ("canonical correlations", f"[{shown}]"),
            ("Pillai trace", f"{self.pillai:.4g}"),
            ("chance", f"{self.chance:.4g}, deviation {self.chance_deviation:.2g}"),
            ("p-value", f"{self.p_value:.3g}, at most {self.bound:.3g} for any x"),
        ]
        if self.p_value_permutation is not None:
            facts.append(("permutation test", f"p = {self.p_value_permutation:.3g}"))
        return facts

    def __str__(self) -> str:
        return as_text(self.conclusion, self._facts())

    def _repr_html_(self) -> str:
        return as_html(self.conclusion, self._facts())


def concept_strength(
    moments: Moments | Factored,
    name: VariableName,
    *,
    X: object = None,
    labels: object = None,
    n_permutations: int = 999,
    random_state: int = 0,
) -> ConceptStrength:
    """Compute the canonical correlations of x with a concept and the chance level of their size.

    Let H and K be the orthogonal projections of R^n onto the column spaces of centred X and of the
    centred class indicators or columns of the concept. The Pillai trace V = tr(H K) is the sum of
    the squared canonical correlations, the eigenvalues of Cov(z)^+ Cov(z, x) Cov(x)^+ Cov(x, z).

    Parameters
    ----------
    moments : Moments or Factored
        Moments of the data. A Factored snapshot must have no shrinkage; features that its
        ``min_scale`` left out are not tested.
    name : str or tuple of str
        Name of the concept.
    X, labels : array-like of shape (n, d), labels, optional
        Rows and labels from which `moments` was computed, in the form that
        :meth:`Moments.update` accepts, without sample weights. They are needed for the permutation
        test only, which takes O(n d) memory in float64, O(n d^2) time, and O(n rank_x rank_z) time
        per permutation.
    n_permutations : int
        Number m of random permutations; the p-value of the test is at least 1 / (m + 1).
    random_state : int
        Seed of the permutations.

    Returns
    -------
    ConceptStrength
        Canonical correlations, chance level, p-values and a conclusion in words.

    Raises
    ------
    UnknownVariableError
        The variable is not in `moments`, or not in `labels`.
    ConstantVariableError
        The variable has a single value, or no labels.
    NotEnoughDataError
        The moments have no rows.
    InputError
        A parameter is out of range; only one of X and labels is passed; X and labels are not the
        data of `moments`; or `moments` was made with ``subsample`` below 1 or ``sketch_size``.

    Notes
    -----
    *Chance level*: V is compared with its distribution for randomly permuted labels, where missing
    labels are permuted too. A random permutation turns K into a random matrix with the mean
    rank_z / (n - 1) (I - 1 1^T / n), so that E[V] = rank_x rank_z / (n - 1) for any x [1]_. With
    N = n - 1, p = rank_x, q = rank_z, h_i = H_ii, k_i = K_ii and
    e(S, r) = n (n + 1) S - (n - 1) r (r + 2) [2]_::

        Var[V] = 2 p (N - p) q (N - q) / (N^2 (N - 1) (N + 2))
                 + e(sum h_i^2, p) e(sum k_i^2, q) / ((n + 1) n (n - 1) (n - 2) (n - 3))

    *p_value*: for Gaussian x the column space is uniformly distributed, and the second term has
    mean 0. The distribution of V is then approximated by the beta distribution on
    [max(0, p + q - N), min(p, q)] with the mean and variance of V. This is exactly the F test if p
    or q is 1, otherwise a refinement of the beta approximation of [3]_ with the same mean. For
    other x the approximation is good if the second term is small. The second term is large if x
    has outlying rows and z has classes with few rows, since both have high leverages: use the
    permutation test or the bound there.

    *bound*: for classes, sum k_i^2 follows from the class sizes. For continuous columns, sum k_i^2
    lies between r^2 / n and r (n - 1) / n, with r the rank; so does sum h_i^2. The largest variance
    in these ranges gives Cantelli's inequality, the mean gives Markov's inequality, and `bound` is
    the smaller of both bounds.

    *Missing labels* count as rows at the mean of the concept. All statements above stay exact,
    with n the number of all rows of x, but the correlations of a concept that is labelled in a
    fraction s of the rows are reduced by about sqrt(s). To test only labelled rows, accumulate
    only labelled rows.

    *Weights* are frequencies, and n is the weight sum. Scale other weights such that the weight
    sum is the effective sample size (sum w)^2 / sum w^2 of [4]_; only n depends on the scale.
    Statements called exact or rigorous above are then approximate.

    References
    ----------
    .. [1] E. J. G. Pitman, "Significance tests which may be applied to samples from any
       populations. II. The correlation coefficient test", Supplement to the Journal of the Royal
       Statistical Society 4 (1937), 225-232.
    .. [2] F. Kazi-Aoual, S. Hitier, R. Sabatier and J.-D. Lebreton, "Refined approximations to
       permutation tests for multivariate inference", Computational Statistics & Data Analysis 20
       (1995), 643-656.
    .. [3] K. C. S. Pillai, "Some new test criteria in multivariate analysis", Annals of
       Mathematical Statistics 26 (1955), 117-121.
    .. [4] L. Kish, Survey Sampling, Wiley, 1965.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> from splince_fast.strength import concept_strength
    >>> rng = np.random.default_rng(0)
    >>> labels = {"related": rng.integers(0, 2, 500), "unrelated": rng.integers(0, 2, 500)}
    >>> X = rng.normal(size=(500, 20)) + labels["related"][:, None] / 2
    >>> moments = sf.Moments().update(X, labels)
    >>> print(concept_strength(moments, "related").conclusion)
    a linear association with 'related' beyond chance
    >>> print(concept_strength(moments, "unrelated").conclusion)
    no linear association with 'unrelated' beyond chance
    >>> after = sf.Moments().update(sf.leace(moments, erase="related")(X), labels)
    >>> print(concept_strength(after, "related").conclusion)
    less association with 'related' than random labels have, as after erasure
    """
    if isinstance(moments, Factored) and moments.shrinkage:
        raise InputError(
            f"these moments were factored with shrinkage {moments.shrinkage:.3g}, which changes "
            "correlations; pass moments.factored() without it, or the moments"
        )
    if (isinstance(moments, Moments) and moments.parameters.subsample < 1) or (
        isinstance(moments, Factored) and moments.sample is not None
    ):
        raise InputError(
            "these moments have the covariance of a sample of the rows, and the chance level "
            "requires the covariance of all rows; accumulate with subsample=1 for a test"
        )
    if (isinstance(moments, Moments) and moments.parameters.sketch_size is not None) or (
        isinstance(moments, Factored) and moments.low_rank is not None
    ):
        raise InputError(
            "these moments keep no covariance (sketch_size=), and correlations with all of x need "
            "it; accumulate without sketch_size=, or test a part of the features"
        )
    if (X is None) != (labels is None):
        raise InputError("the permutation test needs both X and labels; pass both or neither")
    if not is_integer(n_permutations) or n_permutations < 1:
        raise InputError(f"n_permutations is {n_permutations!r}; it must be a positive integer")
    if not is_integer(random_state) or random_state < 0:
        raise InputError(f"random_state is {random_state!r}; it must be a non-negative integer")
    with statistics(moments) as stats:
        variable = stats.variable(name)
        if not len(variable.span()):
            raise ConstantVariableError(
                f"the variable {name!r} takes a single value (or carries no label), so x "
                "has no correlation with it; check the labels"
            )
        x, z = _whiten_both(stats, variable, name)
        null = _Null(round(stats.weight), x.rank, z.rank)
        labelled = min(1.0, variable.weight / stats.weight)
        squared_leverages = _sum_of_squared_leverages(variable)
    correlations = np.minimum(z.singular_values[: null.highest] * labelled**0.5, 1.0)
    pillai = float(np.sum(correlations**2))
    p_permutation = None
    if X is not None:
        bases = _bases(moments, name, X, labels, x, z)
        p_permutation = _permutation_test(*bases, pillai, n_permutations, random_state)
    return ConceptStrength(
        name=str(name),
        correlations=tuple(map(float, correlations)),
        pillai=pillai,
        chance=null.mean,
        chance_deviation=null.variance**0.5,
        p_value=null.p_value(pillai),
        bound=null.bound(pillai, squared_leverages),
        p_value_permutation=p_permutation,
        n=null.n,
        rank_x=null.p,
        rank_z=null.q,
        informative=null.informative,
    )


# --- from moments to canonical correlations ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Whitened:
    """Cross-covariance whitened by the factor L of a covariance matrix."""

    rows: Float  # (k, d): L^+ times each of the k rows of the cross-covariance
    singular_values: Float  # singular values of `rows`
    rank: int  # rank of L L^T
    inverse_scale: Float | float  # (d,): 1 / standard deviation, 0 if constant; 1.0 for classes


def _whiten(factor: Factor, cross: Float, max_rank: int) -> _Whitened:
    """Whiten the rows of `cross`, (k, d), by a factor that does not depend on the labels.

    `factor.admit` is not used: it would make the rank of x, and so the chance level, depend on the
    labels.
    """
    rows = factor.whiten(np.ascontiguousarray(cross))
    values = np.asarray(np.linalg.svd(rows, compute_uv=False), dtype=np.float64)
    return _Whitened(rows, values, min(factor.rank, max_rank), factor.inverse_scale)


def _whiten_both(
    stats: Statistics, variable: Variable, name: object
) -> tuple[_Whitened, _Whitened]:
    """Return Cov(x, z) whitened by Cov(x) alone, and whitened by both Cov(x) and Cov(z).

    The singular values of the second result are the canonical correlations.
    """
    cross = variable.cross_covariance(0.0, name)
    if isinstance(variable, ClassSums):
        # The vectors 1[z = c] / sqrt(n_c) are orthonormal: division by sqrt(n_c / n) whitens the
        # class indicators.
        present = variable.weights > 0
        cross = cross[:, present] / np.sqrt(variable.weights[present] / variable.weight)
    # With min_scale=0, no feature is left out of the whitening.
    options = Options() if isinstance(stats, Factored) else Options(min_scale=0.0)
    with stats.memory(True) as memory:
        factor = stats.factored(options, stats.intensity(options), memory)
        x = _whiten(factor, cross.T, stats.n_rows - 1)
    if isinstance(variable, ClassSums):
        return x, _Whitened(x.rows, x.singular_values, cross.shape[1] - 1, 1.0)
    variable = cast(ColumnSums, variable)
    covariance = np.asfortranarray(variable.variance())
    variance, squares = np.diag(covariance), np.diag(variable.squares) / variable.weight
    size = np.abs(variable.reference) + np.sqrt(squares)
    varies = variable.deviations() > 0.0
    # The rounding error of the covariance scales with the squares about the reference point, which
    # can be larger than the variances.
    cancellation = float(np.max(squares[varies] / variance[varies]))
    tolerance = tolerances.eigenvalue_of_columns(variable.n_columns, variable.n_rows, cancellation)
    max_rank = variable.n_rows - 1
    factor = factors.dense(covariance, 1.0, size, max_rank=max_rank, tolerance=tolerance)
    return x, _whiten(factor, x.rows.T, max_rank)


# --- chance level --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Null:
    """Distribution of V = tr(H K) under random permutations of n rows.

    H is the orthogonal projection onto the centred columns of X, of rank p; K is that onto the
    centred columns of the concept, of rank q.
    """

    n: int
    p: int
    q: int

    @property
    def lowest(self) -> int:
        """Smallest possible V: the number of dimensions that both column spaces always share."""
        return max(0, self.p + self.q - (self.n - 1))

    @property
    def highest(self) -> int:
        return min(self.p, self.q)

    @property
    def informative(self) -> bool:
        """Whether V can vary: 0 < min(p, q) and max(p, q) < n - 1."""
        return self.lowest < self.highest

    @property
    def mean(self) -> float:
        return self.p * self.q / (self.n - 1) if self.informative else float(self.highest)

    @property
    def variance(self) -> float:
        """Variance of V for Gaussian x, or under random rotations of R^n that fix the vector 1."""
        if not self.informative:
            return 0.0
        N, p, q = self.n - 1, self.p, self.q
        return 2.0 * p * (N - p) * q * (N - q) / (N**2 * (N - 1) * (N + 2))

    def p_value(self, pillai: float) -> float:
        """P(V >= pillai) for the beta distribution with the range, mean and variance of V."""
        from scipy.special import betainc

        if not self.informative:
            return 1.0
        width = self.highest - self.lowest
        mean = (self.mean - self.lowest) / width
        size = mean * (1.0 - mean) * width**2 / self.variance - 1.0
        upper = float(np.clip((self.highest - pillai) / width, 0.0, 1.0))
        return float(betainc((1.0 - mean) * size, mean * size, upper))

    def excess(self, squared_leverages: float, rank: int) -> float:
        """n (n + 1) (S - E[S]): S is the sum of squared leverages, E[S] its mean for Gaussian x."""
        return self.n * (self.n + 1) * squared_leverages - (self.n - 1) * rank * (rank + 2)

    def permutation_variance(self, excess_x: float, excess_z: float) -> float:
        """Exact variance of V under permutations, for n > 3."""
        n = self.n
        return self.variance + excess_x * excess_z / ((n + 1) * n * (n - 1) * (n - 2) * (n - 3))

    def bound(self, pillai: float, squared_leverages_z: float | None) -> float:
        """Smaller of Markov's and Cantelli's bounds on P(V >= pillai) under permutations.

        `squared_leverages_z` is sum K_ii^2, or None if unknown.
        """
        if not self.informative or pillai <= self.mean:
            return 1.0
        markov = (self.mean - self.lowest) / (pillai - self.lowest)
        if self.n < 4:
            return markov
        excess_x, excess_z = (
            [self.excess(r * r / self.n, r), self.excess(r * (self.n - 1) / self.n, r)]
            for r in (self.p, self.q)
        )
        if squared_leverages_z is not None:
            excess_z = [self.excess(squared_leverages_z, self.q)]
        # The variance is bilinear in the two excesses: its maximum is at ends of the ranges.
        variance = max(self.permutation_variance(a, b) for a in excess_x for b in excess_z)
        return min(markov, variance / (variance + (pillai - self.mean) ** 2))


def _sum_of_squared_leverages(variable: Variable) -> float | None:
    """Sum of K_ii^2 over the rows i for a concept with classes; None for continuous columns.

    A row of class c has leverage K_ii = 1 / n_c - 1 / n, with n the number of labelled rows.
    """
    if not isinstance(variable, ClassSums):
        return None
    counts = variable.weights[variable.weights > 0]
    return float(np.sum(1.0 / counts) - (2 * len(counts) - 1) / counts.sum())


# --- the permutation test on the data ------------------------------------------------------------


def _bases(
    moments: Moments | Factored,
    name: VariableName,
    X: object,
    labels: object,
    x: _Whitened,
    z: _Whitened,
) -> tuple[Float, Float]:
    """Orthonormal bases of the centred columns of X, (n, p), and of the concept, (n, q)."""
    rows = as_rows(X, width=moments.n_features)
    check_feature_names(feature_names(X, rows.shape[1]), moments.feature_names)
    if len(rows) != moments.n_rows or moments.weight != moments.n_rows:
        raise InputError(
            f"the permutation test needs the rows that the moments were made of, with unit "
            f"weights: X has {len(rows)} rows, and the moments have {moments.n_rows} of weight "
            f"{moments.weight:g}"
        )
    check_values(rows)
    with statistics(moments) as stats:
        kinds, joint = stats.interpretation
        variable = stats.variable(name)
    encoded = encode(labels, len(rows), kinds=kinds or None, joint=joint)
    if name not in encoded:
        raise UnknownVariableError(
            f"labels has no variable {name!r}; pass the labels as they were passed to the moments"
        )
    check_column(variable, encoded[name], name)
    centred = rows.astype(np.float64)
    centred -= centred.mean(axis=0)
    columns = _centred_columns(encoded[name], z.inverse_scale)
    return _basis(centred * x.inverse_scale, x.rank), _basis(columns, z.rank)


def _centred_columns(column: Encoded, inverse_scale: Float | float) -> Float:
    """Columns of the concept, centred and multiplied by `inverse_scale`; 0 for missing labels."""
    if isinstance(column, ClassCodes):
        present = column.codes >= 0
        values = (column.codes[:, None] == np.unique(column.codes[present])).astype(np.float64)
    else:
        values = column.values
        present = np.ones(len(values), bool) if column.present is None else column.present
    centred: Float = (values - values[present].mean(axis=0)) * inverse_scale
    centred[~present] = 0.0
    return centred


def _basis(columns: Float, rank: int) -> Float:
    """Orthonormal basis, with `rank` columns, of the column space of `columns`."""
    return np.asarray(np.linalg.svd(columns, full_matrices=False)[0][:, :rank])


def _permutation_test(
    x: Float, z: Float, pillai: float, n_permutations: int, random_state: int
) -> float:
    """p-value (1 + hits) / (1 + m), where hits of m random permutations have V >= observed V.

    `x` and `z` are the orthonormal bases from `_bases`.
    """
    x_transposed = np.ascontiguousarray(x.T)
    observed = float(np.sum((x_transposed @ z) ** 2))
    if abs(observed - pillai) > 0.01 * max(observed, pillai, x.shape[1] * z.shape[1] / len(x)):
        raise InputError(
            f"X and labels are not those of the moments: their Pillai trace is {observed:.6g}, "
            f"that of the moments {pillai:.6g}; pass the same rows and labels in the same order"
        )
    rng = np.random.default_rng(random_state)
    # Ties within rounding error count as hits, so that the test stays valid.
    threshold = observed * (1.0 - 1e-9)
    hits = sum(
        float(np.sum((x_transposed @ z[rng.permutation(len(z))]) ** 2)) >= threshold
        for _ in range(n_permutations)
    )
    return (1 + hits) / (1 + n_permutations)
