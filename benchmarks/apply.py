"""Applying an eraser: rate against a bare copy, ranks, dtypes, layouts, memory."""

from __future__ import annotations

from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks import _asv, _data
from benchmarks._sizes import pick


def _eraser(d: int, rank: int) -> sf.Projection:
    classes = rank + 1
    return sf.leace(
        _data.problem(max(2 * d, 40 * classes), d, classes=classes).moments(), erase="z"
    )


class Apply(_asv.Suite):
    """C-contiguous rows into a given array."""

    params = (pick([1, 4, 16, 64], [1, 4]), ["float32", "float64"])
    param_names = ("rank", "dtype")

    def setup(self, rank: int, dtype: str) -> None:
        super().setup()
        d = pick(768, 16)
        self.eraser = _eraser(d, rank)
        self.X = np.ones((pick(50_000, 100), d), dtype)
        self.out = np.empty_like(self.X)
        self.eraser(self.X, out=self.out)

    def time_apply(self, rank: int, dtype: str) -> None:
        self.eraser(self.X, out=self.out)

    def track_rate_over_copyto(self, rank: int, dtype: str) -> float:
        return _asv.paired(
            lambda: np.copyto(self.out, self.X), lambda: self.eraser(self.X, out=self.out)
        )

    track_rate_over_copyto.unit = "ratio"  # type: ignore[attr-defined]

    def peakmem_apply_in_place(self, rank: int, dtype: str) -> None:
        self.eraser(self.X, out=self.X)


class Layouts(_asv.Suite):
    """Other layouts and dtypes, and single rows."""

    params = (["new array", "F", "strided", "float16", "int8", "one row"],)
    param_names = ("form",)

    def setup(self, form: str) -> None:
        super().setup()
        d = pick(768, 16)
        self.eraser = _eraser(d, 1)
        X: Any = np.ones((pick(20_000, 100), d), np.float32)
        if form == "F":
            X = np.asfortranarray(X)
        elif form == "strided":
            X = np.repeat(X, 2, axis=1)[:, ::2]
        elif form == "one row":
            X = X[:1]
        elif form != "new array":
            X = X.astype(form)
        self.X = X
        self.eraser(X)

    def time_apply(self, form: str) -> None:
        self.eraser(self.X)


class Algebra(_asv.Suite):
    """What else an eraser does."""

    params = (pick([768, 4096], [16]),)
    param_names = ("d",)

    def setup(self, d: int) -> None:
        super().setup()
        self.eraser = _eraser(d, 1)
        self.weight = np.ones((pick(1000, 10), d), np.float32)

    def time_compose(self, d: int) -> None:
        self.eraser @ self.eraser

    def time_fold_into(self, d: int) -> None:
        self.eraser.fold_into(self.weight)

    def time_matrix(self, d: int) -> None:
        self.eraser.matrix()
