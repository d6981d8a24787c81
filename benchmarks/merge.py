"""The algebra of moments: add, remove, copy."""

from __future__ import annotations

import splince_fast as sf
from benchmarks import _asv, _data, _reference
from benchmarks._sizes import pick


class Algebra(_asv.Suite):
    """Two states of equal width and many classes."""

    params = (pick([768, 4096], [16]), pick([2, 1000], [2, 28]))
    param_names = ("d", "classes")

    def setup(self, d: int, classes: int) -> None:
        super().setup()
        n = pick(4096, 128)
        self.data = [_data.problem(n, d, classes=classes, seed=seed) for seed in (0, 1)]
        self.a, self.b = (data.moments() for data in self.data)
        self.total = self.a + self.b

    def time_add(self, d: int, classes: int) -> None:
        self.a + self.b

    def time_remove(self, d: int, classes: int) -> None:
        self.total - self.b

    def time_copy(self, d: int, classes: int) -> None:
        self.total.copy()

    def time_covariance(self, d: int, classes: int) -> None:
        self.total.covariance()

    def time_cross_covariance(self, d: int, classes: int) -> None:
        self.total.cross_covariance("z")

    def track_error_of_remove(self, d: int, classes: int) -> float:
        found = (self.total - self.b).covariance()
        return _reference.covariance_error(found, self.a.covariance())

    track_error_of_remove.unit = "relative error"  # type: ignore[attr-defined]

    def peakmem_add(self, d: int, classes: int) -> sf.Moments:
        return self.a + self.b
