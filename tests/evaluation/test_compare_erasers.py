"""compare with every kind of eraser (`erasers.py`): baselines, estimators, functions; tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comparisons
import numpy as np
import pytest
from comparisons import LEVEL, data, script
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.baselines import INLP, RLACE
from splince_fast.evaluation import Comparison

X, y, z = data()


def run(X: Any, y: Any, z: Any, **options: Any) -> Comparison:
    return comparisons.run(X, y, z, **({"n_seeds": 1} | options))


def test_inlp_is_fitted_on_the_scaled_training_rows_and_stops_by_the_validation_rows() -> None:
    X, y, z = data(900)
    X = 7 * X + 3
    result = run(X, y, z, erasers=("none", "INLP"), **LEVEL)
    twin = script(X, y, z)
    rows, fitted = twin.scaled(X[twin.train]), np.concatenate([twin.train, twin.validation])
    model = INLP(random_state=0).fit(
        twin.scaled(X[fitted]),
        concept=z[fitted],
        validation=np.arange(len(fitted)) >= len(twin.train),
    )
    assert result.mean("rank", eraser="INLP") == model.projection_.rank >= 1
    erased = model.transform(rows) * twin.unit + twin.mean
    assert result.mean("distortion", eraser="INLP") == pytest.approx(
        twin.distortion(erased), rel=1e-9
    )
    # No guarantee: something of the covariance with the concept is left, but less than before.
    assert 1e-6 < result.mean("residual", eraser="INLP") < 0.5
    assert result.mean("residual", eraser="none") == pytest.approx(1.0)


def test_erasers_by_name_and_as_estimators() -> None:
    """A split without validation rows: the baselines draw their own."""
    quick = RLACE(max_steps=300, check_every=100)
    erasers = {"INLP": "INLP", "one": INLP(max_rank=1), "R-LACE": quick, "A": sf.SPLINCE(),
               "SPLINCE": "SPLINCE", "LEACE": "LEACE"}  # fmt: skip
    result = run(X, y, z, erasers=erasers, association=0.7, sizes=(300, 0, 100))
    assert not result.failures
    assert result.mean("rank", eraser="INLP") > 0
    for eraser in ("one", "R-LACE"):
        assert result.mean("rank", eraser=eraser) == 1
        assert result.mean("residual", eraser=eraser) > 1e-6
    assert result.mean("residual", eraser="LEACE") < 1e-9  # control: a guarded eraser
    assert quick.random_state is None  # the caller's own object is left alone
    for metric in ("accuracy", "probe_auc", "distortion", "kept_covariance"):
        a, b, c = (result.mean(metric, eraser=e) for e in ("A", "SPLINCE", "LEACE"))
        assert a == pytest.approx(b, rel=1e-9)
        if metric == "distortion":
            assert a != pytest.approx(c, rel=1e-6)  # control


def leace_of(X: Any, labels: Any) -> sf.Projection:
    return sf.leace(sf.Moments().update(X, labels), erase="concept")


def o_leace(X: Any, labels: Any) -> sf.ConditionalEraser:
    return sf.oracle(sf.Moments().update(X, labels), erase="concept", missing="raise")


def nonlinear(X: Any, labels: Any) -> Any:
    """Centre the rows beyond the midpoint of the class means, and the others, each alone."""
    means = [X[labels["concept"] == c].mean(axis=0) for c in np.unique(labels["concept"])]
    direction, middle = means[1] - means[0], (means[0] + means[1]) / 2
    return lambda rows: rows - np.sign((rows - middle) @ direction)[:, None] * direction / 2


class Nonlinear(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """The same as a transformer, which overwrites its arguments."""

    def fit(self, X: Any, y: Any, *, concept: Any) -> Nonlinear:
        self.map_ = nonlinear(X, {"concept": concept})
        for array in (X, y, concept):
            array[:] = 0
        return self

    def transform(self, X: Any) -> Any:
        erased = self.map_(X)
        X[:] = 0
        return erased


class Head(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that overwrites its arguments."""

    def fit(self, X: Any, y: Any) -> Head:
        self.model_ = LogisticRegression().fit(X, y)
        X[:] = y[:] = 0
        return self

    def predict(self, X: Any) -> Any:
        y_pred = self.model_.predict(X)
        X[:] = 0
        return y_pred


