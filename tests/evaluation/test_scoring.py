"""The table of metrics (`metrics.py`): directions and labels, of the library and the caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparisons import data, run
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.metrics import accuracy_score, balanced_accuracy_score, r2_score

from splince_fast import evaluation as ev
from splince_fast.evaluation import Comparison
from splince_fast.evaluation.metrics import METRICS, SUMMARY
from splince_fast.exceptions import InputError


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


def test_the_best_is_the_one_in_the_direction_of_the_metric(result: Comparison) -> None:
    for key in result.metrics:
        lower = result.metric(key).lower_is_better
        if lower is None:
            continue
        means = {e: result.mean(key, eraser=e) for e in result.context.erasers}
        pick = min if lower else max
        assert means[result.verdict(key).leaders[0]] == pick(means.values()), key


def test_a_metric_of_the_caller_has_its_direction_or_no_best(result: Comparison) -> None:
    for eraser in result.context.erasers:
        accuracy = result.mean("accuracy", eraser=eraser)
        assert result.mean("plain_accuracy", eraser=eraser) == pytest.approx(accuracy)
        assert result.mean("error", eraser=eraser) == pytest.approx(1 - accuracy)
    assert result.verdict("error").leaders[0] == result.verdict("accuracy").leaders[0]
    with pytest.raises(InputError, match="'plain_accuracy' has no direction"):
        result.verdict("plain_accuracy")
    with pytest.raises(InputError, match="'rank' has no direction"):
        result.verdict("rank")
    text = str(result)
    assert "error rate" in text
    assert "plain_accuracy" in text


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
    import splince_fast as sf

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


def test_an_infinite_metric_is_a_reason_and_no_significant_difference() -> None:
    X, y, z = data()
    endless = ev.Metric(lambda y_true, y_pred: np.inf, lower_is_better=True)
    result = run(X, y, z, n_seeds=3, erasers=("none", "LEACE"), metrics={"endless": endless})
    assert "endless" not in result.metrics
    assert all("'endless': the value is inf" in reason for _, _, reason in result.failures)
    assert {head for _, head, _ in result.failures} == {"retrained", "frozen"}
    assert result.mean("accuracy", eraser="none") > 0.5


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
