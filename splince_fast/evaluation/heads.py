"""Heads: logistic regression on rows (ridge regression for quantities), selection of alpha."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.linalg
import scipy.special

from splince_fast._runtime.rows import as_rows, check_feature_names, check_values, feature_names
from splince_fast._solve.options import is_number
from splince_fast.evaluation import logistic
from splince_fast.evaluation.data import Codes, Float, has_label, occurring_classes
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassName, Columns, encode_one, names_array
from splince_fast.labels.containers import check_index

ALPHAS = (1.0, 0.1, 0.01, 0.001, 0.0001)
# Smallest number of validation rows per cell. If a cell has fewer, alpha is selected by
# cross-validation on the training rows instead.
MIN_CELL = 5


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A fitted linear head."""

    coef_: Float  # (C, d) weights; C is 1 for two classes, and the number of columns for a quantity
    intercept_: Float  # (C,)
    classes_: tuple[ClassName, ...]  # empty for a quantity
    alpha: float  # penalty on the weights of the scaled features
    converged: bool = True  # whether the solver reached its tolerance
    feature_names: tuple[str, ...] | None = None  # columns of the data frame of the fit

    def predict(self, X: object) -> Any:
        """Predict the class names of rows, or their values for a quantity."""
        scores = self._scores(X)
        if self.classes_:
            return names_array(self.classes_)[decide(scores)]
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: object) -> Float:
        """Return the class probabilities of rows, (n, number of classes)."""
        if not self.classes_:
            raise LabelError("the head predicts a quantity, which has no class probabilities")
        scores = self._scores(X)
        if scores.shape[1] == 1:
            scores = np.hstack([np.zeros_like(scores), scores])
        return np.asarray(scipy.special.softmax(scores, axis=1))

    def _scores(self, X: object) -> Float:
        """Return the scores (n, C): x^T coef + intercept of rows x."""
        rows = as_rows(X, width=self.coef_.shape[1], name="X", earlier="the rows of the fit")
        check_values(rows, "X")
        check_feature_names(feature_names(X, rows.shape[1]), self.feature_names)
        return np.asarray(rows, dtype=np.float64) @ self.coef_.T + self.intercept_


def fit_head(X: object, y: object, *, alpha: float = 0.01, scale: bool = True) -> Head:
    """Fit one head: minimise mean log-loss + alpha / 2 |w|^2, with an unpenalised intercept.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Rows, erased or not.
    y : column of shape (n,)
        Classes, or a quantity if the values are floats, for which the loss is half the mean squared
        error.
    alpha : float
        Penalty, at least 0; with 0, separable classes are an error.
    scale : bool
        Whether features are centred and divided by the root of their mean variance before the
        fit. The coefficients of the returned head apply to the unscaled X.

    Returns
    -------
    Head
        The fitted head; ``converged`` is False if the tolerance was not reached.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.evaluation import fit_head
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, 200)
    >>> X = rng.normal(size=(200, 3)) + y[:, None]
    >>> head = fit_head(X, y, alpha=0.01)
    >>> bool(np.mean(head.predict(X) == y) > 0.7)
    True
    """
    check_alpha(alpha)
    check_index(X, y, "y")
    array = as_rows(X)
    check_values(array)
    encoded = encode_one(y, len(array), name="y", of="X")
    present = has_label(encoded)
    rows = np.asarray(array, dtype=np.float64)[present]
    if isinstance(encoded, Columns):
        if not len(rows):
            raise NotEnoughDataError("no row has a value of y")
    else:
        encoded = occurring_classes("task y", encoded)
    centre = rows.mean(axis=0) if scale else np.zeros(rows.shape[1])
    unit = math.sqrt(float(np.mean((rows - centre) ** 2))) if scale else 1.0
    if unit == 0.0:
        raise NotEnoughDataError("all rows are equal, so a head cannot be fitted")
    # A scale for each feature would change their geometry.
    scaled = (rows - centre) / unit
    if isinstance(encoded, Columns):
        (head,) = ridge_path(scaled, encoded.values[present], (alpha,))
    else:
        (head,) = logistic_path(scaled, encoded.codes[present], encoded.classes, (alpha,))
    coef = head.coef_ / unit
    return replace(
        head, coef_=coef, intercept_=head.intercept_ - coef @ centre,
        feature_names=feature_names(X, rows.shape[1]),
    )  # fmt: skip


