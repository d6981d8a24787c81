"""Benchmarks do the same job on every side, measure what they say, and print what they stored."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EPS = float(np.finfo(np.float64).eps)
MODULES = (
    "asv_suite", "compare", "data", "jobs", "jobs_accumulate", "jobs_erase", "jobs_growth",
    "jobs_numbers", "machine", "page", "smoke", "timing",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules of the benchmarks, imported with tiny sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("SPLINCE_FAST_BENCH", "smoke")
        patch.setenv("SPLINCE_FAST_NUM_THREADS", "1")
        yield SimpleNamespace(**{name: import_module(f"benchmarks.{name}") for name in MODULES})


def condition(S: np.ndarray) -> float:
    """Condition number of the correlation matrix, which scaled factorisations work on."""
    scale = np.sqrt(np.diagonal(S))
    return float(np.linalg.cond(S / np.outer(scale, scale)))


@pytest.mark.slow
def test_contenders_of_every_job_give_the_same_result(bench: Any) -> None:
    moments = bench.data.problem(300, 16, "float64", classes=4).moments()
    # Sums of at most 300 terms; or maps by d = 16 products of a factor, whose error grows with the
    # condition number. Features have scales from 0.1 to 1: a map of them multiplies errors by 10.
    sums, maps = 300.0, 8 * 16 * 10 * condition(moments.covariance())
    streams = ("accumulate", "sampled", "stream", "labels", "cluster")
    compared = 0
    for job in bench.jobs.all_jobs():
        if job.unit not in ("row", "call"):
            continue  # a number
        ways = job.build()
        assert ways, job.name
        answers = {
            name: np.asarray(way.answer(way.run()))
            for name, way in ways.items()
            if getattr(way, "answer", None) and way.units == ways["splince_fast"].units
        }  # those with fewer units see only a part of the rows
        ours = answers.pop("splince_fast", None)
        if ours is None:  # timed against the library itself
            continue
        summed = job.name.partition("/")[0] in streams
        for name, other in answers.items():
            eps = max(np.finfo(a.dtype).eps for a in (ours, other))
            if summed and "float64" not in job.name:
                eps = max(eps, np.finfo(np.float32).eps)
            bound = (sums if summed else maps) * eps * np.abs(other).max()
            assert np.abs(ours - other).max() <= bound, (job.name, name)
            compared += 1
    assert compared >= 30  # without torch and dask; more with them
    erased, kept = (
        way.answer(way.run())
        for way in (bench.jobs_erase.leace_of(moments), bench.jobs_erase.splince_of(moments))
    )
    assert np.abs(erased - kept).max() > 1e3 * maps * EPS, "control: another map is seen"


def test_ratio_is_taken_round_by_round(bench: Any) -> None:
    # A drift of the machine by 10 leaves a ratio of 2 in every round, but not in the medians.
    fast, slow = (1.0, 10.0, 100.0, 1.0), (2.0, 20.0, 200.0, 2.0)
    assert set(bench.timing.ratio(slow, fast).values()) == {2.0}
    once = bench.timing.ratio(slow, (4.0,))
    assert (once["low"], once["median"]) == (0.5, 2.75), "one number is compared with every round"


def test_exponent_is_that_of_a_power_law(bench: Any) -> None:
    assert bench.jobs_growth.exponent(3e-9 * 16**2 / (3e-9 * 64**2)) == pytest.approx(2.0)


def test_stored_page_is_made_from_stored_results_without_paths(bench: Any) -> None:
    every = bench.page.read(bench.compare.RESULTS)
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page == bench.page.page(every)
    for path in bench.compare.RESULTS.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        for private in (str(ROOT), str(Path.home()), f'"{getpass.getuser()}"'):
            assert private not in text
    names = {job.name for job in bench.jobs.all_jobs()}
    assert {name for name, *_ in (*bench.page._RATES, *bench.page._PEERS)} <= names
