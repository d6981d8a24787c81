"""INLP: removed directions, stopping rule, report (`iterative`, `inputs`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from baseline_data import bug_parts, draw, figures
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier

import splince_fast as sf
from splince_fast.baselines import INLP, inlp
from splince_fast.exceptions import (
    InputError,
    LabelError,
    NothingErasedWarning,
    WholeNumbersWarning,
)


def test_rounds_equal_the_definition_with_intersected_null_spaces() -> None:
    """The naive twin refits on (I - B B^T)(x - mean) with B from all rounds anew."""
    data, limit = draw(d=12, seed=3), 5
    mask = np.arange(600) % 3 == 0
    eraser = INLP(max_rank=limit, tol=0.0).fit(data.X, concept=data.z, validation=mask)
    train, validation = data.X[~mask], data.X[mask]
    mean = train.mean(axis=0)
    found: list[Any] = []
    for _ in range(limit):
        basis = np.linalg.svd(np.array(found).T, full_matrices=False)[0] if found else None
        P = np.eye(12) if basis is None else np.eye(12) - basis @ basis.T
        model = LogisticRegression(C=1 / (1e-4 * len(train)), solver="newton-cholesky", tol=1e-6)
        model.fit((train - mean) @ P, data.z[~mask])
        if (
            model.score((validation - mean) @ P, data.z[mask])
            <= np.bincount(data.z[mask]).max() / mask.sum()
        ):
            break
        found.append(model.coef_[0])
    basis = np.linalg.svd(np.array(found).T, full_matrices=False)[0]
    assert eraser.report_.rank == len(found)
    # The probes' own tolerance, 1e-6 of a gradient, against a curvature of at least 1e-4.
    np.testing.assert_allclose(eraser.projection_.matrix(), np.eye(12) - basis @ basis.T, atol=1e-2)


def test_an_independent_concept_erases_nothing() -> None:
    rng = np.random.default_rng(0)
    X, z = rng.normal(size=(20_000, 5)), rng.integers(0, 2, size=20_000)
    # 4,000 selection rows: the accuracy of a guess has a standard error of .008.
    with pytest.warns(
        NothingErasedWarning,
        match="the identity: no probe beats the majority .*most frequent class gives 0.5",
    ):
        eraser = INLP(tol=0.03, random_state=0).fit(X, concept=z)
    assert eraser.report_.rank == 0
    assert eraser.report_.residual == 1.0
    assert eraser.report_.warnings
    np.testing.assert_array_equal(eraser.transform(X), X)


def test_the_report_measures_residual_and_distortion() -> None:
    data = draw()
    mask = np.arange(600) % 4 == 0
    eraser = INLP().fit(data.X, concept=data.z, validation=mask)
    report = eraser.report_
    train, z = data.X[~mask], data.z[~mask]
    cross = ((train - train.mean(axis=0)).T @ (z[:, None] == [0, 1])) / len(z)
    P = eraser.projection_.matrix()
    assert report.residual == pytest.approx(np.linalg.norm(P @ cross) / np.linalg.norm(cross))
    clean = eraser.transform(train)
    moved = ((clean - train) ** 2).sum() / ((train - train.mean(axis=0)) ** 2).sum()
    assert report.distortion == pytest.approx(moved)
    direction = cross[:, 1] / np.linalg.norm(cross[:, 1])
    cosine = np.linalg.norm(eraser.projection_.left.T @ direction)
    assert report.cosine_sal == pytest.approx(cosine)
    assert (report.n_rows, report.n_validation) == (450, 150)
    assert report.accuracies[-1] <= report.majority + 0.01
    assert report.accuracies[0] > 0.8
    assert len(report.accuracies) == report.rounds == report.rank + 1
    text = str(report)
    assert "no probe beats the majority" in text
    assert f"{report.residual:.3g}" in text


def test_the_rank_is_bounded_and_the_report_gives_the_reason() -> None:
    data = draw(k=3, d=9)
    report = INLP(max_rank=1, random_state=0).fit(data.X, concept=data.z).report_
    assert report.rank == 1
    assert report.stop == "the largest rank, 1, is reached"


def test_weights_are_repetitions() -> None:
    data = draw(n=200)
    weight = np.random.default_rng(1).integers(0, 4, size=200)
    rows = np.repeat(np.arange(200), weight)
    options = {"validation_share": 0.0, "max_rank": 2, "tol": 0.0}
    weighted = INLP(**options).fit(data.X, concept=data.z, sample_weight=weight)
    repeated = INLP(**options).fit(data.X[rows], concept=data.z[rows])
    np.testing.assert_allclose(
        weighted.projection_.matrix(), repeated.projection_.matrix(), atol=1e-6
    )
    np.testing.assert_allclose(weighted.projection_.mean, repeated.projection_.mean, atol=1e-12)
    assert weighted.report_.distortion == pytest.approx(repeated.report_.distortion, rel=1e-6)


def test_by_task_reads_within_classes_of_the_task() -> None:
    """The concept is readable only through the task: within its classes nothing is left."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, size=4000)
    z = np.where(rng.random(4000) < 0.9, y, 1 - y)
    X = rng.normal(size=(4000, 4)) + np.outer(y, [3, 0, 0, 0])
    with pytest.warns(NothingErasedWarning):
        inside = INLP(by_task=True, random_state=0).fit(X, y, concept=z)
    overall = INLP(random_state=0).fit(X, y, concept=z)
    assert inside.report_.rank == 0
    assert inside.report_.rounds == 2  # one probe closed each class of the task
    assert overall.report_.rank >= 1
    X = X + np.outer(z, [0, 4, 0, 0])
    found = INLP(by_task=True, random_state=0).fit(X, y, concept=z)
    assert found.report_.rank >= 1
    assert abs(found.projection_.left[1, 0]) > 0.9


