"""R-LACE: the low-rank step (`_fantope`) against a dense twin, the game, and the report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from baseline_data import draw
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from sklearn.linear_model import LogisticRegression

from splince_fast import InputError, LabelError
from splince_fast.baselines import RLACE, rlace
from splince_fast.baselines._fantope import LowRankFantope, fantope_shift

Float = NDArray[np.float64]


class DenseFantope:
    """The naive twin: P as a d x d matrix, decomposed as a whole in each step."""

    def __init__(self, start: Float) -> None:
        self.k = start.shape[1]
        self.P = start @ start.T

    def erase(self, rows: Float) -> Float:
        return rows - rows @ self.P

    def step(self, first: Float, second: Float, step_size: float, decay: float) -> None:
        product = first.T @ second
        values, vectors = np.linalg.eigh(decay * self.P + 0.5 * step_size * (product + product.T))

        def excess(t: float) -> float:
            return float(np.clip(values - t, 0, 1).sum()) - self.k

        shift = brentq(excess, values.min() - 1, values.max(), xtol=1e-14)
        self.P = (vectors * np.clip(values - shift, 0, 1)) @ vectors.T

    def reorthonormalise(self) -> None:
        self.P = (self.P + self.P.T) / 2

    def leading_eigenvectors(self) -> Float:
        return np.linalg.eigh(self.P)[1][:, -self.k :]


def matrix(fantope: LowRankFantope) -> Float:
    """P itself."""
    return np.eye(fantope.d) - fantope.erase(np.eye(fantope.d))


@given(
    st.lists(st.floats(-2, 3), min_size=1, max_size=8),
    st.floats(0, 1),
    st.integers(0, 30),
    st.integers(1, 4),
)
def test_the_shift_gives_the_trace(
    values: list[float], c: float, multiplicity: int, k: int
) -> None:
    array = np.array(values)
    k = min(k, len(values) + multiplicity)
    shift = fantope_shift(array, c, multiplicity, k)
    trace = np.clip(array - shift, 0, 1).sum() + multiplicity * np.clip(c - shift, 0, 1)
    # Each of the n terms is rounded at the size of its argument, at most 4.
    assert abs(trace - k) <= 8 * (len(values) + multiplicity + 1) * np.finfo(float).eps * 4


@given(st.integers(0, 2**20), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_steps_equal_those_of_the_dense_form(seed: int, k: int, classes: int, flat: bool) -> None:
    rng = np.random.default_rng(seed)
    d = 12
    start = np.linalg.qr(rng.normal(size=(d, k))).Q
    low, dense = LowRankFantope(start), DenseFantope(start)
    if flat:  # the start of the original: every direction alike
        low.basis, low.eigenvalues, low.c = np.empty((d, 0)), np.empty(0), k / d
        dense.P = k / d * np.eye(d)
    ranks = []
    for _ in range(30):
        first, second = rng.normal(size=(2, classes, d))
        size = 10 ** rng.uniform(-3, 0)
        low.step(first, second, size, 1 - 1e-3)
        dense.step(first, second, size, 1 - 1e-3)
        ranks.append(low.basis.shape[1])
        np.testing.assert_allclose(matrix(low), dense.P, atol=1e-9)
    values = np.linalg.eigvalsh(matrix(low))
    assert values.min() > -1e-12
    assert values.max() < 1 + 1e-12
    assert values.sum() == pytest.approx(k, abs=1e-9)
    rows = rng.normal(size=(5, d))
    np.testing.assert_allclose(low.erase(rows), dense.erase(rows), atol=1e-8)


def test_control_a_step_in_too_small_a_span_is_seen() -> None:
    rng = np.random.default_rng(0)
    start = np.linalg.qr(rng.normal(size=(12, 1))).Q
    low, dense = LowRankFantope(start), DenseFantope(start)
    first, second = rng.normal(size=(2, 2, 12))
    low.step(first[:1], second[:1], 0.3, 1.0)
    dense.step(first, second, 0.3, 1.0)
    assert np.abs(matrix(low) - dense.P).max() > 1e-2


def test_384_features_give_the_result_of_the_dense_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = draw(n=900, d=384, seed=1)
    mask = np.arange(900) % 4 == 0
    X = data.X - data.X.mean(axis=0)
    found: dict[str, tuple[RLACE, float]] = {}
    for name, fantope_class in (("low", LowRankFantope), ("dense", DenseFantope)):
        monkeypatch.setattr(rlace, "LowRankFantope", fantope_class)
        eraser = RLACE(step_size=0.3, max_steps=20, check_every=20, random_state=0).fit(
            X, concept=data.z, validation=mask
        )
        clean = eraser.transform(X)
        head = LogisticRegression(C=1 / (1e-4 * (~mask).sum())).fit(clean[~mask], data.z[~mask])
        chances = head.predict_proba(clean[mask])[np.arange(mask.sum()), data.z[mask]]
        found[name] = eraser, float(-np.log(chances).mean())
    (low, low_loss), (dense, dense_loss) = found["low"], found["dense"]
    assert low_loss == pytest.approx(dense_loss, rel=0.05)
    assert low.report_.residual == pytest.approx(dense.report_.residual, rel=0.05)
    np.testing.assert_allclose(low.projection_.matrix(), dense.projection_.matrix(), atol=1e-5)
    before = LogisticRegression(C=1 / (1e-4 * (~mask).sum())).fit(X[~mask], data.z[~mask])
    assert (
        before.score(X[mask], data.z[mask]) > low.report_.accuracies[-1]
    )  # the game erased something


@pytest.mark.parametrize(("k", "rank"), [(2, 1), (3, 2), (2, 3)])
def test_the_map_is_an_orthogonal_projection_of_the_given_rank(k: int, rank: int) -> None:
    data = draw(n=1500, k=k)
    eraser = RLACE(rank=rank, max_steps=300, check_every=150, random_state=0)
    eraser.fit(data.X, concept=data.z)
    P = eraser.projection_.matrix()
    np.testing.assert_allclose(P @ P, P, atol=1e-12)
    np.testing.assert_allclose(P, P.T, atol=1e-12)
    assert eraser.projection_.rank == eraser.report_.rank == rank


def test_the_concept_is_erased_near_the_direction_of_sal() -> None:
    data = draw(n=4000, d=6)
    eraser = RLACE(max_steps=2000, step_size=0.05, random_state=0).fit(data.X, concept=data.z)
    report = eraser.report_
    assert report.cosine_sal > 0.98
    assert report.residual < 0.1
    fresh = draw(n=4000, d=6, seed=9)
    before, after = (
        LogisticRegression().fit(X[:2000], fresh.z[:2000]).score(X[2000:], fresh.z[2000:])
        for X in (fresh.X, eraser.transform(fresh.X))
    )
    assert before > 0.9
    assert after < 0.6
    assert report.accuracies[0] >= min(report.accuracies)
    assert "R" in str(report)


def test_the_run_ends_when_probes_do_not_improve() -> None:
    data = draw(n=4000, d=6)
    options: dict[str, Any] = {"step_size": 0.05, "check_every": 200, "random_state": 0}
    patient = RLACE(max_steps=1600, patience=None, tol=0.0, **options)
    ended = RLACE(max_steps=1600, patience=2, tol=0.0, **options)
    close = RLACE(max_steps=1600, patience=None, tol=0.1, **options)
    reports = [e.fit(data.X, concept=data.z).report_ for e in (patient, ended, close)]
    assert reports[0].rounds == 1600
    assert reports[0].stop == "the largest number of steps is reached"
    assert reports[1].rounds < 1600
    assert reports[1].stop == "2 probes in a row did not raise the loss"
    assert reports[2].stop == "a probe is no better than the majority"
    assert abs(reports[2].accuracies[-1] - reports[2].majority) < 0.1


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    """Rows of weight 0 count for nothing, and heavy rows for what they weigh."""
    data = draw(n=3000, d=4)
    X = np.concatenate([data.X, data.X + np.array([0, 0, 0, 50.0])])
    z, weight = np.tile(data.z, 2), np.repeat([1.0, 0.0], 3000)
    eraser = RLACE(max_steps=300, step_size=0.05, validation_share=0, random_state=0)
    with_junk = eraser.fit(X, concept=z, sample_weight=weight).projection_
    np.testing.assert_allclose(with_junk.mean, data.X.mean(axis=0), atol=1e-12)
    alone = eraser.fit(data.X, concept=data.z).projection_
    np.testing.assert_allclose(with_junk.matrix(), alone.matrix(), atol=1e-9)
    # Weight on the rows whose concept goes with the third feature makes that what is erased.
    shifted = data.X + np.outer(data.z, [0, 0, 6.0, 0])
    both, labels = np.concatenate([data.X, shifted]), np.tile(data.z, 2)
    heavy = np.repeat([0.01, 1.0], 3000)
    found = eraser.fit(both, concept=labels, sample_weight=heavy).projection_.left[:, 0]
    assert abs(found[2]) > 0.8


@pytest.mark.parametrize(
    ("options", "given", "error", "match"),
    [
        ({"rank": 0}, {}, InputError, "rank is 0"),
        ({"rank": 9}, {}, InputError, "X has only 8 features"),
        ({"momentum": 1.0}, {}, InputError, "momentum is 1.0"),
        ({"step_size": 0.0}, {}, InputError, "step_size is 0.0"),
        ({"batch_size": 0}, {}, InputError, "batch_size is 0"),
        ({"patience": 0}, {}, InputError, "patience is 0"),
        ({"max_steps": 1.5}, {}, InputError, "max_steps is 1.5"),
        ({}, {"concept": None}, InputError, "was given no concept"),
        ({}, {"concept": np.zeros(600, int)}, LabelError, "only one class"),
    ],
)
def test_bad_input_is_refused(
    options: dict[str, Any], given: dict[str, Any], error: type[Exception], match: str
) -> None:
    data = draw()
    eraser = RLACE(**options)
    with pytest.raises(error, match=match):
        eraser.fit(data.X, **{"concept": data.z, **given})
    assert not hasattr(eraser, "n_features_in_")


def test_random_state_determines_the_map() -> None:
    data = draw()
    maps = [
        RLACE(max_steps=50, check_every=25, random_state=seed)
        .fit(data.X, concept=data.z)
        .projection_.matrix()
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(maps[0], maps[1])
    assert np.abs(maps[0] - maps[2]).max() > 1e-3
