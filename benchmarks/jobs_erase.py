"""Jobs that make erasers from moments, and apply them to rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import peers, reference
from benchmarks.data import Problem, cached, one_hot, problem
from benchmarks.jobs import FLOOR, NUMPY, OURS, Job, Ways, faster, within
from benchmarks.jobs_accumulate import layout
from benchmarks.peers import CE, Absent
from benchmarks.timing import Contender, pick

# --- solving --------------------------------------------------------------------------------------


def splince_of(moments: Any) -> Contender:
    return Contender(lambda: sf.splince(moments, erase="z", keep="y"), answer=sf.Projection.matrix)


def leace_of(moments: Any) -> Contender:
    return Contender(lambda: sf.leace(moments, erase="z"), answer=sf.Projection.matrix)


def lapack(moments: sf.Moments, *names: str) -> Contender:
    """The floor: copy the covariance, factor it, and solve for each variable; see reference."""
    S = np.asfortranarray(moments.covariance())
    sides = [np.asfortranarray(moments.cross_covariance(name)) for name in names]
    work = [np.zeros_like(array) for array in (S, *sides)]
    return Contender(lambda: reference.factor_and_solve(S, sides, work))


def moments_of(d: int, classes: int = 2) -> sf.Moments:
    d = pick(d, 16)
    return cached(max(2 * d, 40 * classes), d, "float64", classes).moments()


def _solve() -> Iterator[Job]:
    for d in (768, 2048, 4096):
        targets = [within(FLOOR, 1.5)] * (d > 768) + [faster(NUMPY, 25.0)] * (d == 2048)
        yield Job("splince", f"{d}", "call", partial(_splince_ways, d, 2), tuple(targets))
    yield Job("splince", "768/28 classes", "call", partial(_splince_ways, 768, pick(28, 4)))
    yield Job("splince", "32/2 columns", "call", _small_ways, (faster("scipy.linalg", 3.0),))
    yield Job("splince", "rank deficient/512", "call", _deficient_ways)
    for d, limit in ((768, 0.0), (2048, 15.0), (4096, 25.0)):
        wanted = (faster(CE, limit),) if limit else ()
        yield Job("leace", f"{d}", "call", partial(_leace_ways, d), wanted)


def _splince_ways(d: int, classes: int) -> Ways:
    moments = moments_of(d, classes)
    ways: dict[str, Contender | Absent] = {
        OURS: splince_of(moments),
        FLOOR: lapack(moments, "z", "y"),
    }
    if d <= 2048:
        S = moments.covariance()
        Sz, Sy = (moments.cross_covariance(name) for name in ("z", "y"))
        ranks = (classes - 1, classes - 1)
        ways[NUMPY] = Contender(
            lambda: reference.explicit_splince(S, Sz, Sy, *ranks), answer=np.asarray
        )
    return ways


def _small_ways() -> Ways:
    """A small problem with two continuous columns on either side."""
    data = problem(2000, 32, np.float64, classes=3)
    labels = {name: one_hot(codes, 3, np.float64)[:, :2] for name, codes in data.labels.items()}
    moments = sf.Moments().update(data.X, labels)
    S = moments.covariance()
    sides = [moments.cross_covariance(name) for name in ("z", "y")]
    scipy = Contender(
        lambda: reference.scipy_splince(S, *sides),
        answer=lambda factors: np.eye(32) - factors[0] @ factors[1].T,
    )
    return {OURS: splince_of(moments), "scipy.linalg": scipy}


def _deficient_ways() -> Ways:
    """An eighth of the features constant, an eighth copies; the floor is an eigendecomposition."""
    d = pick(512, 16)
    data = problem(4 * d, d, np.float64)
    data.X[:, : d // 8] = 0.0
    data.X[:, d // 8 : d // 4] = data.X[:, -(d // 8) :]
    moments = data.moments()
    S = moments.covariance()[d // 8 :, d // 8 :]
    floor = Contender(lambda: scipy.linalg.eigh(S, check_finite=False))
    return {OURS: splince_of(moments), FLOOR: floor}


def _leace_ways(d: int) -> Ways:
    moments = moments_of(d)
    return {
        OURS: leace_of(moments),
        FLOOR: lapack(moments, "z"),
        CE: peers.solve_concept_erasure(cached(max(2 * pick(d, 16), 80), pick(d, 16), "float64")),
    }


def _factor() -> Iterator[Job]:
    """From one kept factor: every further eraser, and how strong the concept is."""
    for d, limit in ((2048, 0.15), (4096, 0.05)):
        for kind in ("second eraser", "concept_strength"):
            build = partial(_factor_ways, d, kind)
            yield Job("factor", f"{kind}/{d}", "call", build, (within("first eraser", limit),))


def _factor_ways(d: int, kind: str) -> Ways:
    moments = moments_of(d)
    factored = moments.factored()
    splince_of(factored).run()  # the first eraser, which may finish the factor
    strength = Contender(lambda: sf.concept_strength(factored, "z"))
    return {
        OURS: strength if kind == "concept_strength" else splince_of(factored),
        "first eraser": splince_of(moments),
    }


# --- applying -------------------------------------------------------------------------------------


def orthogonal(d: int, rank: int) -> sf.Projection:
    """A random orthogonal eraser."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(d, rank))).Q
    return sf.Projection(basis, basis, np.ones(d))


