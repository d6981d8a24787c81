"""compare with every kind of eraser (`erasers.py`): baselines, estimators, functions; tensors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import comparisons
import numpy as np
import pytest
from comparisons import data
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.baselines import INLP, RLACE, GroupDRO
from splince_fast.evaluation import Comparison
from splince_fast.evaluation._digest import digest_of
from splince_fast.evaluation.erasers import copy_arguments


def run(X: Any, y: Any, z: Any, **options: Any) -> Comparison:
    return comparisons.run(X, y, z, **({"n_seeds": 1} | options))


# -- erasers ----------------------------------------------------------------------------------


def test_inlp_is_fitted_on_the_scaled_training_rows_and_stops_by_the_validation_rows() -> None:
    X, y, z = data(900)
    X = 7 * X + 3
    sizes = (240, 80, 200)
    result = run(X, y, z, erasers=("none", "INLP"), association=0.8, aligned_class=1, sizes=sizes)
    split = ev.spurious_split(y, z, p=0.8, sizes=sizes, aligned_class=1)
    rows = X[split.train]
    mean, unit = rows.mean(axis=0), np.sqrt(rows.var(axis=0).mean())
    held = ((X[split.validation] - mean) / unit, z[split.validation])
    model = INLP(random_state=0).fit(
        (rows - mean) / unit, y[split.train], concept=z[split.train], validation=held
    )
    assert model.projection_.rank >= 1
    assert result.mean("rank", eraser="INLP") == model.projection_.rank
    erased = model.transform((rows - mean) / unit) * unit + mean
    distortion = np.sum((erased - rows) ** 2) / np.sum((rows - mean) ** 2)
    assert result.mean("distortion", eraser="INLP") == pytest.approx(distortion, rel=1e-9)
    # No guarantee: something of the covariance with the concept is left, but less than before.
    assert 1e-6 < result.mean("residual", eraser="INLP") < 0.5
    assert result.mean("residual", eraser="none") == pytest.approx(1.0)


def test_weights_of_validation_rows_decide_when_inlp_stops() -> None:
    """A rare concept: by validation rows of equal weight the majority class is hard to beat."""
    rng = np.random.default_rng(0)
    z, y = (rng.random(6000) < 0.15).astype(int), rng.integers(0, 2, 6000)
    X = rng.normal(size=(6000, 8)) + 0.6 * np.outer(z, np.eye(8)[0]) + np.outer(y, np.eye(8)[1])
    options: dict[str, Any] = {"p": 0.9, "sizes": (700, 100, 200), "aligned_class": 1}
    split = ev.spurious_split(y, z, method="weights", **options)
    assert split.weights is not None
    assert split.validation_weights is not None
    result = run(
        X, y, z, erasers=("INLP",), association=0.9, association_method="weights",
        sizes=(700, 100, 200), aligned_class=1, heads=("retrained",),
    )  # fmt: skip
    rows = X[split.train]
    mean = np.average(rows, axis=0, weights=split.weights)
    unit = np.sqrt(np.average((rows - mean) ** 2, axis=0, weights=split.weights).mean())
    both = np.concatenate([split.train, split.validation])
    inside = np.arange(len(both)) >= len(split.train)

    def fitted(of_validation: Any) -> Any:
        weights = np.concatenate([split.weights, of_validation])
        return INLP(random_state=0).fit(
            (X[both] - mean) / unit, concept=z[both], validation=inside, sample_weight=weights
        )

    report = fitted(split.validation_weights).report_
    assert result.mean("rank", eraser="INLP") == report.rank > 0
    assert result.mean("distortion", eraser="INLP") == pytest.approx(report.distortion, rel=1e-9)
    with pytest.warns(sf.NothingErasedWarning):  # control: of equal weight
        assert fitted(np.ones(len(split.validation))).report_.rank == 0


def test_inlp_by_task_gets_the_task_of_validation_rows() -> None:
    X, y, z = data()
    eraser = INLP(by_task=True, random_state=0)
    result = run(X, y, z, erasers={"by task": eraser}, heads=("retrained",))
    assert not result.failures
    order = np.random.default_rng(0).permutation(900)
    held, train = order[225:315], order[315:]
    rows = X[train]
    mean, unit = rows.mean(axis=0), np.sqrt(rows.var(axis=0).mean())
    model = eraser.fit(
        (rows - mean) / unit, y[train], concept=z[train],
        validation=((X[held] - mean) / unit, z[held], y[held]),
    )  # fmt: skip
    assert result.mean("rank", eraser="by task") == model.report_.rank > 0


def test_baselines_draw_validation_rows_where_the_split_has_none() -> None:
    X, y, z = data()
    erasers = {"INLP": "INLP", "RLACE": RLACE(max_steps=100)}
    result = run(X, y, z, erasers=erasers, association=0.7, sizes=(300, 0, 100))
    assert not result.failures
    assert result.mean("rank", eraser="INLP") > 0


def test_baselines_as_names_and_as_estimators_with_parameters() -> None:
    X, y, z = data()
    quick = RLACE(max_steps=300, check_every=100)
    result = run(X, y, z, erasers={"one": INLP(max_rank=1), "R-LACE": quick, "LEACE": "LEACE"})
    assert not result.failures
    assert result.mean("rank", eraser="one") == 1
    assert result.mean("rank", eraser="R-LACE") == 1
    for eraser in ("one", "R-LACE"):
        assert result.mean("residual", eraser=eraser) > 1e-6
    assert result.mean("residual", eraser="LEACE") < 1e-9  # control: a guarded eraser
    assert quick.random_state is None  # the caller's own object is left alone


def test_repaired_erasers_keep_the_task_and_leak_what_they_leaked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import splince_fast.baselines as baselines

    brief = functools.partial(RLACE, max_steps=200, check_every=100)
    monkeypatch.setattr(baselines, "RLACE", brief)
    names = ("SAL", "INLP", "RLACE")
    rows = [name + suffix for name in names for suffix in ("", "+repair")]
    result = run(*data(), erasers=("none", "SPLINCE", *rows))
    assert not result.failures
    for name in names:
        repaired = f"{name}+repair"
        assert result.mean("kept_covariance", eraser=repaired) == pytest.approx(1.0, abs=1e-10)
        # A map that can be undone leaves all linear predictors of the training rows.
        assert result.mean("rank", eraser=repaired) >= result.mean("rank", eraser=name)
        assert result.mean("kept_covariance", eraser=name) < 1 - 1e-3  # control
    assert result.mean("residual", eraser="SAL+repair") < 1e-9


def test_a_repair_of_nothing_is_no_eraser() -> None:
    for name in ("none+repair", "LEACE+repair", "SAL+repairs"):
        with pytest.raises(sf.InputError, match="no eraser"):
            run(*data(), erasers=name)


def test_the_package_s_estimators_equal_its_names() -> None:
    result = run(*data(), erasers={"A": sf.SPLINCE(), "B": "SPLINCE", "C": sf.LEACE()})
    for metric in ("accuracy", "probe_auc", "distortion", "kept_covariance"):
        a, b, c = (result.mean(metric, eraser=e) for e in "ABC")
        assert a == pytest.approx(b, rel=1e-9)
        if metric == "distortion":
            assert a != pytest.approx(c, rel=1e-6)  # control


def test_an_infeasible_task_may_be_dropped() -> None:  # case 6
    X, y, _ = data()
    dropped = sf.SPLINCE(on_infeasible="drop")
    result = run(X, y, y.copy(), erasers={"none": "none", "SPLINCE": dropped, "LEACE": "LEACE"})
    assert not result.failures
    assert result.mean("kept_covariance", eraser="SPLINCE") < 1e-12
    assert any("SPLINCE" in note for note in result.notes)


def test_a_function_of_moments_finds_the_variables_by_name_and_owns_what_it_gets() -> None:
    X, y, z = data()
    seen = []

    def mine(moments: sf.Moments) -> sf.Projection:
        seen.append(dict(moments.variables))
        found = sf.leace(moments, erase="concept")
        moments.update(100 * X[:50], {"task": y[:50], "concept": z[:50]})
        return found

    result = run(
        X, y, z, erasers={"mine": mine, "LEACE": "LEACE"}, association=(0.5, 0.8), aligned_class=1
    )
    assert seen == [{"task": "classes", "concept": "classes"}] * 2
    for metric in ("accuracy", "probe_auc", "distortion", "kept_covariance", "residual"):
        a, b = (result.mean(metric, eraser=e) for e in ("mine", "LEACE"))
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


def test_a_function_that_closes_over_something_is_run_again_when_that_changes(
    tmp_path: Path,
) -> None:
    X, y, z = data()

    def removing(direction: Any) -> Any:
        return lambda moments: sf.Projection(direction, direction, moments.mean)

    first, second = np.eye(6)[:, :1], np.eye(6)[:, 1:2]
    known = {}
    for name, direction in (("first", first), ("second", second)):
        alone = run(X, y, z, erasers={"cut": removing(direction)})
        resumed = run(X, y, z, erasers={"cut": removing(direction)}, run=tmp_path, n_jobs=2)
        known[name] = alone.mean("distortion", eraser="cut")
        assert resumed.mean("distortion", eraser="cut") == pytest.approx(known[name])
    assert known["first"] != pytest.approx(known["second"], rel=1e-3)
    large = np.zeros(5000)
    assert digest_of(removing(large)) == digest_of(removing(large.copy()))
    large_too = large.copy()
    large_too[2500] = 1.0  # repr() leaves the middle of long arrays out
    assert digest_of(removing(large)) != digest_of(removing(large_too))
    partials = [functools.partial(sf.leace, erase=name) for name in ("a", "b")]
    assert digest_of(partials[0]) != digest_of(partials[1])


def test_estimators_and_classifiers_that_overwrite_their_arguments_change_no_other_figure() -> None:
    class Overwriting(BaseEstimator):  # type: ignore[misc]
        def fit(self, X: Any, y: Any, *, concept: Any, validation: Any) -> Overwriting:
            self.projection_ = sf.LEACE().fit(X, y, concept=concept).projection_
            for array in (X, y, concept, *validation):
                array[:] = 0
            return self

    class Head(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        def fit(self, X: Any, y: Any, *, groups: Any, validation: Any) -> Head:
            self.model_ = LogisticRegression().fit(X, y)
            for array in (X, y, groups, *validation):
                array[:] = 0
            return self

        def predict(self, X: Any) -> Any:
            y_pred = self.model_.predict(X)
            X[:] = 0
            return y_pred

    X, y, z = data()
    own = {"overwriting": Overwriting(), "none": "none", "LEACE": "LEACE", "INLP": "INLP"}
    heads = {"head": Head(), "retrained": "retrained", "frozen": "frozen"}
    result = run(X, y, z, erasers=own, heads=heads)
    assert not result.failures
    del own["overwriting"], heads["head"]
    alone = run(X, y, z, erasers=own, heads=heads)
    records = {r.id: r for r in result.records}
    assert [records[r.id] for r in alone.records] == alone.records
    for metric in ("distortion", "residual", "probe_auc"):
        assert result.mean(metric, eraser="overwriting") == pytest.approx(
            result.mean(metric, eraser="LEACE"), rel=1e-9, abs=1e-9
        )


def test_the_library_s_estimators_get_the_rows_without_a_copy() -> None:
    for value in (sf.LEACE(), INLP(), RLACE(), GroupDRO()):
        assert copy_arguments(value, data) is data


def test_an_estimator_without_a_projection_is_a_row() -> None:
    class Nothing(BaseEstimator):  # type: ignore[misc]
        def fit(self, X: Any, y: Any = None) -> Nothing:
            return self

    result = run(*data(), erasers={"none": "none", "Nothing": Nothing()})
    assert {e for e, _, _ in result.failures} == {"Nothing"}
    assert "projection_" in result.failures[0][2]


# -- rows -------------------------------------------------------------------------------------


def test_tensors_are_rows_and_labels() -> None:
    torch = pytest.importorskip("torch")
    X, y, z = data()
    expected = run(X.astype(np.float32), y, z, association=0.8, aligned_class=1)
    given = torch.tensor(X, dtype=torch.float32, requires_grad=True)
    found = run(given, torch.tensor(y), torch.tensor(z), association=0.8, aligned_class=1)
    assert [r.values for r in found.records] == [r.values for r in expected.records]
    half = torch.tensor(X).to(torch.bfloat16)
    assert not run(half, y, z, n_jobs=2).failures


# -- levels and folds -------------------------------------------------------------------------


def test_at_p_0_and_1_task_and_concept_are_one_variable() -> None:  # case 7
    X, y, z = data()
    sizes = (100, 40, 100)
    for p, same in ((0.0, False), (1.0, True)):
        split = ev.spurious_split(y, z, p=p, sizes=sizes, aligned_class=1)
        assert ((y[split.train] == z[split.train]) == same).all()
        result = run(
            X, y, z, association=p, aligned_class=1, sizes=sizes, erasers=("none", "LEACE")
        )
        assert not result.failures
        # Concept and task are one variable, so that LEACE takes all of the task.
        assert result.mean("kept_covariance", eraser="LEACE") < 1e-12


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
    X, y, z = data()
    result = run(X, y, z, heads={"brief": LogisticRegression(max_iter=1, solver="lbfgs")})
    assert "~" in str(result)
    assert any("did not converge" in note for note in result.notes)
    plain = run(X, y, z, heads={"whole": LogisticRegression()})
    assert "~" not in str(plain)  # control


# -- erasers that need labels -----------------------------------------------------------------


def near(n: int = 900) -> tuple[Any, Any, Any]:
    """Rows whose first feature shows both the task and the concept."""
    X, y, z = data(n)
    X[:, 0] += y
    return X, y, z


def o_leace(moments: sf.Moments) -> sf.ConditionalEraser:
    return sf.oracle(moments, erase="concept", missing="raise")


@pytest.mark.parametrize("method", ["subsample", "weights"])
def test_erasers_that_need_labels_get_those_of_every_row(method: str) -> None:
    """Twin: a plain script that erases each part with its labels; control: with other labels."""
    X, y, z = near()
    sizes = (240, 80, 200)
    options: dict[str, Any] = {
        "association": 0.8, "aligned_class": 1, "sizes": sizes, "alphas": (0.01,),
        "association_method": method, "heads": ("retrained", "frozen"),
        "erasers": {"none": "none", "LEACE": "LEACE", "oracle": "Oracle", "quadratic": "quadratic",
                    "own": o_leace},
    }  # fmt: skip
    result = run(X, y, z, **options)
    assert not result.failures
    split = ev.spurious_split(y, z, p=0.8, sizes=sizes, aligned_class=1, method=method)
    train, test, w = split.train, split.test, split.weights
    mean = np.average(X[train], axis=0, weights=w)
    unit = np.sqrt(np.average((X[train] - mean) ** 2, axis=0, weights=w).mean())
    labels = {"task": y[train], "concept": z[train]}
    moments = sf.Moments().update(X[train], labels, sample_weight=w)
    folds = sf.Folds(2, by="concept").update(X[train], labels, sample_weight=w)
    total = len(train) if w is None else w.sum()

    def head(rows: Any) -> LogisticRegression:
        model = LogisticRegression(C=1 / (0.01 * total), tol=1e-9, max_iter=5000)
        return model.fit((rows - mean) / unit, y[train], sample_weight=w)

    erasers = {
        "oracle": sf.oracle(moments, erase="concept", keep="task"),
        "quadratic": sf.quadratic(folds, erase="concept", keep="task"),
        "own": o_leace(moments),
    }
    frozen = head(X[train])
    for name, eraser in erasers.items():
        erased, fresh = (eraser(X[rows], {"concept": z[rows]}) for rows in (train, test))
        for role, model in (("retrained", head(erased)), ("frozen", frozen)):
            guess = model.predict((fresh - mean) / unit)
            assert result.mean("accuracy", eraser=name, head=role) == pytest.approx(
                np.mean(guess == y[test])
            )
        probe = ev.leakage((fresh - mean) / unit, z[test], probes=("linear",))["linear"]
        assert result.mean("probe_auc", eraser=name) == pytest.approx(probe.auc)
        moved = np.average(np.sum((erased - X[train]) ** 2, axis=1), weights=w)
        spread = np.average(np.sum((X[train] - mean) ** 2, axis=1), weights=w)
        assert result.mean("distortion", eraser=name) == pytest.approx(moved / spread)
        assert result.mean("residual", eraser=name) < 1e-12
        kept = result.mean("kept_covariance", eraser=name)
        assert (kept == pytest.approx(1.0, abs=1e-10)) == (name != "own")
        # Control: the labels of other rows make another figure.
        wrong = eraser(X[test], {"concept": 1 - z[test]})
        other = ev.leakage((wrong - mean) / unit, z[test], probes=("linear",))["linear"]
        assert abs(other.auc - probe.auc) > 0.05


def test_an_estimator_that_needs_labels_equals_the_name() -> None:
    X, y, z = near()
    concepts = {"one": z, "two": {"a": z, "b": np.arange(900) % 3}}
    for concept in concepts.values():
        named = {"oracle": "oracle", "estimator": sf.OracleSPLINCE(missing="raise")}
        result = run(X, y, concept, erasers=named)
        assert not result.failures
        same = [[result.mean(m, eraser=e) for e in named] for m in ("accuracy", "distortion")]
        # Joint classes are one variable of more columns than the two concepts side by side.
        assert all((a == pytest.approx(b, rel=1e-9)) == (concept is z) for a, b in same[1:])
        assert sum(text.startswith("estimator: the map depends") for text in result.notes) == 1


def test_a_note_names_erasers_that_used_labels() -> None:
    result = run(*near(), erasers=("LEACE", "oracle", "quadratic"))
    for name in ("LEACE", "oracle", "quadratic"):
        notes = [text for text in result.notes if text.startswith(f"{name}: the map depends on")]
        assert len(notes) == (name != "LEACE")
        assert all("the test rows were erased with their labels" in text for text in notes)
    assert "oracle: the map depends on the labels of each row" in str(result)


def test_what_quadratic_and_isotropic_cannot_erase_is_a_row() -> None:
    X, y, z = near()
    for concept in ({"a": z, "b": np.arange(900) % 3}, {"c": X[:, 0]}):
        result = run(X, y, concept, erasers=("oracle", "quadratic", "isotropic"))
        assert {eraser for eraser, _, _ in result.failures} == {"quadratic", "isotropic"}
        assert all("one concept" in reason for _, _, reason in result.failures)


def test_isotropic_needs_no_labels_and_hides_covariances() -> None:
    X, y, z = near(4000)
    X[:, 2] *= 1 + z
    X[:, 3] /= 1 + z
    result = run(X, y, z, erasers=("SPLINCE", "isotropic"), leakage=("quadratic",))
    assert not result.failures
    assert not any("depends on the label" in note for note in result.notes)
    assert result.mean("kept_covariance", eraser="isotropic") == pytest.approx(1.0, abs=1e-9)
    left = {e: result.mean("quadratic_auc", eraser=e) for e in ("SPLINCE", "isotropic")}
    assert left["isotropic"] < 0.58 < 0.65 < left["SPLINCE"]  # control


def test_groups_reach_the_folds_of_quadratic() -> None:
    X, y, z = near()
    for groups, text in ((None, "need folds with groups="), (np.arange(900) // 3, "together")):
        notes = run(X, y, z, erasers=("quadratic",), groups=groups).notes
        assert any(text in note for note in notes)


def test_labelled_erasers_resume_and_run_in_processes(tmp_path: Path) -> None:
    X, y, z = near(400)
    options: dict[str, Any] = {"erasers": ("oracle", "quadratic"), "n_seeds": 2}
    one = run(X, y, z, run=tmp_path, **options)
    assert one.records == run(X, y, z, run=tmp_path, **options).records
    assert one.records == run(X, y, z, n_jobs=2, **options).records


def test_partial_erasers_are_scaled_and_read_by_a_probe() -> None:
    X, y, z = data(900)
    result = run(
        X, y, z, erasers=("none", "leace", "LEACE*0.5", "leace * 0.99"), heads=("retrained",)
    )
    assert result.context.erasers == ("none", "LEACE", "LEACE*0.5", "LEACE*0.99")
    for name, alpha in (("LEACE*0.5", 0.5), ("LEACE*0.99", 0.99)):
        for part, whole in zip(
            result.values("distortion", eraser=name).values(),
            result.values("distortion", eraser="LEACE").values(),
            strict=True,
        ):
            assert part == pytest.approx(alpha**2 * whole, rel=1e-9)
        assert result.mean("residual", eraser=name) == pytest.approx(1 - alpha)
    probe = {e: result.mean("probe_accuracy", eraser=e) for e in result.context.erasers}
    # The probe is penalised: at .5 it reads the concept as before, whole erasing leaves chance.
    assert probe["LEACE*0.5"] > 0.9 * probe["none"] > probe["LEACE"] + 0.1
    pytest.importorskip("matplotlib")
    axes = result.plot("partial").axes[0]
    assert axes.get_ylim()[0] <= result.mean("probe_chance", eraser="none")
    assert "only alpha = 1 erases" in axes.get_title(loc="left")
    with pytest.raises(sf.InputError, match="no number between 0 and 1"):
        run(X, y, z, erasers=("LEACE*2",))
    with pytest.raises(sf.InputError, match="there is no eraser 'lace"):
        run(X, y, z, erasers=("lace*0.5",))
