"""Jobs that measure a number instead of a time: rounding errors and peak memory."""

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
from benchmarks.data import Array, Problem, problem, split_rows, write_rows
from benchmarks.jobs import NUMPY, OURS, Contenders, Numbers, below, job
from benchmarks.jobs_accumulate import BLOCK, DTYPES, accumulate, sparse_rows
from benchmarks.jobs_erase import LEACES, orthogonal
from benchmarks.peers import CE, CE64, ONEDAL
from benchmarks.timing import Absent, Contender, each, pick

Prepare = Callable[[], Callable[[], object]]


def two_pass_covariance(X: Array) -> Array:
    """Return the covariance (ddof = 1) in float64, in two passes: centre, then multiply."""
    centred = X.astype(np.float64)
    centred -= centred.mean(axis=0)
    centred -= centred.mean(axis=0)  # removes the rounding error of the first mean
    return np.asarray(centred.T @ centred) / (len(X) - 1)


def covariance_error(exact: Array, computed: Array) -> float:
    """Return the largest of |computed_ij - S_ij| / sqrt(S_ii S_jj).

    S is the exact covariance.
    """
    root = np.sqrt(np.diagonal(exact))
    return float((np.abs(computed - exact) / np.outer(root, root)).max())


def class_mean_norm(X: Array, z: Array) -> float:
    """Return the Frobenius norm of the class means after subtraction of their mean.

    The first row is subtracted from all rows before the means are computed in float64.
    """
    origin = X[0].astype(np.float64)
    means = [(X[z == c].astype(np.float64) - origin).mean(axis=0) for c in np.unique(z)]
    return float(np.linalg.norm(means - np.mean(means, axis=0)))


def _numbers_of(
    contenders: Contenders, number_of: Callable[[Any], float]
) -> dict[str, float | Absent]:
    """Run all contenders; return the number that `number_of` computes from each result.

    Absent contenders remain as they are.
    """
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
    """Largest rounding error of the covariance, against two passes in float64.

    The error of splince_fast is the largest over row orders, block sizes and update sizes.
    """
    data = problem(pick(10_000, 300), pick(128, 8), dtype, offset=offset)
    exact, n = two_pass_covariance(data.X), len(data.X)
    error = partial(covariance_error, exact)
    ours = 0.0
    sizes = ((None, n), (None, 1), (4096, n), (64, n), (1, 99))
    for X, (block, update) in product((data.X, data.X[np.argsort(data.X[:, 0])]), sizes):
        moments = each(split_rows(update, X), sf.Moments(block_rows=block).update).run()
        ours = max(ours, error(moments.covariance()))
    others = {
        NUMPY: Contender(partial(np.cov, data.X, rowvar=False, dtype=data.X.dtype)),
        CE: peers.stream_concept_erasure(data, BLOCK, dtype),
        CE64: peers.stream_concept_erasure(data, BLOCK, "float64"),
        ONEDAL: peers.stream_onedal(data, BLOCK),
    }
    return {OURS: ours} | _numbers_of(others, error)


@job("remaining association/balanced classes/mean {offset} sd", "ratio", offset=(0, 1000, 10_000))
def _balanced_classes(offset: float) -> Numbers:
    return _remaining_association(problem(*pick((100_000, 64), (500, 8)), offset=offset))


@job("remaining association/prevalence 1e-3, 3.5 sd apart", "ratio")
def _rare_class() -> Numbers:
    """Association after erasure of a concept with a rare class.

    The features have noise of variance 1; feature 0 depends on the concept, feature 1 on the task.
    """
    n, d, prevalence = pick((100_000, 64, 1e-3), (500, 8, 1e-2))
    rng = np.random.default_rng(1)
    z = (rng.random(n) < prevalence).astype(np.int64)
    y = rng.integers(0, 2, n)
    X = rng.standard_normal((n, d), np.float32)
    X[:, 0] += np.float32(3.5) * z
    X[:, 1] += y
    return _remaining_association(Problem(X, z, y))