def apply_into(X: NDArray[Any], eraser: sf.Projection) -> Ways:
    """Into a given array: every contender."""
    out = X.copy()  # memory that was touched before
    return {
        OURS: Contender(lambda: eraser(X, out=out), units=len(X), answer=np.array),
        FLOOR: Contender(lambda: np.copyto(out, X), units=len(X)),
        NUMPY: peers.apply_numpy(X, eraser, out),
    }


def _apply() -> Iterator[Job]:
    wanted = {
        1: (within(FLOOR, 1.0), faster(NUMPY, 5.0)),
        16: (within(FLOOR, 2.0), faster(NUMPY, 3.0)),
        64: (),
    }
    for rank, targets in wanted.items():
        for dtype in ("float32", "float64")[: 2 if rank == 1 else 1]:
            build = partial(_into_ways, dtype, rank)
            yield Job("apply", f"given array/{dtype}/768/rank {rank}", "row", build, targets)
    for rank, new in ((1, (faster(CE, 10.0), faster(NUMPY, 5.0))), (16, (faster(NUMPY, 3.0),))):
        build = partial(_new_ways, rank)
        yield Job("apply", f"new array/float32/768/rank {rank}", "row", build, new)
    for form in ("float16", "Fortran", "strided"):
        for rank in (1, 16):
            build = partial(_form_ways, form, rank)
            yield Job("apply", f"{form}/512/rank {rank}", "row", build,
                      (within("C order, float32", 2.0),))  # fmt: skip


def _into_ways(dtype: str, rank: int) -> Ways:
    n, d = pick((100_000, 768), (300, 16))
    return apply_into(cached(n, d, dtype).X, orthogonal(d, pick(rank, min(rank, 4))))


def _new_ways(rank: int) -> Ways:
    n, d = pick((100_000, 768), (300, 16))
    X, eraser = cached(n, d).X, orthogonal(d, pick(rank, min(rank, 4)))
    return {
        OURS: Contender(lambda: eraser(X), units=n, answer=np.asarray),
        FLOOR: Contender(lambda: X.copy(), units=n),
        NUMPY: peers.apply_numpy(X, eraser),
        CE: peers.apply_concept_erasure(X, eraser),
    }


def _form_ways(form: str, rank: int) -> Ways:
    n, d = pick((40_000, 512), (300, 16))
    eraser = orthogonal(d, pick(rank, min(rank, 4)))
    X = layout(cached(n, d).X, form)
    same = np.ascontiguousarray(X, np.float32)
    return {
        OURS: Contender(lambda: eraser(X), units=n, answer=np.asarray),
        "C order, float32": Contender(lambda: eraser(same), units=n, answer=np.asarray),
        FLOOR: Contender(lambda: X.copy(), units=n),
    }


# --- estimators, import ---------------------------------------------------------------------------


def erasers(data: Problem) -> Ways:
    """LEACE from rows and labels to clean rows, each as its documentation does it."""
    n = len(data.X)
    return {
        OURS: Contender(
            lambda: sf.LEACE().fit(data.X, concept=data.z).transform(data.X),
            units=n, answer=np.asarray,
        ),
        CE: peers.erase_concept_erasure(data),
        "fairlearn": peers.erase_fairlearn(data),
    }  # fmt: skip


def splinces(data: Problem) -> Ways:
    """The same for SPLINCE; the functions are what the estimator adds its checks to."""
    n = len(data.X)

    def functions() -> NDArray[Any]:
        return np.asarray(sf.splince(data.moments(), erase="z", keep="y")(data.X))

    return {
        OURS: Contender(
            lambda: sf.SPLINCE().fit(data.X, data.y, concept=data.z).transform(data.X),
            units=n, answer=np.asarray,
        ),
        "functions": Contender(functions, units=n, answer=np.asarray),
        NUMPY: peers.erase_numpy(data),
    }  # fmt: skip


def _estimators() -> Iterator[Job]:
    for method, ways, sizes in (
        ("LEACE", erasers, [(10_000, 768), (50_000, 768)]),
        ("SPLINCE", splinces, [(2000, 32), (10_000, 768)]),
    ):
        for n, d in sizes:
            build = partial(_estimator_ways, ways, *pick((n, d), (300, 16)))
            yield Job("fit and transform", f"{method}/{n:,} x {d}", "row", build)


def _estimator_ways(ways: Callable[[Problem], Ways], n: int, d: int) -> Ways:
    return ways(cached(n, d))


def _import() -> Iterator[Job]:
    yield Job("import", "splince_fast", "call", _import_ways)


def _import_ways() -> Ways:
    """A fresh interpreter; the floor imports NumPy, which every use needs."""

    def fresh(code: str) -> Contender:
        root = Path(__file__).resolve().parent.parent
        line = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"]
        return Contender(lambda: subprocess.run(line, check=True))

    return {OURS: fresh("import splince_fast"), FLOOR: fresh("import numpy")}


GROUPS = (_solve, _factor, _apply, _estimators, _import)
