"""Metrics (`metrics.py`, `data.py`) against scikit-learn and fairlearn, and their edge cases."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, recall_score

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.exceptions import InputError, LabelError, SplinceWarning

CASES = 200


def case(seed: int) -> tuple[Any, Any, Any, Any]:
    """Random truth, prediction, concept and weights, every cell present."""
    rng = np.random.default_rng(seed)
    classes, concepts = int(rng.integers(2, 5)), int(rng.integers(2, 4))
    grid = np.stack(np.meshgrid(range(classes), range(concepts)), -1).reshape(-1, 2)
    extra = np.stack([rng.integers(0, classes, 60), rng.integers(0, concepts, 60)], 1)
    rows = np.concatenate([grid, extra])
    guess = np.where(rng.random(len(rows)) < 0.6, rows[:, 0], rng.integers(0, classes, len(rows)))
    guess[:classes] = range(classes)
    return rows[:, 0], guess, rows[:, 1], rng.random(len(rows)) + 0.1


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(i, marks=pytest.mark.slow) for i in range(20, CASES))]
)
def test_metrics_equal_fairlearn_and_scikit_learn(seed: int) -> None:
    fairlearn = pytest.importorskip("fairlearn.metrics")
    y, guess, z, weight = case(seed)
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
    weighted = ev.group_accuracy(y, guess, groups=z, sample_weight=weight)
    for row in weighted.rows:
        of = z == row.cell
        direct = accuracy_score(y[of], guess[of], sample_weight=weight[of])
        assert row.accuracy == pytest.approx(direct, abs=1e-12)
    assert ev.class_accuracy(y, guess).mean == pytest.approx(
        balanced_accuracy_score(y, guess), abs=1e-12
    )
    gaps = frame.difference().drop("accuracy").to_numpy()
    assert ev.tpr_gap(y, guess, concept=z) == pytest.approx(
        math.sqrt(np.mean(np.square(gaps))), abs=1e-12
    )
    assert ev.tpr_gap(y, guess, concept=z, average="max") == pytest.approx(max(gaps), abs=1e-12)
    assert ev.tpr_gap(y, guess, concept=z, average="mean") == pytest.approx(
        np.mean(gaps), abs=1e-12
    )


def test_control_a_wrong_prediction_moves_every_metric() -> None:
    y, guess, z, _ = case(0)
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


def test_metrics_work_as_scorers_and_in_metric_frames() -> None:
    fairlearn = pytest.importorskip("fairlearn.metrics")
    y, guess, z, _ = case(1)
    frame = fairlearn.MetricFrame(
        metrics=lambda a, b: ev.class_accuracy(a, b).mean,
        y_true=y, y_pred=guess, sensitive_features=z,
    )  # fmt: skip
    assert frame.overall == pytest.approx(balanced_accuracy_score(y, guess))
    assert ev.worst_group_accuracy(y, guess, sensitive_features=z) == ev.worst_group_accuracy(
        y, guess, groups=z
    )


@given(st.integers(0, 50), st.integers(1, 50))
def test_wilson_limits_solve_the_score_equation(right: int, more: int) -> None:
    from splince_fast.evaluation.statistics import wilson_interval

    n = right + more
    low, high = wilson_interval(right, n, level=0.9)
    q = 1.6448536269514722
    for limit in (low, high):
        if 0 < limit < 1:
            error = math.sqrt(limit * (1 - limit) / n)
            assert abs(right / n - limit) == pytest.approx(q * error, rel=1e-9)
    assert low <= right / n <= high


def test_an_empty_cell_is_listed_and_warned_of() -> None:  # case 1
    y, guess = [0, 0, 1], [0, 1, 1]
    groups = (y, ["a", "b", "a"])
    with pytest.warns(SplinceWarning, match=r"1 of 4 cells have no row.*\(1, 'b'\)"):
        found = ev.group_accuracy(y, guess, groups=groups)
    assert found.missing == ((1, "b"),)
    assert found.worst.cell == (0, "b")


def test_a_cell_whose_rows_all_weigh_nothing_is_listed_as_empty() -> None:
    columns = [0, 1, 1, 0], [0, 0, 1, 0]
    groups, weight = ["a", "b", "b", "a"], [1, 0, 0, 1]
    with pytest.warns(SplinceWarning, match="1 of 2 cells have no row: 'b'"):
        found = ev.group_accuracy(*columns, groups=groups, sample_weight=weight)
    assert ([row.cell for row in found.rows], found.missing) == (["a"], ("b",))


def test_a_class_without_rows_in_a_group_has_no_gap() -> None:  # case 1
    with pytest.warns(SplinceWarning, match="1 of 2 classes"):
        found = ev.tpr_gap([0, 0, 1], [0, 1, 1], concept=["a", "b", "a"], average=None)
    assert found[0] == -1.0
    assert math.isnan(found[1])
    with pytest.warns(SplinceWarning, match="1 of 2 classes"):
        assert ev.tpr_gap([0, 0, 1], [0, 1, 1], concept=["a", "b", "a"]) == 1.0


def test_no_pair_at_all_is_nan_and_not_zero() -> None:  # case 1
    with pytest.warns(SplinceWarning, match="2 of 2"):
        assert math.isnan(ev.tpr_gap([0, 1], [0, 1], concept=["a", "b"]))


def test_small_cells_are_marked() -> None:  # case 2
    y, guess = [0] * 12, [0] * 11 + [1]
    groups = ["big"] * 11 + ["small"]
    assert ev.worst_group_accuracy(y, guess, groups=groups) == 0.0
    assert "fewer than 20 rows" in str(ev.group_accuracy(y, guess, groups=groups))


def test_a_thousand_classes_take_little_memory_and_print_ten() -> None:  # case 19
    import tracemalloc

    rng = np.random.default_rng(0)
    y, z = np.repeat(np.arange(1000), 4), np.tile([0, 1], 2000)
    guess = np.where(rng.random(4000) < 0.5, y, 0)
    tracemalloc.start()
    ev.tpr_gap(y, guess, concept=z)
    found = ev.group_accuracy(y, guess, groups=(y, z))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1000 * 1000 * 8
    assert len(str(found).splitlines()) == 11


def test_covariance_ratio_follows_its_formula() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    z = rng.integers(0, 2, 300)
    X = rng.normal(size=(300, 5)) + y[:, None] * rng.normal(size=5) + z[:, None]
    moments = sf.Moments().update(X, {"y": y, "z": z})
    for eraser in (sf.sal(moments, erase="z"), sf.splince(moments, erase="z", keep="y")):
        S = (X - X.mean(0)).T @ np.eye(3)[y] / 300
        direct = np.sum((eraser.matrix() @ S) ** 2) / np.sum(S**2)
        assert ev.covariance_ratio(eraser, moments, "y") == pytest.approx(direct, rel=1e-9)
    assert ev.covariance_ratio(eraser, moments, "y") == pytest.approx(1.0)
    with pytest.raises(InputError, match="a Projection of width 4"):
        ev.covariance_ratio(eraser, sf.Moments().update(X[:, :4], {"y": y}), "y")
    with pytest.raises(InputError, match="ConditionalEraser"):
        ev.covariance_ratio(sf.oracle(moments, erase="z"), moments, "y")


def test_arguments_out_of_range_are_typed_errors() -> None:
    with pytest.raises(InputError, match="exactly one"):
        ev.group_accuracy([0], [0])
    with pytest.raises(InputError, match="average"):
        ev.tpr_gap([0], [0], concept=[0], average="sum")
    with pytest.raises(InputError):
        ev.class_accuracy([0, 1], [0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ev.class_accuracy(["a"], ["b"])


def test_integers_that_floats_merge_are_classes_of_their_own() -> None:
    names = np.array([2**63 - 2, 2**63 + 1], np.uint64)
    assert float(names[0]) == float(names[1])
    code, guess = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    for a, b in ((names[code], names[guess]), (code, guess)):
        assert ev.class_accuracy(a, b).mean == 0.75
        assert ev.worst_group_accuracy(a, b, groups=a) == 0.5


def test_classes_that_no_row_has_change_no_number() -> None:
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(1)
    y, guess, z = (rng.integers(0, 2, 60) for _ in range(3))
    expected = ev.tpr_gap(y, guess, concept=z, average=None)
    assert min(expected.values()) < 0  # signed, as for two classes

    def declared(codes: np.ndarray) -> object:
        return pd.Categorical.from_codes(codes, ["a", "b", "neither"])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ev.tpr_gap(declared(y), declared(guess), concept=declared(z), average=None)
    assert list(found.values()) == list(expected.values())
    with pytest.warns(SplinceWarning, match="neither"):  # of groups it is an empty cell
        ev.group_accuracy(y, guess, groups=declared(z))


def test_rows_without_a_true_label_are_left_out() -> None:
    y, guess, z = [1, 1, 0, None], [1, 0, 0, 1], ["a", "a", "b", "b"]
    found = ev.group_accuracy(y, guess, groups=z)
    assert (found.n, found.overall) == (3, pytest.approx(2 / 3))
    assert [(row.n, row.accuracy) for row in found.rows] == [(2, 0.5), (1, 1.0)]
    assert str(found) == str(ev.group_accuracy(y[:3], guess[:3], groups=z[:3]))
    wrong = ev.group_accuracy([*y[:3], 0], [*guess[:3], None], groups=z)
    assert (wrong.n, wrong.overall) == (4, 0.5)  # a missing prediction is wrong


def test_text_beside_numbers_is_refused() -> None:
    for function in (ev.class_accuracy, lambda y, p: ev.group_accuracy(y, p, groups=y)):
        with pytest.raises(LabelError, match="text equals no number"):
            function([1, 0], ["1", "0"])
        function([1, 0], [1.0, 0.0])


def test_arguments_of_other_types_are_refused() -> None:
    y, z = np.arange(40) % 2, np.arange(40) // 20
    X = np.random.default_rng(0).normal(size=(40, 3))
    moments = sf.Moments().update(X, {"z": z})
    for call, text in (
        (lambda: ev.group_accuracy(y, y, groups=z, interval=None), "interval is None"),
        (lambda: ev.group_accuracy(y, y, groups=z, sample_weight="a"), "sample_weight cannot"),
        (lambda: ev.group_accuracy(y, y, groups={}), "no column"),
        (lambda: ev.covariance_ratio(sf.leace(moments, erase="z"), None, "z"), "moments is None"),
        (lambda: ev.leakage(X, z, probes=None), "probes is None"),
        (lambda: ev.Comparison.load(None), "the path is None"),
    ):
        with pytest.raises(sf.InputError, match=text):
            call()  # type: ignore[no-untyped-call]
    assert len(ev.leakage(X, z, probes="linear", cv=2).probes) == 1


def test_a_column_of_another_length_is_compared_with_its_rows() -> None:
    y, X = np.arange(40) % 2, np.zeros((40, 2))
    calls: dict[str, Any] = {
        "'y_pred' has 3 labels but y_true has 40": lambda: ev.group_accuracy(y, y[:3], groups=y),
        "'groups' has 3 labels but y_true has 40": lambda: ev.group_accuracy(y, y, groups=y[:3]),
        "'y' has 3 labels but X has 40": lambda: ev.fit_head(X, y[:3]),
        "'concept' has 3 labels but X has 40": lambda: ev.compare(X, task=y, concept=y[:3]),
        "'z_fresh' has 3 labels but X_fresh has 40": lambda: ev.leakage(X, y[:3]),
        "'groups' has 3 labels but X_fresh has 40": lambda: ev.leakage(X, y, groups=y[:3]),
        "'groups' has 3 labels but X_validation has 40": lambda: ev.select_head(
            X, y, X, y, groups=y[:3]
        ),
    }
    for match, call in calls.items():
        with pytest.raises(InputError, match=match):
            call()
