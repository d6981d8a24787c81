"""The association protocol: its rule to the row, its shares, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splince_fast import evaluation as ev
from splince_fast.evaluation.splits import natural_split
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError

rng = np.random.default_rng(0)
Y, Z = rng.integers(0, 2, 4000), rng.integers(0, 3, 4000)


def by_the_rule(y: Any, z: Any, p: float, sizes: Any, seed: int, tied: int) -> list[Any]:
    """The published rule, written out a second time."""
    draw = np.random.default_rng(seed)
    K = len(np.unique(z))
    parts: list[list[Any]] = [[], [], []]
    for a in (0, 1):
        for b in range(K):
            m = draw.permutation(np.flatnonzero((y == a) & (z == b)))
            own = p / 2 if a == 1 else (1 - p) / 2
            share = own if b == tied else (0.5 - own) / (K - 1)
            t, v, n = sizes[2] // (2 * K), round(sizes[1] * share), round(sizes[0] * share)
            parts[2].append(m[:t])
            parts[1].append(m[t : t + v])
            parts[0].append(m[t + v : t + v + n])
    return [np.concatenate(part) for part in parts]


@pytest.mark.parametrize("p", [0.0, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_split_is_the_published_rule_to_the_row(p: float, seed: int) -> None:
    sizes = (900, 90, 300)
    split = ev.associated_split(Y, Z, p=p, sizes=sizes, seed=seed, tied=1)
    expected = by_the_rule(Y, Z, p, sizes, seed, 1)
    for part, rows in zip((split.train, split.validation, split.test), expected, strict=True):
        assert np.array_equal(part, rows)


@given(st.floats(0, 1), st.integers(0, 1000))
def test_parts_share_no_row_and_test_rows_are_the_same_at_every_p(p: float, seed: int) -> None:
    split = ev.associated_split(Y, Z, p=p, sizes=(600, 60, 240), seed=seed, tied=0)
    rows = np.concatenate([split.train, split.validation, split.test])
    assert len(np.unique(rows)) == len(rows)
    other = ev.associated_split(Y, Z, p=0.5, sizes=(600, 60, 240), seed=seed, tied=0)
    assert np.array_equal(split.test, other.test)


def test_the_paper_s_table_of_three_classes() -> None:
    y, z = np.repeat([0, 1], 9000), np.tile([0, 1, 2], 6000)
    split = ev.associated_split(y, z, p=0.9, sizes=(3332, 0, 600), tied=0)
    counts = [int(np.sum((y[split.train] == a) & (z[split.train] == b)))
              for a in (1, 0) for b in (0, 1, 2)]  # fmt: skip
    assert counts == [1499, 83, 83, 167, 750, 750]


def test_a_mapping_ties_every_class() -> None:
    y, z = np.repeat(["a", "b", "c"], 3000), np.tile(["u", "v", "w"], 3000)
    tied = {"a": "u", "b": "v", "c": "w"}
    split = ev.associated_split(y, z, p=0.8, sizes=(900, 0, 90), tied=tied)
    same = [tied[k] for k in y[split.train]] == z[split.train]
    assert np.mean(same) == pytest.approx(0.8)
    with pytest.raises(LabelError, match="3 classes"):
        ev.associated_split(y, z, p=0.8)


def test_groups_stay_on_one_side() -> None:
    groups = np.arange(4000) // 8
    split = ev.associated_split(Y, Z, p=0.8, sizes=(600, 100, 200), groups=groups, tied=0)
    parts = [set(groups[rows]) for rows in (split.train, split.validation, split.test)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not parts[a] & parts[b]
    free = ev.associated_split(Y, Z, p=0.8, sizes=(600, 100, 200), tied=0)
    assert set(groups[free.train]) & set(groups[free.test])  # control: without groups they mix


def test_shortage_names_the_feasible_size_or_shrinks_all_cells() -> None:
    y, z = np.repeat([0, 1], 500), np.r_[np.zeros(480), np.ones(20), np.ones(500)].astype(int)
    y, z = np.r_[y, [1] * 40], np.r_[z, [0] * 40]
    with pytest.raises(NotEnoughDataError, match=r"cell \(0, 1\) has 20 rows"):
        ev.associated_split(y, z, p=0.6, sizes=(400, 40, 80), tied=1)
    split = ev.associated_split(y, z, p=0.6, sizes=(400, 40, 80), tied=1, on_shortage="shrink")
    assert split.notes
    assert "made smaller" in split.notes[0]
    agree = np.mean(z[split.train] == y[split.train])
    assert agree == pytest.approx(0.6, abs=0.06)  # p does not drift


def test_default_sizes_are_feasible() -> None:
    for p in (0.0, 0.5, 0.95):
        split = ev.associated_split(Y, Z, p=p, tied=2)
        assert split.sizes[0] > 5 * split.sizes[1] > 0


@pytest.mark.parametrize(
    ("p", "sizes", "match"),
    [
        (1.2, None, "probability"),
        (True, None, "probability"),
        (0.5, (10, 1), "sizes"),
        (0.5, (10, True, 5), "sizes"),
        (0.5, (0, 1, 5), "at least one"),
    ],
)
def test_parameters_out_of_range(p: Any, sizes: Any, match: str) -> None:  # case 7
    with pytest.raises(InputError, match=match):
        ev.associated_split(Y, Z, p=p, sizes=sizes)


def test_one_class_is_refused() -> None:  # case 7
    with pytest.raises(LabelError, match="concept has 1 class"):
        ev.associated_split(Y, np.zeros(4000, int), p=0.5)
    with pytest.raises(LabelError, match="task has 1 class"):
        ev.associated_split(np.zeros(4000, int), Z, p=0.5)
    with pytest.raises(LabelError, match="tied is 9"):
        ev.associated_split(Y, Z, p=0.5, tied=9)


def test_rows_without_a_label_are_left_out_and_counted() -> None:  # case 9
    z = Z.astype(float)
    z[:100] = np.nan
    split = ev.associated_split(Y, z, p=0.7, sizes=(600, 60, 240), tied=0)
    assert split.missing == 100
    assert min(map(np.min, (split.train, split.validation, split.test))) >= 100


def test_the_natural_split_is_its_rule() -> None:
    order = np.random.default_rng(3).permutation(1000)
    split = natural_split(1000, seed=3)
    assert np.array_equal(split.test, order[:250])
    assert np.array_equal(split.validation, order[250:350])
    assert np.array_equal(split.train, order[350:])
