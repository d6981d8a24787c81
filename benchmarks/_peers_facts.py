"""What each contender takes in memory, and how right it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from benchmarks import _memory, _peers, _reference
from benchmarks._data import Problem, problem, rare_concept
from benchmarks._peers import Absent
from benchmarks._rows import Fact
from benchmarks._sizes import pick


def facts() -> Iterator[Fact]:
    """Every line of the tables of memory and accuracy."""
    yield _memory_of_fit_and_apply()
    for offset in (0.0, 1e3, 1e4):
        data = problem(pick(200_000, 500), pick(64, 8), offset=offset)
        truth = _reference.two_pass_covariance(data.X)
        yield _fact(
            "error of the covariance, float32 rows",
            f"n = {len(data.X):,}, mean {offset:g} standard deviations",
            "entrywise, against float64 in two passes",
            _peers.covariances(data, pick(4096, 128)),
            partial(_reference.covariance_error, truth=truth),
        )
        yield _trace_left(f"balanced classes, mean {offset:g} standard deviations", data)
    data = rare_concept(pick(200_000, 4000), pick(64, 8), pick(1e-3, 1e-2), 3.5)
    yield _trace_left("prevalence 1e-3, classes 3.5 standard deviations apart", data)


def _memory_of_fit_and_apply() -> Fact:
    """Peak beyond the rows themselves; the clean rows that are returned are part of it."""
    n, d = pick((200_000, 768), (500, 16))
    values, missing = {}, {}
    for name, work in _peers.erasers(problem(64, 4)).items():
        if isinstance(work, Absent):
            missing[name] = work.reason
        elif name in pick(list(_peers.ARRAYS_AT_PEAK), [_peers.OURS]):
            extra = _memory.extra_bytes("benchmarks._jobs:erase", name=name, n=n, d=d)
            values[name] = extra / (4 * n * d)
    return Fact(
        "peak memory of fit and apply beyond the rows", f"float32, n = {n:,}, d = {d}",
        "times the size of the rows", values, missing,
    )  # fmt: skip


def _trace_left(what: str, data: Problem) -> Fact:
    """Distance of the class means after erasure over that before, of float32 rows."""

    def left(clean: NDArray[Any]) -> float:
        return _reference.trace_left(data.X, clean, data.z)

    return _fact(
        "trace of the concept that is left, float32 rows", what,
        "distance of class means after over before", _peers.erasers(data), left,
    )  # fmt: skip


def _fact(
    group: str,
    what: str,
    unit: str,
    contenders: Mapping[str, Callable[[], NDArray[Any]] | Absent],
    judge: Callable[[NDArray[Any]], float],
) -> Fact:
    values = {name: judge(work()) for name, work in contenders.items() if callable(work)}
    missing = {n: work.reason for n, work in contenders.items() if isinstance(work, Absent)}
    return Fact(group, what, unit, values, missing)
