"""Metrics (`metrics.py`, `data.py`) against scikit-learn and fairlearn, and their edge cases."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score, make_scorer, recall_score

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.exceptions import LabelError, NotEnoughDataError, SplinceWarning

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
    fairlearn = pytest.importorskip("fairlearn.metrics")
    y, guess, z = case(seed)
    wanted = {"accuracy": accuracy_score}
    for k in np.unique(y).tolist():
        wanted[f"recall {k}"] = lambda a, b, k=k: recall_score(a == k, b == k)
    frame = fairlearn.MetricFrame(metrics=wanted, y_true=y, y_pred=guess, sensitive_features=z)
    found = ev.group_accuracy(y, guess, groups=z)
    assert {row.cell: row.accuracy for row in found.rows} == pytest.approx(
        frame.by_group["accuracy"].to_dict(), abs=1e-12
    )
    assert found.overall == pytest.approx(accuracy_score(y, guess), abs=1e-12)
    assert ev.worst_group_accuracy(y, guess, groups=z) == pytest.approx(
        frame.group_min()["accuracy"], abs=1e-12
    )
    gaps = frame.difference().drop("accuracy").to_numpy()
    assert ev.tpr_gap(y, guess, concept=z) == pytest.approx(
        math.sqrt(np.mean(np.square(gaps))), abs=1e-12
    )


def test_control_a_wrong_prediction_moves_every_metric() -> None:
    y, guess, z = case(0)
    other = guess.copy()
    other[0] = (guess[0] + 1) % 2
    assert ev.group_accuracy(y, guess, groups=z) != ev.group_accuracy(y, other, groups=z)
    assert ev.tpr_gap(y, guess, concept=z) != ev.tpr_gap(y, other, concept=z)


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_columns_of_groups_are_a_mapping_or_a_frame_of_any_library(library: str) -> None:
    frames = pytest.importorskip(library)
    rng = np.random.default_rng(0)
    y, guess, first, second = (rng.integers(0, 2, 100).tolist() for _ in range(4))
    columns = {"first": first, "second": second}
    frame = (frames.table if library == "pyarrow" else frames.DataFrame)(columns)
    cells = ev.group_accuracy(y, guess, groups=(first, second))
    assert len(cells.rows) == 4
    assert cells == ev.group_accuracy(y, guess, groups=columns)
    assert cells == ev.group_accuracy(y, guess, groups=frame)


def test_metrics_work_as_scorers() -> None:
    y, guess, z = case(1)

    class Fixed(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        classes_ = np.unique(y)

        def predict(self, X: Any) -> Any:
            return guess

    for metric, columns in ((ev.worst_group_accuracy, {"groups": z}), (ev.tpr_gap, {"concept": z})):
        assert make_scorer(metric, **columns)(Fixed(), None, y) == metric(y, guess, **columns)


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


def test_classes_that_no_row_has_change_no_number(pd: Any) -> None:
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
        "probes is None": lambda: ev.leakage(X, z, probes=None),
        "the path is None": lambda: ev.Comparison.load(None),  # type: ignore[arg-type]
    }
    for match, call in calls.items():
        with pytest.raises(sf.exceptions.InputError, match=match):
            call()
