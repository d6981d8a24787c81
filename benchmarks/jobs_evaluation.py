"""compare beside a plain scikit-learn script of the same work, and beside the fits inside it.

Rows are those of bug_profession_gender in the folder named by SPLINCE_FAST_DATA, or random ones of
that shape. Both sides run on one thread.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks.data import problem
from benchmarks.jobs import OURS, Ways, below, job, within
from benchmarks.timing import Contender, pick
from splince_fast import evaluation as ev

_STRENGTHS = (1.0, 0.1, 0.01, 0.001, 0.0001)
_LEVELS = (0.5, 0.9)
_ERASERS = ("none", "SAL", "LEACE", "SPLINCE")
_HEADS = ("retrained", "frozen")


@lru_cache(maxsize=1)
def _rows() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """X, y, z."""
    folder = Path(os.environ.get("SPLINCE_FAST_DATA", "")) / "bug_profession_gender"
    if folder.is_dir() and pick(True, False):
        X, y, z = (np.load(folder / f"{name}.npy") for name in ("X", "y", "z"))
        return X, y, z
    data = problem(*pick((40_000, 384), (1500, 8)))
    return data.X, data.y, data.z


def _sizes() -> tuple[int, int, int]:
    return pick((4000, 600, 1000), (100, 40, 40))


def _compared() -> Any:
    X, y, z = _rows()
    return ev.compare(
        X, task=y, concept=z, sizes=_sizes(), tied=0, association=_LEVELS, n_seeds=1, n_jobs=1,
        progress=False,
    )  # fmt: skip


def _script() -> NDArray[np.float64]:
    """Worst-group accuracies (level, eraser, head), written by hand.

    Split, scale, erase by closed forms, fit every strength with scikit-learn, choose, freeze,
    probe.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    def logistic(rows: NDArray[Any], labels: NDArray[Any], strength: float) -> Any:
        inverse = 1 / (strength * len(rows))
        return LogisticRegression(C=inverse, solver="newton-cholesky", tol=1e-6).fit(rows, labels)

    X, y, z = _rows()
    results = []
    with threadpool_limits(1):
        for p in _LEVELS:
            split = ev.associated_split(y, z, p=p, sizes=_sizes(), seed=0, tied=0)
            parts = (split.train, split.validation, split.test)
            rows = [X[part].astype(np.float64) for part in parts]
            mean, unit = rows[0].mean(axis=0), float(np.sqrt(rows[0].var(axis=0).mean()))
            rows = [(part - mean) / unit for part in rows]
            (y_train, y_valid, y_test), (z_train, z_valid, z_test) = (
                [labels[part] for part in parts] for labels in (y, z)
            )
            moments = sf.Moments().update(rows[0], {"y": y_train, "z": z_train})
            ways: list[Any] = [
                lambda x: x, sf.sal(moments, erase="z"), sf.leace(moments, erase="z"),
                sf.splince(moments, erase="z", keep="y"),
            ]  # fmt: skip
            frozen: Any = None
            for eraser in ways:
                train, valid, test = (eraser(part) for part in rows)
                found = []
                for strength in _STRENGTHS:
                    model = logistic(train, y_train, strength)
                    guess = model.predict(valid)
                    worst = ev.worst_group_accuracy(y_valid, guess, groups=(y_valid, z_valid))
                    found.append(((worst, float(np.mean(guess == y_valid)), strength), model))
                best = max(found, key=lambda pair: pair[0])[1]
                frozen = frozen or best
                results += [
                    ev.worst_group_accuracy(y_test, head.predict(test), groups=(y_test, z_test))
                    for head in (best, frozen)
                ]
                folds = StratifiedKFold(5, shuffle=True, random_state=0).split(test, z_test)
                for fitted, held in folds:
                    scaler = StandardScaler().fit(test[fitted])
                    probe = logistic(scaler.transform(test[fitted]), z_test[fitted], 0.01)
                    probe.score(scaler.transform(test[held]), z_test[held])
    return np.array(results)


@job("evaluation/compare", "call", within("script", 0.5), modules=("threadpoolctl",))
def _compare() -> Ways:
    return {OURS: Contender(_compared), "script": Contender(_script)}


@job("evaluation/difference to the script", "worst-group accuracy", below(0.004), number=True,
     modules=("threadpoolctl",))  # fmt: skip
def _difference() -> Ways:
    """Largest difference between the worst groups of compare and of the script."""

    def gap() -> float:
        ours = _compared()
        found = [
            ours.values("worst_group", eraser=eraser, head=head, p=p)[0]
            for p in _LEVELS for eraser in _ERASERS for head in _HEADS
        ]  # fmt: skip
        return float(np.abs(np.array(found) - _script()).max())

    return {OURS: Contender(gap)}


@job("evaluation/compare over its fits", "processor time", below(1.3), number=True)
def _overhead() -> Ways:
    """Processor time of compare over that of the fits of heads and linear probes in it."""
    from splince_fast.evaluation import _logistic

    def overhead() -> float:
        fits, original = 0.0, _logistic.fit

        def timed(*arguments: Any, **options: Any) -> _logistic.Fits:
            nonlocal fits
            started = process_time()
            found = original(*arguments, **options)
            fits += process_time() - started
            return found

        _logistic.fit = timed
        started = process_time()
        try:
            _compared()
        finally:
            _logistic.fit = original
        return (process_time() - started) / fits

    return {OURS: Contender(overhead)}
