"""Parts of heads: scaling, decisions, the choice among them, ridge fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from splince_fast.exceptions import InputError, NotEnoughDataError

Float = NDArray[np.float64]
Factors = tuple[Float, Float]

ALPHAS = (1.0, 0.1, 0.01, 0.001, 0.0001)
MIN_CELL = 5  # validation cells below it decide nothing: training folds do
SEPARABLE = (
    "the classes are separable on the training rows, so an unregularised head has no minimiser; "
    "use an alpha above 0, or more rows than features"
)


def decide(scores: Float) -> NDArray[np.intp]:
    """Codes of the decisions: the sign of one score, the largest of several."""
    if scores.ndim == 1:
        return (scores > 0).astype(np.intp)
    return np.asarray(scores.argmax(axis=1), dtype=np.intp)


def score(
    truth: NDArray[np.intp],
    decided: NDArray[np.intp],
    cells: NDArray[np.intp],
    weights: Float | None = None,
) -> tuple[float, float]:
    """Worst accuracy over the cells present, and accuracy.

    Weights are constant in a cell, so that they change the accuracy alone.
    """
    correct = truth == decided
    accuracy = float(np.average(correct, weights=weights))
    inside = cells >= 0
    counts = np.bincount(cells[inside])
    right = np.bincount(cells[inside], correct[inside], len(counts))
    present = counts > 0
    if not present.any():
        return math.nan, accuracy
    return float((right[present] / counts[present]).min()), accuracy


def choose(judged: Sequence[tuple[float, float]], alphas: Sequence[float], rule: str) -> int:
    """Position of the best (worst group, accuracy, alpha), or accuracy first.

    Accuracy alone decides where no row is in a cell, so that the worst group is NaN.
    """
    flip = rule == "accuracy"
    judged = [(a if math.isnan(w) else w, a) for w, a in judged]
    keys = [((a, w) if flip else (w, a), s) for (w, a), s in zip(judged, alphas, strict=True)]
    return max(range(len(keys)), key=lambda j: keys[j])


def ridge_path(
    rows: Float, target: Float, alphas: Sequence[float], factors: Factors | None
) -> tuple[Float, Float]:
    """Minimisers of mean |target - A(x)|^2 / 2 + alpha / 2 |w|^2: (J, k, d) and (J, k).

    w = (P S P^T + alpha I)^{-1} P Cov(x, target), from one eigendecomposition of P S P^T.
    """
    n = len(rows)
    centre, mean = rows.mean(axis=0), target.mean(axis=0)
    S = rows.T @ rows / n - np.outer(centre, centre)
    cross = rows.T @ (target - mean) / n
    if factors is not None:
        left, right = factors
        S = S - left.T @ (right @ S)
        S = S - (S @ right.T) @ left
        cross = cross - left.T @ (right @ cross)
    values, vectors = scipy.linalg.eigh((S + S.T) / 2)
    usable = values > 1e-12 * max(float(values[-1]), 1e-300)
    coordinates = vectors.T @ cross
    weights = []
    for alpha in alphas:
        inverse = np.where(usable | (alpha > 0), 1 / np.maximum(values + alpha, 1e-300), 0)
        inverse = np.where(usable, inverse, 0.0 if alpha == 0 else inverse)
        weights.append((vectors @ (inverse[:, None] * coordinates)).T)
    w = np.array(weights)
    through = w if factors is None else w - (w @ factors[0].T) @ factors[1]
    return w, mean - through @ centre


def scaling(rows: Float, scale: bool) -> tuple[Float, Float, float]:
    """Centred rows over the root of the mean feature variance (ddof 0), the centre, the root."""
    if not scale:
        return rows, np.zeros(rows.shape[1]), 1.0
    centre = rows.mean(axis=0)
    centred = rows - centre
    unit = math.sqrt(float(np.mean(centred**2)))
    if unit == 0.0:
        raise NotEnoughDataError("all rows are equal, so a head has nothing to learn from")
    return centred / unit, centre, unit


def check_alpha(alpha: Any) -> None:
    """Refuse a penalty that is no finite number of at least 0."""
    number = isinstance(alpha, int | float | np.floating) and not isinstance(alpha, bool)
    if not number or not 0 <= alpha < math.inf:
        raise InputError(f"alpha is {alpha!r}; it must be a finite number of at least 0")


def check_alphas(alphas: Any) -> tuple[float, ...]:
    """A descending tuple of distinct positive alphas."""
    if isinstance(alphas, int | float):
        alphas = (alphas,)
    for alpha in alphas:
        check_alpha(alpha)
        if alpha == 0:
            raise InputError(
                "alpha 0 is not tuned over; the head 'unregularised' is the fit without penalty"
            )
    if not len(alphas):
        raise InputError("alphas is empty; pass at least one penalty, such as (.01,)")
    return tuple(sorted({float(s) for s in alphas}, reverse=True))


def check_rule(rule: Any) -> None:
    """Refuse an unknown rule of selection."""
    if rule not in ("worst_group", "accuracy"):
        raise InputError(f"the rule of selection is {rule!r}; choose 'worst_group' or 'accuracy'")
