"""A model of the time of large jobs, from the rates of the machine alone.

The model, for float32 rows of s = 4 bytes in blocks of b rows::

    accumulate  n d^2 / SYRK  +  n d s / copy  +  (n / b) 5 d^2 / copy
    solve       (d^3 / 3) / POTRF  +  20 (8 d^2 / 2) / copy
    apply       n d s / copy

where SYRK counts n d^2 operations, and the copy rate is that of the bytes read. A block is read and
written once, checked and shifted in one sweep. Adding its float32 product to the float64 state
moves 20 bytes for each of d^2 / 2 entries, as copying 5 d^2 bytes does. Reading from a disk goes on
meanwhile, and counts where it is slower than all of that. A solve sweeps over a triangle about
twenty times beside the factorisation: to scale it, to estimate its condition, and for its columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

import splince_fast as sf
from benchmarks import _peers, _tables
from benchmarks._data import problem
from benchmarks._sizes import pick
from benchmarks._timing import Contender, interleave

BLOCK = 4096
_SIZE = 4  # bytes of a float32
_COPIED_PER_ENTRY = 5.0
_SWEEPS_PER_SOLVE = 20


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does: operations and bytes per second; infinite where nothing limits."""

    syrk: float
    potrf: float
    copy: float
    disk: float = float("inf")

    def accumulate(self, n: float, d: float) -> float:
        """Seconds for n float32 rows of d features."""
        block = min(BLOCK, (1 << 27) // (8 * d))
        product = n * d**2 / self.syrk
        passes = n * d * _SIZE / self.copy
        merges = n / block * _COPIED_PER_ENTRY * d**2 / self.copy
        return max(product + passes + merges, n * d * _SIZE / self.disk)

    def solve(self, d: float) -> float:
        """Seconds for one eraser."""
        return d**3 / 3 / self.potrf + _SWEEPS_PER_SOLVE * 4 * d**2 / self.copy

    def apply(self, n: float, d: float) -> float:
        """Seconds for n float32 rows and an eraser of low rank."""
        return max(n * d * _SIZE / self.copy, n * d * _SIZE / self.disk)


def measured_rates() -> Rates:
    """The roofline, at sizes that no cache holds."""
    d = pick(4096, 32)
    data = problem(pick(BLOCK, 64), d)
    S = np.asfortranarray(np.eye(d) * d + 1.0)
    source = np.ones(pick(1 << 26, 1 << 12))
    target = np.empty_like(source)
    timings = interleave(
        {
            "syrk": _peers.accumulate_syrk(data, BLOCK),
            "potrf": bare_potrf(S),
            "copy": Contender(lambda: np.copyto(target, source)),
        }
    )
    return Rates(
        d**2 / timings["syrk"].median,
        d**3 / 3 / timings["potrf"].median,
        source.nbytes / timings["copy"].median,
    )


def splince_of(moments: sf.Moments) -> Contender:
    """A solve."""
    return Contender(lambda: sf.splince(moments, erase="z", keep="y"))


def bare_potrf(S: NDArray[np.float64]) -> Contender:
    """The floor of a solve: a Cholesky factorisation in place; S Fortran-ordered."""
    work = S.copy(order="F")
    return Contender(
        lambda: lapack.dpotrf(work, lower=1, clean=0, overwrite_a=1),
        before=lambda: np.copyto(work, S),
    )


def apply_and_copy(n: int, d: int, rank: int) -> tuple[Contender, Contender]:
    """An orthogonal eraser on float32 rows, into a given array; and a copy into the same array."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(d, rank))).Q
    eraser = sf.Projection(basis, basis, np.zeros(d))
    X = np.ones((n, d), np.float32)
    out = np.empty_like(X)
    return Contender(lambda: eraser(X, out=out)), Contender(lambda: np.copyto(out, X))


@dataclass(frozen=True, slots=True)
class Check:
    """A prediction of the model beside a measurement."""

    what: str
    predicted: float
    measured: float

    def cells(self) -> list[str]:
        return [self.what, _tables.seconds(self.predicted), _tables.seconds(self.measured),
                f"{self.measured / self.predicted:.2f}"]  # fmt: skip


def checks(rates: Rates) -> list[Check]:
    """The model against whole jobs at sizes that were not used to get the rates."""
    found = []
    block = pick(BLOCK, 64)
    for n, d in pick([(32_768, 1024), (16_384, 2048), (8192, 4096)], [(128, 16)]):
        timing = _alone(_peers.accumulate_ours(problem(n, d), block))
        found.append(Check(f"accumulate, n = {n}, d = {d}", rates.accumulate(n, d), timing))
    for d in pick([1024, 2048], [16]):
        timing = _alone(splince_of(problem(2 * d, d, "float64").moments()))
        found.append(Check(f"solve, d = {d}", rates.solve(d), timing))
    for n, d in pick([(100_000, 768), (50_000, 2048)], [(100, 16)]):
        ours, _ = apply_and_copy(n, d, 1)
        found.append(Check(f"apply, n = {n}, d = {d}", rates.apply(n, d), _alone(ours)))
    return found


def _alone(contender: Contender) -> float:
    """Seconds of one call."""
    return interleave({"": replace(contender, units=1.0)}, budget=3.0)[""].median