def test_the_report_names_task_classes_without_a_probe() -> None:
    """Class 1 of the task has no validation row; class 2 has a single class of the concept."""
    rng = np.random.default_rng(0)
    y, z = np.arange(900) % 3, rng.integers(0, 2, size=900)
    z[y == 2] = 1
    X = rng.normal(size=(900, 3))
    mask = (np.arange(900) < 450) & (y != 1)
    options: dict[str, Any] = {"by_task": True, "tol": 0.1, "random_state": 0}
    with pytest.warns(NothingErasedWarning, match=r"the identity: .*\(1 of 3 task classes\)"):
        report = INLP(**options).fit(X, y, concept=z, validation=mask).report_
    assert len(report.accuracies) == 1
    assert set(report.stop.split("; ")) == {
        "no probe beats the majority on the selection rows (1 of 3 task classes)",
        "there are no selection rows to evaluate a probe (1 of 3 task classes)",
        "the training rows hold a single class of the concept (1 of 3 task classes)",
    }
    with pytest.warns(NothingErasedWarning):
        report = INLP(**options).fit(X, np.where(y == 0, None, z), concept=z).report_
    assert report.stop == (
        "the training rows hold a single class of the concept (2 of 2 task classes)"
    )
    task, concept = [*z[:300].tolist(), *[None] * 600], [*[None] * 300, *z[300:].tolist()]
    with pytest.warns(NothingErasedWarning, match="identity: "):
        report = INLP(**options).fit(X, task, concept=concept).report_
    assert report.stop == "no training row has a label of the task"


def test_a_probe_without_new_directions_is_the_reason_of_the_stop() -> None:
    class FirstFeature(LogisticRegression):  # type: ignore[misc]
        """A probe that reads all features, but reports the weights of the first one only."""

        def fit(self, X: Any, y: Any) -> Any:
            self.model_ = LogisticRegression().fit(X, y)
            self.coef_ = np.eye(1, X.shape[1])
            return self

        def predict(self, X: Any) -> Any:
            return self.model_.predict(X)

    data = draw()
    report = INLP(probe=FirstFeature(), random_state=0).fit(data.X, concept=data.z).report_
    assert (report.rank, report.rounds) == (1, 2)
    assert report.stop == "a probe gives no new direction"


