"""Moments.update: rates against bare SYRK, layouts, block sizes, classes, accuracy, memory."""

from __future__ import annotations

from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks import _asv, _data, _peers, _reference
from benchmarks._sizes import pick

_ROWS = pick(4096, 128)


class Update(_asv.Suite):
    """One full block, with a class-coded concept and a class-coded task."""

    params = (pick([768, 2048, 4096], [16]), ["float32", "float64"])
    param_names = ("d", "dtype")

    def setup(self, d: int, dtype: str) -> None:
        super().setup()
        self.data = _data.problem(_ROWS, d, dtype)
        self.ours = _peers.accumulate_ours(self.data, _ROWS).run
        self.syrk = _peers.accumulate_syrk(self.data, _ROWS).run
        self.ours()

    def time_update(self, d: int, dtype: str) -> None:
        self.ours()

    def track_rate_over_bare_syrk(self, d: int, dtype: str) -> float:
        return _asv.paired(self.syrk, self.ours)

    track_rate_over_bare_syrk.unit = "ratio"  # type: ignore[attr-defined]

    def peakmem_update(self, d: int, dtype: str) -> None:
        self.ours()


class Classes(_asv.Suite):
    """Class-coded variables cost the same whatever the number of classes."""

    params = (pick([2, 28, 1000, 10_000], [2, 28]), ["float32", "float64"])
    param_names = ("classes", "dtype")

    def setup(self, classes: int, dtype: str) -> None:
        super().setup()
        self.data = _data.problem(_ROWS, pick(768, 16), dtype, classes=classes)
        self.ours = _peers.accumulate_ours(self.data, _ROWS).run
        self.ours()

    def time_update(self, classes: int, dtype: str) -> None:
        self.ours()


class Labels(_asv.Suite):
    """Reading labels of other kinds than integers, without the rows' own cost mattering much."""

    params = (["strings", "floats", "missing", "weights"],)
    param_names = ("kind",)

    def setup(self, kind: str) -> None:
        super().setup()
        self.data = _data.problem(_ROWS, pick(128, 8))
        names = np.array(["first", "second"])[self.data.z]
        self.weight = np.linspace(0.5, 2.0, _ROWS) if kind == "weights" else None
        choices: dict[str, dict[str, Any]] = {
            "strings": {"z": names},
            "floats": {"z": self.data.X[:, :2].astype(np.float64)},
            "missing": {"z": [None if i % 3 == 0 else name for i, name in enumerate(names)]},
            "weights": {"z": self.data.z},
        }
        self.labels = choices[kind]
        self.moments = sf.Moments()
        self.time_update(kind)

    def time_update(self, kind: str) -> None:
        self.moments.update(self.data.X, self.labels, sample_weight=self.weight)


class Layouts(_asv.Suite):
    """Rows in any layout and narrow dtype."""

    params = (["C", "F", "strided", "float16", "int8"],)
    param_names = ("layout",)

    def setup(self, layout: str) -> None:
        super().setup()
        X: Any = _data.problem(_ROWS, pick(1024, 16)).X
        if layout == "F":
            X = np.asfortranarray(X)
        elif layout == "strided":
            X = np.repeat(X, 2, axis=1)[:, ::2]
        elif layout != "C":
            X = (10 * X).astype(layout)
        self.X, self.labels = X, {"z": np.arange(_ROWS) % 2}
        self.moments = sf.Moments().update(self.X, self.labels)

    def time_update(self, layout: str) -> None:
        self.moments.update(self.X, self.labels)


class Streams(_asv.Suite):
    """The same rows in updates of another size."""

    params = (pick([1, 64, 1024, 4096], [1, 64]), ["float32", "float64"])
    param_names = ("update_rows", "dtype")

    def setup(self, update_rows: int, dtype: str) -> None:
        super().setup()
        self.data = _data.problem(_ROWS, pick(1024, 16), dtype)
        self.ours = _peers.accumulate_ours(self.data, update_rows).run
        self.whole = _peers.accumulate_ours(self.data, _ROWS).run
        self.ours()

    def time_stream(self, update_rows: int, dtype: str) -> None:
        self.ours()

    def track_time_over_one_update(self, update_rows: int, dtype: str) -> float:
        return _asv.paired(self.ours, self.whole)

    track_time_over_one_update.unit = "ratio"  # type: ignore[attr-defined]


class Blocks(_asv.Suite):
    """The parameter block_rows: how many rows are reduced at a time."""

    params = (pick([256, 1024, 4096, 16_384], [8, 32]),)
    param_names = ("block_rows",)

    def setup(self, block_rows: int) -> None:
        super().setup()
        self.data = _data.problem(pick(16_384, 128), pick(1024, 16))
        self.moments = sf.Moments(block_rows=block_rows)
        self.time_update(block_rows)

    def time_update(self, block_rows: int) -> None:
        self.moments.update(self.data.X, self.data.labels)


class Accuracy(_asv.Suite):
    """Entrywise error of the covariance against a float64 two-pass result."""

    params = ([0.0, 1e4], ["float32", "float64"], [1, 4096])
    param_names = ("offset", "dtype", "block_rows")

    def setup(self, offset: float, dtype: str, block_rows: int) -> None:
        super().setup()
        self.X = _data.problem(pick(5000, 200), pick(64, 8), dtype, offset=offset).X
        self.X = self.X[np.argsort(self.X[:, 0])]

    def track_error(self, offset: float, dtype: str, block_rows: int) -> float:
        found = sf.Moments(block_rows=block_rows).update(self.X).covariance()
        return _reference.covariance_error(found, _reference.two_pass_covariance(self.X))

    track_error.unit = "relative error"  # type: ignore[attr-defined]
