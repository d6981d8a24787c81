"""Heads: logistic regression on embeddings (ridge regression for quantities), selection of alpha.

A head for classes minimises the mean log-loss plus ``alpha / 2 |w|^2``, with an unpenalised
intercept. ``LogisticRegression(C=1 / (alpha n))`` and ``SGDClassifier(alpha=alpha)`` have the same
objective. A head for a quantity minimises half the mean squared error plus the same penalty.
Features are centred and divided by one number, the root of the mean variance of the training
features, so that alphas are comparable between erasers and between data sets. A separate scale for
each feature would change the geometry of the features, on which the penalty and SAL depend.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.linalg
import scipy.special
from numpy.typing import NDArray

from splince_fast._runtime.rows import (
    as_rows,
    check_feature_names,
    check_values,
    feature_names,
)
from splince_fast._solve.options import is_number
from splince_fast.evaluation import logistic
from splince_fast.evaluation.data import (
    cells_of_groups,
    check_classes,
    class_codes,
    common_codes,
    counts_per_code,
)
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassName, Columns, encode_one, names_array
from splince_fast.labels.positions import check_index

Float = NDArray[np.float64]
Codes = NDArray[np.intp]
ValidationScore = tuple[float, float]  # worst-group accuracy, accuracy

ALPHAS = (1.0, 0.1, 0.01, 0.001, 0.0001)
RULES = ("worst_group", "accuracy")
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
    # (alpha, worst-group accuracy, accuracy) of every candidate, for a head of `select_head`
    validation: tuple[tuple[float, float, float], ...] = ()

    def unscaled(self, centre: Float, unit: float, columns: tuple[str, ...] | None) -> Head:
        """Return the head of rows x for a head of the scaled rows (x - centre) / unit."""
        coef = self.coef_ / unit
        intercept = self.intercept_ - coef @ centre
        return replace(self, coef_=coef, intercept_=intercept, feature_names=columns)

    def decision_function(self, X: object) -> Float:
        """Return the scores x^T coef + intercept of rows x: (n,) for C = 1, else (n, C)."""
        rows = _checked_rows(X, "X", width=self.coef_.shape[1], of="the rows of the fit")
        check_feature_names(feature_names(X, rows.shape[1]), self.feature_names)
        scores = rows @ self.coef_.T + self.intercept_
        return np.asarray(scores[:, 0] if scores.shape[1] == 1 else scores)

    def predict(self, X: object) -> Any:
        """Predict the class names of rows, or their values for a quantity."""
        scores = self.decision_function(X)
        if not self.classes_:
            return scores
        return names_array(self.classes_)[decide(scores.reshape(len(scores), -1))]

    def predict_proba(self, X: object) -> Float:
        """Return the class probabilities of rows, (n, number of classes)."""
        if not self.classes_:
            raise LabelError("the head predicts a quantity, which has no class probabilities")
        scores = self.decision_function(X)
        if scores.ndim == 1:
            p = scipy.special.expit(scores)
            return np.stack([1 - p, p], axis=1)
        return np.asarray(scipy.special.softmax(scores, axis=1))


def fit_head(X: object, y: object, *, alpha: float = 0.01, scale: bool = True) -> Head:
    """Fit one head: minimise mean log-loss + alpha / 2 |w|^2, with an unpenalised intercept.

    Parameters
    ----------
    X : array-like of shape (n, d)
        Rows, erased or not.
    y : column of shape (n,)
        Classes, or a quantity if the values are floats. For a quantity, the head minimises half
        the mean squared error plus the same penalty.
    alpha : float
        Penalty, at least 0. With alpha 0, separable classes raise InputError.
    scale : bool
        Whether features are centred and divided by the root of their mean variance before the
        fit. The coefficients of the returned head apply to the unscaled X.

    Returns
    -------
    Head
        The fitted head; ``converged`` is False if the tolerance was not reached.

    Raises
    ------
    InputError
        A parameter is out of range, or alpha is 0 and the classes are separable.

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
    rows = _checked_rows(X, "X")
    columns = feature_names(X, rows.shape[1])
    encoded = encode_one(y, len(rows), name="y", of="X")
    if isinstance(encoded, Columns):
        present = slice(None) if encoded.present is None else encoded.present
        rows, values = rows[present], encoded.values[present]
        if not len(rows):
            raise NotEnoughDataError("no row has a value of y")
        centre, unit = _scaling(rows, scale)
        return ridge_path((rows - centre) / unit, values, (alpha,))[0].unscaled(
            centre, unit, columns
        )
    check_classes("task y", encoded)
    labelled = encoded.codes >= 0
    present_codes, codes = np.unique(encoded.codes[labelled], return_inverse=True)
    names = tuple(encoded.classes[i] for i in present_codes)
    centre, unit = _scaling(rows[labelled], scale)
    scaled = (rows[labelled] - centre) / unit
    return logistic_path(scaled, codes, names, (alpha,))[0].unscaled(centre, unit, columns)


