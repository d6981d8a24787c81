"""From moments to erasers: time, ratio to bare LAPACK, residuals of the constraints."""

from __future__ import annotations

import numpy as np

import splince_fast as sf
from benchmarks import _asv, _data, _reference
from benchmarks._sizes import pick


class Solve(_asv.Suite):
    """The methods at several widths and numbers of classes."""

    params = (pick([64, 768, 2048], [16]), pick([2, 28], [2, 4]))
    param_names = ("d", "classes")

    def setup(self, d: int, classes: int) -> None:
        super().setup()
        self.moments = _data.problem(
            max(2 * d, 40 * classes), d, "float64", classes=classes
        ).moments()
        self.S = np.asfortranarray(self.moments.covariance())
        self.sides = [np.asfortranarray(self.moments.cross_covariance(v)) for v in ("z", "y")]

    def time_splince(self, d: int, classes: int) -> None:
        sf.splince(self.moments, erase="z", keep="y")

    def time_leace(self, d: int, classes: int) -> None:
        sf.leace(self.moments, erase="z")

    def time_sal(self, d: int, classes: int) -> None:
        sf.sal(self.moments, erase="z")

    def time_report(self, d: int, classes: int) -> None:
        str(sf.splince(self.moments, erase="z", keep="y").report)

    def track_time_over_bare_lapack(self, d: int, classes: int) -> float:
        work = [array.copy(order="F") for array in (self.S, *self.sides)]

        def bare() -> None:
            for target, source in zip(work, (self.S, *self.sides), strict=True):
                np.copyto(target, source)
            _reference.factor_and_solve(work[0], *work[1:])

        return _asv.paired(lambda: self.time_splince(d, classes), bare)

    track_time_over_bare_lapack.unit = "ratio"  # type: ignore[attr-defined]

    def track_residual_of_what_is_erased(self, d: int, classes: int) -> float:
        P = sf.splince(self.moments, erase="z", keep="y").matrix()
        Sz = self.sides[0]
        return float(np.linalg.norm(P @ Sz) / np.linalg.norm(Sz))

    track_residual_of_what_is_erased.unit = "relative error"  # type: ignore[attr-defined]

    def track_residual_of_what_is_kept(self, d: int, classes: int) -> float:
        P = sf.splince(self.moments, erase="z", keep="y").matrix()
        Sy = self.sides[1]
        return float(np.linalg.norm(P @ Sy - Sy) / np.linalg.norm(Sy))

    track_residual_of_what_is_kept.unit = "relative error"  # type: ignore[attr-defined]

    def peakmem_splince(self, d: int, classes: int) -> None:
        self.time_splince(d, classes)


class Solvers(_asv.Suite):
    """Full rank, rank deficient, shrunk, and the eigendecomposition on request."""

    params = (["full rank", "deficient", "eigh", "oas"],)
    param_names = ("case",)

    def setup(self, case: str) -> None:
        super().setup()
        d = pick(512, 16)
        data = _data.problem(4 * d, d, "float64")
        if case == "deficient":
            data.X[:, : d // 8] = 0.0
        self.moments = data.moments()
        self.solver = "eigh" if case == "eigh" else "auto"
        self.shrinkage = "oas" if case == "oas" else None

    def time_splince(self, case: str) -> None:
        sf.splince(self.moments, erase="z", keep="y", solver=self.solver, shrinkage=self.shrinkage)
