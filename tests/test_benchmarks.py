"""The benchmarks run, measure what they say, and cannot fail in silence."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import splince_fast as sf

ROOT = Path(__file__).resolve().parent.parent
EPS = float(np.finfo(np.float64).eps)
MODULES = (
    "_data", "_discovery", "_machine", "_memory", "_peers", "_profile", "_reference", "_rows",
    "_sizes", "_tables", "_timing", "_model", "growth", "page", "peers", "profiles", "smoke",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules of the benchmarks, imported with tiny sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("SPLINCE_FAST_BENCH", "smoke")
        yield SimpleNamespace(**{name: import_module(f"benchmarks.{name}") for name in MODULES})


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True, text=True, check=False, cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


# --- they run ------------------------------------------------------------------------------------


def test_every_benchmark_runs_once() -> None:
    # Names of asv benchmarks have parentheses; targets run in a test of their own.
    result = run("benchmarks.smoke", "(", "discovery", "peers", "growth", "profiles", "page")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith(", 0 failed")
    assert int(result.stdout.split()[0]) > 100


def test_control_a_benchmark_that_fails_is_reported(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "benchmarks" / "broken.py").write_text(
        "from benchmarks import _asv\n"
        "class Broken(_asv.Suite):\n"
        "    params = ([0, 1],)\n"
        "    def time_reciprocal(self, n):\n        1 / n\n"
        "    def track_reciprocal(self, n):\n        return 1 / n if n else float('nan')\n"
    )
    result = run("benchmarks.smoke", "broken.", cwd=tmp_path)
    assert result.returncode == 1
    assert "4 benchmarks ran" in result.stdout
    assert "2 failed" in result.stdout
    assert "FAILED broken.Broken.time_reciprocal(0)" in result.stderr
    assert "FAILED broken.Broken.track_reciprocal(0)" in result.stderr


def test_a_text_that_matches_no_benchmark_is_a_failure(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLINCE_FAST_NUM_THREADS", "1")  # as the run sets it, but for good
    assert bench.smoke.run(["no such benchmark"]) == 1
    assert bench.smoke.run(["merge.Algebra.time_copy"]) == 0


def test_every_theme_is_discovered_with_every_kind(bench: Any) -> None:
    families = {benchmark.family for benchmark in bench._discovery.find()}
    themes = {family.split(".")[0] for family in families}
    assert themes == {
        "accumulate", "merge", "solve", "apply", "files", "estimators", "import_time",
    }  # fmt: skip
    kinds = {family.split(".")[2].split("_")[0] for family in families}
    assert kinds == {"time", "timeraw", "peakmem", "track"}


def test_configuration_of_asv_names_what_exists() -> None:
    lines = (ROOT / "asv.conf.json").read_text(encoding="utf-8").splitlines()
    settings = json.loads("\n".join(line for line in lines if not line.strip().startswith("//")))
    assert (ROOT / settings["benchmark_dir"] / "__init__.py").exists()
    assert settings["environment_type"] == "virtualenv"
    assert "pip wheel" in settings["build_command"][0]


def test_targets_are_all_there_measured_or_explained(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    result = run("benchmarks.targets", "--smoke", "--json", str(path))
    assert result.returncode == 0, result.stderr
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        assert row["met"] is None, "tiny sizes decide nothing"
        assert row["measured"] or row["note"], row["what"]
    promised = {(row["sense"], row["target"]) for row in rows}
    assert promised == {
        (">=", 0.85), (">=", 2.0), (">=", 3.5), (">=", 1.4), (">=", 3.0), (">=", 5.5), (">=", 1.2),
        (">=", 50), ("<=", 1.25), ("<=", 1.5), ("<=", 1e-6), ("<=", 1e-12), ("<=", 1.0),
        ("<=", 1.3), (">=", 15), (">=", 25), (">=", 1.0), (">=", 10), (">=", 5), ("<=", 8),
    }  # fmt: skip
    text = path.read_text(encoding="utf-8")
    assert str(ROOT) not in text
    assert str(Path.home()) not in text
    assert f'"{getpass.getuser()}"' not in text


# --- they measure what they say ------------------------------------------------------------------


def test_ratio_is_taken_round_by_round(bench: Any) -> None:
    # A drift of the machine by 10 leaves a ratio of 2 in every round, but not in the medians.
    fast = bench._timing.Timing((1.0, 10.0, 100.0, 1.0))
    slow = bench._timing.Timing((2.0, 20.0, 200.0, 2.0))
    found = bench._timing.ratio(slow, fast)
    assert (found.low, found.median, found.high) == (2.0, 2.0, 2.0)
    once = bench._timing.ratio(slow, bench._timing.Timing((4.0,)))
    assert (once.low, once.median) == (0.5, 2.75), "a single number stands beside every round"


def test_contenders_take_turns(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINCE_FAST_BENCH", "full")
    monkeypatch.setattr(bench._timing, "sleep", lambda _: None)
    monkeypatch.setattr(bench._timing, "_LEAST_SECONDS", 0.0)
    calls: list[str] = []
    contenders = {
        name: bench._timing.Contender(lambda name=name: calls.append(name), units=2.0)
        for name in "ab"
    }
    timings = bench._timing.interleave(contenders, budget=0.0)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]


def test_a_call_that_takes_too_long_is_not_repeated(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLINCE_FAST_BENCH", "full")
    monkeypatch.setattr(bench._timing, "_LONG_SECONDS", 0.01)
    calls = []

    def slow() -> None:
        calls.append("slow")
        time.sleep(0.02)

    contenders = {
        "slow": bench._timing.Contender(slow),
        "quick": bench._timing.Contender(lambda: None),
    }
    timings = bench._timing.interleave(contenders, budget=0.015)
    assert calls == ["slow"]
    assert [len(timing.seconds) for timing in timings.values()] == [1, 3]


def test_preparation_is_outside_the_clock(bench: Any) -> None:
    slow_before = bench._timing.Contender(lambda: None, before=lambda: time.sleep(0.05))
    assert bench._timing.interleave({"": slow_before})[""].median < 0.01


@pytest.mark.parametrize("classes", [2, 4])
def test_formulas_that_are_raced_against_give_the_same_eraser(bench: Any, classes: int) -> None:
    moments = bench._data.problem(2000, 12, "float64", classes=classes).moments()
    S = moments.covariance()
    Sz, Sy = (moments.cross_covariance(name) for name in ("z", "y"))
    P = sf.splince(moments, erase="z", keep="y").matrix()
    rank = classes - 1
    printed = bench._reference.explicit_splince(S, Sz, Sy, rank, rank)
    left, right = bench._reference.scipy_splince(S, Sz, Sy)
    # Both sides err by 8 d eps (cond + q) / s (Theorem 1, forward error); cond < 1e4, s > 0.05.
    bound = 8 * 12 * EPS * 1e4 / 0.05
    assert np.abs(printed - P).max() < bound
    assert np.abs(np.eye(12) - left @ right.T - P).max() < bound
    leace = sf.leace(moments, erase="z").matrix()
    assert np.abs(leace - P).max() > 1e6 * bound, "control: keeping nothing is another map"


def test_floors_do_the_products_they_stand_for(bench: Any) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 6))
    total = np.zeros((6, 6), order="F")
    bench._reference.syrk_into(X, total)
    bench._reference.syrk_into(X, total)
    # 100 products per entry, each rounded once.
    np.testing.assert_allclose(np.tril(total), np.tril(2 * X.T @ X), atol=100 * EPS * 100)
    S = np.asfortranarray(X.T @ X)
    side = np.asfortranarray(rng.normal(size=(6, 2)))
    L, solved = S.copy(order="F"), side.copy(order="F")
    bench._reference.factor_and_solve(L, solved, side.copy(order="F"))
    np.testing.assert_allclose(np.tril(L) @ np.tril(L).T, S, atol=1e3 * EPS * np.abs(S).max())
    np.testing.assert_allclose(np.tril(L) @ solved, side, atol=1e3 * EPS)


def test_trace_left_sees_what_is_left(bench: Any) -> None:
    data = bench._data.problem(500, 5, "float64")
    clean = sf.LEACE().fit(data.X, concept=data.z).transform(data.X)
    assert bench._reference.trace_left(data.X, clean, data.z) < 1e-12
    half = (data.X + clean) / 2
    assert bench._reference.trace_left(data.X, half, data.z) == pytest.approx(0.5)


def test_every_eraser_that_is_compared_erases(bench: Any) -> None:
    data = bench._data.problem(2000, 6)
    for name, work in bench._peers.erasers(data).items():
        if callable(work):
            # Float32 rows of 2000: their rounding, averaged, stays far below 1e-4 of the gap.
            assert bench._reference.trace_left(data.X, work(), data.z) < 1e-4, name
        else:
            assert work.reason.startswith("not installed: "), name


def test_contenders_that_do_not_fit_into_memory_are_left_out(bench: Any) -> None:
    data = bench._data.problem(100, 4)
    work = bench._peers.erasers(data, free_bytes=2 * data.X.nbytes)
    assert callable(work[bench._peers.OURS])
    assert "GiB" in work["NumPy"].reason


def test_peak_memory_of_a_job_is_seen(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_jobs.py").write_text(
        "import time\n"
        "def allocate(size):\n"
        "    def work():\n"
        "        block = bytearray(b'x') * size\n"
        "        time.sleep(0.05)\n"
        "        del block\n"
        "    return work\n"
        "def fail():\n    raise KeyError('reason')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    extra = bench._memory.extra_bytes("some_jobs:allocate", size=50_000_000)
    assert extra == pytest.approx(50e6, rel=0.05)
    with pytest.raises(bench._memory.JobError, match="reason"):
        bench._memory.extra_bytes("some_jobs:fail")


def test_model_predicts_from_rates(bench: Any) -> None:
    rates = bench._model.Rates(syrk=1e12, potrf=1e11, copy=1e10)
    # 10^9 8192^2 / 10^12 s, a copy of 32.8 TB, and 10^9 / 2048 merges of 5 8192^2 bytes.
    expected = 67_109 + 3276.8 + 1e9 / 2048 * 5 * 8192**2 / 1e10
    assert rates.accumulate(1e9, 8192) == pytest.approx(expected, rel=1e-3)
    slow_disk = bench._model.Rates(1e12, 1e11, 1e10, disk=1e8)
    assert slow_disk.accumulate(1e9, 8192) == pytest.approx(1e9 * 8192 * 4 / 1e8)
    # A factorisation of 1.83 s, and twenty sweeps over 268 MB.
    assert rates.solve(8192) == pytest.approx(1.8325 + 20 * 0.026844, rel=1e-3)


def test_exponent_is_that_of_a_power_law(bench: Any) -> None:
    sizes = (16, 32, 64, 128)
    growth = bench.growth.Growth("", "d", 2, sizes, tuple(3e-9 * d**2 for d in sizes), ())
    assert growth.exponent == pytest.approx(2.0)


def test_durations_have_a_unit_that_fits(bench: Any) -> None:
    shown = [bench._tables.seconds(s) for s in (2.5, 0.99999, 0.9994, 3e-5, 5e-8)]
    assert shown == ["2.5 s", "1 s", "999 ms", "30 us", "50 ns"]
    shown = [bench._tables.duration(s) for s in (599.0, 7200.0, 3e5)]
    assert shown == ["599 s", "2.0 h", "3.5 days"]


def test_verdicts(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINCE_FAST_BENCH", "full")
    rows = bench._rows
    assert rows.at_least("x", 2.0, rows.exactly(2.0)).met is True
    assert rows.at_least("x", 2.0, rows.exactly(1.9)).cells()[3] == "MISSED"
    assert rows.at_most("x", 2.0, rows.exactly(2.1)).met is False
    assert rows.at_most("x", 2.0, None, "not installed: y").cells()[3:] == ["-", "not installed: y"]


def test_an_unknown_size_is_refused(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINCE_FAST_BENCH", "large")
    with pytest.raises(SystemExit, match="'smoke' or 'full'"):
        bench._sizes.smoke()


# --- where the time goes -------------------------------------------------------------------------


class Naps:
    """Work that takes time by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def inner(self) -> None:
        self.now += 2.0

    def outer(self) -> None:
        self.inner()
        self.now += 1.0
        self.inner()

    def job(self) -> None:
        self.outer()
        self.now += 0.5
        other = threading.Thread(target=self.inner)
        other.start()
        other.join()

    def stages(self, bench: Any) -> list[Any]:
        return [bench._profile.Stage(name, self, name) for name in ("outer", "inner")]


