"""Small data and a brief run of compare, for the tests beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

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


def changed(result: Comparison, values: dict[str, dict[int, float]]) -> Comparison:
    """The result with worst groups by eraser and seed at every level; absent ones failed."""
    records = []
    for r in result.records:
        known = values.get(r.eraser, {})
        if r.eraser not in values or r.head != "retrained":
            records.append(r)
        elif r.seed in known:
            worst = r.values | {"worst_group": known[r.seed]}
            records.append(dataclasses.replace(r, values=worst))
        else:
            failed = dataclasses.replace(r, values={}, cells=(), path=(), reason="it failed")
            records.append(failed)
    return Comparison(records, result.context)
