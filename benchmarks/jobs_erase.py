"""Jobs that fit erasers to moments and apply them to rows."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.linalg

import splince_fast as sf
from benchmarks import peers
from benchmarks.data import Array, Problem, cached_problem, problem
from benchmarks.jobs import FLOOR, NUMPY, OURS, Contenders, faster, job, within
from benchmarks.peers import CE
from benchmarks.timing import Absent, Contender, pick


def splince_of(moments: Any) -> Contender:
    return Contender(lambda: sf.splince(moments, erase="z", keep="y"), answer=sf.Projection.matrix)


def leace_of(moments: Any) -> Contender:
    return Contender(lambda: sf.leace(moments, erase="z"), answer=sf.Projection.matrix)


def lapack(moments: sf.Moments, *names: str) -> Contender:
    """Return a floor: one Cholesky factorisation of Cov(x), and one triangular solve per variable.

    The floor works on copies of the lower triangle of Cov(x) and of the cross-covariances, because
    the library does not change its input either. The time includes the copies. All arrays are
    Fortran-ordered.
    """
    S, *cross_covariances = map(np.asfortranarray, covariances_of(moments, *names))
    factor, *solved = [np.zeros_like(array) for array in (S, *cross_covariances)]

    def run() -> list[Array]:
        for start in range(0, len(S), 256):  # copies the lower triangle
            factor[start:, start : start + 256] = S[start:, start : start + 256]
        _, status = scipy.linalg.lapack.dpotrf(factor, lower=1, clean=0, overwrite_a=1)
        if status:
            raise ArithmeticError(f"dpotrf returned {status}")
        for cross_covariance, target in zip(cross_covariances, solved, strict=True):
            np.copyto(target, cross_covariance)
            scipy.linalg.blas.dtrsm(1.0, factor, target, lower=1, overwrite_b=1)
        return [factor, *solved]

    return Contender(run)


def by_scipy(S: Array, Sz: Array, Sy: Array) -> tuple[Array, Array]:
    """Return left and right factors of I - P by the library's algorithm, in scipy.linalg."""
    scale = 1.0 / np.sqrt(np.diagonal(S))
    L = scipy.linalg.cholesky(S * np.outer(scale, scale), lower=True, check_finite=False)
    solve = partial(scipy.linalg.solve_triangular, L, lower=True, check_finite=False)
    Qz, Qy = (scipy.linalg.orth(solve(scale[:, None] * T)) for T in (Sz, Sy))
    N = Qz - Qy @ (Qy.T @ Qz)
    N -= Qy @ (Qy.T @ N)
    left = scipy.linalg.solve((N.T @ Qz).T, (L @ Qz).T).T / scale[:, None]
    return left, solve(N, trans=1) * scale[:, None]


def covariances_of(moments: sf.Moments, *names: str) -> list[Array]:
    """Return the covariance of x and its cross-covariances with the named variables."""
    return [moments.covariance(), *map(moments.cross_covariance, names)]


def problem_of(d: int) -> Problem:
    d = pick(d, 16)
    return cached_problem(max(2 * d, 80), d, "float64")


@job("splince/{d}", "call", d=[768])
@job("splince/{d}", "call", within(FLOOR, 1.5), faster(NUMPY, 25.0), d=[2048])
@job("splince/{d}", "call", within(FLOOR, 1.5), d=[4096])
def _splince(d: int) -> Contenders:
    moments = problem_of(d).moments()
    contenders = {OURS: splince_of(moments), FLOOR: lapack(moments, "z", "y")}
    if d <= 2048:
        explicit = partial(peers.explicit_splince, *covariances_of(moments, "z", "y"))
        contenders[NUMPY] = Contender(explicit, answer=np.asarray)
    return contenders


