"""Metrics (`metrics.py`) against scikit-learn and fairlearn; their directions in comparisons."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from comparisons import data, run
from fairlearn.metrics import MetricFrame
from hypothesis import given
from hypothesis import strategies as st
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    r2_score,
    recall_score,
)

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.evaluation import Comparison
from splince_fast.evaluation.metrics import METRICS, SUMMARY
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError, SplinceWarning

CASES = 200


def case(seed: int) -> tuple[Any, Any, Any]:
    """Random truth, prediction and concept, every cell present."""
    rng = np.random.default_rng(seed)
    classes, concepts = int(rng.integers(2, 5)), int(rng.integers(2, 4))
    grid = np.stack(np.meshgrid(range(classes), range(concepts)), -1).reshape(-1, 2)
    extra = np.stack([rng.integers(0, classes, 60), rng.integers(0, concepts, 60)], 1)
    rows = np.concatenate([grid, extra])
    guess = np.where(rng.random(len(rows)) < 0.6, rows[:, 0], rng.integers(0, classes, len(rows)))
    guess[:classes] = range(classes)
    return rows[:, 0], guess, rows[:, 1]


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(i, marks=pytest.mark.slow) for i in range(20, CASES))]
)
def test_metrics_equal_fairlearn_and_scikit_learn(seed: int) -> None:
    y, guess, z = case(seed)
    wanted = {"accuracy": accuracy_score}
    for k in np.unique(y).tolist():
        wanted[f"recall {k}"] = lambda a, b, k=k: recall_score(a == k, b == k)
    frame = MetricFrame(metrics=wanted, y_true=y, y_pred=guess, sensitive_features=z)
    found = ev.group_accuracy(y, guess, groups=z)
    assert {row.cell: row.accuracy for row in found.rows} == pytest.approx(
        frame.by_group["accuracy"].to_dict(), abs=1e-12
    )
    assert found.overall == pytest.approx(accuracy_score(y, guess), abs=1e-12)
    assert ev.worst_group_accuracy(y, guess, groups=z) == pytest.approx(
        frame.group_min()["accuracy"], abs=1e-12
    )
    gaps = frame.difference().drop("accuracy").to_numpy()
    gap = ev.tpr_gap(y, guess, concept=z)
    assert gap == pytest.approx(math.sqrt(np.mean(np.square(gaps))), abs=1e-12)
    if seed == 0:  # control: a wrong prediction moves every metric
        other = np.where(np.arange(len(y)) == 0, (guess + 1) % 2, guess)
        assert found != ev.group_accuracy(y, other, groups=z)
        assert gap != ev.tpr_gap(y, other, concept=z)


def test_columns_of_groups_are_a_mapping_or_a_frame_of_any_library() -> None:
    y, guess, first, second = np.random.default_rng(0).integers(0, 2, (4, 100)).tolist()
    cells = ev.group_accuracy(y, guess, groups=(first, second))
    assert len(cells.rows) == 4
    for make in (dict, pd.DataFrame, pl.DataFrame, pa.table):
        assert cells == ev.group_accuracy(y, guess, groups=make({"first": first, "second": second}))


@given(st.integers(0, 50), st.integers(1, 50))
def test_wilson_limits_solve_the_score_equation(right: int, more: int) -> None:
    n = right + more
    (row,) = ev.group_accuracy([1] * n, [1] * right + [0] * more, groups=["a"] * n).rows
    q = 1.959963984540054
    for limit in (row.low, row.high):
        if 0 < limit < 1:
            error = math.sqrt(limit * (1 - limit) / n)
            assert abs(right / n - limit) == pytest.approx(q * error, rel=1e-9)
    assert row.low <= right / n <= row.high


def test_an_empty_cell_is_listed_and_warned_of() -> None:  # case 1
    y, guess = [0, 0, 1], [0, 1, 1]
    groups = (y, ["a", "b", "a"])
    with pytest.warns(SplinceWarning, match=r"1 of 4 cells have no row.*\(1, 'b'\)"):
        found = ev.group_accuracy(y, guess, groups=groups)
    assert found.missing == ((1, "b"),)
    assert found.worst.cell == (0, "b")


def test_a_class_without_rows_in_a_group_has_no_gap() -> None:  # case 1
    with pytest.warns(SplinceWarning, match="1 of 2 classes"):
        assert ev.tpr_gap([0, 0, 1], [0, 1, 1], concept=["a", "b", "a"]) == 1.0
    with pytest.warns(SplinceWarning, match="2 of 2"):  # no pair at all: NaN, and not zero
        assert math.isnan(ev.tpr_gap([0, 1], [0, 1], concept=["a", "b"]))


def test_a_thousand_classes_take_little_memory() -> None:  # case 19
    import tracemalloc

    rng = np.random.default_rng(0)
    y, z = np.repeat(np.arange(1000), 4), np.tile([0, 1], 2000)
    guess = np.where(rng.random(4000) < 0.5, y, 0)
    tracemalloc.start()
    ev.tpr_gap(y, guess, concept=z)
    ev.group_accuracy(y, guess, groups=(y, z))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1000 * 1000 * 8


def test_integers_that_floats_merge_are_classes_of_their_own() -> None:
    names = np.array([2**63 - 2, 2**63 + 1], np.uint64)
    assert float(names[0]) == float(names[1])
    code, guess = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    for a, b in ((names[code], names[guess]), (code, guess)):
        assert [row.accuracy for row in ev.group_accuracy(a, b, groups=a).rows] == [0.5, 1.0]


def test_classes_that_no_row_has_change_no_number() -> None:
    rng = np.random.default_rng(1)
    y, guess, z = (rng.integers(0, 2, 60) for _ in range(3))

    def declared(codes: np.ndarray) -> object:
        return pd.Categorical.from_codes(codes, ["a", "b", "neither"])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ev.tpr_gap(declared(y), declared(guess), concept=declared(z))
    assert found == ev.tpr_gap(y, guess, concept=z)
    with pytest.warns(SplinceWarning, match="neither"):  # of groups it is an empty cell
        ev.group_accuracy(y, guess, groups=declared(z))


def test_rows_without_a_true_label_are_left_out() -> None:
    y, guess, z = [1, 1, 0, None], [1, 0, 0, 1], ["a", "a", "b", "b"]
    found = ev.group_accuracy(y, guess, groups=z)
    assert (found.n, found.overall) == (3, pytest.approx(2 / 3))
    assert [(row.n, row.accuracy) for row in found.rows] == [(2, 0.5), (1, 1.0)]
    wrong = ev.group_accuracy([*y[:3], 0], [*guess[:3], None], groups=z)
    assert (wrong.n, wrong.overall) == (4, 0.5)  # a missing prediction is wrong


def test_arguments_that_do_not_fit_are_typed_errors() -> None:
    y, z = np.arange(40) % 2, np.arange(40) // 20
    X = np.random.default_rng(0).normal(size=(40, 3))
    with pytest.raises(LabelError, match="text equals no number"):
        ev.group_accuracy([1, 0], ["1", "0"], groups=[1, 0])
    ev.group_accuracy([1, 0], [1.0, 0.0], groups=[1, 0])
    with pytest.raises(LabelError, match="'groups' is None"):
        ev.group_accuracy(y, y, groups=None)
    with pytest.raises(NotEnoughDataError, match="no row has a true label and a group"):
        ev.group_accuracy([1, None], [1, 0], groups=[None, 1])
    calls: dict[str, Any] = {
        "no column": lambda: ev.group_accuracy(y, y, groups={}),
        "'y_pred' has 3 labels but y_true has 40": lambda: ev.group_accuracy(y, y[:3], groups=y),
        "'groups' has 3 labels but y_true has 40": lambda: ev.group_accuracy(y, y, groups=y[:3]),
        "'y' has 3 labels but X has 40": lambda: ev.fit_head(X, y[:3]),
        "'concept' has 3 labels but X has 40": lambda: ev.compare(X, task=y, concept=y[:3]),
        "'z_fresh' has 3 labels but X_fresh has 40": lambda: ev.leakage(X, y[:3]),
        "'groups' has 3 labels but X_fresh has 40": lambda: ev.leakage(X, y, groups=y[:3]),
        "None is not a valid probe": lambda: ev.leakage(X, z, probes=None),
        "the path is None": lambda: ev.Comparison.load(None),  # type: ignore[arg-type]
    }
    for match, call in calls.items():
        with pytest.raises(sf.exceptions.InputError, match=match):
            call()


def error_rate(truth: Any, guess: Any) -> float:
    return float(np.mean(truth != guess))


@pytest.fixture(scope="module")
def result() -> Comparison:
    X, y, z = data()
    metrics = {
        "balanced_accuracy": ev.Metric(balanced_accuracy_score, lower_is_better=False),
        "error": ev.Metric(error_rate, lower_is_better=True, label="error rate"),
        "plain_accuracy": accuracy_score,
    }
    return run(X, y, z, n_seeds=3, metrics=metrics, erasers=("none", "SAL", "LEACE"))


# Written out by hand: whether the smaller value is the better one.
LOWER = {
    "accuracy": False, "class_accuracy": False, "worst_group": False, "r2": False,
    "kept_covariance": False, "tpr_gap": True, "mse": True, "distortion": True,
    "residual": True, "rank": None,
    **{f"{probe}_{figure}": lower for probe in ("probe",)
       for figure, lower in (("accuracy", True), ("auc", True), ("r2", True), ("chance", None))},
}  # fmt: skip


def test_every_metric_has_its_direction_and_a_label_of_its_own() -> None:
    assert {key: metric.lower_is_better for key, metric in METRICS.items()} == LOWER
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)
    assert set(SUMMARY) <= set(METRICS)


def test_the_best_follows_the_direction_of_the_metric_and_needs_one(result: Comparison) -> None:
    for key in result.metrics:
        lower = result.metric(key).lower_is_better
        if lower is None:
            with pytest.raises(InputError, match=f"'{key}' has no direction"):
                result.verdict(key)
            continue
        means = {e: result.mean(key, eraser=e) for e in result.context.erasers}
        assert means[result.verdict(key).leaders[0]] == (min if lower else max)(means.values()), key
    assert result.metric("plain_accuracy").lower_is_better is None
    for eraser in result.context.erasers:
        accuracy = result.mean("accuracy", eraser=eraser)
        assert result.mean("plain_accuracy", eraser=eraser) == pytest.approx(accuracy)
        assert result.mean("error", eraser=eraser) == pytest.approx(1 - accuracy)
    for name in ("error rate", "plain_accuracy"):
        assert name in str(result)


def test_a_star_follows_the_direction_and_needs_one() -> None:
    X, y, z = data(1500)
    X[:, 1] += 2 * y
    wrong = {"mistakes": ev.Metric(error_rate, lower_is_better=True), "undirected": error_rate}
    result = run(X, y, z, n_seeds=8, metrics=wrong, erasers={"none": "none", "all": removing_task})
    assert result.verdict("mistakes").leaders == ("none",)
    tables = str(result).split("\n\n")[1:]
    own = next(t for t in tables if "mistakes" in t.splitlines()[1])
    none, other = own.splitlines()[2:4]
    assert none.split()[0] == "none"
    assert none.count("*") == 1  # that of "mistakes"; "undirected" has none
    assert other.count("*") == 0


def removing_task(X: Any, labels: Any) -> Any:
    return sf.leace(sf.Moments().update(X, labels), erase="task")


def test_metrics_of_quantities_have_their_directions() -> None:
    X = data()[0]
    rng = np.random.default_rng(1)
    task = X[:, 1] - X[:, 0] + rng.normal(size=900)
    result = run(X, task, X[:, 0].copy(), n_seeds=3, erasers=("none", "LEACE"),
                 metrics={"mae": lambda a, b: np.mean(np.abs(a - b))})  # fmt: skip
    assert not result.failures
    assert result.verdict("probe_r2").leaders[0] == "LEACE"
    assert result.mean("probe_r2", eraser="LEACE") < 0.1
    assert result.mean("probe_r2", eraser="none") > 0.9
    assert result.verdict("r2").leaders[0] == result.verdict("mse").leaders[0] == "none"
    assert 0 < result.mean("mae", eraser="none") < result.mean("mae", eraser="LEACE")
    assert "R2, retrained head" in str(result.table("r2"))


def test_a_metric_that_changes_its_arguments_changes_no_other_figure() -> None:
    def overwriting(y_true: Any, y_pred: Any) -> float:
        y_true[:] = y_true[0]
        y_pred[:] = y_pred[0]
        return 0.0

    X, y, z = data()
    for task in (y, X[:, 1] - X[:, 0]):
        plain, after = (
            run(X, task, z, metrics={"first": first, "last": error_rate})
            for first in (error_rate, overwriting)
        )
        for old, new in zip(plain.records, after.records, strict=True):
            assert new.values | {"first": 0.0} == old.values | {"first": 0.0}


def test_r2_of_a_head_is_that_of_scikit_learn() -> None:
    """Where the mean differs between training and test rows, which tells it from other R2."""
    X = data()[0]
    test = np.arange(900) >= 700
    task = X[:, 1] + 2 * test
    result = run(
        X, task, X[:, 0].copy(), test=test, n_seeds=1, erasers=("none",),
        heads={"mean": DummyRegressor()},
    )  # fmt: skip
    order = np.random.default_rng(0).permutation(700)
    y_pred = np.full(200, task[order[70:]].mean())  # a tenth of the other rows are validation rows
    expected = r2_score(task[test], y_pred)
    assert result.mean("r2", eraser="none", head="mean") == pytest.approx(expected)
    assert expected < -1


def test_a_constant_head_has_a_worst_group_of_0_only_where_it_is_wrong() -> None:
    X, y, z = data()
    test = np.arange(900) >= 600
    for task, concept, text in (
        (np.where(test, 1, y), z, "for all test rows"),
        (y, X[:, 0], "for all test rows"),  # no groups
        (y, z, "for all test rows, so its worst group has accuracy 0"),
    ):
        head = DummyClassifier(strategy="constant", constant=1)
        result = run(X, task, concept, n_seeds=1, test=test, erasers=("none",), heads={"h": head})
        assert f"none, h: the head predicts the same class {text}" in result.notes
    assert result.mean("worst_group", eraser="none") == 0