def test_a_nonlinear_eraser_has_the_figures_of_a_plain_script() -> None:
    X, y, z = data()
    X = 5 * X + 2
    erasers = {"function": nonlinear, "transformer": Nonlinear(), "LEACE": "LEACE"}
    heads = {"retrained": "retrained", "frozen": "frozen", "own": Head()}
    result = run(X, y, z, erasers=erasers, heads=heads, alphas=(0.01,), **LEVEL)
    assert not result.failures
    twin = script(X, y, z)
    train, test = twin.train, twin.test
    eraser = nonlinear(X[train], {"concept": z[train]})
    erased, fresh = eraser(X[train]), eraser(X[test])
    models = {
        "retrained": twin.head(erased), "frozen": twin.head(X[train]),
        "own": LogisticRegression().fit(twin.scaled(erased), y[train]),
    }  # fmt: skip
    for name in ("function", "transformer"):
        twin.assert_figures(result, name, erased, fresh, models)
        assert np.isnan(result.mean("rank", eraser=name))  # no projection
    assert result.mean("residual", eraser="function") > 0.05  # control: not LEACE


def test_functions_and_transformers_change_no_other_figure() -> None:
    names = {name: name for name in ("none", "LEACE", "INLP")}
    erasers = {"own": Nonlinear(), "scaled": StandardScaler(), **names}
    heads = {"own": Head(), "retrained": "retrained", "frozen": "frozen"}
    result = run(X, y, z, erasers=erasers, heads=heads)
    assert not result.failures
    for metric in ("accuracy", "probe_auc"):  # a scale for each feature erases nothing
        scaled, none = (result.mean(metric, eraser=e) for e in ("scaled", "none"))
        assert scaled == pytest.approx(none, abs=0.02)
    del heads["own"]
    alone = run(X, y, z, erasers=names, heads=heads)
    records = {r.id: r for r in result.records}
    assert [records[r.id] for r in alone.records] == alone.records


def test_a_function_owns_rows_and_names_of_classes_with_the_task_beside_them() -> None:
    """A concept that is called "task" leaves the task the name "kept task"."""
    names, amount = np.array(["f", "m"])[z], X[:, 2] + 1
    seen = []

    def mine(rows: Any, labels: Any) -> sf.Projection:
        seen.append((rows.shape, sorted(labels), sorted(set(labels["task"])), labels["age"].dtype))
        moments = sf.Moments().update(rows, labels)
        rows[:] = labels["age"][:] = 0
        return sf.splince(moments, erase=["task", "age"], keep="kept task")

    concept = {"task": names, "age": amount}
    result = run(X, y, concept, erasers={"mine": mine, "SPLINCE": "SPLINCE"})
    assert seen == [((585, 6), ["age", "kept task", "task"], ["f", "m"], np.float64)]
    for metric in ("accuracy", "probe_auc[task]", "distortion", "kept_covariance", "residual"):
        a, b = (result.mean(metric, eraser=e) for e in ("mine", "SPLINCE"))
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


def test_concepts_of_every_kind_reach_every_eraser() -> None:
    """Random removes a subspace of their dimension; estimators get a mapping with the classes."""
    X, y, z = data()
    three = np.random.default_rng(3).integers(0, 3, 900)
    X[:, 3] += three == 1  # the codes 0, 1, 2 as numbers do not show it
    erasers = {"Random": "Random", "LEACE": "LEACE", "L": sf.LEACE(), "S": sf.SPLINCE()}
    result = run(X, y, {"z": z, "three": three, "amount": X[:, 2]}, erasers=erasers)
    assert not result.failures
    for eraser in erasers:
        assert result.mean("rank", eraser=eraser) == 4  # 1 + 2 + 1
        residual = result.mean("residual", eraser=eraser)
        assert residual > 0.1 if eraser == "Random" else residual < 1e-9
    own, named = (result.mean("distortion", eraser=eraser) for eraser in ("L", "LEACE"))
    assert own == pytest.approx(named, rel=1e-9)


def test_what_depends_on_an_object_of_the_caller_is_computed_in_every_run(tmp_path: Path) -> None:
    calls: list[str] = []

    def eraser(rows: Any, labels: Any) -> Any:
        calls.append("eraser")
        return leace_of(rows, labels)

    def metric(y_true: Any, y_pred: Any) -> float:
        calls.append("metric")
        return 0.5

    class Counted(LogisticRegression):  # type: ignore[misc]
        def fit(self, *args: Any) -> Any:
            calls.append("fit")
            return super().fit(*args)

    plain: dict[str, Any] = {"erasers": ("LEACE",), "heads": ("frozen",), "run": tmp_path}
    first = run(X, y, z, **plain)
    for change, made in (
        ({}, []),
        ({"erasers": {"LEACE": "LEACE", "own": eraser}}, ["eraser"]),
        ({"heads": {"frozen": "frozen", "own": Counted()}}, ["fit"]),
        ({"metrics": {"own": metric}}, ["metric"]),
        ({"leakage": {"linear": "linear", "own": Counted()}}, ["fit"] * 5),
    ):
        for _ in range(2):
            calls.clear()
            result = run(X, y, z, **(plain | change))
            assert calls == made, change
            assert not result.failures
        for metric_name in ("accuracy", "probe_auc", "distortion"):
            assert result.mean(metric_name, eraser="LEACE", head="frozen") == first.mean(
                metric_name, eraser="LEACE", head="frozen"
            )


