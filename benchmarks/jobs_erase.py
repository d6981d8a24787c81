"""Jobs that make erasers from moments, and apply them to rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import peers, reference
from benchmarks.data import Problem, cached, one_hot, problem
from benchmarks.jobs import FLOOR, NUMPY, OURS, Ways, faster, job, within
from benchmarks.peers import CE
from benchmarks.timing import Absent, Contender, pick

# --- solving --------------------------------------------------------------------------------------


def splince_of(moments: Any) -> Contender:
    return Contender(lambda: sf.splince(moments, erase="z", keep="y"), answer=sf.Projection.matrix)


def leace_of(moments: Any) -> Contender:
    return Contender(lambda: sf.leace(moments, erase="z"), answer=sf.Projection.matrix)


def lapack(moments: sf.Moments, *names: str) -> Contender:
    """The floor: copy the covariance, factor it, and solve for each variable; see reference."""
    S, *sides = map(np.asfortranarray, parts(moments, *names))
    work = [np.zeros_like(array) for array in (S, *sides)]
    return Contender(lambda: reference.factor_and_solve(S, sides, work))


def parts(moments: sf.Moments, *names: str) -> list[NDArray[np.float64]]:
    """The covariance, and the cross-covariances with these variables."""
    return [moments.covariance(), *map(moments.cross_covariance, names)]


def problem_of(d: int) -> Problem:
    d = pick(d, 16)
    return cached(max(2 * d, 80), d, "float64")


@job("splince/{d}", "call", d=[768])
@job("splince/{d}", "call", within(FLOOR, 1.5), faster(NUMPY, 25.0), d=[2048])
@job("splince/{d}", "call", within(FLOOR, 1.5), d=[4096])
def _splince(d: int) -> Ways:
    moments = problem_of(d).moments()
    ways = {OURS: splince_of(moments), FLOOR: lapack(moments, "z", "y")}
    if d <= 2048:
        explicit = partial(reference.explicit_splince, *parts(moments, "z", "y"))
        ways[NUMPY] = Contender(explicit, answer=np.asarray)
    return ways


@job("splince/32/2 columns", "call", faster("scipy.linalg", 3.0))
def _small() -> Ways:
    """A small problem with two continuous columns on either side."""
    data = problem(2000, 32, "float64", classes=3)
    labels = {name: one_hot(codes, 3, np.float64)[:, :2] for name, codes in data.labels.items()}
    moments = sf.Moments().update(data.X, labels)
    scipy = Contender(
        partial(reference.scipy_splince, *parts(moments, "z", "y")),
        answer=lambda factors: np.eye(32) - factors[0] @ factors[1].T,
    )
    return {OURS: splince_of(moments), "scipy.linalg": scipy}


@job("splince/rank deficient/512", "call")
def _deficient() -> Ways:
    """An eighth of the features constant, an eighth copies; the floor is an eigendecomposition."""
    d = pick(512, 16)
    data = problem(4 * d, d, "float64")
    data.X[:, : d // 8] = 0.0
    data.X[:, d // 8 : d // 4] = data.X[:, -(d // 8) :]
    moments = data.moments()
    S = moments.covariance()[d // 8 :, d // 8 :]
    floor = Contender(lambda: scipy.linalg.eigh(S, check_finite=False))
    return {OURS: splince_of(moments), FLOOR: floor}


@job("leace/{d}", "call", d=[768])
@job("leace/{d}", "call", faster(CE, 15.0), d=[2048])
@job("leace/{d}", "call", faster(CE, 25.0), d=[4096])
def _leace(d: int) -> Ways:
    data = problem_of(d)
    moments = data.moments()
    return {
        OURS: leace_of(moments),
        FLOOR: lapack(moments, "z"),
        CE: peers.solve_concept_erasure(data),
    }


_KINDS = ("second eraser", "concept_strength")


@job("factor/{kind}/{d}", "call", within("first eraser", 0.15), d=[2048], kind=_KINDS)
@job("factor/{kind}/{d}", "call", within("first eraser", 0.05), d=[4096], kind=_KINDS)
def _factor(d: int, kind: str) -> Ways:
    """From one kept factor: every further eraser, and how strong the concept is."""
    moments = problem_of(d).moments()
    factored = moments.factored()
    splince_of(factored).run()  # the first eraser, which may finish the factor
    strength = Contender(lambda: sf.concept_strength(factored, "z"))
    return {
        OURS: strength if kind == "concept_strength" else splince_of(factored),
        "first eraser": splince_of(moments),
    }


# --- applying -------------------------------------------------------------------------------------


def layout(X: NDArray[Any], form: str) -> NDArray[Any]:
    """The same rows in another layout or dtype."""
    if form == "Fortran":
        return np.asfortranarray(X)
    if form == "strided":
        return np.repeat(X, 2, axis=1)[:, ::2]
    return X.astype(form)


def orthogonal(d: int, rank: int) -> sf.Projection:
    """A random orthogonal eraser."""
    rank = pick(rank, min(rank, 4))
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(d, rank))).Q
    return sf.Projection(basis, basis, np.ones(d))


def apply_new(X: NDArray[Any], eraser: sf.Projection) -> Contender:
    """Into a new array."""
    return Contender(lambda: eraser(X), len(X), answer=np.asarray)


def apply_into(X: NDArray[Any], eraser: sf.Projection) -> Ways:
    """Into a given array: every contender."""
    out = X.copy()  # memory that was touched before
    return {
        OURS: Contender(lambda: eraser(X, out=out), len(X), answer=np.array),
        FLOOR: Contender(lambda: np.copyto(out, X), len(X)),
        NUMPY: peers.apply_numpy(X, eraser, out),
    }


@job("apply/given array/{dtype}/768/rank {rank}", "row", within(FLOOR, 1.0), faster(NUMPY, 5.0),
     dtype=("float32", "float64"), rank=[1])  # fmt: skip
@job("apply/given array/{dtype}/768/rank {rank}", "row", within(FLOOR, 2.0), faster(NUMPY, 3.0),
     dtype=["float32"], rank=[16])  # fmt: skip
def _into(dtype: str, rank: int) -> Ways:
    X = cached(*pick((100_000, 768), (300, 16)), dtype).X
    return apply_into(X, orthogonal(X.shape[1], rank))


@job("apply/new array/float32/768/rank {rank}", "row", faster(NUMPY, 5.0), faster(CE, 10.0),
     rank=[1])  # fmt: skip
@job("apply/new array/float32/768/rank {rank}", "row", faster(NUMPY, 3.0), rank=[16])
def _new(rank: int) -> Ways:
    X = cached(*pick((100_000, 768), (300, 16)), "float32").X
    eraser = orthogonal(X.shape[1], rank)
    return {
        OURS: apply_new(X, eraser),
        FLOOR: Contender(X.copy, len(X)),
        NUMPY: peers.apply_numpy(X, eraser),
        CE: peers.apply_concept_erasure(X, eraser),
    }


@job("apply/{form}/512/rank {rank}", "row", within("C order, float32", 2.0),
     form=("float16", "Fortran", "strided"), rank=(1, 16))  # fmt: skip
def _forms(form: str, rank: int) -> Ways:
    X = layout(cached(*pick((40_000, 512), (300, 16))).X, form)
    eraser = orthogonal(X.shape[1], rank)
    return {
        OURS: apply_new(X, eraser),
        "C order, float32": apply_new(np.ascontiguousarray(X, np.float32), eraser),
        FLOOR: Contender(X.copy, len(X)),
    }


# --- estimators, import ---------------------------------------------------------------------------


def erase_ours(estimator: Callable[[], Any], data: Problem) -> Contender:
    """`fit` and `transform`."""
    return Contender(
        lambda: estimator().fit(data.X, data.y, concept=data.z).transform(data.X),
        len(data.X), answer=np.asarray,
    )  # fmt: skip


# From rows and labels to clean rows, each as its documentation does it.
LEACES: dict[str, Callable[[Problem], Contender | Absent]] = {
    OURS: partial(erase_ours, sf.LEACE),
    CE: peers.erase_concept_erasure,
    "fairlearn": peers.erase_fairlearn,
}
SPLINCES = {OURS: partial(erase_ours, sf.SPLINCE), NUMPY: peers.erase_numpy}


@job("fit and transform/LEACE/{n:,} x {d}", "row", n=(10_000, 50_000), d=[768], makers=[LEACES])
@job("fit and transform/SPLINCE/{n:,} x {d}", "row", n=[2000], d=[32], makers=[SPLINCES])
@job("fit and transform/SPLINCE/{n:,} x {d}", "row", n=[10_000], d=[768], makers=[SPLINCES])
def _fit(n: int, d: int, makers: dict[str, Callable[[Problem], Any]]) -> Ways:
    data = cached(*pick((n, d), (300, 16)))
    return {name: make(data) for name, make in makers.items()}


@job("import/splince_fast", "call")
def _import() -> Ways:
    """A fresh interpreter; the floor imports NumPy, which every use needs."""
    found_here = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def fresh(module: str) -> Contender:
        line = [sys.executable, "-c", f"import {module}"]
        return Contender(lambda: subprocess.run(line, check=True, env=found_here))

    return {OURS: fresh("splince_fast"), FLOOR: fresh("numpy")}