def test_a_probe_may_be_any_linear_classifier() -> None:
    data = draw()
    eraser = INLP(probe=LinearSVC(C=0.01, dual=False), random_state=0).fit(data.X, concept=data.z)
    assert 1 <= eraser.report_.rank < 8
    with pytest.raises(InputError, match="no coef_"):
        INLP(probe=DecisionTreeClassifier(), random_state=0).fit(data.X, concept=data.z)


def test_missing_labels_count_for_the_mean_alone() -> None:
    data = draw()
    z = [None if i % 3 == 0 else int(c) for i, c in enumerate(data.z)]
    eraser = INLP(validation_share=0).fit(data.X, concept=z)
    np.testing.assert_allclose(eraser.projection_.mean, data.X.mean(axis=0), atol=1e-12)
    assert eraser.report_.n_rows == 400


def test_whole_floats_are_classes_without_a_warning_that_they_are_numbers() -> None:
    data = draw(k=3, d=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WholeNumbersWarning)
        eraser = INLP(random_state=0).fit(data.X, concept=data.z.astype(float))
        assert eraser.classes_.tolist() == [0, 1, 2]
        with pytest.raises(WholeNumbersWarning):  # moments do read them as numbers
            sf.Moments().update(data.X, {"concept": data.z.astype(float)})


def test_a_pipeline_passes_the_concept() -> None:
    data = draw()
    pipe = make_pipeline(StandardScaler(), INLP(random_state=0), LogisticRegression())
    pipe.fit(data.X, data.y, inlp__concept=data.z)
    alone = INLP(random_state=0).fit(StandardScaler().fit_transform(data.X), concept=data.z)
    np.testing.assert_array_equal(pipe[1].projection_.matrix(), alone.projection_.matrix())
    with pytest.raises(InputError, match="inlp__concept=z"):
        pipe.fit(data.X, data.y)


def test_metadata_is_routed_without_a_request() -> None:
    import sklearn
    from sklearn.model_selection import cross_validate

    data = draw()
    with sklearn.config_context(enable_metadata_routing=True):
        pipe = make_pipeline(INLP(random_state=0), LogisticRegression())
        scores = cross_validate(pipe, data.X, data.y, params={"concept": data.z}, cv=3)
    assert np.isfinite(scores["test_score"]).all()


@pytest.mark.parametrize("probe", ["svm", LinearSVC, Ridge(), 3])
def test_a_probe_that_is_no_classifier_is_refused(probe: Any) -> None:
    data = draw()
    with pytest.raises(InputError, match="it must be a linear classifier"):
        INLP(probe=probe).fit(data.X, concept=data.z)


def test_a_probe_without_weights_is_refused_with_weights() -> None:
    data = draw()
    probe, weight = LinearDiscriminantAnalysis(), np.arange(1.0, 601.0)
    assert INLP(probe=probe, random_state=0).fit(data.X, concept=data.z).report_.rank
    with pytest.raises(InputError, match="LinearDiscriminantAnalysis takes no sample_weight"):
        INLP(probe=probe, random_state=0).fit(data.X, concept=data.z, sample_weight=weight)


def test_validation_of_one_class_is_refused() -> None:
    data = draw()
    with pytest.raises(LabelError, match="validation rows hold a single class"):
        INLP().fit(data.X, concept=data.z, validation=(data.z == 1) & (np.arange(600) < 300))


