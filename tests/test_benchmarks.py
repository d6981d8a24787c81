"""The benchmarks run, measure what they say, and cannot fail in silence."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
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
    "_data", "_discovery", "_machine", "_memory", "_peers", "_reference", "_rows", "_sizes",
    "_tables", "_timing", "_model", "growth", "peers", "smoke",
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
    result = run("benchmarks.smoke", "(", "discovery", "peers", "growth")
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
    # 10^9 8192^2 / 10^12 s, 1.5 copies of 32.8 TB, and 10^9 / 2048 merges of 5 8192^2 bytes.
    expected = 67_109 + 1.5 * 3276.8 + 1e9 / 2048 * 5 * 8192**2 / 1e10
    assert rates.accumulate(1e9, 8192) == pytest.approx(expected, rel=1e-3)
    slow_disk = bench._model.Rates(1e12, 1e11, 1e10, disk=1e8)
    assert slow_disk.accumulate(1e9, 8192) == pytest.approx(1e9 * 8192 * 4 / 1e8)


def test_exponent_is_that_of_a_power_law(bench: Any) -> None:
    sizes = (16, 32, 64, 128)
    growth = bench.growth.Growth("", "d", 2, sizes, tuple(3e-9 * d**2 for d in sizes), ())
    assert growth.exponent == pytest.approx(2.0)


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
