"""Regression of a language model's log-odds between two words on scores of its prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splince_fast._runtime.arrays import as_reals
from splince_fast.evaluation.data import class_codes
from splince_fast.exceptions import InputError, NonFiniteError, NotEnoughDataError
from splince_fast.labels.positions import check_index

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LogOddsRegression:
    """Least-squares regression of log-odds on k scores.

    Attributes
    ----------
    names : tuple of str
        "intercept" and the names of the scores.
    coefficients : ndarray of shape (k + 1,)
        Coefficients, in the order of `names`.
    covariance : ndarray of shape (k + 1, k + 1)
        Covariance of the coefficients, robust to heteroscedasticity and to dependence within
        clusters.
    n, n_clusters : int
        Numbers of rows and of clusters; without clusters, every row is a cluster.
    residual_scores : ndarray of shape (n_clusters, k + 1)
        Influence of every cluster on the coefficients, (X^T X)^{-1} X_g^T e_g for cluster g, in the
        notation of :func:`log_odds_regression`. The sum over clusters is 0.
    clusters : ndarray of shape (n,)
        Cluster code of every row.
    """

    names: tuple[str, ...]
    coefficients: Float
    covariance: Float
    n: int
    n_clusters: int
    residual_scores: Float
    clusters: NDArray[np.intp]

    def __getitem__(self, name: str) -> float:
        return float(self.coefficients[self._index(name)])

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise KeyError(f"no score {name!r}; the coefficients are {self.names}")
        return self.names.index(name)

    @property
    def odds_ratios(self) -> dict[str, float]:
        """exp(coefficient) by name: the factor by which one unit of a score multiplies the odds."""
        return dict(zip(self.names, np.exp(self.coefficients).tolist(), strict=True))

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Limits of the t interval of a coefficient, with ``n_clusters - 1`` degrees of freedom."""
        from scipy.stats import t

        if not 0 < level < 1:
            raise InputError(f"level is {level!r}; it must lie between 0 and 1, such as .95")
        i = self._index(name)
        quantile = float(t.ppf((1 + level) / 2, self.n_clusters - 1))
        half_width = quantile * self.covariance[i, i] ** 0.5
        return self[name] - half_width, self[name] + half_width

    def difference(self, other: LogOddsRegression, name: str) -> tuple[float, float, float]:
        """Paired test of a coefficient against the same coefficient of another regression.

        `other` is a regression of other log-odds on the same rows and clusters, and `name` is a
        score or "intercept". The variance of the difference is G / (G - 1) times the sum over the G
        clusters of the squared difference between the cluster's influences on the two coefficients.
        Noise that is common to both regressions cancels.

        Returns
        -------
        tuple of float
            Difference, its standard error, and two-sided p value.

        Raises
        ------
        InputError
            The regressions have different rows or clusters, or a regression has no such score.
        """
        from scipy.stats import t

        same = self.n == other.n and np.array_equal(self.clusters, other.clusters)
        if not same or name not in self.names or name not in other.names:
            raise InputError("the two regressions have different rows, clusters or scores")
        i, j = self.names.index(name), other.names.index(name)
        influence = self.residual_scores[:, i] - other.residual_scores[:, j]
        g = self.n_clusters
        error = float(np.sum(influence**2) * g / (g - 1)) ** 0.5
        value = self[name] - other[name]
        if error == 0.0:
            return value, 0.0, 1.0 if value == 0 else 0.0
        return value, error, 2 * float(t.sf(abs(value) / error, g - 1))

    def __str__(self) -> str:
        lines = [f"log-odds on {self.n:,} rows, {self.n_clusters:,} clusters"]
        for name in self.names:
            low, high = self.interval(name)
            lines.append(
                f"  {name:<12} {self[name]:+.3f} [{low:+.3f}, {high:+.3f}]  "
                f"odds x {np.exp(self[name]):.3g}"
            )
        return "\n".join(lines)


