"""Jobs whose result is a number, not a time: errors of rounding, and peaks of memory."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import splince_fast as sf
from benchmarks import peers
from benchmarks.data import Array, Problem, cut, problem, write_rows
from benchmarks.jobs import NUMPY, OURS, Contenders, Numbers, below, job
from benchmarks.jobs_accumulate import BLOCK, DTYPES, accumulate, sparse_rows
from benchmarks.jobs_erase import LEACES, orthogonal
from benchmarks.peers import CE, CE64, ONEDAL
from benchmarks.timing import Absent, Contender, each, pick

Prepare = Callable[[], Callable[[], object]]


def two_pass_covariance(X: Array) -> Array:
    """Covariance (ddof 1) in float64: centre, then multiply."""
    centred = X.astype(np.float64)
    centred -= centred.mean(axis=0)
    centred -= centred.mean(axis=0)  # the rounding error of the first mean
    return np.asarray(centred.T @ centred) / (len(X) - 1)


def covariance_error(exact: Array, computed: Array) -> float:
    """Largest entrywise error against sqrt(S_ii S_jj)."""
    root = np.sqrt(np.diagonal(exact))
    return float((np.abs(computed - exact) / np.outer(root, root)).max())


def class_spread(X: Array, z: Array) -> float:
    """Norm of the centred class means in float64, from deviations about the first row."""
    origin = X[0].astype(np.float64)
    means = [(X[z == c].astype(np.float64) - origin).mean(axis=0) for c in np.unique(z)]
    return float(np.linalg.norm(means - np.mean(means, axis=0)))


def _numbers_of(
    contenders: Contenders, number_of: Callable[[Any], float]
) -> dict[str, float | Absent]:
    """A number from the result of each contender."""
    return {
        name: contender
        if isinstance(contender, Absent)
        else number_of((contender.answer or np.asarray)(contender.run()))
        for name, contender in contenders.items()
    }


@job("covariance error/{dtype}/mean {offset} sd", "relative",
     lambda dtype, offset: below(1e-6 if dtype == "float32" else 1e-12),
     dtype=DTYPES, offset=(0, 100, 10_000))  # fmt: skip
def _covariance_error(dtype: str, offset: float) -> Numbers:
    """Largest entrywise error relative to sqrt(S_ii S_jj), against two passes in float64.

    Ours is the worst over orders of the rows, sizes of blocks and sizes of updates.
    """
    data = problem(pick(10_000, 300), pick(128, 8), dtype, offset=offset)
    exact, n = two_pass_covariance(data.X), len(data.X)
    error = partial(covariance_error, exact)
    ours = 0.0
    cuts = ((None, n), (None, 1), (4096, n), (64, n), (1, 99))
    for X, (block, update) in product((data.X, data.X[np.argsort(data.X[:, 0])]), cuts):
        moments = each(cut(update, X), sf.Moments(block_rows=block).update).run()
        ours = max(ours, error(moments.covariance()))
    others = {
        NUMPY: Contender(partial(np.cov, data.X, rowvar=False, dtype=data.X.dtype)),
        CE: peers.stream_concept_erasure(data, BLOCK, dtype),
        CE64: peers.stream_concept_erasure(data, BLOCK, "float64"),
        ONEDAL: peers.stream_onedal(data, BLOCK),
    }
    return {OURS: ours} | _numbers_of(others, error)


@job("trace left/balanced classes/mean {offset} sd", "ratio", offset=(0, 1000, 10_000))
def _trace_left(offset: float) -> Numbers:
    return _traces(problem(*pick((100_000, 64), (500, 8)), offset=offset))


@job("trace left/prevalence 1e-3, 3.5 sd apart", "ratio")
def _rare() -> Numbers:
    """Rows of unit variance; a rare class differs along one direction, the task along another."""
    n, d, prevalence = pick((100_000, 64, 1e-3), (500, 8, 1e-2))
    rng = np.random.default_rng(1)
    z = (rng.random(n) < prevalence).astype(np.int64)
    y = rng.integers(0, 2, n)
    X = rng.standard_normal((n, d), np.float32)
    X[:, 0] += np.float32(3.5) * z
    X[:, 1] += y
    return _traces(Problem(X, z, y))


def _traces(data: Problem) -> Numbers:
    """Spread of the class means of erased float32 rows over that before: 0 is perfect."""
    before = class_spread(data.X, data.z)
    contenders = {name: make(data) for name, make in LEACES.items()}
    return _numbers_of(contenders, lambda rows: class_spread(rows, data.z) / before)


def extra_bytes(prepare: Prepare, unit: float = 1.0) -> float | Absent:
    """Bytes, in a unit, that a task takes at its peak beyond what its process held before.

    `prepare` is a function of a module, or a partial one, and is called in a process of its own. It
    prepares data, runs once on a few rows, so that libraries are loaded and compiled, and returns
    the task. What the child raises is raised here; BrokenProcessPool, if it ends. Its anonymous
    memory is watched: pages of mapped files, which belong to the page cache, do not count.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        pid = child.submit(_prepare, prepare).result()
        before = peak = _anonymous(pid)
        work = child.submit(_work)
        while not wait([work], timeout=0.001).done:
            peak = max(peak, _anonymous(pid))
        work.result()
    return (peak - before) / unit if before else Absent("the system has no /proc")


