"""`compare` against a scikit-learn script of the same work, and against the fits that it makes.

The rows are those of the experiment "bios". All contenders run on one thread.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

import splince_fast as sf
from benchmarks.data import Array
from benchmarks.jobs import OURS, Contenders, Numbers, below, job, within
from benchmarks.timing import Contender, pick
from reproduction.data import load
from splince_fast import evaluation as ev
from splince_fast.evaluation import logistic

_ALPHAS = (1.0, 0.1, 0.01, 0.001, 0.0001)
_LEVELS = (0.5, 0.9)


@cache
def _data() -> tuple[Array, Array, Array, tuple[int, int, int]]:
    """Return rows, task, concept, and the numbers of training, validation and test rows."""
    data = load("bios")
    X, sizes = pick((data.X, (4000, 600, 1000)), (data.X[:, :8], (100, 40, 40)))
    return X, data.labels["task"], data.labels["concept"], sizes


def _run_compare() -> Any:
    X, y, z, sizes = _data()
    return ev.compare(
        X, task=y, concept=z, sizes=sizes, aligned_class=0, association=_LEVELS, n_seeds=1,
        n_jobs=1,
        progress=False,
    )  # fmt: skip


def _script_accuracies() -> Array:
    """Return worst-group accuracies by level, eraser and head, computed with scikit-learn."""
    with threadpool_limits(1):
        return np.concatenate([_accuracies_at_level(p) for p in _LEVELS])


def _accuracies_at_level(p: float) -> list[float]:
    """Return the worst-group accuracies at association level `p`, by eraser and head.

    The steps are: split, scale, erase, select alpha, test the retrained and the frozen head, and
    cross-validate a linear probe for the concept.
    """

    def logistic(alpha: float, n: int) -> Any:
        return LogisticRegression(C=1 / (alpha * n), solver="newton-cholesky", tol=1e-6)

    def scores(head: Any, rows: Any, y: Any, z: Any) -> tuple[float, float]:
        """Return the worst-group accuracy and the accuracy of a head."""
        y_pred = head.predict(rows)
        return ev.worst_group_accuracy(y, y_pred, groups=(y, z)), float(np.mean(y_pred == y))

    X, y, z, sizes = _data()
    split = ev.spurious_split(y, z, p=p, sizes=sizes, random_state=0, aligned_class=0)
    parts = (split.train, split.validation, split.test)
    rows = [X[part].astype(np.float64) for part in parts]
    mean, scale = rows[0].mean(axis=0), float(np.sqrt(rows[0].var(axis=0).mean()))
    rows = [(part - mean) / scale for part in rows]
    (y_train, z_train), validated, tested = ((y[part], z[part]) for part in parts)
    moments = sf.Moments().update(rows[0], {"y": y_train, "z": z_train})
    erasers: list[Any] = [
        lambda x: x, sf.sal(moments, erase="z"), sf.leace(moments, erase="z"),
        sf.splince(moments, erase="z", keep="y"),
    ]  # fmt: skip
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    results: list[float] = []
    frozen: Any = None
    for eraser in erasers:
        train, valid, test = (eraser(part) for part in rows)
        heads = [logistic(alpha, len(train)).fit(train, y_train) for alpha in _ALPHAS]
        validation_scores = [scores(head, valid, *validated) for head in heads]
        # of equal scores, the first is taken: the head with the strongest penalty
        best = heads[validation_scores.index(max(validation_scores))]
        frozen = frozen or best
        results += [scores(head, test, *tested)[0] for head in (best, frozen)]
        probe = make_pipeline(StandardScaler(), logistic(0.01, len(test) * 4 // 5))
        cross_val_score(probe, test, tested[1], cv=folds)
    return results


@job("evaluation/compare", "call", within("script", 0.5))
def _compare() -> Contenders:
    return {OURS: Contender(_run_compare), "script": Contender(_script_accuracies)}


@job("evaluation/difference to the script", "worst-group accuracy", below(0.004))
def _difference() -> Numbers:
    """Largest difference in worst-group accuracy between `compare` and the script."""
    ours = _run_compare()
    cells = product(_LEVELS, ("none", "SAL", "LEACE", "SPLINCE"), ("retrained", "frozen"))
    worst_groups = [ours.values("worst_group", eraser=e, head=h, p=p)[0] for p, e, h in cells]
    return {OURS: float(np.abs(np.array(worst_groups) - _script_accuracies()).max())}


@job("evaluation/compare over its fits", "processor time", below(1.3))
def _overhead() -> Numbers:
    """Processor time of `compare`, divided by that of its fits of heads and linear probes."""
    fits, original = 0.0, logistic.fit

    def timed(*arguments: Any, **options: Any) -> logistic.Fits:
        nonlocal fits
        started = process_time()
        fits_of_call = original(*arguments, **options)
        fits += process_time() - started
        return fits_of_call

    with patch.object(logistic, "fit", timed):
        started = process_time()
        _run_compare()
        return {OURS: (process_time() - started) / fits}