def test_a_stage_counts_alone_and_all_sum_to_the_whole(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps = Naps()
    monkeypatch.setattr(bench._profile, "perf_counter", naps.clock)
    job, floor = (bench._timing.Contender(f) for f in (naps.job, naps.inner))
    found = bench._profile.profile("", "", job, naps.stages(bench), "floor", floor)
    # Twice 2 inside the outer stage; the third time is another thread's, for which this one waits.
    assert found.stages == [("outer", 1.0), ("inner", 4.0), (bench._profile.REST, 2.5)]
    assert found.seconds == 7.5
    assert found.shares == {"outer": 1 / 7.5, "inner": 4 / 7.5, bench._profile.REST: 2.5 / 7.5}


def test_what_was_timed_is_put_back_whatever_happens(bench: Any) -> None:
    naps = Naps()
    before = naps.inner, Naps.outer
    stages = [bench._profile.Stage("", Naps, "outer"), bench._profile.Stage("", naps, "inner")]
    with bench._profile.watched(stages):
        assert naps.inner != before[0]
        assert Naps.outer != before[1]
    assert (naps.inner, Naps.outer) == before
    with pytest.raises(ZeroDivisionError), bench._profile.watched(stages):
        1 / 0  # noqa: B018
    assert (naps.inner, Naps.outer) == before
    missing = [*stages, bench._profile.Stage("", naps, "missing")]
    with pytest.raises(AttributeError, match="missing"), bench._profile.watched(missing):
        pass
    assert (naps.inner, Naps.outer) == before


def test_profiles_reach_every_stage_and_leave_the_library_as_it_was(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[tuple[Any, str, object]] = []
    watched = bench._profile.watched

    def spy(stages: Any) -> Any:
        touched.extend((owner, name, vars(owner)[name]) for _, owner, name in stages)
        return watched(stages)

    monkeypatch.setattr(bench._profile, "watched", spy)
    monkeypatch.setenv("SPLINCE_FAST_NUM_THREADS", "1")
    found = list(bench.profiles.profiles())
    assert {one.group for one in found} == {"accumulate", "solve", "apply", "fit an estimator"}
    for one in found:
        assert one.stages[-1][0] == bench._profile.REST
        assert all(seconds > 0 for _, seconds in one.stages), "a stage was never called"
        assert one.untimed > 0
        assert sum(one.shares.values()) == pytest.approx(1.0, rel=len(one.stages) * EPS)
    assert touched
    for owner, name, original in touched:
        assert vars(owner)[name] is original, name


# --- the page ------------------------------------------------------------------------------------


def _ratio(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.5 * median, "high": 2.0 * median}


def _target(what: str, sense: str, target: float, measured: float | None, met: bool | None) -> Any:
    found = None if measured is None else _ratio(measured)
    note = "" if measured else "not installed: something"
    return {"what": what, "sense": sense, "target": target, "measured": found, "met": met,
            "note": note}  # fmt: skip


def _profile(group: str, what: str, stages: dict[str, float]) -> Any:
    return {"group": group, "what": what, "stages": list(stages.items()), "untimed": 0.9,
            "floor": "bare thing", "floor_seconds": 0.45, "shares": {}}  # fmt: skip


def _head(program: str, **environment: str) -> dict[str, Any]:
    machine = {
        "date": "2024-02-29", "processor": "Some Processor", "cores": 6, "memory_gib": 12.5,
        "system": "Linux x86_64", "python": "3.11.9", "splince_fast": "0.1",
        "versions": {"numpy": "2.0.1"}, "environment": environment,
        "blas": {"name": "scipy", "core": "SkylakeX", "reason": "asked for"},
        "pools": [{"library": "openblas", "version": "0.3.27", "core": "Zen", "threads": 6}],
    }  # fmt: skip
    return {"command": f"python -m benchmarks.{program}", "smoke": False, "machine": machine}


def results() -> dict[str, Any]:
    """Small results of every program."""
    job = {"group": "solve", "what": "d = 4321", "unit": "call", "ours": 0.002}
    return {
        "targets": {
            **_head("targets"),
            "rows": [
                _target("rate against bare SYRK, d = 768, float32", ">=", 0.85, 0.8765, True),
                _target("splince against potrf and two solves, d = 2048", "<=", 1.5, 1.777, False),
                _target("apply against np.copyto, rank 1", ">=", 1.0, 0.9091, False),
                _target("relative error of S, float32", "<=", 1e-6, 3.21e-7, True),
                _target("wide kernels: rate, d = 5", ">=", 1.4, None, None),
            ],
        },
        "peers": {
            **_head("peers"),
            "times": [
                {**job, "others": {"tool": _ratio(33.3), "floor": _ratio(0.111)}, "left_out": {}},
                {**job, "what": "d = 5", "others": {"tool": _ratio(0.7071)},
                 "left_out": {"rival": "it needs a licence"}},
            ],
            "facts": [{"group": "peak memory", "what": "n = 77", "unit": "GiB",
                       "values": {"splince_fast": 0.25, "tool": 9.75}, "left_out": {}}],
        },
        "growth": {
            **_head("growth"),
            "rates": {"syrk": 2.34e11, "potrf": 5.6e10, "copy": 7.8e9},
            "growth": [{"what": "accumulate", "axis": "d", "promised": 2, "sizes": [10, 100],
                        "seconds": [1.0, 100.0], "share": [0.5, 0.66], "exponent": 2.0}],
            "checks": [{"what": "solve, d = 9", "predicted": 1.0, "measured": 1.37}],
            "prediction": {"n": 1e9, "d": 8192, "seconds": {"accumulate": 360000.0, "solve": 8.0,
                           "apply": 7200.0},
                           "rates": {"syrk": 9.87e11, "potrf": 1e11, "copy": 1e10, "disk": 3e9}},
        },
        "profiles": {
            **_head("profiles", OPENBLAS_CORETYPE="Haswell"),
            "profiles": [
                _profile("accumulate", "d = 768", {"product": 0.6, "centre": 0.3, "labels": 0.1}),
                _profile("solve", "d = 32", {"kernel": 0.25, "rest (Python)": 0.75}),
                _profile("apply", "rank 1", {"kernel": 1.0}),
                _profile("fit an estimator", "n = 200", {"validation": 0.37, "solve": 0.63}),
            ],
        },
    }  # fmt: skip


@pytest.fixture
def make_page(bench: Any, tmp_path: Path) -> Callable[..., str]:
    def make(content: dict[str, Any], *more: str) -> str:
        arguments = ["--out", str(tmp_path / "performance.md"), *more]
        for program, found in content.items():
            path = tmp_path / f"{program}.json"
            path.write_text(json.dumps(found))
            arguments += [f"--{program}", str(path)]
        bench.page.main(arguments)
        return (tmp_path / "performance.md").read_text()

    return make


def test_page_holds_every_row_and_marks_what_is_missed(make_page: Callable[..., str]) -> None:
    content = results()
    page = make_page(content)
    lines = page.splitlines()
    for row in content["targets"]["rows"]:
        (line,) = [text for text in lines if text.startswith(f"| {row['what']} ")]
        assert ("MISSED" in line) == (row["met"] is False)
        assert (" met " in line) == (row["met"] is True)
        assert ("not measured" in line) == (row["measured"] is None)
    rows = [" ".join(line.split()) for line in lines]
    for row in (
        "| solve | d = 4321 | 2 ms/call | 33.3 [16.6, 66.6] | 0.111 [0.0555, 0.222] |",
        "| solve | d = 5 | 2 ms/call | 0.707 [0.354, 1.41] | |",
        "| n = 77 (GiB) | 0.25 | 9.8 |",
        "- rival left out of solve d = 5: it needs a licence",
        "| accumulate | d = 10, 100 | 1 s, 100 s | 2.00 | 2 | 0.66 |",
        "| solve, d = 9 | 1 s | 1.37 s | 1.37 |",
        "| accumulate | 4.2 days |",
        "| solve | 8 s |",
        "| apply | 2.0 h |",
        "| d = 768 | 1 s | 60.0% | 30.0% | 10.0% | 900 ms | 450 ms |",
        "| n = 200 | 1 s | 37.0% | 63.0% | 900 ms | 450 ms |",
    ):
        assert row in rows


def test_sentences_of_the_page_are_made_of_the_results(make_page: Callable[..., str]) -> None:
    page = " ".join(make_page(results()).split())
    for sentence in (
        "Measured on Some Processor, 6 cores, 12.5 GiB, Linux x86_64, with Python 3.11.9, "
        "splince_fast 0.1, numpy 2.0.1; with all packages loaded the thread pools are openblas "
        "0.3.27 Zen x6.",
        "**OPENBLAS_CORETYPE was set in the environment",
        "runs at 0.876 of the rate of the bare symmetric product",
        "takes 1.78 (d = 2048) times as long as a bare Cholesky",
        "is 3.21e-07 (float32)",
        "| tool | 2 | 0.707 | 17 | 33.3 | 1 |",
        "2 of 4 targets with a verdict are met (without one: 1). These are missed: - splince "
        "against potrf and two solves, d = 2048: 1.78 [0.888, 3.55], target <= 1.5 - apply against "
        "np.copyto, rank 1: 0.909 [0.455, 1.82], target >= 1 In 1 of 2 comparisons with other "
        "packages splince_fast is slower: - solve, d = 5: tool takes 0.707 [0.354, 1.41] of its",
        "The product's share of an update is 60% (d = 768). Where it is smallest, the largest "
        "other shares are centre (30%) and labels (10%).",
        "A solve at d = 32 takes 900 ms, 75% of it outside the compiled kernel",
        "scikit-learn's validation is 37% of it",
        "SYRK in float32 234 GFLOP/s",
        "For n = 1e+09 float32 rows of d = 8192, 32.8 TB, at SYRK in float32 987 GFLOP/s, POTRF in "
        "float64 100 GFLOP/s, copy 10 GB/s of what is read, disk 3 GB/s, it predicts",
        "as long as it delivers 0.091 GB/s",
        "not measured: not installed: something",
    ):
        assert sentence in page, sentence


def test_page_draws_the_figure_and_links_it(make_page: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "figures").mkdir()
    path = tmp_path / "figures" / "peers.svg"
    page = make_page(results(), "--figure", str(path))
    assert "](figures/peers.svg)" in page
    assert str(tmp_path) not in page
    drawn = path.read_text()
    assert "solve: d = 4321" in drawn
    make_page(results(), "--figure", str(path))
    assert path.read_text() == drawn, "the same results draw the same file"
    assert "figures" not in make_page(results())


def _keys(content: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every key, but for those of mappings that may hold any."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*where, key)
            if key not in ("versions", "environment", "others", "values", "left_out"):
                yield from _keys(value, (*where, key))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield from _keys(value, (*where, index))


def _is_needed(where: tuple[Any, ...]) -> bool:
    """Whether a key is not derived, not optional, and (pools) of the run that is shown."""
    derived = {"exponent", "shares", "disk"}
    return (
        len(where) > 1 and where[-1] not in derived and ("pools" not in where or "peers" in where)
    )


def test_a_missing_key_ends_the_making_of_the_page(
    make_page: Callable[..., str], tmp_path: Path
) -> None:
    needed = list(filter(_is_needed, _keys(results())))
    assert len(needed) > 100
    for where in needed:
        content = results()
        inside: Any = content
        for step in where[:-1]:
            inside = inside[step]
        del inside[where[-1]]
        with pytest.raises(SystemExit, match=f"benchmarks.{where[0]} have no '{where[-1]}'"):
            make_page(content)
    assert not (tmp_path / "performance.md").exists()
    make_page(results())  # control: with all of them there is a page


def test_groups_that_sentences_need_are_asked_for(make_page: Callable[..., str]) -> None:
    content = results()
    del content["targets"]["rows"][0]
    with pytest.raises(SystemExit, match="begins with 'rate against bare SYRK, '"):
        make_page(content)
    content = results()
    del content["profiles"]["profiles"][2]
    with pytest.raises(SystemExit, match="no group 'apply'"):
        make_page(content)


@pytest.mark.parametrize("key", ["processor", "cores", "versions", "python"])
def test_runs_of_different_machines_make_no_page(key: str, make_page: Callable[..., str]) -> None:
    content = results()
    content["growth"]["machine"][key] = "another"
    with pytest.raises(SystemExit, match=f"targets and growth differ in {key}"):
        make_page(content)


def test_page_of_smoke_sizes_says_so(make_page: Callable[..., str]) -> None:
    content = results()
    assert "Smoke sizes" not in make_page(content)
    for found in content.values():
        found["smoke"] = True
    assert "**Smoke sizes" in make_page(content)


def test_commands_are_recorded_without_paths(bench: Any) -> None:
    given = ["--json", "/home/someone/a.json", "--figure=/srv/b c.png", "--n", "1e9"]
    assert bench._machine.command("benchmarks.x", given) == (
        "python -m benchmarks.x --json a.json '--figure=b c.png' --n 1e9"
    )


def test_environment_of_a_run_holds_no_paths(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLINCE_FAST_DATA", "/home/someone/data")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = bench._machine.describe()["environment"]
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "SPLINCE_FAST_DATA" not in environment