@job("splince/32/2 columns", "call", faster("scipy.linalg", 3.0))
def _small() -> Contenders:
    """A small problem: concept and task have two continuous columns each."""
    data = problem(2000, 32, "float64", classes=3)
    labels = {name: np.eye(3, 2)[codes] for name, codes in data.labels.items()}
    moments = sf.Moments().update(data.X, labels)
    scipy = Contender(
        partial(by_scipy, *covariances_of(moments, "z", "y")),
        answer=lambda factors: np.eye(32) - factors[0] @ factors[1].T,
    )
    return {OURS: splince_of(moments), "scipy.linalg": scipy}


@job("splince/rank deficient/512", "call")
def _deficient() -> Contenders:
    """SPLINCE with one eighth of the features constant and one eighth copies of others.

    The floor is an eigendecomposition of the covariance of the features that are not constant.
    """
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
def _leace(d: int) -> Contenders:
    data = problem_of(d)
    moments = data.moments()
    other = peers.solve_concept_erasure(data)
    return {OURS: leace_of(moments), FLOOR: lapack(moments, "z"), CE: other}


@job("oracle/{d}", "call", d=[768])
@job("oracle/{d}", "call", within("splince", 1.2), d=[2048])
def _oracle(d: int) -> Contenders:
    """The oracle eraser, including its map for unlabelled rows, compared with SPLINCE."""
    data = problem_of(d)
    moments = sf.Moments(joint=[("z", "y")]).update(data.X, data.labels)
    ours = Contender(lambda: sf.oracle(moments, erase="z", keep="y"))
    return {OURS: ours, "splince": splince_of(moments)}


@job("factor/{kind}/{d}", "call",
     lambda kind, d: within("first eraser", {2048: 0.15, 4096: 0.05}[d]),
     d=(4096, 2048), kind=("second eraser", "concept_strength"))  # fmt: skip
def _factor(d: int, kind: str) -> Contenders:
    """A further eraser, or the concept strength, from a snapshot in which Cov(x) is factored.

    The reference is the first eraser, which includes the factorisation.
    """
    moments = problem_of(d).moments()
    factored = moments.factored()
    splince_of(factored).run()  # may complete the factor of the snapshot
    alpha = Contender(lambda: sf.concept_strength(factored, "z"))
    ours = alpha if kind == "concept_strength" else splince_of(factored)
    return {OURS: ours, "first eraser": splince_of(moments)}


@job("quadratic/{d}", "call", within(FLOOR, 20.0), d=[768])
def _quadratic(d: int) -> Contenders:
    """Quadratic erasure of a concept with two classes that keeps a task.

    The floor is one eigendecomposition of Cov(x).
    """
    d = pick(d, 16)
    data = problem(4 * d, d, "float64")
    moments = sf.Moments(by="z").update(data.X, data.labels)
    S = moments.covariance()

    def ours() -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sf.exceptions.UnseenRowsWarning)
            eraser = sf.quadratic(moments, erase="z", keep="y", shrinkage=0.5)
        assert eraser.maps is not None
        return eraser.maps

    return {OURS: Contender(ours), FLOOR: Contender(lambda: scipy.linalg.eigh(S)[0])}


def orthogonal(d: int, rank: int) -> sf.Projection:
    """Return an eraser that projects out `rank` random orthonormal directions."""
    rank = pick(rank, min(rank, 4))
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(d, rank))).Q
    return sf.Projection(basis, basis, np.ones(d))


def applied(X: Array, eraser: sf.Projection, out: Array | None = None) -> dict[str, Contender]:
    """Return contenders that erase X.

    They write into `out`, whose memory is already in use, or into a new array if `out` is None.
    """
    return {
        OURS: Contender(lambda: eraser(X, out=out), len(X), answer=np.array),
        FLOOR: Contender(X.copy if out is None else partial(np.copyto, out, X), len(X)),
        NUMPY: peers.apply_numpy(X, eraser, out),
    }


@job("apply/{where}/{dtype}/768/rank {rank}", "row", faster(NUMPY, 5.0), faster(CE, 10.0),
     where=["new array"], dtype=["float32"], rank=[1])  # fmt: skip
@job("apply/{where}/{dtype}/768/rank {rank}", "row", faster(NUMPY, 3.0),
     where=["new array"], dtype=["float32"], rank=[16])  # fmt: skip
