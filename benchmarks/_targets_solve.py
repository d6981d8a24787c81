"""Targets of solving and applying."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks import _memory, _peers, _reference
from benchmarks._data import problem
from benchmarks._rows import Row, at_least, at_most, exactly
from benchmarks._sizes import pick
from benchmarks._timing import Contender, Ratio, Timing, interleave, ratio

LAPACK = "bare LAPACK"


def solving() -> Iterator[Row]:
    """From accumulated moments to an eraser."""
    for d in pick([2048, 4096], [24, 32]):
        with_formula = d == pick([2048, 4096], [24, 32])[0]
        data = problem(2 * d, d, np.float64)
        contenders = {**_peers.solvers(data), LAPACK: _bare(data.moments())}
        if not with_formula:
            del contenders["NumPy"]
        present, missing = _peers.split(contenders)
        timings = interleave(present, budget=60.0)
        ours = timings[_peers.OURS]
        yield at_most(
            f"splince against potrf and two solves, d = {d}", 1.5, ratio(ours, timings[LAPACK])
        )
        what = f"leace against concept-erasure's eraser, float64, d = {d}"
        yield at_least(
            what,
            15 if with_formula else 25,
            _quotient(timings, "concept-erasure", _peers.OTHER),
            missing.get("concept-erasure", ""),
        )
        if with_formula:
            yield at_least(
                f"splince against the explicit formula in NumPy, d = {d}",
                25, ratio(timings["NumPy"], ours),
            )  # fmt: skip
    yield _small_solves()


def _quotient(timings: dict[str, Timing], peer: str, ours: str) -> Ratio | None:
    return ratio(timings[peer], timings[ours]) if peer in timings else None


def _bare(moments: sf.Moments) -> Contender:
    """The LAPACK and BLAS calls alone, on arrays that are restored outside the clock."""
    S = np.asfortranarray(moments.covariance())
    sides = [np.asfortranarray(moments.cross_covariance(name)) for name in ("z", "y")]
    work = [array.copy(order="F") for array in (S, *sides)]

    def restore() -> None:
        for target, source in zip(work, (S, *sides), strict=True):
            np.copyto(target, source)

    return Contender(lambda: _reference.factor_and_solve(work[0], *work[1:]), before=restore)


def _small_solves() -> Row:
    """Many solves of a small problem, with two continuous columns on either side."""
    d, count = 32, pick(1000, 2)
    data = problem(2000, d, np.float64, classes=3)
    labels = {name: np.eye(3)[codes][:, :2] for name, codes in data.labels.items()}
    moments = sf.Moments().update(data.X, labels)
    S = moments.covariance()
    sides = [moments.cross_covariance(name) for name in ("z", "y")]

    def ours() -> None:
        for _ in range(count):
            sf.splince(moments, erase="z", keep="y")

    def theirs() -> None:
        for _ in range(count):
            _reference.scipy_splince(S, *sides)

    timings = interleave({"ours": Contender(ours), "scipy": Contender(theirs)})
    return at_least(
        f"{count} solves at d = {d}, k = 2, against the same algebra in scipy.linalg",
        3.0, ratio(timings["scipy"], timings["ours"]),
        f"{timings['ours'].median / count * 1e6:.0f} us each",
    )  # fmt: skip


def applying() -> Iterator[Row]:
    """From rows to clean rows."""
    n, d = pick((200_000, 768), (300, 16))
    for rank in (1, 16):
        classes = rank + 1
        few = problem(max(20 * classes, 4 * d), d, classes=classes)
        eraser = sf.leace(few.moments(), erase="z")
        if eraser.rank != pick(rank, eraser.rank):
            raise ArithmeticError(f"an eraser of rank {rank} came out with {eraser.rank}")
        X: Any = problem(n, d).X
        present, missing = _peers.split(_peers.appliers(X, eraser))
        timings = interleave(present)
        ours, new = timings[_peers.OURS], timings[_peers.OTHER]
        where = f"rank {rank}, n = {n}, d = {d}, float32"
        gigabytes = X.nbytes / n / 1e9
        note = f"into a new array {gigabytes / new.median:.1f} GB/s"
        formula = timings["NumPy"]
        if rank == 1:
            yield at_least(
                f"apply against np.copyto, {where}", 1.0, ratio(timings[_peers.FLOOR], ours),
                f"{gigabytes / ours.median:.1f} GB/s",
            )  # fmt: skip
            peer = timings.get("concept-erasure")
            into_new = f"{ratio(peer, new)} into a new array" if peer else ""
            yield at_least(
                f"apply against concept-erasure, {where}",
                10, ratio(peer, ours) if peer else None,
                missing.get("concept-erasure", into_new),
            )  # fmt: skip
        yield at_least(
            f"apply against the formula in NumPy, {where}",
            5 if rank == 1 else 3, ratio(formula, ours), f"{ratio(formula, new)} {note}",
        )  # fmt: skip
    for dtype in pick(["float32", "float16"], ["float32"]):
        for rows in pick([50_000, 200_000], [2000]):
            extra = _memory.extra_bytes(
                "benchmarks._jobs:apply_in_place", n=rows, d=768, dtype=dtype
            )
            size = rows * 768 * np.dtype(dtype).itemsize
            yield at_most(
                f"MiB beyond X of eraser(X, out=X), {dtype}, n = {rows}, d = 768",
                8, exactly(extra / 2**20), f"X has {size / 2**20:.0f} MiB",
            )  # fmt: skip