def select_head(
    X: object,
    y: object,
    X_validation: object,
    y_validation: object,
    *,
    groups: object,
    alphas: Sequence[float] = ALPHAS,
    rule: str = "worst_group",
) -> Head:
    """Fit a head at every alpha; return the head with the best worst-group validation accuracy.

    Ties are resolved by the higher accuracy, then by the larger alpha. If you compare erasers by
    worst-group accuracy, use one `rule` for all erasers and for unerased rows.

    Parameters
    ----------
    X, y : rows (n, d) and their classes
        Training rows.
    X_validation, y_validation : rows (m, d) and their classes
        Validation rows; rows without a label are left out.
    groups : column, or tuple, mapping or frame of columns, of m entries
        Groups of the validation rows; the groups of several columns are their combinations.
    alphas : sequence of float
        Candidate penalties.
    rule : {"worst_group", "accuracy"}
        Validation score by which heads are compared first.

    Returns
    -------
    Head
        The selected head; ``validation`` holds (alpha, worst-group accuracy, accuracy) of all
        candidates.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.evaluation import select_head
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, 300)
    >>> X = rng.normal(size=(300, 3)) + y[:, None]
    >>> head = select_head(X[:200], y[:200], X[200:], y[200:], groups=y[200:])
    >>> len(head.validation)
    5
    """
    alphas = check_alphas(alphas)
    check_rule(rule)
    check_index(X, y, "y")
    check_index(X_validation, y_validation, "y_validation")
    check_index(X_validation, groups, "groups")
    rows = _checked_rows(X, "X")
    validation = _checked_rows(X_validation, "X_validation", width=rows.shape[1], of="X")
    columns = feature_names(X, rows.shape[1])
    check_feature_names(feature_names(X_validation, rows.shape[1]), columns, "X_validation")
    task = class_codes(y, "y", len(rows))
    n, of = len(validation), "X_validation"
    codes, y_true = common_codes(task, class_codes(y_validation, "y_validation", n, of=of))
    cells = cells_of_groups(groups, n, of).codes
    labelled = y_true >= 0
    if not labelled.any():
        raise NotEnoughDataError("no validation row has a label, so alpha cannot be selected")
    validation, y_true, cells = validation[labelled], y_true[labelled], cells[labelled]
    check_classes("task y", task)
    labelled_train = codes >= 0
    centre, unit = _scaling(rows[labelled_train], scale=True)
    scaled = (rows[labelled_train] - centre) / unit
    path = [
        head.unscaled(centre, unit, columns)
        for head in logistic_path(scaled, codes[labelled_train], task.classes, alphas)
    ]
    predictions = (decide(validation @ head.coef_.T + head.intercept_) for head in path)
    scored = [score(y_true, y_pred, cells) for y_pred in predictions]
    table = tuple((alpha, *pair) for alpha, pair in zip(alphas, scored, strict=True))
    return replace(path[select_best(scored, alphas, rule)], validation=table)


