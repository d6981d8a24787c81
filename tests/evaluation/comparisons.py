"""Small data, a brief run of compare, and a plain script of its figures, for the tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

from splince_fast import evaluation as ev
from splince_fast.evaluation import Comparison


def data(n: int = 900, d: int = 6, seed: int = 0) -> tuple[Any, Any, Any]:
    """Rows in which the first feature shows the concept z and the second the task y."""
    rng = np.random.default_rng(seed)
    y, z = rng.integers(0, 2, n), rng.integers(0, 2, n)
    X = rng.normal(size=(n, d))
    X[:, 0] += 1.5 * z
    X[:, 1] += y
    return X, y, z


def run(X: Any, y: Any, z: Any, **options: Any) -> Comparison:
    """Two seeds and two alphas unless `options` say otherwise."""
    settings: dict[str, Any] = {"n_seeds": 2, "alphas": (0.1, 0.001), "progress": False}
    return ev.compare(X, task=y, concept=z, **(settings | options))


FAILED: dict[str, Any] = {"values": {}, "cells": (), "path": (), "reason": "it failed"}


def edited(result: Comparison, fields: Callable[[Any], dict[str, Any]]) -> Comparison:
    """The result with other fields of its records, which `fields` returns for a record."""
    records = [dataclasses.replace(r, **fields(r)) for r in result.records]
    return Comparison(records, result.context)


def changed(result: Comparison, values: dict[str, dict[int, float]]) -> Comparison:
    """The result with worst groups by eraser and seed at every level; absent ones failed."""

    def fields(r: Any) -> dict[str, Any]:
        if r.eraser not in values or r.head != "retrained":
            return {}
        known = values[r.eraser]
        return {"values": r.values | {"worst_group": known[r.seed]}} if r.seed in known else FAILED

    return edited(result, fields)


class Script:
    """The figures of compare by a plain script, for one split: scaled rows, heads, and measures."""

    def __init__(self, X: Any, y: Any, z: Any, split: Any) -> None:
        self.X, self.y, self.z = X, y, z
        self.train, self.validation, self.test = split.train, split.validation, split.test
        rows = X[self.train]
        self.mean, self.unit = rows.mean(axis=0), np.sqrt(rows.var(axis=0).mean())

    def scaled(self, rows: Any) -> Any:
        return (rows - self.mean) / self.unit

    def head(self, rows: Any, alpha: float = 0.01) -> LogisticRegression:
        model = LogisticRegression(C=1 / (alpha * len(rows)), tol=1e-9, max_iter=5000)
        return model.fit(self.scaled(rows), self.y[self.train])

    def scores(self, model: Any, rows: Any, part: Any) -> dict[str, float]:
        """Scores of a head on the erased rows of a part."""
        guess, y, z = model.predict(self.scaled(rows)), self.y[part], self.z[part]
        return {
            "accuracy": float(np.mean(guess == y)),
            "class_accuracy": balanced_accuracy_score(y, guess),
            "worst_group": ev.worst_group_accuracy(y, guess, groups=(y, z)),
            "tpr_gap": ev.tpr_gap(y, guess, concept=z),
        }

    def distortion(self, erased: Any) -> float:
        rows = self.X[self.train]
        return float(np.sum((erased - rows) ** 2) / np.sum((rows - self.mean) ** 2))

    def kept(self, erased: Any, column: Any) -> float:
        """Kept squared covariance with a column."""
        centred = column[self.train] - column[self.train].mean()
        return float(np.sum((centred @ erased) ** 2) / np.sum((centred @ self.X[self.train]) ** 2))

    def assert_figures(
        self, result: Comparison, eraser: str, erased: Any, fresh: Any, models: Any
    ) -> None:
        """The result has the figures of erased training and test rows, with heads by name."""
        probe = ev.leakage(self.scaled(fresh), self.z[self.test])["linear"]
        own = {
            "probe_accuracy": probe.accuracy,
            "probe_auc": probe.auc,
            "kept_covariance": self.kept(erased, self.y),
            "residual": self.kept(erased, self.z) ** 0.5,
            "distortion": self.distortion(erased),
        }
        for head, model in models.items():
            for metric, value in (own | self.scores(model, fresh, self.test)).items():
                found = result.mean(metric, eraser=eraser, head=head)
                assert found == pytest.approx(value, rel=1e-9, abs=1e-12), metric


SIZES = (240, 80, 200)
LEVEL: dict[str, Any] = {"association": 0.8, "aligned_class": 1, "sizes": SIZES}


def script(X: Any, y: Any, z: Any) -> Script:
    return Script(X, y, z, ev.spurious_split(y, z, p=0.8, sizes=SIZES, aligned_class=1))
