"""Small data, a brief run of compare, and a plain script of its figures, for the tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

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

    def __init__(self, X: Any, y: Any, split: Any) -> None:
        self.X, self.y = X, y
        self.train, self.validation, self.test = split.train, split.validation, split.test
        rows = X[self.train]
        self.mean, self.unit = rows.mean(axis=0), np.sqrt(rows.var(axis=0).mean())

    def scaled(self, rows: Any) -> Any:
        return (rows - self.mean) / self.unit

    def head(self, rows: Any, alpha: float = 0.01) -> LogisticRegression:
        model = LogisticRegression(C=1 / (alpha * len(rows)), tol=1e-9, max_iter=5000)
        return model.fit(self.scaled(rows), self.y[self.train])

    def accuracy(self, model: Any, rows: Any) -> Any:
        return pytest.approx(np.mean(model.predict(self.scaled(rows)) == self.y[self.test]))

    def distortion(self, erased: Any) -> Any:
        rows = self.X[self.train]
        moved, spread = np.sum((erased - rows) ** 2), np.sum((rows - self.mean) ** 2)
        return pytest.approx(moved / spread, rel=1e-9)

    def kept(self, erased: Any, column: Any) -> float:
        """Kept squared covariance with a column."""
        centred = column[self.train] - column[self.train].mean()
        return float(np.sum((centred @ erased) ** 2) / np.sum((centred @ self.X[self.train]) ** 2))

    def assert_figures(
        self, result: Comparison, eraser: str, erased: Any, fresh: Any, z: Any, models: Any
    ) -> None:
        """The result has the figures of erased training and test rows, with heads by name."""
        for head, model in models.items():
            found = result.mean("accuracy", eraser=eraser, head=head)
            assert found == self.accuracy(model, fresh)
        expected = {
            "probe_auc": ev.leakage(self.scaled(fresh), z[self.test])["linear"].auc,
            "kept_covariance": self.kept(erased, self.y), "residual": self.kept(erased, z) ** 0.5,
        }  # fmt: skip
        for metric, value in expected.items():
            found = result.mean(metric, eraser=eraser)
            assert found == pytest.approx(value, rel=1e-9, abs=1e-12), metric
        assert result.mean("distortion", eraser=eraser) == self.distortion(erased)


SIZES = (240, 80, 200)
LEVEL: dict[str, Any] = {"association": 0.8, "aligned_class": 1, "sizes": SIZES}


def script(X: Any, y: Any, z: Any) -> Script:
    return Script(X, y, ev.spurious_split(y, z, p=0.8, sizes=SIZES, aligned_class=1))
