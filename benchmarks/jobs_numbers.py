"""Jobs whose result is a number, not a time: errors of rounding, and peaks of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import memory, peers, reference
from benchmarks.data import Problem, problem, rare_concept, write_rows
from benchmarks.jobs import NUMPY, OURS, Ways, below, job, scratch
from benchmarks.jobs_accumulate import BLOCK, sparse_rows
from benchmarks.jobs_erase import LEACES, orthogonal
from benchmarks.peers import CE, CE64, ONEDAL
from benchmarks.timing import Absent, Contender, pick

# --- rounding -------------------------------------------------------------------------------------


@job("covariance error/{dtype}/mean {offset} sd", "relative",
     lambda dtype, offset: below(1e-6 if dtype == "float32" else 1e-12), number=True,
     dtype=("float32", "float64"), offset=(0, 100, 10_000))  # fmt: skip
def _covariance_error(dtype: str, offset: float) -> Ways:
    """Largest entrywise error relative to sqrt(S_ii S_jj), against two passes in float64.

    Ours is the worst over orders of the rows, sizes of blocks and sizes of updates.
    """
    data = problem(pick(10_000, 300), pick(128, 8), dtype, offset=offset)
    truth = reference.two_pass_covariance(data.X)

    def error(found: Any) -> float:
        return reference.covariance_error(np.asarray(found, np.float64), truth)

    def ours() -> float:
        worst = 0.0
        for X in (data.X, data.X[np.argsort(data.X[:, 0])]):
            for block, update in ((None, len(X)), (None, 1), (4096, len(X)), (64, len(X)), (1, 99)):
                worst = max(worst, error(_streamed(X, block, update)))
        return worst

    ways: dict[str, Contender | Absent] = {
        NUMPY: peers.covariance_numpy(data),
        CE: peers.stream_concept_erasure(data, BLOCK, dtype),
        CE64: peers.stream_concept_erasure(data, BLOCK, "float64"),
        ONEDAL: peers.stream_onedal(data, BLOCK),
    }
    return {OURS: Contender(ours)} | {name: _judged(way, error) for name, way in ways.items()}


def _streamed(X: NDArray[Any], block: int | None, update: int) -> NDArray[np.float64]:
    moments = sf.Moments(block_rows=block)
    for start in range(0, len(X), update):
        moments.update(X[start : start + update])
    return moments.covariance()


def _judged(way: Contender | Absent, judge: Callable[[Any], float]) -> Contender | Absent:
    """A contender whose result is a number."""
    if isinstance(way, Absent):
        return way
    run, answer = way.run, way.answer or np.asarray
    return Contender(lambda: judge(answer(run())))


@job("trace left/balanced classes/mean {offset} sd", "ratio", number=True,
     offset=(0, 1000, 10_000))  # fmt: skip
def _trace_left(offset: float) -> Ways:
    """Distance of the class means after erasure over that before, of float32 rows."""
    return _traces(problem(*pick((100_000, 64), (500, 8)), offset=offset))


@job("trace left/prevalence 1e-3, 3.5 sd apart", "ratio", number=True)
def _rare() -> Ways:
    return _traces(rare_concept(*pick((100_000, 64, 1e-3), (500, 8, 1e-2)), 3.5))


def _traces(data: Problem) -> Ways:
    def left(clean: Any) -> float:
        return reference.trace_left(data.X, np.asarray(clean), data.z)

    return {name: _judged(make(data), left) for name, make in LEACES.items()}


# --- memory: peaks of child processes beyond what they hold before the job ------------------------


def _extra(unit: float, prepare: Callable[..., Callable[[], object]], *arguments: Any) -> Contender:
    return Contender(lambda: memory.extra_bytes(prepare, *arguments) / unit)


@job("memory/mapped file/float32/1024", "3 d^2 doubles + 3 blocks", below(1.0), number=True)
def _mapped() -> Ways:
    n, d = pick((400_000, 1024), (12_288, 16))
    return {OURS: _extra(3 * 8 * d**2 + 3 * 4 * d * BLOCK, accumulate_file, n, d)}


def accumulate_file(n: int, d: int) -> Callable[[], object]:
    """`Moments.from_blocks` over a .npy file of rows, with a binary concept."""
    path = write_rows(scratch() / "rows.npy", n, d)
    rows, z = np.load(path, mmap_mode="r"), np.arange(n) % 2
    sf.Moments.from_blocks(sf.sources.from_arrays(rows[:9000], {"z": z[:9000]}))
    source = sf.sources.from_npy(path, {"z": z})
    return lambda: sf.Moments.from_blocks(source)


@job("memory/dense rows/rank 64/100,000", "MiB", below(500.0), number=True)
def _wide() -> Ways:
    return {OURS: _extra(2**20, accumulate_wide, *pick((1024, 100_000), (64, 80)))}


def accumulate_wide(n: int, d: int) -> Callable[[], object]:
    """Blocks of float32 rows by rank: beside the blocks, which are made before."""
    data = problem(n, d)
    blocks = data.blocks(pick(512, 32))
    small = problem(200, 100)
    sf.Moments(rank=64).update(small.X, small.labels)

    def run() -> sf.Moments:
        moments = sf.Moments(rank=64)
        for block in blocks:
            moments.update(block.X, block.labels)
        return moments

    return run


@job("memory/sparse rows/rank 64/40,000", "MiB", below(100.0), number=True)
def _sparse() -> Ways:
    return {OURS: _extra(2**20, accumulate_sparse, *pick((37_000, 40_000), (60, 80)))}


def accumulate_sparse(n: int, d: int) -> Callable[[], object]:
    """CSR rows by rank; one dense copy of them would be 5.5 GiB."""
    X, z = sparse_rows(n, d), np.arange(n) % 2
    sf.Moments(rank=64).update(X[:50], {"z": z[:50]})
    return lambda: sf.Moments(rank=64).update(X, {"z": z})


@job("memory/apply in place/{dtype}/768", "MiB", below(8.0), number=True,
     dtype=("float32", "float16"))  # fmt: skip
def _in_place(dtype: str) -> Ways:
    return {OURS: _extra(2**20, apply_in_place, pick(100_000, 2000), 768, dtype)}


def apply_in_place(n: int, d: int, dtype: str) -> Callable[[], object]:
    """`eraser(X, out=X)`."""
    eraser = orthogonal(d, 1)
    X = np.ones((n, d), dtype)
    eraser(X[:2000], out=X[:2000])
    return lambda: eraser(X, out=X)