@job("apply/{where}/{dtype}/768/rank {rank}", "row", within(FLOOR, 1.0), faster(NUMPY, 5.0),
     where=["given array"], dtype=("float32", "float64"), rank=[1])  # fmt: skip
@job("apply/{where}/{dtype}/768/rank {rank}", "row", within(FLOOR, 2.0), faster(NUMPY, 3.0),
     where=["given array"], dtype=["float32"], rank=[16])  # fmt: skip
def _apply(where: str, dtype: str, rank: int) -> Contenders:
    X = cached_problem(*pick((100_000, 768), (300, 16)), dtype).X
    eraser = orthogonal(X.shape[1], rank)
    if where == "given array":
        return applied(X, eraser, X.copy())
    return {**applied(X, eraser), CE: peers.apply_concept_erasure(X, eraser)}


@job("apply/given array/float32/{d}/rank 1", "row", within(FLOOR, 1.5), faster(NUMPY, 3.0),
     d=(300, 4096))  # fmt: skip
def _widths(d: int) -> Contenders:
    """Rows of 300 or of 4096 features.

    300 is no multiple of a vector register; for 4096, the eraser's factors exceed the L1 cache.
    """
    X = cached_problem(*pick((100_000_000 // d, d), (300, 16))).X
    return applied(X, orthogonal(X.shape[1], 1), X.copy())


@job("apply/{form}/512/rank {rank}", "row", within("C order, float32", 2.0),
     form=("float16", "Fortran", "strided"), rank=(1, 16))  # fmt: skip
def _forms(form: str, rank: int) -> Contenders:
    """Rows of another memory layout or dtype, compared with C-ordered float32 rows."""
    rows = cached_problem(*pick((40_000, 512), (300, 16))).X
    forms: dict[str, Array] = {
        "float16": rows.astype("float16"),
        "Fortran": np.asfortranarray(rows),
        "strided": np.repeat(rows, 2, axis=1)[:, ::2],
    }
    X, eraser = forms[form], orthogonal(rows.shape[1], rank)
    ours, plain = applied(X, eraser), applied(np.ascontiguousarray(X, np.float32), eraser)
    return {OURS: ours[OURS], "C order, float32": plain[OURS], FLOOR: ours[FLOOR]}


def erase_ours(estimator: Callable[[], Any], data: Problem) -> Contender:
    """Return a contender that fits an estimator to the rows and transforms the rows."""
    return Contender(
        lambda: estimator().fit(data.X, data.y, concept=data.z).transform(data.X),
        len(data.X), answer=np.asarray,
    )  # fmt: skip


# Contenders that fit an eraser and apply it as the documentation of each package shows.
LEACES: dict[str, Callable[[Problem], Contender | Absent]] = {
    OURS: partial(erase_ours, sf.LEACE),
    CE: peers.erase_concept_erasure,
    "fairlearn": peers.erase_fairlearn,
}
SPLINCES = {OURS: partial(erase_ours, sf.SPLINCE), NUMPY: peers.erase_numpy}


@job("fit and transform/LEACE/{n:,} x {d}", "row", n=(10_000, 50_000), d=[768], makers=[LEACES])
@job("fit and transform/SPLINCE/{n:,} x {d}", "row", n=[2000], d=[32], makers=[SPLINCES])
@job("fit and transform/SPLINCE/{n:,} x {d}", "row", n=[10_000], d=[768], makers=[SPLINCES])
def _fit(n: int, d: int, makers: dict[str, Callable[[Problem], Any]]) -> Contenders:
    data = cached_problem(*pick((n, d), (300, 16)))
    return {name: make(data) for name, make in makers.items()}


@job("import/splince_fast", "call")
def _import() -> Contenders:
    """Import in a new interpreter; the floor imports NumPy, a dependency."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def import_of(module: str) -> Contender:
        line = [sys.executable, "-c", f"import {module}"]
        return Contender(lambda: subprocess.run(line, check=True, env=environment))

    return {OURS: import_of("splince_fast"), FLOOR: import_of("numpy")}