def logistic_path(
    rows: Float,
    codes: Codes,
    names: tuple[ClassName, ...],
    alphas: Sequence[float],
    *,
    gram: Float | None = None,
    weights: Float | None = None,
    max_iter: int = 400,
) -> list[Head]:
    """Fit a head of the classes `names` at every alpha; further arguments of `logistic.fit`."""
    fits = logistic.fit(
        rows, codes, len(names), np.array(alphas), gram=gram, sample_weights=weights,
        max_iter=max_iter,
    )  # fmt: skip
    path = [
        Head(fits.weights[j], fits.intercepts[j], names, alpha, bool(fits.converged[j]))
        for j, alpha in enumerate(alphas)
    ]
    for head in path:
        # Without a penalty, a head that predicts all rows correctly has no minimiser.
        if head.alpha == 0 and (decide(rows @ head.coef_.T + head.intercept_) == codes).all():
            raise InputError(
                "the classes are separable on the training rows, so an unregularised head has no "
                "minimiser; use an alpha above 0, or more rows than features"
            )
    return path


def _scaling(rows: Float, scale: bool) -> tuple[Float, float]:
    """Return the mean of rows and the root of their mean variance (ddof 0), or 0 and 1."""
    if not scale:
        return np.zeros(rows.shape[1]), 1.0
    centre = rows.mean(axis=0)
    unit = math.sqrt(float(np.mean((rows - centre) ** 2)))
    if unit == 0.0:
        raise NotEnoughDataError("all rows are equal, so a head cannot be fitted")
    return centre, unit


def _checked_rows(X: object, name: str, *, width: int | None = None, of: str = "") -> Float:
    """Return finite float64 rows, of the `width` of the rows `of`."""
    rows = as_rows(X, width=width, name=name, earlier=of)
    check_values(rows, name)
    return np.asarray(rows, dtype=np.float64)


def decide(scores: Float) -> Codes:
    """Return the predicted class codes (...,) for scores (..., C)."""
    if scores.shape[-1] == 1:
        return (scores[..., 0] > 0).astype(np.intp)
    return np.asarray(scores.argmax(axis=-1), dtype=np.intp)


def score(y_true: Codes, y_pred: Codes, cells: Codes | None) -> ValidationScore:
    """Return the worst-group accuracy, NaN if no row is in a cell, and the accuracy."""
    correct = y_true == y_pred
    worst = math.nan
    if cells is not None:
        counts, n_correct = counts_per_code(cells, correct)
        if (present := counts > 0).any():
            worst = float((n_correct[present] / counts[present]).min())
    return worst, float(np.mean(correct))


def select_best(scored: Sequence[ValidationScore], alphas: Sequence[float], rule: str) -> int:
    """Return the index of the best score; `rule` names the score that is compared first."""
    # Without cells, accuracy takes the place of the worst group. Ties go to the larger alpha.

    def sort_key(j: int) -> tuple[float, ...]:
        worst, accuracy = scored[j]
        pair = (accuracy if math.isnan(worst) else worst, accuracy)
        return (*(pair[::-1] if rule == "accuracy" else pair), alphas[j])

    return max(range(len(scored)), key=sort_key)


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
        if alpha == 0:
            raise InputError(
                "alphas contains 0; pass positive penalties only, and use the head 'unregularised' "
                "of compare, or fit_head, for alpha 0"
            )
    if not alphas:
        raise InputError("alphas is empty; pass at least one penalty, such as (.01,)")
    return tuple(sorted({float(alpha) for alpha in alphas}, reverse=True))


def check_rule(rule: object) -> None:
    """Raise InputError unless `rule` is one of RULES."""
    if rule not in RULES:
        raise InputError(f"the rule of selection is {rule!r}; choose 'worst_group' or 'accuracy'")
