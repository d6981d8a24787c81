"""Digests (`_digest.py`): another value, global, closure or method is another digest."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons import data, run
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression

import splince_fast as sf
from splince_fast.evaluation._digest import UnreadableError, digest_of
from splince_fast.exceptions import SplinceWarning

DIRECTION = np.eye(6)[:, :1]
LOCK = threading.Lock()
SCALE = {"by": 1.0}


def cut(moments: sf.Moments) -> sf.Projection:
    return helper(moments)


def helper(moments: sf.Moments) -> sf.Projection:
    return sf.Projection(DIRECTION, DIRECTION, moments.mean)


def guarded(moments: sf.Moments) -> sf.Projection:
    with LOCK:
        return sf.leace(moments, erase="concept")


def by_name(moments: sf.Moments) -> sf.Projection:
    return sf.Projection(globals()["DIRECTION"], DIRECTION, moments.mean)


class Tilted(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that adds a constant to the scores."""

    def __init__(self, shifts: Any = None) -> None:
        self.shifts = shifts

    def fit(self, X: Any, y: Any) -> Tilted:
        self.model_ = LogisticRegression().fit(X, y)
        return self

    def predict(self, X: Any) -> Any:
        scores = self.model_.decision_function(X) * SCALE["by"]
        return (scores + np.sum(self.shifts) > 0).astype(int)


def test_a_global_that_changed_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y, z = data()
    options: dict[str, Any] = {"n_seeds": 1, "erasers": {"cut": cut}}
    first = run(X, y, z, run=tmp_path, **options)
    monkeypatch.setitem(globals(), "DIRECTION", np.eye(6)[:, 1:2])
    second = run(X, y, z, run=tmp_path, **options)
    fresh = run(X, y, z, **options)
    assert second.records == fresh.records
    assert second.mean("distortion", eraser="cut") != first.mean("distortion", eraser="cut")


def test_an_array_of_a_head_that_changed_in_its_middle_is_computed_again(tmp_path: Path) -> None:
    X, y, z = data()
    shifts = np.zeros(5000)
    other = shifts.copy()
    other[2500] = 100.0  # repr() of the array leaves it out
    found = [
        run(X, y, z, n_seeds=1, erasers=("none",), heads={"t": Tilted(s)}, run=tmp_path)
        for s in (shifts, other)
    ]
    assert found[0].mean("accuracy", eraser="none") > 0.6
    assert found[1].mean("accuracy", eraser="none") < 0.6


def test_records_of_an_unreadable_global_are_not_reused_and_a_warning_says_so(
    tmp_path: Path,
) -> None:
    X, y, z = data(300)
    for _ in range(2):
        with pytest.warns(SplinceWarning, match="lock is computed again in every run"):
            run(X, y, z, n_seeds=1, erasers={"LEACE": "LEACE", "lock": guarded}, run=tmp_path)
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"eraser": "LEACE"' in line]) == 3
    assert not [line for line in lines if '"eraser": "lock"' in line]
    run(X, y, z, n_seeds=1, erasers={"lock": guarded})  # without a folder there is no warning
    with pytest.raises(UnreadableError, match=r"globals\(\)"):
        digest_of(by_name)


def made(source: str, **variables: Any) -> Any:
    """A function of a module that is no library."""
    scope: dict[str, Any] = {"__name__": "mine", "np": np, "sf": sf, **variables}
    exec(source, scope)
    return scope["f"]


OUTER = "def f(x):\n    return [a * {0} for a in (lambda: b)()]\n"
CHANGES: dict[str, tuple[Any, Any]] = {
    "constant": (made("def f(x): return x + 1"), made("def f(x): return x + 2")),
    "called function": (made("def f(x): return np.sin(x)"), made("def f(x): return np.cos(x)")),
    "default": (made("def f(x, y=1): return y"), made("def f(x, y=2): return y")),
    "keyword default": (made("def f(x, *, y=1): return y"), made("def f(x, *, y=2): return y")),
    "global of an inner function": (
        made(OUTER.format(1), b=[1]), made(OUTER.format(1), b=[2])
    ),
    "code of an inner function": (
        made("def f(x): return (lambda: 1)()"), made("def f(x): return (lambda: 2)()")
    ),
    "type": ([1], [1.0]),
    "sign of zero": (np.zeros(2), -np.zeros(2)),
    "dtype": (np.zeros(2, np.int64), np.zeros(2)),
    "shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "objects": (np.array([1, None]), np.array([2, None])),
    "masked": (np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 2], mask=[True, False])),
    "set": ({1, 2}, {1, 3}),
    "nesting": ([[1], [2]], [[1, 2]]),
    "partial": (functools.partial(max, 1), functools.partial(max, 2)),
    "state of a generator": (np.random.default_rng(0), np.random.default_rng(1)),
    "estimator": (LogisticRegression(C=1.0), LogisticRegression(C=2.0)),
    "bound method": (np.random.default_rng(0).normal, np.random.default_rng(1).normal),
    "cached": (
        functools.lru_cache(made("def f(x): return 1")),
        functools.lru_cache(made("def f(x): return 2")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_anything_changes_the_digest(what: str) -> None:
    a, b = CHANGES[what]
    assert digest_of(a) != digest_of(b)
    assert digest_of(a) == digest_of(a)


def test_methods_bases_and_class_variables_count() -> None:
    def classifier(value: int, inherited: int = 0) -> Any:
        class Base(BaseEstimator):  # type: ignore[misc]
            def read(self) -> int:
                return inherited

        class Mine(Base):
            def fit(self, X: Any, y: Any) -> Any:
                self.value_ = value
                return self

        return Mine()

    same = [digest_of(classifier(1)) for _ in range(2)]
    assert same[0] == same[1]
    assert len({same[0], digest_of(classifier(2)), digest_of(classifier(1, 1))}) == 3


def test_a_module_of_the_caller_is_read_by_the_names_that_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_settings.py").write_text("scale = 1\nunused = 1\n")
    settings = importlib.import_module("my_settings")
    monkeypatch.setitem(sys.modules, "my_settings", settings)
    readers = {
        "attribute": made("def f(x): return s.scale", s=settings),
        "text": made("def f(x): return getattr(s, 'scale')", s=settings),
        "import": made("def f(x):\n    import my_settings as s\n    return s.scale"),
        "from": made("def f(x):\n    from my_settings import scale\n    return scale"),
    }
    before = {name: digest_of(f) for name, f in readers.items()}
    monkeypatch.setattr(settings, "unused", 2)
    assert {name: digest_of(f) for name, f in readers.items()} == before
    monkeypatch.setattr(settings, "scale", 2)
    for name, f in readers.items():
        assert digest_of(f) != before[name], name


def test_digests_are_the_same_in_another_process() -> None:
    folder = str(Path(__file__).parent)
    code = (
        f"import sys; sys.path[:0] = [{folder!r}, {str(Path(folder).parents[1])!r}]\n"
        "import test_digest as t\n"
        "from splince_fast.evaluation._digest import digest_of\n"
        "print(digest_of(t.cut), digest_of(t.Tilted({'a', 'b', 'c'})))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


def test_digests_of_cycles_end_and_differ() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [2]
    other.append(other)
    assert digest_of(loop) != digest_of(other)