def log_odds_regression(
    log_odds: ArrayLike, *, clusters: object = None, **scores: ArrayLike
) -> LogOddsRegression:
    """Regress log-odds on scores by least squares, with cluster-robust standard errors.

    The model is, for example, log p(he) - log p(she) = b_0 + sum_j b_j score_j + e over test rows.
    Rows that depend on each other, such as prompts about the same noun, belong to one cluster. The
    covariance of the coefficients is
    (X^T X)^{-1} (sum_g X_g^T e_g e_g^T X_g) (X^T X)^{-1} G / (G - 1), where X, (n, k + 1), holds a
    column of ones and the scores, and X_g and e_g are the rows and residuals of cluster g of G
    (Liang and Zeger, Biometrika 73, 1986).

    Parameters
    ----------
    log_odds : array-like of shape (n,)
        Finite log-odds.
    clusters : column of shape (n,), optional
        Cluster of every row; by default every row is a cluster.
    **scores : array-like of shape (n,)
        Regressors by name, such as ``stereotype=..., factual=...``.

    Returns
    -------
    LogOddsRegression
        Coefficients, odds ratios and intervals, and a paired test against another regression.

    Raises
    ------
    InputError
        There is no score, a score is named "intercept", lengths differ, or scores are collinear.
    LabelError
        The pandas index of a column is that of `log_odds` in another order.
    NonFiniteError
        Log-odds or scores contain NaN or infinity.
    NotEnoughDataError
        The number of clusters does not exceed the number of coefficients.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.evaluation import log_odds_regression
    >>> s = np.linspace(-1, 1, 50)
    >>> result = log_odds_regression(2 * s + 1 + 0.01 * np.cos(40 * s), stereotype=s)
    >>> round(result["stereotype"], 2)
    2.0
    """
    for column, argument in ((scores, "scores"), (clusters, "clusters")):
        check_index(log_odds, column, argument, of="log_odds")
    y = as_reals(log_odds, "log_odds")
    if "intercept" in scores:
        raise InputError("a score has the name of the constant term, 'intercept'; rename the score")
    if y.ndim != 1 or not scores:
        raise InputError("pass log_odds of shape (n,) and at least one score by name")
    columns = [np.ones(len(y))]
    for name, score in scores.items():
        column = as_reals(score, f"score {name!r}")
        if column.shape != y.shape:
            raise InputError(f"score {name!r} has shape {column.shape}, and log_odds {y.shape}")
        columns.append(column)
    X = np.stack(columns, axis=1)
    if not (np.isfinite(X).all() and np.isfinite(y).all()):
        raise NonFiniteError("log_odds or a score contains NaN or infinity; drop those rows")
    cluster_codes = (
        np.arange(len(y))
        if clusters is None
        else class_codes(clusters, "clusters", len(y), of="log_odds").codes
    )
    if (cluster_codes < 0).any():
        raise InputError("a row has no cluster; every row needs a cluster")
    _, cluster_codes = np.unique(cluster_codes, return_inverse=True)
    g = int(cluster_codes.max(initial=-1)) + 1
    if g <= X.shape[1]:
        raise NotEnoughDataError(f"{g} clusters are too few for {X.shape[1]} coefficients")
    Q, R = np.linalg.qr(X)
    if (np.abs(np.diag(R)) <= 1e-10 * np.linalg.norm(X, axis=0)).any():
        raise InputError("the scores are collinear (or constant); leave one out")
    coefficients = np.linalg.solve(R, Q.T @ y)
    residual = y - X @ coefficients
    cluster_sums = np.zeros((g, X.shape[1]))
    np.add.at(cluster_sums, cluster_codes, X * residual[:, None])
    inverse = np.linalg.inv(R)
    influence = cluster_sums @ (inverse @ inverse.T)
    covariance = influence.T @ influence * g / (g - 1)
    return LogOddsRegression(
        ("intercept", *scores), coefficients, covariance, len(y), g, influence, cluster_codes
    )
