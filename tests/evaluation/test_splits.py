"""Splits (`splits.py`): the association protocol to the row, its fractions, and refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from comparisons import data, run
from hypothesis import given
from hypothesis import strategies as st

from splince_fast import evaluation as ev
from splince_fast.evaluation.job import fold_of_rows
from splince_fast.evaluation.plan import ComparisonPlan, make_plan
from splince_fast.evaluation.probes import FOLDS
from splince_fast.evaluation.splits import Protocol, natural_split
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassCodes

rng = np.random.default_rng(0)
Y, Z = rng.integers(0, 2, 4000), rng.integers(0, 3, 4000)


def planned(X: Any, y: Any, z: Any, *, groups: Any, test: Any) -> ComparisonPlan:
    """The plan of a comparison on a split of one's own."""
    return make_plan(
        X, task=y, concept=z, groups=groups, erasers="none", heads="frozen", association=None,
        aligned_class=None, sizes=None, n_seeds=1, random_state=0, alphas=(0.1,),
        leakage=(), metrics=None, test=test,
    )  # fmt: skip


def by_the_rule(y: Any, z: Any, p: float, sizes: Any, seed: int, aligned_class: int) -> list[Any]:
    """The published rule, written out a second time."""
    draw = np.random.default_rng(seed)
    K = len(np.unique(z))
    parts: list[list[Any]] = [[], [], []]
    for a in (0, 1):
        for b in range(K):
            m = draw.permutation(np.flatnonzero((y == a) & (z == b)))
            own = p / 2 if a == 1 else (1 - p) / 2
            fraction = own if b == aligned_class else (0.5 - own) / (K - 1)
            t, v, n = sizes[2] // (2 * K), round(sizes[1] * fraction), round(sizes[0] * fraction)
            parts[2].append(m[:t])
            parts[1].append(m[t : t + v])
            parts[0].append(m[t + v : t + v + n])
    return [np.concatenate(part) for part in parts]


