"""DFR: balanced subsets, the choice of C, the mean of the heads (`_linear`, `_inputs`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from baseline_data import bug_parts, draw, figures
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from splince_fast import InputError, LabelError, NotEnoughDataError
from splince_fast.baselines import DFR


def test_coefficients_equal_the_definition() -> None:
    data = draw(n=800, d=5)
    head = DFR(C=0.3, penalty="l2", n_subsets=3, random_state=7).fit(data.X, data.y, groups=data.z)
    rng = np.random.default_rng(7)
    scaler = StandardScaler().fit(data.X)
    cells = [(a, b) for a in (0, 1) for b in (0, 1)]
    rows = {cell: np.flatnonzero((data.y == cell[0]) & (data.z == cell[1])) for cell in cells}
    m = min(map(len, rows.values()))
    decisions = []
    for _ in range(3):
        subset = np.concatenate([rng.permutation(rows[cell])[:m] for cell in cells])
        model = LogisticRegression(C=0.3, max_iter=1000)
        model.fit(scaler.transform(data.X[subset]), data.y[subset])
        decisions.append(model.decision_function(scaler.transform(data.X)))
    np.testing.assert_allclose(
        head.decision_function(data.X), np.mean(decisions, axis=0), atol=1e-9
    )
    assert head.cells_ == cells
    np.testing.assert_array_equal(head.predict(data.X), np.mean(decisions, axis=0) > 0)
    chances = head.predict_proba(data.X)
    np.testing.assert_allclose(chances[:, 1], 1 / (1 + np.exp(-np.mean(decisions, axis=0))))


def test_decisions_do_not_depend_on_units() -> None:
    data = draw(n=800, d=5)
    scale, shift = np.array([1e-3, 1, 1e3, 7, 0.1]), np.array([0, 1e3, -5, 0, 2])
    first = DFR(random_state=0).fit(data.X, data.y, groups=data.z)
    second = DFR(random_state=0).fit(data.X * scale + shift, data.y, groups=data.z)
    np.testing.assert_allclose(
        first.decision_function(data.X),
        second.decision_function(data.X * scale + shift),
        atol=1e-6,
    )


def test_a_constant_feature_gets_no_weight() -> None:
    data = draw(n=400, d=4)
    X = np.column_stack([data.X, np.full(400, 3.0)])
    head = DFR(random_state=0).fit(X, data.y, groups=data.z)
    assert head.coef_[0, -1] == 0


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_a_constant_feature_whose_mean_is_rounded_changes_no_decision(
    penalty: str, value: float
) -> None:
    data = draw(n=5000, d=4)
    assert np.full((5000, 1), value).std(axis=0) > 0  # the rounding of the mean
    plain, wider = (
        DFR(C=0.3, penalty=penalty, n_subsets=2, random_state=0).fit(X, data.y, groups=data.z)
        for X in (data.X, np.column_stack([data.X, np.full(5000, value)]))
    )
    # The feature is 0 to rounding after centring, so that both heads solve one problem.
    assert abs(wider.coef_[0, -1]) < 1e-6
    np.testing.assert_allclose(wider.coef_[0, :-1], plain.coef_[0], atol=1e-3)
    np.testing.assert_allclose(
        wider.decision_function(np.column_stack([data.X, np.full(5000, value)])),
        plain.decision_function(data.X),
        atol=1e-3,  # of the solvers
    )


def test_a_feature_of_float32_roundings_gets_no_weight() -> None:
    data = draw(n=2000, d=4)
    value = np.float32(1000.1)
    noise = value + np.spacing(value) * np.random.default_rng(0).integers(-1, 2, 2000)
    X = np.column_stack([data.X, noise])
    head = DFR(C=1.0, random_state=0).fit(X.astype(np.float32), data.y, groups=data.z)
    assert abs(head.coef_[0, -1]) < 0.1
    control = DFR(C=1.0, random_state=0).fit(X, data.y, groups=data.z)  # of float64 rows
    assert abs(control.coef_[0, -1]) > 100


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_several_classes_and_crossed_groups(penalty: str) -> None:
    data = draw(n=3000, d=9, k=3, classes=3, tied=0.5)
    other = np.random.default_rng(2).integers(0, 2, size=3000)
    head = DFR(penalty=penalty, n_subsets=2, random_state=0)
    head.fit(data.X, data.y, groups=(data.z, other))
    assert head.coef_.shape == (3, 9)
    assert len(head.cells_) == 18
    assert head.cells_[0] == (0, 0, 0)
    chances = head.predict_proba(data.X)
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)
    np.testing.assert_array_equal(chances.argmax(axis=1), head.predict(data.X))
    assert head.score(data.X, data.y) > 0.5
    alone = DFR(penalty=penalty, n_subsets=2, random_state=0)
    alone.fit(data.X, data.y, groups={"a": data.z, "b": other})
    np.testing.assert_array_equal(alone.coef_, head.coef_)


def test_joint_codes_of_class_and_group_equal_groups() -> None:
    data = draw(n=800)
    first = DFR(random_state=0).fit(data.X, data.y, groups=data.z)
    second = DFR(random_state=0).fit(data.X, data.y, groups=2 * data.y + data.z)
    np.testing.assert_array_equal(first.coef_, second.coef_)


def test_validation_rows_choose_and_do_not_train() -> None:
    data = draw(n=900)
    mask = np.arange(900) % 3 == 0
    head = DFR(random_state=0).fit(data.X, data.y, groups=data.z, validation=mask)
    fixed = DFR(C=head.C_, random_state=0).fit(data.X[~mask], data.y[~mask], groups=data.z[~mask])
    np.testing.assert_allclose(head.coef_, fixed.coef_, atol=1e-12)
    assert head.C_ in (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)


def test_predictions_are_class_names() -> None:
    data = draw(n=400)
    y = np.array(["arts", "writing"])[data.y]
    head = DFR(random_state=0).fit(data.X, y, groups=data.z)
    assert set(head.predict(data.X)) <= {"arts", "writing"}
    assert head.classes_.tolist() == ["arts", "writing"]
    pipe = make_pipeline(StandardScaler(), DFR(random_state=0)).fit(data.X, y, dfr__groups=data.z)
    assert pipe.score(data.X, y) > 0.6


@pytest.mark.parametrize(
    ("options", "given", "error", "match"),
    [
        ({"C": []}, {}, InputError, "C is"),
        ({"C": "all"}, {}, InputError, "C is 'all'"),
        ({"C": -1.0}, {}, InputError, "C is -1.0"),
        ({"penalty": "l0"}, {}, InputError, "penalty is 'l0'"),
        ({"n_subsets": 0}, {}, InputError, "n_subsets is 0"),
        ({"groups_from": "z"}, {}, InputError, "groups_from is 'z'"),
        ({}, {"groups": None}, InputError, "was given no groups"),
        ({"groups_from": "y"}, {}, InputError, "was given groups, too"),
        ({}, {"y": None}, InputError, "requires y to be passed"),
        ({}, {"y": np.zeros(400, int)}, LabelError, "one class"),
        ({}, {"groups": [None] + [1] * 399}, LabelError, "has no group in 1 of 400 rows"),
        ({}, {"y": np.array([b"p", b"q"] * 200)}, LabelError, "represented as bytes"),
    ],
)
def test_bad_input_is_refused(
    options: dict[str, Any], given: dict[str, Any], error: type[Exception], match: str
) -> None:
    data = draw(n=400)
    head = DFR(**options)
    arguments = {"y": data.y, "groups": data.z, **given}
    with pytest.raises(error, match=match):
        head.fit(data.X, arguments.pop("y"), **arguments)
    assert not hasattr(head, "n_features_in_")


def test_named_groups_of_validation_rows_belong_by_their_names() -> None:
    data, u = draw(d=4), np.random.default_rng(1).choice(["p", "q"], size=600)
    train, test = np.arange(600) < 450, np.arange(600) >= 450
    groups = {"z": data.z[train], "u": u[train]}

    def fitted(others: dict[str, Any]) -> DFR:
        validation = (data.X[test], data.y[test], others)
        head = DFR(random_state=0, n_subsets=2)
        return head.fit(data.X[train], data.y[train], groups=groups, validation=validation)

    straight = fitted({"z": data.z[test], "u": u[test]})
    turned = fitted({"u": u[test], "z": data.z[test]})
    np.testing.assert_array_equal(turned.coef_, straight.coef_)
    with pytest.raises(LabelError, match="mixes types"):  # control: other columns
        fitted({"z": u[test], "u": data.z[test]})
    with pytest.raises(InputError, match="the groups 'u', 'v' and the fit 'z', 'u'"):
        fitted({"u": u[test], "v": data.z[test]})


def test_validation_labels_of_another_type_change_no_class() -> None:
    data = draw(d=4)
    train, test = np.arange(600) < 450, np.arange(600) >= 450

    def fitted(y: Any, z: Any) -> DFR:
        head = DFR(random_state=0, n_subsets=2)
        validation = (data.X[test], y, z)
        return head.fit(data.X[train], data.y[train], groups=data.z[train], validation=validation)

    y, z = data.y[test], data.z[test]
    plain = fitted(y, z)
    for other in (fitted(y.astype(float), z), fitted(y.astype(object), z), fitted(y == 1, z)):
        assert other.classes_.dtype == data.y.dtype
        np.testing.assert_array_equal(other.coef_, plain.coef_)
    for bad in ((y.astype(str), z), (y, z.astype(str))):
        with pytest.raises(InputError, match="text never equals a number"):
            fitted(*bad)


def test_a_cell_without_training_rows_is_named() -> None:
    data = draw(n=400)
    mask = (data.y == 1) & (data.z == 0)
    with pytest.raises(NotEnoughDataError, match=r"the cell \(1, 0\)"):
        DFR().fit(data.X, data.y, groups=data.z, validation=mask)


def test_figures_on_biographies_of_dfr(real_data: Callable[[str], Path]) -> None:
    bug = bug_parts(real_data("bug_profession_gender"))
    rows = bug.fitted
    head = DFR(random_state=0).fit(
        bug.X[rows], bug.y[rows], groups=bug.z[rows], validation=bug.mask
    )
    assert head.C_ == 0.7
    found = figures(bug, head.predict(bug.X[bug.test]))
    np.testing.assert_allclose(found, (0.769, 0.720, 0.035), atol=0.004)


def test_c_is_chosen_on_the_validation_rows_and_not_on_the_training_rows() -> None:
    """Training rows with a rare noisy feature favour a weak penalty, validation rows a strong."""
    rng = np.random.default_rng(3)
    n, d = 120, 60
    y, z = np.tile([0, 1], n // 2), np.repeat([0, 1], n // 2)
    X = rng.normal(size=(n, d))
    X[:, 0] += 0.8 * (2 * y - 1)
    y_test, z_test = np.tile([0, 1], 1000), np.repeat([0, 1], 1000)
    X_test = rng.normal(size=(2000, d))
    X_test[:, 0] += 0.8 * (2 * y_test - 1)
    tried = (100.0, 0.1)
    head = DFR(C=tried, n_subsets=1, random_state=0).fit(
        X, y, groups=z, validation=(X_test, y_test, z_test)
    )
    worst = {}
    for value in tried:
        fixed = DFR(C=value, n_subsets=1, random_state=0).fit(X, y, groups=z)
        worst[value] = [
            min(np.mean(fixed.predict(rows)[cell] == truth[cell]) for cell in cells)
            for rows, truth, cells in (
                (X, y, [(y == a) & (z == b) for a in (0, 1) for b in (0, 1)]),
                (X_test, y_test, [(y_test == a) & (z_test == b) for a in (0, 1) for b in (0, 1)]),
            )
        ]
    assert worst[100.0][0] > worst[0.1][0]  # the training rows would choose the weak penalty
    assert worst[0.1][1] > worst[100.0][1]
    assert head.C_ == 0.1


def test_groups_of_validation_rows_take_every_form_of_the_groups() -> None:
    pd = pytest.importorskip("pandas")
    data, u = draw(d=4), np.random.default_rng(1).choice(["p", "q"], size=600)
    train, test = np.arange(600) < 450, np.arange(600) >= 450
    forms: dict[str, Callable[[Any], Any]] = {
        "tuple": lambda rows: (data.z[rows], u[rows]),
        "mapping": lambda rows: {"z": data.z[rows], "u": u[rows]},
        "frame": lambda rows: pd.DataFrame({"z": data.z[rows], "u": u[rows]}),
    }
    heads = [
        DFR(random_state=0).fit(
            data.X[train], data.y[train], groups=form(train),
            validation=(data.X[test], data.y[test], form(test)),
        )
        for form in forms.values()
    ]  # fmt: skip
    assert heads[0].cells_[:2] == [(0, 0, "p"), (0, 0, "q")]
    for head in heads[1:]:
        assert head.cells_ == heads[0].cells_
        np.testing.assert_array_equal(head.coef_, heads[0].coef_)
    with pytest.raises(InputError, match="the lengths 600, 599"):
        DFR().fit(data.X, data.y, groups=(data.z, u[1:]), validation=(data.X, data.y, (data.z, u)))
    X = pd.DataFrame(data.X, columns=list("abcd"))
    held_out = (X[test][list("dcba")], data.y[test], data.z[test])
    with pytest.raises(InputError, match="feature names"):
        DFR().fit(X[train], data.y[train], groups=data.z[train], validation=held_out)
