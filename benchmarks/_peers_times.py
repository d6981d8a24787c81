"""How long each contender takes for accumulating, fitting, solving, applying and streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import splince_fast as sf
from benchmarks import _machine, _peers
from benchmarks._data import problem
from benchmarks._peers import FLOOR, OURS, Absent
from benchmarks._rows import Job
from benchmarks._sizes import pick
from benchmarks._timing import Contender, interleave, ratio

BLOCK = 4096


def jobs() -> Iterator[Job]:
    """Every line of the table of times."""
    for dtype in ("float32", "float64"):
        for d in pick([384, 768, 2048, 4096], [24]):
            yield _accumulate(dtype, d)
    yield _one_row_streams(pick(3072, 24))
    yield _many_classes(pick(768, 24))
    for n in pick([10_000, 100_000, 1_000_000], [300]):
        yield _end_to_end(n, pick(768, 24))
    for d in pick([768, 2048], [24]):
        data = problem(2 * d, d, "float64")
        yield _job("solve", f"d = {d}, 2 classes", "call", _peers.solvers(data))
    data = problem(4096, pick(768, 24), "float64", classes=pick(28, 4))
    what = f"d = {data.X.shape[1]}, {pick(28, 4)} classes"
    yield _job("solve", what, "call", _peers.solvers(data, pick(28, 4)))
    for classes in pick([2, 28], [2]):
        yield _apply(classes)


def _job(group: str, what: str, unit: str, contenders: Mapping[str, Contender | Absent]) -> Job:
    present, missing = _peers.split(contenders)
    timings = interleave(present)
    ours = timings.pop(OURS)
    others = {name: ratio(timing, ours) for name, timing in timings.items()}
    return Job(group, what, unit, ours.median, others, missing)


def _accumulate(dtype: str, d: int) -> Job:
    block = pick(BLOCK, 64)
    data = problem(pick(4 if d < 4096 else 2, 2) * block, d, dtype)
    contenders: dict[str, Contender | Absent] = {
        OURS: _peers.accumulate_ours(data, block),
        FLOOR: _peers.accumulate_syrk(data, block),
        "concept-erasure": _peers.accumulate_concept_erasure(data, block, dtype=dtype),
        "concept-erasure float64": (
            _peers.accumulate_concept_erasure(data, block, dtype="float64")
            if dtype == "float32"
            else Absent("its statistics have the dtype of the rows")
        ),
        "oneDAL": _peers.accumulate_onedal(data, block),
        "LedoitWolf": (
            _peers.accumulate_ledoit_wolf(data)
            if d < 2048
            else Absent("many small products in Python, most of a minute at this width")
        ),
        "IncrementalPCA": (
            _peers.accumulate_ipca(data, block)
            if d < 2048
            else Absent("a singular value decomposition per block, minutes at this width")
        ),
        "NumPy": _peers.accumulate_numpy(data),
        "torch": _peers.accumulate_torch(data),
    }
    return _job("accumulate", f"{dtype}, d = {d}", "row", contenders)


def _one_row_streams(d: int) -> Job:
    data = problem(pick(BLOCK, 64), d)
    few = 64
    return _job(
        "one-row updates", f"float32, d = {d}", "row",
        {
            OURS: _peers.accumulate_ours(data, 1),
            "concept-erasure": _peers.accumulate_concept_erasure(
                data, 1, dtype="float32", only=few
            ),
            "oneDAL": _peers.accumulate_onedal(data, 1, only=few),
            "IncrementalPCA": Absent("needs as many rows per update as components"),
        },
    )  # fmt: skip


def _many_classes(d: int) -> Job:
    block, classes = pick(BLOCK, 64), pick(28, 4)
    data = problem(4 * block, d, classes=classes)
    return _job(
        "accumulate", f"float32, d = {d}, {classes} classes", "row",
        {
            OURS: _peers.accumulate_ours(data, block),
            "concept-erasure": _peers.accumulate_concept_erasure(
                data, block, dtype="float32", classes=classes
            ),
            "concept-erasure float64": _peers.accumulate_concept_erasure(
                data, block, dtype="float64", classes=classes
            ),
        },
    )  # fmt: skip


def _end_to_end(n: int, d: int) -> Job:
    """Fit and apply: rows and labels in, clean rows out."""
    what = f"float32, n = {n:,}, d = {d}"
    free = _machine.available_memory() - 4 * n * d
    least = (_peers.ARRAYS_AT_PEAK[OURS] - 1) * 4 * n * d
    if least > free:
        reason = f"the rows and a result take {2 * least / 2**30:.0f} GiB, more than is free"
        return Job("fit and apply", what, "row", None, {}, {"everything": reason})
    work = _peers.erasers(problem(n, d), free_bytes=free)
    contenders = {
        name: Contender(erase, units=n) if callable(erase) else erase
        for name, erase in work.items()
    }
    return _job("fit and apply", what, "row", contenders)


def _apply(classes: int) -> Job:
    n, d = pick((100_000, 768), (300, 24))
    eraser = sf.leace(problem(4 * d, d, classes=classes).moments(), erase="z")
    what = f"float32, rank {eraser.rank}, n = {n:,}, d = {d}"
    return _job("apply", what, "row", _peers.appliers(problem(n, d).X, eraser))