def test_ctrl_c_leaves_the_estimator_unfitted(monkeypatch: pytest.MonkeyPatch) -> None:
    data, calls = draw(k=3, d=9), []
    original = inlp.fit_probe

    def interrupted(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(inlp, "fit_probe", interrupted)
    eraser = INLP(random_state=0)
    with pytest.raises(KeyboardInterrupt):
        eraser.fit(data.X, concept=data.z)
    assert len(calls) == 2
    assert not [name for name in vars(eraser) if name.endswith("_")]


@pytest.mark.slow
def test_figures_on_biographies_after_inlp(real_data: Callable[[str], Path]) -> None:
    """The figures of the data sets for seed 0: deterministic, so to the digits that are given."""
    bug = bug_parts(real_data("bug_profession_gender"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eraser = INLP(max_rank=40).fit(
            bug.X[bug.fitted], concept=bug.z[bug.fitted], validation=bug.mask
        )
    report = eraser.report_
    assert report.rank == 40
    assert report.stop == "the largest rank, 40, is reached"
    assert report.distortion == pytest.approx(0.084, abs=1e-3)
    clean = eraser.transform(bug.X)
    heads = {}
    for name, X in (("none", bug.X), ("INLP", clean)):
        scored = []
        for alpha in (1.0, 0.1, 0.01, 0.001, 0.0001):
            head = LogisticRegression(
                C=1 / (alpha * len(bug.train)), solver="newton-cholesky", tol=1e-6
            ).fit(X[bug.train], bug.y[bug.train])
            hit = head.predict(X[bug.validation]) == bug.y[bug.validation]
            cells = 2 * bug.y[bug.validation] + bug.z[bug.validation]
            worst = min(hit[cells == c].mean() for c in range(4))
            scored.append((worst, hit.mean(), alpha, head))
        heads[name] = max(scored, key=lambda s: s[:3])[3]
    tuned = figures(bug, heads["INLP"].predict(clean[bug.test]))
    np.testing.assert_allclose(tuned, (0.705, 0.560, 0.250), atol=0.004)
    frozen = figures(bug, heads["none"].predict(clean[bug.test]))
    np.testing.assert_allclose(frozen[:2], (0.603, 0.436), atol=0.004)
    none = figures(bug, heads["none"].predict(bug.X[bug.test]))
    np.testing.assert_allclose(none, (0.699, 0.496, 0.406), atol=0.004)
    y = (bug.y[bug.train][:, None] == [0, 1]).astype(float)
    cross = (bug.X[bug.train].T @ (y - y.mean(axis=0))) / len(y)
    P = eraser.projection_.matrix()
    assert np.sum((P @ cross) ** 2) / np.sum(cross**2) == pytest.approx(0.038, abs=1e-3)


def test_separate_validation_rows_equal_a_mask() -> None:
    data = draw(k=3, d=9)
    mask = np.arange(600) >= 450
    weight = np.random.default_rng(0).uniform(0.5, 2, size=450)
    weight /= weight.mean()
    whole = INLP().fit(
        data.X, concept=data.z, validation=mask, sample_weight=np.append(weight, np.ones(150))
    )
    parts = INLP().fit(
        data.X[~mask],
        concept=data.z[~mask],
        validation=(data.X[mask], data.z[mask]),
        sample_weight=weight,
    )
    np.testing.assert_allclose(parts.projection_.matrix(), whole.projection_.matrix(), atol=1e-6)
    with pytest.raises(InputError, match="tuple of 1"):
        INLP().fit(data.X, concept=data.z, validation=(data.X,))
    with pytest.raises(InputError, match="the same width"):
        INLP().fit(data.X, concept=data.z, validation=(data.X[:, :3], data.z))


def test_validation_frames_are_read_as_the_frames_of_the_fit(pd: Any) -> None:
    data = draw(d=4)
    mask = np.arange(600) >= 450
    X, concept = pd.DataFrame(data.X, columns=list("abcd")), pd.DataFrame({"z": data.z})
    plain = INLP().fit(
        data.X[~mask], concept=data.z[~mask], validation=(data.X[mask], data.z[mask])
    )
    framed = INLP().fit(X[~mask], concept=concept[~mask], validation=(X[mask], concept[mask]))
    assert framed.report_ == plain.report_
    with pytest.raises(InputError, match="feature names"):
        INLP().fit(
            X[~mask], concept=data.z[~mask], validation=(X[mask][list("dcba")], data.z[mask])
        )
