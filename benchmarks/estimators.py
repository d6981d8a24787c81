"""The scikit-learn objects: fit, partial_fit, transform, and what they add to the functions."""

from __future__ import annotations

import numpy as np

import splince_fast as sf
from benchmarks import _asv, _data
from benchmarks._sizes import pick

_CLASSES = {cls.__name__: cls for cls in (sf.SPLINCE, sf.LEACE, sf.SAL, sf.MeanProjection)}


class Fit(_asv.Suite):
    """Rows in memory, a binary concept and a binary task."""

    params = (list(_CLASSES), pick([64, 768], [16]))
    param_names = ("estimator", "d")

    def setup(self, estimator: str, d: int) -> None:
        super().setup()
        self.data = _data.problem(pick(20_000, 200), d)
        self.new = _CLASSES[estimator]
        self.fitted = self.new().fit(self.data.X, self.data.y, concept=self.data.z)
        self.partial = self.new()
        self.time_partial_fit(estimator, d)

    def time_fit(self, estimator: str, d: int) -> None:
        self.new().fit(self.data.X, self.data.y, concept=self.data.z)

    def time_partial_fit(self, estimator: str, d: int) -> None:
        self.partial.partial_fit(self.data.X, self.data.y, concept=self.data.z)

    def time_transform(self, estimator: str, d: int) -> None:
        self.fitted.transform(self.data.X)

    def peakmem_fit(self, estimator: str, d: int) -> None:
        self.time_fit(estimator, d)

    def track_trace_left(self, estimator: str, d: int) -> float:
        """Distance of the class means after erasure over that before."""
        clean = self.fitted.transform(self.data.X.astype(np.float64))
        gaps = [
            np.linalg.norm(X[self.data.z == 1].mean(axis=0) - X[self.data.z == 0].mean(axis=0))
            for X in (self.data.X.astype(np.float64), clean)
        ]
        return float(gaps[1] / gaps[0])

    track_trace_left.unit = "ratio"  # type: ignore[attr-defined]


class Overhead(_asv.Suite):
    """What the estimator costs beyond `Moments.update`, a solve and an apply."""

    params = (pick([(2000, 32), (20_000, 768)], [(200, 16)]),)
    param_names = ("n_and_d",)

    def setup(self, n_and_d: tuple[int, int]) -> None:
        super().setup()
        self.data = _data.problem(*n_and_d)

    def _functions(self) -> None:
        moments = sf.Moments().update(self.data.X, self.data.labels)
        sf.splince(moments, erase="z", keep="y")(self.data.X)

    def _estimator(self) -> None:
        data = self.data
        sf.SPLINCE().fit(data.X, data.y, concept=data.z).transform(data.X)

    def track_estimator_over_functions(self, n_and_d: tuple[int, int]) -> float:
        return _asv.paired(self._estimator, self._functions)

    track_estimator_over_functions.unit = "ratio"  # type: ignore[attr-defined]