def _remaining_association(data: Problem) -> Numbers:
    """Norm of the centred class means after erasure, divided by the norm before.

    The ratio is 0 if erasure is perfect.
    """
    before = class_mean_norm(data.X, data.z)
    contenders = {name: make(data) for name, make in LEACES.items()}
    return _numbers_of(contenders, lambda rows: class_mean_norm(rows, data.z) / before)


def extra_bytes(prepare: Prepare, unit: float = 1.0) -> float | Absent:
    """Return the peak memory of a task minus the memory of its process before, in `unit` bytes.

    A child process calls `prepare`, which makes the data, warms up on a few rows and returns the
    task. `prepare` is a module-level function or a partial of one. Only anonymous memory counts,
    not the pages of mapped files. Exceptions of the child are raised here; BrokenProcessPool is
    raised if the child exits.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        pid = child.submit(_prepare_task, prepare).result()
        before = peak = _anonymous_bytes(pid)
        work = child.submit(_run_task)
        while not wait([work], timeout=0.001).done:
            peak = max(peak, _anonymous_bytes(pid))
        work.result()
    return (peak - before) / unit if before else Absent("the system has no /proc")


_tasks: list[Callable[[], object]] = []  # the child process stores its task here


def _prepare_task(prepare: Prepare) -> int:
    _tasks.append(prepare())
    gc.collect()
    return os.getpid()


def _run_task() -> None:
    _tasks[0]()


def _anonymous_bytes(pid: int) -> int:
    """Return the anonymous resident bytes of a process; 0 if /proc or the process is missing."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    match = re.search(r"RssAnon:\s*(\d+)", status)
    return 1024 * int(match[1]) if match else 0


@job("memory/mapped file/float32/1024", "3 d^2 doubles + 3 blocks", below(1.0))
def _mapped_file() -> Numbers:
    n, d = pick((400_000, 1024), (12_288, 16))
    unit = 3 * 8 * d**2 + 3 * 4 * d * BLOCK
    return {OURS: extra_bytes(partial(accumulate_file, n, d), unit)}


def accumulate_file(n: int, d: int) -> Callable[[], object]:
    """Return a task that runs `Moments.from_blocks` on a .npy file, with a binary concept."""
    path = write_rows(n, d)
    rows, z = np.load(path, mmap_mode="r"), np.arange(n) % 2
    sf.Moments.from_blocks(sf.sources.from_arrays(rows[:9000], {"z": z[:9000]}))
    return partial(sf.Moments.from_blocks, sf.sources.from_npy(path, {"z": z}))


def accumulate_wide() -> Callable[[], object]:
    """Return a task that accumulates variances of existing blocks of wide float32 rows."""
    sizes = ((200, 100), pick((1024, 100_000), (64, 80)))
    small, full = (
        accumulate(problem(*size), pick(512, 32), covariance_type="diag") for size in sizes
    )
    small.run()
    return full.run


def accumulate_sparse() -> Callable[[], object]:
    """Return a task that accumulates variances of CSR rows.

    A dense float32 copy of the rows would take 5.5 GiB.
    """
    X, z = sparse_rows()
    sf.Moments(covariance_type="diag").update(X[:50], {"z": z[:50]})
    return lambda: sf.Moments(covariance_type="diag").update(X, {"z": z})


def apply_in_place(dtype: str) -> Callable[[], object]:
    """Return a task that erases rows in place, by ``eraser(X, out=X)``."""
    eraser = orthogonal(768, 1)
    X = np.ones((pick(100_000, 2000), 768), dtype)
    eraser(X[:2000], out=X[:2000])
    return lambda: eraser(X, out=X)


# name: (function that prepares the task, limit of its extra memory in MiB)
_TASKS: dict[str, tuple[Prepare, float]] = {
    "dense rows/rank 64/100,000": (accumulate_wide, 500.0),
    "sparse rows/rank 64/40,000": (accumulate_sparse, 100.0),
    "apply in place/float32/768": (partial(apply_in_place, "float32"), 8.0),
    "apply in place/float16/768": (partial(apply_in_place, "float16"), 8.0),
}


@job("memory/{task}", "MiB", lambda task: below(_TASKS[task][1]), task=_TASKS)
def _peak_memory(task: str) -> Numbers:
    return {OURS: extra_bytes(_TASKS[task][0], 2**20)}