def logistic_path(
    rows: Float, codes: Codes, names: tuple[ClassName, ...], alphas: Sequence[float], **options: Any
) -> list[Head]:
    """Fit a head of the classes `names` at every alpha, with the options of `logistic.fit`."""
    fits = logistic.fit(rows, codes, len(names), np.array(alphas), **options)
    path = [
        Head(fits.weights[j], fits.intercepts[j], names, alpha, bool(fits.converged[j]))
        for j, alpha in enumerate(alphas)
    ]
    for head in path:
        if head.alpha == 0 and (decide(rows @ head.coef_.T + head.intercept_) == codes).all():
            raise InputError(
                "the classes are separable on the training rows, so an unregularised head has no "
                "minimiser; use an alpha above 0, or more rows than features"
            )
    return path


def decide(scores: Float) -> Codes:
    """Return the predicted class codes (...,) for scores (..., C)."""
    if scores.shape[-1] == 1:
        return (scores[..., 0] > 0).astype(np.intp)
    return np.asarray(scores.argmax(axis=-1), dtype=np.intp)


def select_best(scores: Sequence[Mapping[str, float]], alphas: Sequence[float]) -> int:
    """Return the index of the best worst group, then accuracy, then the larger alpha."""
    # Without cells, accuracy takes the place of the worst group.
    accuracies = [score["accuracy"] for score in scores]
    worst = [score.get("worst_group", score["accuracy"]) for score in scores]
    return max(range(len(scores)), key=lambda j: (worst[j], accuracies[j], alphas[j]))


def ridge_path(rows: Float, target: Float, alphas: Sequence[float]) -> list[Head]:
    """Fit ridge regression of `target` (n, k) at every alpha."""
    # w^T = (S + alpha I)^{-1} Cov(x, target), with one eigendecomposition of S = Cov(x).
    n = len(rows)
    centre, mean = rows.mean(axis=0), target.mean(axis=0)
    S = rows.T @ rows / n - np.outer(centre, centre)
    values, vectors = scipy.linalg.eigh((S + S.T) / 2)
    above_rounding = values > 1e-12 * max(float(values[-1]), 1e-300)
    coordinates = vectors.T @ (rows.T @ (target - mean) / n)
    path = []
    for alpha in alphas:
        inverse = 1 / np.maximum(values + alpha, 1e-300)
        inverse[~above_rounding & (alpha == 0)] = 0.0
        w = (vectors @ (inverse[:, None] * coordinates)).T
        path.append(Head(w, mean - w @ centre, (), alpha))
    return path


def check_alpha(alpha: object) -> None:
    """Raise InputError unless the penalty `alpha` is a finite number of at least 0."""
    if not is_number(alpha) or not 0 <= alpha < math.inf:
        raise InputError(f"alpha is {alpha!r}; it must be a finite number of at least 0")


def check_alphas(alphas: Any) -> tuple[float, ...]:
    """Return one or several alphas as a descending tuple of distinct positive floats."""
    is_sequence = isinstance(alphas, Iterable) and getattr(alphas, "ndim", 1) != 0
    alphas = tuple(alphas) if is_sequence else (alphas,)
    for alpha in alphas:
        check_alpha(alpha)
    if not alphas or 0 in alphas:
        raise InputError(
            f"alphas is {alphas!r}; pass at least one penalty, and positive ones only: for alpha 0 "
            "there are the head 'unregularised' of compare, and fit_head"
        )
    return tuple(sorted({float(alpha) for alpha in alphas}, reverse=True))
