"""Figures of probes from their scores on the rows held out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy.special
import scipy.stats
from numpy.typing import NDArray

Float = NDArray[np.float64]
Fold = tuple[NDArray[np.intp], NDArray[np.intp]]


def figures(
    scores: Float, target: NDArray[np.intp], folds: Sequence[Fold], n_classes: int
) -> tuple[float, float]:
    """Accuracy and AUC, means over folds."""
    accuracies, areas = [], []
    for _, held in folds:
        s, t = scores[held], target[held]
        decided = (s[:, 0] > 0).astype(np.intp) if n_classes == 2 else s.argmax(axis=1)
        accuracies.append(float(np.mean(decided == t)))
        if n_classes == 2:
            areas.append(_auc(s[:, 0], t == 1))
        else:
            p = np.asarray(scipy.special.softmax(s, axis=1))
            areas.append(float(np.mean([_auc(p[:, k], t == k) for k in range(n_classes)])))
    return float(np.mean(accuracies)), float(np.mean(areas))


def _auc(score: Float, positive: NDArray[np.bool_]) -> float:
    """P(score of a positive > score of a negative) + 1/2 P(equal), by ranks."""
    n1 = int(positive.sum())
    n0 = len(positive) - n1
    if not n0 or not n1:
        return math.nan
    ranks = scipy.stats.rankdata(score)
    return float((ranks[positive].sum() - n1 * (n1 + 1) / 2) / (n0 * n1))


def against(figure: float, others: list[float]) -> tuple[float, float]:
    """Mean of the permuted figures, and the permutation p value."""
    if not others:
        return math.nan, math.nan
    beaten = sum(other >= figure for other in others)
    return float(np.mean(others)), (1 + beaten) / (1 + len(others))
