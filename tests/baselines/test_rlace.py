"""R-LACE: the projection onto the Fantope, the game, and the report."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from test_baselines import draw

from splince_fast.baselines import RLACE
from splince_fast.baselines.rlace import project_to_fantope


@given(st.integers(0, 2**20), st.integers(1, 12), st.integers(1, 12), st.floats(-3, 2))
def test_the_projection_is_the_nearest_matrix_of_the_fantope(
    seed: int, d: int, k: int, size: float
) -> None:
    rng, k = np.random.default_rng(seed), min(k, d)
    matrix = 10**size * rng.normal(size=(d, d))
    matrix += matrix.T
    P = project_to_fantope(matrix, k)
    # Backward errors of d eigenvalues, each some eps times the largest.
    slack = 64 * d * np.finfo(float).eps * max(1.0, np.linalg.norm(matrix, 2))
    values = np.linalg.eigvalsh(P)
    assert values.min() >= -slack
    assert values.max() <= 1 + slack
    assert abs(np.trace(P) - k) <= d * slack
    # <M - P, Q - P> <= 0 for all Q: the largest <M - P, Q> is the sum of k eigenvalues of M - P.
    largest = np.sort(np.linalg.eigvalsh(matrix - P))[-k:].sum()
    assert largest - np.sum((matrix - P) * P) <= d * slack * max(1.0, np.linalg.norm(matrix))


def test_control_other_matrices_of_the_fantope_are_no_nearest_ones() -> None:
    matrix = np.diag([2.0, 0.6, 0.1])
    np.testing.assert_allclose(project_to_fantope(matrix, 1), np.diag([1.0, 0, 0]), atol=1e-15)
    np.testing.assert_allclose(project_to_fantope(matrix, 2), np.diag([1, 0.75, 0.25]), atol=1e-15)
    other = np.diag([1.0, 1, 0])
    assert np.sort(np.linalg.eigvalsh(matrix - other))[-2:].sum() > np.sum((matrix - other) * other)


def test_the_concept_is_erased_near_the_direction_of_sal() -> None:
    X, _, z = draw(n=4000, d=6)
    eraser = RLACE(max_steps=2000, step_size=0.05, random_state=0).fit(X, concept=z)
    report = eraser.report_
    direction = X[z == 1].mean(axis=0) - X[z == 0].mean(axis=0)  # that SAL removes
    cosine = direction @ eraser.projection_.left[:, 0] / np.linalg.norm(direction)
    assert abs(cosine) > 0.98
    assert report.residual < 0.1
    X, _, z = draw(n=4000, d=6, seed=9)
    before, after = (
        LogisticRegression().fit(rows[:2000], z[:2000]).score(rows[2000:], z[2000:])
        for rows in (X, eraser.transform(X))
    )
    assert before > 0.9
    assert after < 0.6
    assert report.accuracies[0] >= min(report.accuracies)
    assert "R" in str(report)


def test_the_run_ends_when_probes_do_not_improve() -> None:
    X, _, z = draw(n=4000, d=6)
    options: dict[str, Any] = {"step_size": 0.05, "check_every": 200, "random_state": 0}
    patient = RLACE(max_steps=1600, patience=None, tol=0.0, **options)
    ended = RLACE(max_steps=1600, patience=2, tol=0.0, **options)
    close = RLACE(max_steps=1600, patience=None, tol=0.1, **options)
    reports = [e.fit(X, concept=z).report_ for e in (patient, ended, close)]
    assert reports[0].rounds == 1600
    assert reports[0].stop == "the largest number of steps is reached"
    assert reports[1].rounds < 1600
    assert reports[1].stop == "2 probes in a row did not raise the loss"
    assert reports[2].stop == "a probe is no better than the majority"
    assert abs(reports[2].accuracies[-1] - reports[2].majority) < 0.1


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    """Rows of weight 0 count for nothing, and heavy rows for what they weigh."""
    data, _, labels = draw(n=3000, d=4)
    X = np.concatenate([data, data + np.array([0, 0, 0, 50.0])])
    z, weight = np.tile(labels, 2), np.repeat([1.0, 0.0], 3000)
    eraser = RLACE(max_steps=300, step_size=0.05, validation_share=0, random_state=0)
    with_junk = eraser.fit(X, concept=z, sample_weight=weight).projection_
    np.testing.assert_allclose(with_junk.mean, data.mean(axis=0), atol=1e-12)
    alone = eraser.fit(data, concept=labels).projection_
    np.testing.assert_allclose(with_junk.matrix(), alone.matrix(), atol=1e-9)
    # Weight on the rows whose concept goes with the third feature makes that what is erased.
    shifted = np.concatenate([data, data + np.outer(labels, [0, 0, 6.0, 0])])
    heavy = np.repeat([0.01, 1.0], 3000)
    found = eraser.fit(shifted, concept=z, sample_weight=heavy).projection_.left[:, 0]
    assert abs(found[2]) > 0.8
