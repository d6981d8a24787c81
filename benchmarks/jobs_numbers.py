"""Jobs whose result is a number, not a time: errors of rounding, and peaks of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import splince_fast as sf
from benchmarks import memory, peers, reference
from benchmarks.data import Problem, problem, rare_concept, write_rows
from benchmarks.jobs import NUMPY, OURS, Job, Target, Ways, scratch
from benchmarks.jobs_accumulate import BLOCK
from benchmarks.jobs_erase import erasers, splinces
from benchmarks.peers import CE, CE64, ONEDAL, Absent
from benchmarks.timing import Contender, pick


def below(limit: float) -> tuple[Target, ...]:
    return (Target("", limit, at_least=False),)


# --- rounding -------------------------------------------------------------------------------------


def _covariance_error() -> Iterator[Job]:
    """Largest entrywise error relative to sqrt(S_ii S_jj), against two passes in float64."""
    for dtype, limit in (("float32", 1e-6), ("float64", 1e-12)):
        for offset in (0.0, 1e2, 1e4):
            build = partial(_error_ways, dtype, offset)
            yield Job("covariance error", f"{dtype}/mean {offset:g} sd", "relative", build,
                      below(limit), number=True)  # fmt: skip


def _error_ways(dtype: str, offset: float) -> Ways:
    """Ours is the worst over orders of the rows, sizes of blocks and sizes of updates."""
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
        "torch": peers.covariance_torch(data),
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


def _trace_left() -> Iterator[Job]:
    """Distance of the class means after erasure over that before, of float32 rows."""
    n, d = pick((100_000, 64), (500, 8))
    for offset in (0.0, 1e3, 1e4):
        balanced = partial(problem, n, d, offset=offset)
        yield Job("trace left", f"balanced classes/mean {offset:g} sd", "ratio",
                  partial(_trace_ways, balanced), number=True)  # fmt: skip
    rare = partial(rare_concept, n, d, pick(1e-3, 1e-2), 3.5)
    yield Job("trace left", "prevalence 1e-3, 3.5 sd apart", "ratio",
              partial(_trace_ways, rare), number=True)  # fmt: skip


def _trace_ways(make: Callable[[], Problem]) -> Ways:
    data = make()

    def left(clean: Any) -> float:
        return reference.trace_left(data.X, np.asarray(clean), data.z)

    return {name: _judged(way, left) for name, way in erasers(data).items()}


# --- memory ---------------------------------------------------------------------------------------


def _memory() -> Iterator[Job]:
    """Peaks of child processes beyond what they hold before the job."""
    yield Job("memory", "mapped file/float32/1024", "3 d^2 doubles + 3 blocks", _mapped_ways,
              below(1.0), number=True)  # fmt: skip
    for dtype in ("float32", "float16"):
        build = partial(_in_place_ways, dtype)
        yield Job("memory", f"apply in place/{dtype}/768", "MiB", build, below(8.0), number=True)
    yield Job("memory", "fit and transform/float32/768", "times the rows", _fit_ways, number=True)


def _mapped_ways() -> Ways:
    n, d = pick((400_000, 1024), (12_288, 16))

    def ours() -> float:
        path = write_rows(scratch() / "large.npy", n, d)
        extra = memory.extra_bytes("benchmarks.memory:accumulate_file", path=str(path))
        path.unlink()
        return extra / (3 * 8 * d**2 + 3 * 4 * d * BLOCK)

    return {OURS: Contender(ours)}


def _in_place_ways(dtype: str) -> Ways:
    extra = partial(memory.extra_bytes, "benchmarks.memory:apply_in_place",
                    n=pick(100_000, 2000), d=768, dtype=dtype)  # fmt: skip
    return {OURS: Contender(lambda: extra() / 2**20)}


def _fit_ways() -> Ways:
    n, d = pick((100_000, 768), (500, 16))
    few = problem(64, 4)
    ways = {**erasers(few), NUMPY: splinces(few)[NUMPY]}

    def extra(name: str) -> float:
        return memory.extra_bytes("benchmarks.memory:erase", name=name, n=n, d=d) / (4 * n * d)

    return {
        name: way if isinstance(way, Absent) else Contender(partial(extra, name))
        for name, way in ways.items()
        if name in pick(tuple(ways), (OURS,))
    }


GROUPS = (_covariance_error, _trace_left, _memory)
