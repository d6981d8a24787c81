"""Benchmarks do the same job on every side, measure what they say, and print what they stored."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba.core import event

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


# --- jobs ----------------------------------------------------------------------------------------


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


def test_accumulating_gives_the_covariance_in_two_passes(bench: Any) -> None:
    data = bench.data.problem(300, 8, offset=100.0)
    truth = bench.jobs_numbers.two_pass_covariance(data.X)
    way = bench.jobs_accumulate.accumulate(data, 7)
    found = way.answer(way.run())
    # Products of centred float32 rows: their sums err by n eps at most.
    bound = 300 * np.finfo(np.float32).eps
    assert bench.jobs_numbers.covariance_error(truth, found) < bound
    crude = np.cov(data.X, rowvar=False, dtype=np.float32, bias=True) * 1.01
    assert bench.jobs_numbers.covariance_error(truth, crude) > bound, "control: 1 % is seen"


def test_floors_do_the_products_they_stand_for(bench: Any) -> None:
    rng = np.random.default_rng(0)
    X, Z = rng.normal(size=(50, 6)), rng.normal(size=(50, 3))
    total, cross = np.zeros((6, 6), order="F"), np.zeros((6, 3), order="F")
    for _ in range(2):
        bench.jobs_accumulate.syrk_into(X, total)
        bench.jobs_accumulate.gemm_into(X, Z, cross)
    # 100 products per entry, each rounded once.
    np.testing.assert_allclose(np.tril(total), np.tril(2 * X.T @ X), atol=100 * EPS * 100)
    np.testing.assert_allclose(cross, 2 * X.T @ Z, atol=100 * EPS * 100)
    moments = bench.data.problem(300, 6, "float64", classes=3).moments()
    S, side = bench.jobs_erase.parts(moments, "z")
    floor = bench.jobs_erase.lapack(moments, "z")
    for _ in range(2):  # the second call starts from the same S
        L, solved = floor.run()
        np.testing.assert_allclose(np.tril(L) @ np.tril(L).T, S, atol=1e3 * EPS * np.abs(S).max())
        np.testing.assert_allclose(np.tril(L) @ solved, side, atol=1e3 * EPS)


class Clock:
    """A clock of its own in place of the machine's."""

    def __init__(self, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(bench.timing, "perf_counter", lambda: self.now)
        monkeypatch.setattr(bench.timing, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_targets_are_judged_by_the_right_side(bench: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SPLINCE_FAST_BENCH", "full")
    clock = Clock(bench, monkeypatch)
    naps = {"splince_fast": 0.01, "slow": 0.03, "quick": 0.005}
    ways = {
        name: bench.timing.Contender(lambda nap=nap: clock.sleep(nap)) for name, nap in naps.items()
    }
    ways["none"] = bench.timing.Absent("not installed: it")
    wanted = [("slow", 2, True), ("quick", 1, True), ("quick", 4, False), ("slow", 0.1, False),
              ("none", 1, True)]  # fmt: skip
    targets = tuple(bench.jobs.Target(*values) for values in wanted)
    job = bench.jobs.Job("group/case", "call", lambda: ways, targets, larger_of=("quick", "slow"))
    found = bench.compare.measure(job, budget=0.1)
    assert [target["met"] for target in found["targets"]] == [True, False, True, False, None]
    assert found["left_out"] == {"none": "not installed: it"}
    assert found["values"]["floor"] == found["values"]["slow"] != found["values"]["quick"]


# --- timing --------------------------------------------------------------------------------------


def test_ratio_is_taken_round_by_round(bench: Any) -> None:
    # A drift of the machine by 10 leaves a ratio of 2 in every round, but not in the medians.
    fast, slow = (1.0, 10.0, 100.0, 1.0), (2.0, 20.0, 200.0, 2.0)
    assert set(bench.timing.ratio(slow, fast).values()) == {2.0}
    once = bench.timing.ratio(slow, (4.0,))
    assert (once["low"], once["median"]) == (0.5, 2.75), "one number is compared with every round"


def test_contenders_alternate_and_long_calls_are_not_repeated(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLINCE_FAST_BENCH", "full")
    clock = Clock(bench, monkeypatch)
    monkeypatch.setattr(bench.timing, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(bench.timing, "_LONG_SECONDS", 0.2)
    calls: list[str] = []

    def pause(name: str) -> float:
        return 0.25 if name == "long" else 0.1 * (calls.count(name) == 1)

    contenders = {
        name: bench.timing.Contender(
            lambda name=name: calls.append(name) or clock.sleep(pause(name)),
            units=2.0,
        )
        for name in ("a", "b", "long")
    }
    timings = bench.timing.interleave(contenders, budget=0.0)
    assert calls == ["a", "b", "long", "a", "b", "b", "a", "a", "b"]
    assert [len(seconds) for seconds in timings.values()] == [3, 3, 1]
    # The first call (0.1 s) is not inside the clock.
    assert bench.timing.spread(timings["a"])["median"] < 0.02 / 2
    assert timings["long"][0] >= 0.25 / 2, "control: the time of a call is"


def test_a_first_call_that_compiles_is_not_a_result(bench: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SPLINCE_FAST_BENCH", "full")
    clock = Clock(bench, monkeypatch)
    calls: list[str] = []

    def run(name: str, compiles: bool) -> None:
        calls.append(name)
        clock.sleep(5.0 if calls.count(name) == 1 else 0.1)
        if compiles and calls.count(name) == 1:
            with event.trigger_event("numba:compile"):
                pass

    contenders = {
        name: bench.timing.Contender(partial(run, name, compiles))
        for name, compiles in (("compiles", True), ("long", False))
    }
    timings = bench.timing.interleave(contenders, budget=3.0)
    assert timings["compiles"].max() < 0.2
    assert list(timings["long"].round(1)) == [5.0], "control"


def test_a_sample_waits_until_threads_of_the_last_one_sleep(bench: Any, monkeypatch: Any) -> None:
    clock = Clock(bench, monkeypatch)
    monkeypatch.setattr(bench.timing, "process_time", lambda: min(clock.now, 0.1))
    bench.timing._rest(0.02)
    assert 0.1 < clock.now < 0.15, "one step more than the threads run"
    monkeypatch.setattr(bench.timing, "process_time", lambda: clock.now)
    bench.timing._rest(0.02)
    assert 0.5 < clock.now < 0.65, "control: what never ends is seen, and not waited for"


def allocating(size: int) -> Any:
    def work() -> bytearray:
        block = bytearray(b"x") * size
        time.sleep(0.05)
        return block

    return work


def failing() -> Any:
    raise KeyError("reason")


def ending() -> Any:
    return lambda: os._exit(1)


@pytest.mark.slow
def test_peak_memory_of_a_task_is_seen(bench: Any) -> None:
    extra = bench.jobs_numbers.extra_bytes(partial(allocating, 50_000_000), 1e6)
    assert extra == pytest.approx(50, rel=0.05)
    with pytest.raises(KeyError, match="reason"):
        bench.jobs_numbers.extra_bytes(failing)
    with pytest.raises(BrokenProcessPool):
        bench.jobs_numbers.extra_bytes(ending)


def test_exponent_is_that_of_a_power_law(bench: Any) -> None:
    assert bench.jobs_growth.exponent(3e-9 * 16**2 / (3e-9 * 64**2)) == pytest.approx(2.0)


def test_every_combination_of_axes_is_a_job(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(bench.jobs, "_JOBS", found)
    job, below = bench.jobs.job, bench.jobs.below

    @job("group/{a} of {b}", "row", lambda a, b: below(a), a=(1, 2), b=("x", "y"))
    def build(a: int, b: str) -> Any:
        return {"splince_fast": bench.timing.Contender(lambda: (a, b))}

    assert list(found) == ["group/1 of x", "group/1 of y", "group/2 of x", "group/2 of y"]
    last = found["group/2 of y"]
    assert (last.name, last.targets[0].limit) == ("group/2 of y", 2)
    assert last.build()["splince_fast"].run() == (2, "y")
    job("group/none", "row", modules=("no_such_module",))(build)
    assert found["group/none"].build()["splince_fast"].reason == "not installed: no_such_module"


# --- what is made of the jobs --------------------------------------------------------------------


@pytest.mark.slow
def test_smoke_run_measures_what_is_named() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.smoke", "growth", "merge"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2 + 9 + 1, "a header, and a line for every job"


def test_control_a_failure_ends_the_smoke_run(bench: Any, monkeypatch: Any) -> None:
    good = bench.jobs.Job("good", "call", lambda: {"splince_fast": 1.0})
    bad = bench.jobs.Job("bad", "call", lambda: {"splince_fast": 1 / 0})
    monkeypatch.setattr(bench.compare, "all_jobs", lambda: [good, bad])
    bench.smoke.run(["good"])
    with pytest.raises(ZeroDivisionError):
        bench.smoke.run([])
    with pytest.raises(SystemExit, match="no such benchmark"):
        bench.smoke.run(["no such benchmark"])


def test_asv_classes_track_every_job(bench: Any, monkeypatch: Any) -> None:
    suites = bench.asv_suite
    groups = [found for found in vars(suites).values() if hasattr(found, "track_ours")]
    names = [name for group in groups for name in group.params]
    assert sorted(names) == sorted(job.name for job in bench.jobs.all_jobs())
    seconds = suites.Merge().track_ours("merge/a + b/2048")
    assert np.all(np.array(seconds["samples"]) > 0)
    seen = {"measured": spread(3.0), "limit": 2.0, "at_least": False}
    slow = {"measured": spread(0.5), "limit": 2.0, "at_least": True}
    none = {"measured": None, "limit": 2.0, "at_least": True}
    for targets, expected in (([seen, none], 1.5), ([seen, slow], 4.0), ([none], np.nan)):
        monkeypatch.setattr(bench.compare, "measure", lambda job, budget, t=targets: {"targets": t})
        np.testing.assert_equal(suites.Merge().track_promised("merge/a + b/2048"), expected)


def test_configuration_of_asv_names_what_exists() -> None:
    lines = (ROOT / "asv.conf.json").read_text(encoding="utf-8").splitlines()
    settings = json.loads("\n".join(line for line in lines if not line.strip().startswith("//")))
    assert (ROOT / settings["benchmark_dir"] / "asv_suite.py").exists()


# --- the page ------------------------------------------------------------------------------------


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.5 * median, "high": 2 * median}


def results(family: int) -> dict[str, Any]:
    """A stored run of one job."""
    missed = {"against": "floor", "limit": 0.8125, "at_least": True, "met": False}
    job = {
        "name": "accumulate/float32/2048",
        "ratios": {"floor": spread(0.6125), "concept-erasure": spread(3.125)},
        "targets": [missed | {"measured": spread(0.6125)}],
    }
    facts = {
        "processor": "Some AMD Chip", "family": family, "avx512": False, "cores": 6, "threads": 5,
        "blas": {"kernels": "Zen"},
        "gemm_over_syrk": {"float32": {"scipy": 1.625, "torch": 2.375}, "float64": {}},
    }  # fmt: skip
    return {
        "commit": "0123456789abcdef", "changed": False, "began": "2020-02-02T02:02",
        "load_average": {"before": [0.25, 0, 0]}, "smoke": False, "machine": facts, "jobs": [job],
    }  # fmt: skip


def stored(name: str, seconds: float, **ratios: float) -> dict[str, Any]:
    return {
        "name": name, "values": {"splince_fast": spread(seconds)}, "targets": [],
        "ratios": {other: spread(value) for other, value in ratios.items()},
    }  # fmt: skip


def test_numbers_of_the_page_are_those_of_the_results(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(results(25)))
    newer = results(26)
    newer["load_average"]["before"][0] = 7.5
    newer["jobs"][0]["ratios"]["floor"]["median"] = 0.7375
    newer["jobs"] += [
        stored("growth/solve/features^3", 2e-3, quarter=1 / 64),
        stored("accumulate/float32/4096", 9e-6),
        stored("sampled/sums alone/4096", 0.9e-6),
        stored("cluster/1,048,576 rows/2048", 1e-6, **{"one process": 0.5}),
    ]
    (tmp_path / "b.json").write_text(json.dumps(newer))
    text = " ".join(bench.page.page(bench.page.read(tmp_path)).split())
    for part in (
        "| Some AMD Chip, family 26 (Zen 5) | 5 of 6 | Zen | scipy 1.625, torch 2.375 | not meas",
        "| 0.738 [0.306, 1.23] | 0.613 [0.306, 1.23] |",  # the newest family comes first
        "| 3.12 [1.56, 6.25] | 3.12 [1.56, 6.25] |",
        "- accumulate, floor: float32/2048 0.613 (>= 0.8125). Beside the product",
        "Some AMD Chip, family 25 (Zen 3): 0 of 1 targets are met.",
    ):
        assert part in text
    # 10^9 rows of twice the features: 9 us x 4 each; of 2^-12 of them, and sums of all, 0.9 us x 2.
    assert (
        'solve in features 3.00 (3). A billion rows: 10.0 h; subsample="auto" 0.5 h; on 16' in text
    )
    assert "such machines 1.2 h. " in text, "10 h / 16 / 0.5"
    assert text.count("provisional") == 1, "only the run on a busy machine"
    assert "0123456789ab |" in text


@pytest.mark.parametrize("key", ["commit", "machine", "jobs", "load_average"])
def test_results_that_lack_something_make_no_page(bench: Any, key: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no results"):
        bench.page.read(tmp_path)
    found = results(25)
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert "Some AMD Chip" in bench.page.page(bench.page.read(tmp_path))
    del found[key]
    (tmp_path / "a.json").write_text(json.dumps(found))
    with pytest.raises(KeyError, match=key):
        bench.page.page(bench.page.read(tmp_path))


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


def test_some_jobs_measured_again_replace_their_results_of_the_same_commit(
    bench: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    path, first, second = tmp_path / "a.json", *bench.jobs.all_jobs()[:2]
    monkeypatch.setattr(bench.machine, "describe", dict)
    monkeypatch.setattr(bench.machine, "commit", lambda: {"commit": "a", "changed": False})
    monkeypatch.setattr(bench.compare, "cells", lambda found: [found["name"]])

    def run(value: int, *jobs: Any, some: bool) -> list[tuple[str, int]]:
        monkeypatch.setattr(
            bench.compare, "measure", lambda job, _: {"name": job.name, "value": value}
        )
        bench.compare.run(jobs, path, some=some)
        return [(found["name"], found["value"]) for found in json.loads(path.read_text())["jobs"]]

    assert run(1, first, second, some=False) == [(first.name, 1), (second.name, 1)]
    assert run(2, first, some=True) == [(first.name, 2), (second.name, 1)]
    assert json.loads(path.read_text())["command"].count("benchmarks.compare") == 2
    monkeypatch.setattr(bench.machine, "commit", lambda: {"commit": "b", "changed": False})
    assert run(3, first, some=True) == [(first.name, 3)]
    assert run(4, second, some=False) == [(second.name, 4)]


def test_commands_are_recorded_without_paths(bench: Any, monkeypatch: Any) -> None:
    given = ["/home/someone/compare.py", "--json", "/home/someone/a.json", "--budget", "2", "a/b"]
    monkeypatch.setattr(sys, "argv", given)
    assert bench.machine.command() == ("python -m benchmarks.compare --json a.json --budget 2 a/b")