def test_at_p_0_and_1_task_and_concept_are_one_variable() -> None:  # case 7
    options: dict[str, Any] = {"aligned_class": 1, "sizes": (100, 40, 100)}
    for p in (0.0, 1.0):
        result = run(X, y, z, association=p, erasers=("none", "LEACE"), **options)
        assert not result.failures
        assert result.mean("kept_covariance", eraser="LEACE") < 1e-12  # it takes all of the task


def test_folds_without_a_class_are_left_out_and_without_any_fold_it_is_an_error() -> None:  # case 4
    X, _, z = data(200)
    rare = np.zeros(200, dtype=int)
    part = np.array(["train"] * 120 + ["validation"] * 4 + ["test"] * 76)
    rare[:1] = 1  # one training row: the fold that holds it out has a single class
    rare[150:155] = 1
    result = run(X, rare, z, test=part, erasers=("none",))
    assert any("1 of 5 folds were left out" in note for note in result.notes)
    assert np.isfinite(result.mean("accuracy", eraser="none"))
    alone = np.r_[np.arange(12), np.arange(12)]  # every class has one training row
    few = np.array(["train"] * 12 + ["test"] * 12)
    result = run(X[:24], alone.astype(str), z[:24], test=few, erasers=("none",))
    reasons = {reason for _, head, reason in result.failures if head == "retrained"}
    assert len(reasons) == 1
    assert "the training rows of every fold lack a class" in reasons.pop()


def test_a_head_that_does_not_converge_is_marked_in_the_table() -> None:  # case 5
    result = run(X, y, z, heads={"brief": LogisticRegression(max_iter=1, solver="lbfgs")})
    assert "~" in str(result)
    assert any("did not converge" in note for note in result.notes)
    plain = run(X, y, z, heads={"whole": LogisticRegression()})
    assert "~" not in str(plain)  # control


def near(n: int = 900) -> tuple[Any, Any, Any]:
    """Rows whose first feature shows both the task and the concept."""
    X, y, z = data(n)
    X[:, 0] += y
    return X, y, z


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.UnseenRowsWarning")
def test_erasers_that_need_labels_get_those_of_every_row() -> None:
    """Twin: a plain script that erases each part with its labels; control: with other labels."""
    X, y, z = near()
    erasers: dict[str, Any] = {
        "none": "none", "LEACE": "LEACE", "oracle": "Oracle", "quadratic": "quadratic",
        "own": o_leace,
    }  # fmt: skip
    heads = ("retrained", "frozen")
    result = run(X, y, z, alphas=(0.01,), heads=heads, erasers=erasers, **LEVEL)
    assert not result.failures
    twin = script(X, y, z)
    train, test = twin.train, twin.test
    labels = {"task": y[train], "concept": z[train]}
    moments = sf.Moments().update(X[train], labels)
    by_class = sf.Moments(by="concept").update(X[train], labels)
    erasers = {
        "oracle": sf.oracle(moments, erase="concept", keep="task"),
        "quadratic": sf.quadratic(by_class, erase="concept", keep="task"),
        "own": o_leace(X[train], labels),
    }
    frozen = twin.head(X[train])
    for name, eraser in erasers.items():
        erased, fresh = (eraser(X[rows], {"concept": z[rows]}) for rows in (train, test))
        models = {"retrained": twin.head(erased), "frozen": frozen}
        twin.assert_figures(result, name, erased, fresh, models)
        assert result.mean("residual", eraser=name) < 1e-12
        kept = result.mean("kept_covariance", eraser=name)
        assert (kept == pytest.approx(1.0, abs=1e-10)) == (name != "own")
        # Control: the labels of other rows make another figure.
        wrong = eraser(X[test], {"concept": 1 - z[test]})
        other = ev.leakage(twin.scaled(wrong), z[test])["linear"]
        assert abs(other.auc - result.mean("probe_auc", eraser=name)) > 0.05
    for name in result.context.erasers:
        notes = [text for text in result.notes if text.startswith(f"{name}: the map depends on")]
        assert len(notes) == (name in erasers)
        assert all("the test rows were erased with their labels" in text for text in notes)
    assert "oracle: the map depends on the labels of each row" in str(result)


def test_what_quadratic_cannot_erase_is_a_row() -> None:
    X, y, z = near()
    for concept in ({"a": z, "b": np.arange(900) % 3}, {"c": X[:, 0]}):
        result = run(X, y, concept, erasers=("oracle", "quadratic"))
        assert {eraser for eraser, _, _ in result.failures} == {"quadratic"}
        assert all("one concept" in reason for _, _, reason in result.failures)
