"""Differences of class covariances from folds: unbiased, and shrunk to less than their noise."""

from __future__ import annotations

import numpy as np
import pytest

from splince_fast._solve import class_covariances as shrinking
from splince_fast._solve.class_covariances import ClassStatistics
from splince_fast._solve.class_maps import solve, support_of

D = 20
CHANGE = np.diag([1.2, 1.0, 0.8, -0.5, -0.5, -0.4] + [0.0] * (D - 6))
POPULATION = np.array([np.eye(D), np.eye(D) + CHANGE])


def statistics(parts):
    return ClassStatistics(
        np.array([len(x) for x in parts], float), np.array([len(x) for x in parts]),
        np.array([x.mean(axis=0) for x in parts]),
        np.array([np.cov(x.T, ddof=0) for x in parts]),
        np.zeros((len(parts), D, 0)), np.zeros((len(parts), 0)),
    )  # fmt: skip


def population(covariances):
    k = len(covariances)
    return ClassStatistics(
        np.ones(k), np.ones(k), np.zeros((k, D)), covariances, np.zeros((k, D, 0)), np.zeros((k, 0))
    )


def size(statistics):
    support = support_of(statistics.pooled, np.zeros(D), 0.0)
    white = statistics.differences(support)
    return shrinking.inner_product(white, white)


def drawn(rng, n):
    return [rng.normal(size=(n, D)) @ np.linalg.cholesky(s).T for s in POPULATION]


def test_two_classes_give_a_quarter_of_the_squared_difference():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 2, 5, 5))
    assert np.isclose(shrinking.inner_product(a, b), np.vdot(a[1] - a[0], b[1] - b[0]) / 4)


def test_kept_is_the_covariance_of_all_rows():
    rng = np.random.default_rng(1)
    z = rng.integers(0, 3, 90)
    X, y = rng.normal(size=(90, 2)) + z[:, None], rng.normal(size=(90, 1)) + z[:, None] ** 2
    parts = [(X[z == c], y[z == c]) for c in range(3)]
    found = ClassStatistics(
        np.array([len(a) for a, _ in parts], float), np.array([len(a) for a, _ in parts]),
        np.array([a.mean(axis=0) for a, _ in parts]),
        np.array([np.cov(a.T, ddof=0) for a, _ in parts]),
        np.array([(a - a.mean(axis=0)).T @ b / len(a) for a, b in parts]),
        np.array([b.mean(axis=0) for _, b in parts]),
    )  # fmt: skip
    assert np.allclose(found.kept, (X - X.mean(axis=0)).T @ y / 90)
    assert np.allclose(found.mean, X.mean(axis=0))


def test_product_of_folds_has_no_noise_and_that_of_all_rows_has():
    rng = np.random.default_rng(2)
    true = size(population(POPULATION))
    found, raw = [], []
    for _ in range(40):
        rows = drawn(rng, 400)
        whole = statistics(rows)
        support = support_of(whole.pooled, whole.mean, 0.0)
        folds = [statistics([x[i::2] for x in rows]).differences(support) for i in range(2)]
        found.append(shrinking.unbiased_difference(folds))
        own = whole.differences(support)
        raw.append(shrinking.inner_product(own, own))
    error = 4 * np.std(found) / 40**0.5
    assert abs(np.mean(found) - true) < error + 0.05 * true
    # Control: two classes of 400 rows carry D (D + 1) / 800 = .53 of noise.
    assert np.mean(raw) - true > 0.4


@pytest.mark.parametrize("n", [300, 1000])
def test_shrunk_erasers_leave_less_and_the_figure_says_how_much(n):
    rng = np.random.default_rng(n)
    rows = []
    for _ in range(12):
        drawn_rows = drawn(rng, n)
        whole = statistics(drawn_rows)
        support = support_of(whole.pooled, whole.mean, 0.0)
        own = whole.differences(support)
        folds = [statistics([x[i::2] for x in drawn_rows]).differences(support) for i in range(2)]
        before = shrinking.unbiased_difference(folds)
        share = shrinking.intensity(whole.fractions, own, folds)
        eigenvalues = shrinking.held_out_eigenvalues(whole.fractions, folds)
        assert (np.diff(eigenvalues.values) >= 0).all()
        row = []
        for used, left in (
            (whole.covariances, shrinking.expected_difference(before, own, 0.0, None)),
            (
                shrinking.shrunk(whole, share),
                shrinking.expected_difference(before, own, share, None),
            ),
            (
                shrinking.with_eigenvalues(whole, support, eigenvalues.values),
                shrinking.expected_difference(before, own, 0.0, eigenvalues),
            ),
        ):
            assert all(np.linalg.eigvalsh(s)[0] > 0 for s in used)
            assert np.allclose(np.tensordot(whole.fractions, used, 1), whole.pooled)
            maps = solve(whole.problem(support, used)).maps
            after = np.array([a @ s @ a.T for a, s in zip(maps, POPULATION, strict=True)])
            row += [left, size(population(after))]
        rows.append(row)
    raw, raw_true, cv, cv_true, eig, eig_true = np.mean(rows, axis=0)
    assert cv_true < raw_true
    assert eig_true < raw_true
    # To first order in the differences, which are not small here.
    assert 0.6 < raw / raw_true < 1.6
    assert 0.7 < cv / cv_true < 1.4
    assert 0.55 < eig / eig_true < 1.2


@pytest.mark.parametrize("m", [2, 5])
def test_figure_for_held_out_eigenvalues_tends_to_what_is_left(m):
    rng = np.random.default_rng(4)
    said, true = [], []
    for _ in range(5):
        rows = drawn(rng, 16_000)
        whole = statistics(rows)
        support = support_of(whole.pooled, whole.mean, 0.0)
        own = whole.differences(support)
        folds = [statistics([x[i::m] for x in rows]).differences(support) for i in range(m)]
        eigenvalues = shrinking.held_out_eigenvalues(whole.fractions, folds)
        before = shrinking.unbiased_difference(folds)
        said.append(shrinking.expected_difference(before, own, 0.0, eigenvalues))
        used = shrinking.with_eigenvalues(whole, support, eigenvalues.values)
        maps = solve(whole.problem(support, used)).maps
        after = np.array([a @ s @ a.T for a, s in zip(maps, POPULATION, strict=True)])
        true.append(size(population(after)))
    assert np.mean(said) == pytest.approx(np.mean(true), rel=0.15)


def test_one_share_for_no_difference_and_for_nothing_but_noise():
    rng = np.random.default_rng(3)
    folds = list(rng.normal(size=(2, 2, 4, 4)))
    assert shrinking.intensity(np.full(2, 0.5), np.zeros((2, 4, 4)), folds) == 1.0
    assert shrinking.intensity(np.full(2, 0.5), folds[0], [folds[0], -folds[0]]) == 1.0
    assert shrinking.intensity(np.full(2, 0.5), folds[0], [folds[0], folds[0]]) == 0.0
