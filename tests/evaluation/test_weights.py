"""Associations by weights, and rows that lack the task (`splits.py`, `plan.py`, `job.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons import data, rows_read, run
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression

import splince_fast as sf
from splince_fast import evaluation as ev
from splince_fast.baselines import GroupDRO
from splince_fast.evaluation import plan
from splince_fast.evaluation.data import level_moments
from splince_fast.exceptions import InputError, NotEnoughDataError, SplinceWarning
from splince_fast.labels import encode

SIZES = (240, 80, 200)
rng = np.random.default_rng(0)
Y, Z = rng.integers(0, 2, 2000), (rng.random(2000) < 0.35).astype(int) + rng.integers(0, 2, 2000)


def by_the_rule(y: Any, z: Any, p: float, sizes: Any, seed: int, aligned_class: int) -> list[Any]:
    """The published rule of method="weights", written out a second time: rows and weights."""
    draw = np.random.default_rng(seed)
    K = len(np.unique(z))
    parts: list[list[Any]] = [[], [], []]
    raw: list[list[Any]] = [[], []]
    for a in (0, 1):
        for b in range(K):
            m = draw.permutation(np.flatnonzero((y == a) & (z == b)))
            own = p / 2 if a == 1 else (1 - p) / 2
            fraction = own if b == aligned_class else (0.5 - own) / (K - 1)
            t = sizes[2] // (2 * K)
            parts[2].append(m[:t])
            if fraction == 0:
                continue
            v = round((len(m) - t) * sizes[1] / (sizes[0] + sizes[1]))
            for part, weights, rows in zip(parts, raw, (m[t + v :], m[t : t + v]), strict=False):
                part.append(rows)
                weights.append(np.full(len(rows), fraction / len(rows)))
    weights = [np.concatenate(part) for part in raw]
    return [np.concatenate(part) for part in parts] + [w * w.sum() / (w @ w) for w in weights]


# -- the split --------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_split_is_the_published_rule_to_the_row(p: float, seed: int) -> None:
    split = ev.spurious_split(
        Y, Z, p=p, sizes=SIZES, random_state=seed, aligned_class=1, method="weights"
    )
    expected = by_the_rule(Y, Z, p, SIZES, seed, 1)
    for rows, known in zip((split.train, split.validation, split.test), expected, strict=False):
        assert np.array_equal(rows, known)
    for weights, known in zip((split.weights, split.validation_weights), expected[3:], strict=True):
        assert weights is not None
        np.testing.assert_allclose(weights, known, rtol=1e-12)


@given(st.floats(0.001, 0.999), st.integers(0, 1000))
def test_no_row_is_lost_and_cells_have_their_fractions(p: float, seed: int) -> None:
    options: dict[str, Any] = {"p": p, "sizes": SIZES, "random_state": seed, "aligned_class": 1}
    split = ev.spurious_split(Y, Z, method="weights", **options)
    rows = np.concatenate([split.train, split.validation, split.test])
    assert np.array_equal(np.sort(rows), np.arange(len(Y)))
    for part, weights in (
        (split.train, split.weights),
        (split.validation, split.validation_weights),
    ):
        assert weights is not None
        assert weights.sum() == pytest.approx(weights.sum() ** 2 / (weights @ weights))
        for a, own in ((1, p / 2), (0, (1 - p) / 2)):
            inside = (Y[part] == a) & (Z[part] == 1)
            assert weights[inside].sum() / weights.sum() == pytest.approx(own)
    plain = ev.spurious_split(Y, Z, p=0.5, sizes=SIZES, random_state=seed, aligned_class=1)
    assert np.array_equal(split.test, plain.test)  # the same at every p and by rows
    assert len(plain.train) < len(split.train)  # control: by rows most of them are lost
    assert plain.weights is None


def test_every_group_is_in_one_part_and_every_training_group_is_used() -> None:
    groups = np.arange(2000) // 8
    split = ev.spurious_split(
        Y, Z, p=0.8, sizes=(600, 100, 100), groups=groups, aligned_class=1, method="weights"
    )
    parts = [set(groups[rows]) for rows in (split.train, split.validation, split.test)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not parts[a] & parts[b]
    assert split.weights is not None
    assert len(split.train) == sum(int(np.sum(groups == g)) for g in parts[0])


def test_a_shortage_that_weights_cannot_cover_is_refused() -> None:
    y, z = np.repeat([0, 1], 500), np.r_[np.zeros(480), np.ones(20), np.ones(500)].astype(int)
    y, z = np.r_[y, [1] * 40], np.r_[z, [0] * 40]
    with pytest.raises(
        NotEnoughDataError, match=r"cell \(0, 1\) has .* test rows and no training rows"
    ):
        ev.spurious_split(y, z, p=0.6, sizes=(400, 0, 80), aligned_class=1, method="weights")
    with pytest.raises(NotEnoughDataError, match=r"cell \(0, 1\) has 20 and needs 30"):
        ev.spurious_split(y, z, p=0.6, sizes=(400, 0, 120), aligned_class=1, method="weights")
    split = ev.spurious_split(  # cell (0, 1) has no share at p = 1, and needs no row
        y, z, p=1.0, sizes=(400, 0, 120), aligned_class=1, method="weights", on_shortage="shrink"
    )
    assert "sizes reduced" in split.notes[0]
    assert len(split.test) == 80
    assert len(split.train) == 460 + 480
    with pytest.raises(NotEnoughDataError, match="0 test rows"):
        ev.spurious_split(y, z, p=0.6, sizes=(40, 0, 3), aligned_class=1)
    with pytest.raises(InputError, match="'subsample'"):
        ev.spurious_split(y, z, p=0.6, method="columns")
    X, y, z = data(100)
    with pytest.raises(InputError, match="natural split"):
        run(X, y, z, association_method="weights")
    with pytest.raises(InputError, match="association_method is 'row'"):
        run(X, y, z, association=0.8, association_method="row")


# -- moments ----------------------------------------------------------------------------------


def test_moments_of_weighted_levels_come_from_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    X = np.random.default_rng(1).normal(size=(2000, 4)) + Y[:, None]
    labels = {"task": Y, "concept": Z}
    splits = [
        ev.spurious_split(Y, Z, p=p, sizes=SIZES, aligned_class=1, method="weights")
        for p in (0.5, 0.8, 1.0)
    ]
    direct = [
        sf.Moments().update(X[s.train], {k: v[s.train] for k, v in labels.items()},
                            sample_weight=s.weights)
        for s in splits
    ]  # fmt: skip
    read = rows_read(monkeypatch)
    found = level_moments(X, encode(labels, len(X)), [(s.train, s.weights) for s in splits])
    assert sum(read) == len(splits[0].train)
    for ours, theirs in zip(found, direct, strict=True):
        assert ours.weight == pytest.approx(theirs.weight)
        assert ours.n_rows == theirs.n_rows
        np.testing.assert_allclose(ours.covariance(), theirs.covariance(), atol=1e-12)
        for name in labels:
            there = [ours.classes(name).index(c) for c in theirs.classes(name)]  # by their names
            np.testing.assert_allclose(
                ours.cross_covariance(name)[:, there], theirs.cross_covariance(name), atol=1e-12
            )


# -- compare ----------------------------------------------------------------------------------


def scripted(X: Any, y: Any, z: Any, select: str, folds: int = 0) -> dict[str, dict[str, float]]:
    """Retrained heads at p = .8 by weights, from scikit-learn with sample_weight."""
    split = ev.spurious_split(y, z, p=0.8, sizes=SIZES, aligned_class=1, method="weights")
    train, validation, test = split.train, split.validation, split.test
    w, v = split.weights, split.validation_weights
    assert w is not None
    mean = np.average(X[train], axis=0, weights=w)
    unit = np.sqrt(np.average((X[train] - mean) ** 2, axis=0, weights=w).mean())
    moments = sf.Moments().update(X[train], {"y": y[train], "z": z[train]}, sample_weight=w)
    found = {}
    erasers: tuple[tuple[str, Any], ...] = (
        ("none", lambda rows: rows),
        ("SAL", sf.sal(moments, erase="z")),
        ("SPLINCE", sf.splince(moments, erase="z", keep="y")),
    )
    for name, eraser in erasers:
        rows = [(eraser(X)[part] - mean) / unit for part in (train, validation, test)]
        best: Any = None
        for alpha in (0.1, 0.001):
            model = LogisticRegression(C=1 / (alpha * w.sum()), tol=1e-9, max_iter=5000)
            model.fit(rows[0], y[train], sample_weight=w)
            guess = model.predict(rows[1])
            worst = ev.worst_group_accuracy(
                y[validation], guess, groups=(y[validation], z[validation])
            )
            mass = float(np.average(guess == y[validation], weights=v))
            first = (worst, mass) if select == "worst_group" else (mass, worst)
            rank = (*first, alpha)
            best = max(best, (rank, id(model), model)) if best else (rank, id(model), model)
        guess = best[2].predict(rows[2])
        found[name] = {
            "accuracy": float(np.mean(guess == y[test])),
            "worst_group": ev.worst_group_accuracy(y[test], guess, groups=(y[test], z[test])),
        }
    return found


@pytest.mark.parametrize("select", ["worst_group", "accuracy"])
def test_heads_are_those_of_a_plain_script_with_sample_weights(select: str) -> None:
    X, y, z = data(1200)
    keep = np.r_[np.flatnonzero(y == z), np.flatnonzero(y != z)[:400]]
    X, y, z = X[keep], y[keep], z[keep]
    options: dict[str, Any] = {"association": 0.8, "aligned_class": 1, "sizes": SIZES, "n_seeds": 1}
    result = run(X, y, z, association_method="weights", select=select, **options)
    for name, figures in scripted(X, y, z, select).items():
        for metric, value in figures.items():
            assert result.mean(metric, eraser=name) == pytest.approx(value), (name, metric)
    by_rows = run(X, y, z, select=select, **options)
    assert by_rows.context.sizes[0] < result.context.sizes[0]
    assert by_rows.values("distortion", eraser="SPLINCE") != pytest.approx(
        result.values("distortion", eraser="SPLINCE"), rel=1e-6
    )  # control
    assert "association p = 0.8 by weights (aligned: 1)" in str(result)
    assert "by weights" not in str(by_rows)
    assert any("effective number of training rows" in note for note in result.notes)


def test_weights_reach_estimators_classifiers_folds_and_unregularised_heads() -> None:
    class Unweighted(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        def fit(self, X: Any, y: Any) -> Unweighted:
            return self

    X, y, z = data()
    options: dict[str, Any] = {
        "association": 0.9, "aligned_class": 1, "sizes": (240, 12, 200), "n_seeds": 1,
        "association_method": "weights",
        "erasers": {"A": sf.LEACE(), "B": "LEACE", "INLP": "INLP"},
        "heads": {"retrained": "retrained", "free": "unregularised", "plain": Unweighted(),
                  "sklearn": LogisticRegression(C=np.inf, tol=1e-9, max_iter=5000)},
    }  # fmt: skip
    result = run(X, y, z, **options)
    failed = {(head, reason) for _, head, reason in result.failures}
    assert {head for head, _ in failed} == {"plain"}
    assert "has no parameter sample_weight" in failed.pop()[1]
    for metric in ("distortion", "residual", "probe_auc"):
        a, b = (result.mean(metric, eraser=e) for e in "AB")
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12)
    assert result.values("accuracy", eraser="B", head="free") == result.values(
        "accuracy", eraser="B", head="sklearn"
    )
    # Control: without the weights the same rows give another head.
    split = ev.spurious_split(
        y, z, p=0.9, sizes=(240, 12, 200), aligned_class=1, method="weights"
    )  # fmt: skip
    moments = sf.Moments().update(
        X[split.train], {"z": z[split.train]}, sample_weight=split.weights
    )
    eraser = sf.leace(moments, erase="z")
    for weights, equal in ((split.weights, True), (None, False)):
        model = LogisticRegression(C=np.inf, tol=1e-9, max_iter=5000)
        model.fit(eraser(X[split.train]), y[split.train], sample_weight=weights)
        accuracy = model.score(eraser(X[split.test]), y[split.test])
        head = result.mean("accuracy", eraser="B", head="free")
        assert (head == pytest.approx(accuracy)) is equal


@pytest.mark.slow
def test_figures_do_not_depend_on_processes_and_a_folder_tells_methods_apart(
    tmp_path: Path,
) -> None:
    X, y, z = data()
    options: dict[str, Any] = {"association": (0.5, 0.9), "aligned_class": 1, "sizes": SIZES}
    one = run(X, y, z, association_method="weights", **options)
    assert (
        one.records
        == run(X, y, z, association_method="weights", n_jobs=2, run=tmp_path, **options).records
    )
    assert (
        one.records == run(X, y, z, association_method="weights", run=tmp_path, **options).records
    )
    by_rows = run(X, y, z, run=tmp_path, **options)
    assert by_rows.records == run(X, y, z, **options).records
    assert by_rows.records != one.records
    one.save(tmp_path / "all.json")
    assert ev.Comparison.load(tmp_path / "all.json").context.association_method == "weights"


def test_rows_beyond_the_memory_of_a_job_are_drawn_and_test_rows_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, y, z = data()
    options: dict[str, Any] = {
        "association": 0.6, "aligned_class": 1, "association_method": "weights", "n_seeds": 1,
        "alphas": (0.1,),
    }  # fmt: skip
    whole = run(X, y, z, **options).context.sizes
    for rows in (500, 850):
        monkeypatch.setattr(plan, "_JOB_BYTES", 8 * 6 * rows)
        with pytest.warns(SplinceWarning, match=f"{rows} of 900 are used"):
            sizes = run(X, y, z, **options).context.sizes
        assert rows - 3 <= sum(sizes) <= rows
        assert (sizes[2] == whole[2]) is (rows == 850)


# -- rows without the task --------------------------------------------------------------------


def unlabelled(n: int = 300) -> tuple[Any, Any, Any]:
    X, y, z = data(1200)
    X[:n] *= 1.5
    return X, [None if i < n else int(v) for i, v in enumerate(y)], z


@pytest.mark.parametrize("by", ["subsample", "weights"])
def test_rows_without_the_task_count_for_the_moments_alone(by: str) -> None:  # case 9
    X, y, z = unlabelled()
    options: dict[str, Any] = {
        "association": 0.8, "aligned_class": 1, "sizes": SIZES, "n_seeds": 1,
        "association_method": by,
        "alphas": (0.01,),
    }  # fmt: skip
    with pytest.warns(SplinceWarning, match="300 of these rows count in the moments"):
        result = run(X, y, z, unlabelled=True, **options)
    with pytest.warns(SplinceWarning, match="300 of 1,200 rows lack a label and were left out$"):
        plain = run(X, y, z, **options)
    assert result.context.sizes == plain.context.sizes
    split = ev.spurious_split(y, z, p=0.8, sizes=SIZES, aligned_class=1, method=by)
    rows = np.r_[split.train, np.arange(300)]
    weight = np.r_[np.ones(len(split.train)) if by == "subsample" else split.weights, np.ones(300)]
    names = np.array([None if v is None else f"class {v}" for v in y], dtype=object)
    moments = sf.Moments().update(X[rows], {"y": names[rows], "z": z[rows]}, sample_weight=weight)
    mean = np.average(X[rows], axis=0, weights=weight)
    unit = np.sqrt(np.average((X[rows] - mean) ** 2, axis=0, weights=weight).mean())
    assert moments.mean == pytest.approx(mean)
    eraser = sf.splince(moments, erase="z", keep="y")
    model = LogisticRegression(C=1 / (0.01 * weight[:-300].sum()), tol=1e-9, max_iter=5000)
    target = np.array([-1 if v is None else v for v in y])
    scaled = (eraser(X) - mean) / unit
    model.fit(scaled[split.train], target[split.train], sample_weight=weight[:-300])
    guess = model.predict(scaled[split.test])
    accuracy = np.mean(guess == target[split.test])
    assert result.mean("accuracy", eraser="SPLINCE") == pytest.approx(accuracy)
    found = ev.leakage(scaled[split.test], z[split.test], probes=("linear",))["linear"]
    assert result.mean("probe_accuracy", eraser="SPLINCE") == pytest.approx(found.accuracy)
    change = np.average(np.sum((eraser(X[rows]) - X[rows]) ** 2, axis=1), weights=weight)
    share = change / np.average(np.sum((X[rows] - mean) ** 2, axis=1), weights=weight)
    assert result.mean("distortion", eraser="SPLINCE") == pytest.approx(share)
    assert plain.mean("distortion", eraser="SPLINCE") != pytest.approx(share, rel=1e-3)  # control


def test_rows_without_the_task_stay_out_of_the_moments_where_their_group_or_part_tests() -> None:
    X, y, z = unlabelled()
    groups = np.arange(1200) % 400  # a row without the task shares its group with three others
    with pytest.warns(SplinceWarning) as told:
        run(X, y, z, groups=groups, unlabelled=True, n_seeds=1, alphas=(0.1,))
    (text,) = [str(w.message) for w in told if "count in" in str(w.message)]
    count = int(text.split("; ")[1].split()[0])
    assert 150 < count < 240  # 65 % of the groups train
    part = np.where(np.arange(1200) % 4 == 0, "test", "train")
    with pytest.warns(SplinceWarning, match="225 of these rows count"):
        run(X, y, z, test=part, unlabelled=True, n_seeds=1, alphas=(0.1,))


def test_quantities_without_a_value_count_for_the_moments() -> None:
    X = data()[0]
    task = X[:, 1] + 0.1 * np.arange(900) % 7
    task[:100] = np.nan
    concept = X[:, 0].copy()
    with pytest.warns(SplinceWarning, match="100 of these rows count"):
        result = run(X, task, concept, unlabelled=True, n_seeds=1)
    assert not result.failures
    assert result.mean("r2", eraser="none") > 0.2


def test_weights_of_validation_rows_choose_alpha() -> None:
    """Rows of a rare cell have most of the weight: with and without it another alpha is best."""
    X, y, z = data(1500)
    rng = np.random.default_rng(5)
    X[:, 0] += 1.5 * z
    keep = np.flatnonzero((y == z) | (rng.random(1500) < 0.12))  # p is about .9
    X, y, z = X[keep], y[keep], z[keep]
    alphas = (3.0, 0.3, 0.001)
    differs = []
    for p in (0.1, 0.2, 0.3, 0.5):
        result = run(
            X, y, z, association=p, aligned_class=1, sizes=(400, 200, 80), n_seeds=4,
            association_method="weights", select="accuracy", alphas=alphas, erasers=("none",),
            heads=("retrained",),
        )  # fmt: skip
        chosen = {r.seed: r.alpha for r in result.records if r.head == "retrained"}
        for seed in range(4):
            assert chosen[seed] == by_hand(X, y, z, p, seed, alphas), (p, seed)
            differs.append(chosen[seed] != by_hand(X, y, z, p, seed, alphas, weighted=False))
    assert any(differs)  # control: without the weights of the validation rows


def test_weights_of_validation_rows_decide_ties_of_group_dro() -> None:
    """Two alphas have the same worst cell at this seed, and the accuracy decides."""
    X, y, z = data(1500)
    keep = np.flatnonzero((y == z) | (np.random.default_rng(5).random(1500) < 0.12))
    X, y, z = X[keep], y[keep], z[keep]
    protocol: dict[str, Any] = {"sizes": (400, 30, 80), "random_state": 8, "aligned_class": 1}
    alphas = (10.0, 0.1)
    result = run(
        X, y, z, association=0.9, association_method="weights", n_seeds=1, erasers=("none",),
        heads={"dro": GroupDRO(alpha=alphas)}, **protocol,
    )  # fmt: skip
    split = ev.spurious_split(y, z, p=0.9, method="weights", **protocol)
    assert split.weights is not None
    assert split.validation_weights is not None
    rows = X[split.train]
    mean = np.average(rows, axis=0, weights=split.weights)
    unit = np.sqrt(np.average((rows - mean) ** 2, axis=0, weights=split.weights).mean())
    both = np.concatenate([split.train, split.validation])
    ones = np.ones(len(split.validation))
    for weights, equal in ((split.validation_weights, True), (ones, False)):
        model = GroupDRO(alpha=alphas, random_state=8).fit(
            (X[both] - mean) / unit, y[both], groups=(y[both], z[both]),
            validation=np.arange(len(both)) >= len(rows),
            sample_weight=np.concatenate([split.weights, weights]),
        )  # fmt: skip
        accuracy = model.score((X[split.test] - mean) / unit, y[split.test])
        assert (result.mean("accuracy", eraser="none") == pytest.approx(accuracy)) is equal


def by_hand(
    X: Any, y: Any, z: Any, p: float, seed: int, alphas: Any, *, weighted: bool = True
) -> float:
    """The alpha with the best (weighted) validation accuracy, then the worst group."""
    split = ev.spurious_split(
        y, z, p=p, sizes=(400, 200, 80), random_state=seed, aligned_class=1, method="weights"
    )  # fmt: skip
    train, held, w = split.train, split.validation, split.weights
    v = split.validation_weights if weighted else None
    assert w is not None
    mean = np.average(X[train], axis=0, weights=w)
    unit = np.sqrt(np.average((X[train] - mean) ** 2, axis=0, weights=w).mean())
    ranks = []
    for alpha in alphas:
        model = LogisticRegression(C=1 / (alpha * w.sum()), tol=1e-9, max_iter=5000)
        guess = model.fit((X[train] - mean) / unit, y[train], sample_weight=w).predict(
            (X[held] - mean) / unit
        )
        worst = ev.worst_group_accuracy(y[held], guess, groups=(y[held], z[held]))
        ranks.append((float(np.average(guess == y[held], weights=v)), worst, alpha))
    return float(max(ranks)[2])
