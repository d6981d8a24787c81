"""INLP: removed directions, stopping rule, report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from test_baselines import draw

from splince_fast.baselines import INLP
from splince_fast.exceptions import NothingErasedWarning


def test_rounds_equal_the_definition_with_intersected_null_spaces() -> None:
    """The naive twin refits on (I - B B^T)(x - mean) with B from all rounds anew."""
    (X, _, z), limit = draw(d=12, seed=3), 5
    mask = np.arange(600) % 3 == 0
    eraser = INLP(max_rank=limit, tol=0.0).fit(X, concept=z, validation=mask)
    train, validation = X[~mask], X[mask]
    mean = train.mean(axis=0)
    found: list[Any] = []
    for _ in range(limit):
        basis = np.linalg.svd(np.array(found).T, full_matrices=False)[0] if found else None
        P = np.eye(12) if basis is None else np.eye(12) - basis @ basis.T
        model = LogisticRegression(C=1 / (1e-4 * len(train)), solver="newton-cholesky", tol=1e-6)
        model.fit((train - mean) @ P, z[~mask])
        if model.score((validation - mean) @ P, z[mask]) <= np.bincount(z[mask]).max() / mask.sum():
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
    assert (eraser.report_.rank, eraser.report_.residual) == (0, 1.0)
    assert eraser.report_.warnings
    np.testing.assert_array_equal(eraser.transform(X), X)


def test_the_report_measures_residual_and_distortion() -> None:
    X, _, z = draw()
    mask = np.arange(600) % 4 == 0
    eraser = INLP().fit(X, concept=z, validation=mask)
    report = eraser.report_
    train, labels = X[~mask], z[~mask]
    cross = ((train - train.mean(axis=0)).T @ (labels[:, None] == [0, 1])) / len(labels)
    P = eraser.projection_.matrix()
    assert report.residual == pytest.approx(np.linalg.norm(P @ cross) / np.linalg.norm(cross))
    moved = ((eraser.transform(train) - train) ** 2).sum()
    moved /= ((train - train.mean(axis=0)) ** 2).sum()
    assert report.distortion == pytest.approx(moved)
    assert (report.n_rows, report.n_validation) == (450, 150)
    assert report.accuracies[-1] <= report.majority + 0.01
    assert report.accuracies[0] > 0.8
    assert len(report.accuracies) == report.rounds == report.rank + 1
    assert "no probe beats the majority" in str(report)
    assert f"{report.residual:.3g}" in str(report)


class FirstFeature(LogisticRegression):  # type: ignore[misc]
    """A probe that reads all features, but reports the weights of the first one only."""

    def fit(self, X: Any, y: Any) -> Any:
        self.model_ = LogisticRegression().fit(X, y)
        self.coef_ = np.eye(1, X.shape[1])
        return self

    def predict(self, X: Any) -> Any:
        return self.model_.predict(X)


@pytest.mark.parametrize(
    ("options", "rank", "stop"),
    [
        ({"max_rank": 1}, 1, "the largest rank, 1, is reached"),
        ({"probe": FirstFeature()}, 1, "a probe gives no new direction"),
        ({"probe": LinearSVC(C=0.01, dual=False)}, None, "no probe beats the majority on the "),
    ],
    ids=["rank", "no direction", "another probe"],
)
def test_the_report_gives_the_reason_of_the_stop(
    options: dict[str, Any], rank: int | None, stop: str
) -> None:
    X, _, z = draw(k=3 if "max_rank" in options else 2, d=9)
    report = INLP(random_state=0, **options).fit(X, concept=z).report_
    assert report.stop.startswith(stop)
    assert 1 <= report.rank < 9
    assert rank is None or report.rank == rank