_tasks: list[Callable[[], object]] = []  # of the child


def _prepare(prepare: Prepare) -> int:
    _tasks.append(prepare())
    gc.collect()
    return os.getpid()


def _work() -> None:
    _tasks[0]()


def _anonymous(pid: int) -> int:
    """Anonymous resident bytes of a process; 0 where the system does not say, or when it ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    match = re.search(r"RssAnon:\s*(\d+)", status)
    return 1024 * int(match[1]) if match else 0


@job("memory/mapped file/float32/1024", "3 d^2 doubles + 3 blocks", below(1.0))
def _mapped() -> Numbers:
    n, d = pick((400_000, 1024), (12_288, 16))
    unit = 3 * 8 * d**2 + 3 * 4 * d * BLOCK
    return {OURS: extra_bytes(partial(accumulate_file, n, d), unit)}


def accumulate_file(n: int, d: int) -> Callable[[], object]:
    """`Moments.from_blocks` over a .npy file of rows, with a binary concept."""
    path = write_rows(n, d)
    rows, z = np.load(path, mmap_mode="r"), np.arange(n) % 2
    sf.Moments.from_blocks(sf.sources.from_arrays(rows[:9000], {"z": z[:9000]}))
    return partial(sf.Moments.from_blocks, sf.sources.from_npy(path, {"z": z}))


def accumulate_wide() -> Callable[[], object]:
    """Blocks of float32 rows with a sketch; the blocks are made before."""
    sizes = ((200, 100), pick((1024, 100_000), (64, 80)))
    small, full = (accumulate(problem(*size), pick(512, 32), sketch_size=64) for size in sizes)
    small.run()
    return full.run


def accumulate_sparse() -> Callable[[], object]:
    """CSR rows with a sketch; one dense copy of them would be 5.5 GiB."""
    X, z = sparse_rows()
    sf.Moments(sketch_size=64).update(X[:50], {"z": z[:50]})
    return lambda: sf.Moments(sketch_size=64).update(X, {"z": z})


def apply_in_place(dtype: str) -> Callable[[], object]:
    """`eraser(X, out=X)`."""
    eraser = orthogonal(768, 1)
    X = np.ones((pick(100_000, 2000), 768), dtype)
    eraser(X[:2000], out=X[:2000])
    return lambda: eraser(X, out=X)


# Task of a process of its own, and the MiB that it may take beyond its data.
_TASKS: dict[str, tuple[Prepare, float]] = {
    "dense rows/rank 64/100,000": (accumulate_wide, 500.0),
    "sparse rows/rank 64/40,000": (accumulate_sparse, 100.0),
    "apply in place/float32/768": (partial(apply_in_place, "float32"), 8.0),
    "apply in place/float16/768": (partial(apply_in_place, "float16"), 8.0),
}


@job("memory/{task}", "MiB", lambda task: below(_TASKS[task][1]), task=_TASKS)
def _peak(task: str) -> Numbers:
    return {OURS: extra_bytes(_TASKS[task][0], 2**20)}