@pytest.mark.parametrize("p", [0.0, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_split_is_the_published_rule_to_the_row(p: float, seed: int) -> None:
    sizes = (900, 90, 300)
    split = ev.spurious_split(Y, Z, p=p, sizes=sizes, random_state=seed, aligned_class=1)
    expected = by_the_rule(Y, Z, p, sizes, seed, 1)
    for part, rows in zip((split.train, split.validation, split.test), expected, strict=True):
        assert np.array_equal(part, rows)


@given(st.floats(0, 1), st.integers(0, 1000))
def test_parts_share_no_row_and_test_rows_are_the_same_at_every_p(p: float, seed: int) -> None:
    split = ev.spurious_split(Y, Z, p=p, sizes=(600, 60, 240), random_state=seed, aligned_class=0)
    rows = np.concatenate([split.train, split.validation, split.test])
    assert len(np.unique(rows)) == len(rows)
    other = ev.spurious_split(Y, Z, p=0.5, sizes=(600, 60, 240), random_state=seed, aligned_class=0)
    assert np.array_equal(split.test, other.test)


def test_a_mapping_aligns_every_class_with_the_fraction_p() -> None:
    y, z = np.repeat(["a", "b", "c"], 3000), np.tile(["u", "v", "w"], 3000)
    aligned_class = {"a": "u", "b": "v", "c": "w"}
    split = ev.spurious_split(y, z, p=0.8, sizes=(900, 0, 90), aligned_class=aligned_class)
    same = [aligned_class[k] for k in y[split.train]] == z[split.train]
    assert np.mean(same) == pytest.approx(0.8)


def test_every_group_is_in_one_part() -> None:
    groups = np.arange(4000) // 8
    y, z = (ClassCodes(tuple(range(k)), codes) for k, codes in ((2, Y), (3, Z)))
    split = Protocol.of(y, z, 0, groups).split(0.8, (600, 100, 200), 0)
    parts = [set(groups[rows]) for rows in (split.train, split.validation, split.test)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not parts[a] & parts[b]
    free = ev.spurious_split(Y, Z, p=0.8, sizes=(600, 100, 200), aligned_class=0)
    assert set(groups[free.train]) & set(groups[free.test])  # control: without groups they mix
    for p in (0.0, 0.5, 0.95):  # default sizes are feasible
        split = ev.spurious_split(Y, Z, p=p, aligned_class=2)
        assert split.sizes[0] > 5 * split.sizes[1] > 0


def test_shortage_names_the_feasible_size_and_with_groups_shrinks_all_cells() -> None:
    y, z = np.repeat([0, 1], 500), np.r_[np.zeros(480), np.ones(20), np.ones(500)].astype(int)
    y, z = np.r_[y, [1] * 40], np.r_[z, [0] * 40]
    with pytest.raises(NotEnoughDataError, match=r"cell \(0, 1\) has 20 rows"):
        ev.spurious_split(y, z, p=0.6, sizes=(400, 40, 80), aligned_class=1)
    y, z = (np.tile(column, 5) for column in (y, z))
    columns = [ClassCodes((0, 1), codes) for codes in (y, z)]
    split = Protocol.of(*columns, 1, np.arange(5200)).split(0.6, (2000, 200, 400), 0)
    assert split.notes
    assert "sizes reduced" in split.notes[0]
    agree = np.mean(z[split.train] == y[split.train])
    assert agree == pytest.approx(0.6, abs=0.06)  # p does not drift


def test_arguments_that_give_no_split_are_refused() -> None:  # case 7
    for change, error, match in (
        ({"p": 1.2}, InputError, "probability"),
        ({"p": True}, InputError, "probability"),
        ({"sizes": (10, 1)}, InputError, "sizes"),
        ({"sizes": (10, True, 5)}, InputError, "sizes"),
        ({"sizes": (10, -1, 5)}, InputError, "sizes"),
        ({"sizes": (0, 1, 5)}, InputError, "at least one"),
        ({"random_state": -1}, InputError, "random_state is -1"),
        ({"concept": 0 * Z}, LabelError, "concept has 1 class"),
        ({"task": 0 * Y}, LabelError, "task has 1 class"),
        ({"aligned_class": 9}, LabelError, "aligned_class is 9"),
        ({"aligned_class": {0: 1}}, LabelError, "map at least two"),
        ({"aligned_class": {0: 1, 1: 9}}, LabelError, "the concept"),
        ({"task": Z, "concept": Y}, LabelError, "3 classes"),
    ):
        options: dict[str, Any] = {"task": Y, "concept": Z, "p": 0.5} | change
        with pytest.raises(error, match=match):
            ev.spurious_split(**options)


def test_rows_without_a_label_are_left_out() -> None:  # case 9
    z = Z.astype(float)
    z[:100] = np.nan
    split = ev.spurious_split(Y, z, p=0.7, sizes=(600, 60, 240), aligned_class=0)
    assert min(map(np.min, (split.train, split.validation, split.test))) >= 100
    order = np.random.default_rng(3).permutation(np.arange(100, 4000))
    natural = natural_split(np.isfinite(z), random_state=3)
    parts = (natural.test, natural.validation, natural.train)
    for part, expected in zip(parts, np.split(order, [975, 975 + 390]), strict=True):
        assert np.array_equal(part, expected)


def test_validation_rows_of_your_own_split_are_whole_groups() -> None:
    X, y, z = data(800)
    groups = np.arange(800) // 8
    test = groups % 4 == 0
    made = planned(X, y, z, groups=groups, test=test)
    split = made.split(0, None)
    parts = [set(groups[rows]) for rows in (split.train, split.validation, split.test)]
    assert not parts[0] & parts[1]
    assert not (parts[0] | parts[1]) & parts[2]
    assert len(split.validation) == pytest.approx(60, abs=8)
    assert sum(split.sizes) == 800
    with pytest.raises(NotEnoughDataError, match=r"0 training .*all rows of a group"):
        planned(X, y, z, groups=test, test=test).split(0, None)
    free = planned(X, y, z, groups=None, test=test).split(0, None)
    assert set(groups[free.train]) & set(groups[free.validation])  # control


def test_a_split_of_your_own_that_cuts_groups_is_refused() -> None:
    X, y, z = data(800)
    groups = np.array([f"g{i // 8}" for i in range(800)])
    test = np.arange(800) % 4 == 0
    with pytest.raises(InputError, match=r"divides 100 of 100 groups between parts, such as 'g0'"):
        planned(X, y, z, groups=groups, test=test)
    parts = np.where(np.arange(800) // 8 % 2 == 0, None, "train")
    parts[test & (np.arange(800) // 8 % 2 == 0)] = "test"  # rows of no part cut nothing
    planned(X, y, z, groups=groups, test=parts)
    whole = np.where(np.arange(800) < 400, "train", "test").astype(object)
    planned(X, y, z, groups=groups, test=whole)  # control
    whole[4] = "validation"
    with pytest.raises(InputError, match=r"divides 1 of 100 groups between parts, such as 'g0'"):
        planned(X, y, z, groups=groups, test=whole)


def test_folds_that_choose_alpha_keep_groups_whole() -> None:
    rng = np.random.default_rng(0)
    groups, cells = rng.permutation(np.arange(300) // 10), rng.integers(0, 4, 300)
    groups[:20] = -1
    fold = fold_of_rows(cells, groups, 0)
    assert sorted(set(fold.tolist())) == list(range(FOLDS))
    for group in range(30):
        assert len(set(fold[groups == group].tolist())) <= 1
    assert len(set(fold[groups == -1].tolist())) > 1  # rows without a group are free
    free = fold_of_rows(cells, None, 0)  # control
    assert any(len(set(free[groups == g].tolist())) > 1 for g in range(30))
    assert np.ptp(np.bincount(free[cells == 0], minlength=FOLDS)) <= 1
    with pytest.raises(NotEnoughDataError, match="4 groups"):
        fold_of_rows(cells, np.arange(300) // 75, 0)


def test_alphas_are_scored_in_folds_of_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = data(400)
    groups = np.arange(400) // 5
    seen: list[Any] = []

    def watched(cells: Any, members: Any, seed: int) -> Any:
        seen.append(members)
        return fold_of_rows(cells, members, seed)

    monkeypatch.setattr("splince_fast.evaluation.job.fold_of_rows", watched)
    run(X, y, np.where(np.arange(400) < 330, 0, 1), groups=groups, n_seeds=1, erasers=("none",))
    assert seen
    assert all(members is not None and len(np.unique(members)) > 20 for members in seen)


def test_groups_that_leave_no_rows_of_a_part_are_refused() -> None:
    X, y, z = data(n=60)
    for groups, text in (([1] * 60, "0 training and 60 test"), ([None] * 60, "60 training and 0")):
        with pytest.raises(NotEnoughDataError, match=text):
            run(X, y, z, groups=groups)


def test_rows_without_a_group_are_groups_of_their_own_in_a_split_of_yours() -> None:
    X, y, z = data(n=400)
    test = np.arange(400) % 2 == 0
    options: dict[str, Any] = {"test": test, "n_seeds": 1, "alphas": (0.1,)}
    found = run(X, y, z, groups=[None] * 400, erasers=("none", "LEACE"), **options)
    assert found.mean("probe_auc", eraser="none") > 0.8  # five folds, not one group
    (difference,) = found.differences("accuracy", reference="none")
    assert difference.how == "bootstrap"
    assert difference.low <= difference.difference <= difference.high
    assert difference.high - difference.low > 0.02
    interval = found.interval("accuracy", eraser="LEACE")
    assert 0 < interval.high - interval.low < 0.25
    whole = np.where(test, 0, np.arange(400))  # one group of all test rows has no interval
    result = run(X, y, z, groups=whole, erasers=("none", "LEACE"), **options)
    (difference,) = result.differences("accuracy", reference="none")
    assert math.isnan(difference.p)
    assert math.isnan(difference.low)
    assert (difference.how, difference.significant) == ("no test", False)


@pytest.mark.parametrize("classes", [2, 3])
def test_an_aligned_class_that_chance_may_have_chosen_is_named(classes: int) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(3000) % 2
    unrelated = rng.permutation(
        np.arange(3000) % classes
    )  # every class has one rate, but for noise
    related = np.where(rng.random(3000) < 0.2, classes - 1, unrelated) * y + unrelated * (1 - y)
    for z, noted in ((unrelated, True), (related, False)):
        split = ev.spurious_split(y, z, p=0.8)
        assert (
            any("chance may have chosen the aligned class" in note for note in split.notes) == noted
        )
        named = ev.spurious_split(y, z, p=0.8, aligned_class=split.aligned_class)
        assert named.notes == ()  # control: the caller has chosen it
        assert np.array_equal(named.train, split.train)
    assert split.aligned_class == classes - 1
