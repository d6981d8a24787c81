"""Permutation tests of probes (`probes.py`): exchangeable given the groups, with own folds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from splince_fast import evaluation as ev
from splince_fast.evaluation import probes
from splince_fast.evaluation.probes import permutation_test, permutation_within
from splince_fast.exceptions import InputError, SplinceWarning


def test_a_permutation_keeps_whole_groups_where_the_concept_is_constant() -> None:
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([5, 2, 9, -1], [4, 2, 3, 6]))
    z = np.select([groups == 5, groups == 2, groups == 9], [0, 1, 2], 3)
    z[np.flatnonzero(groups == -1)[:2]] = 4  # the concept varies in this group alone
    seen = set()
    for _ in range(50):
        new = z[permutation_within(z, groups, rng)]
        of = {g: set(new[groups == g].tolist()) for g in (5, 2, 9)}
        assert all(len(found) == 1 for found in of.values())
        seen.add(tuple(min(found) for found in of.values()))
        assert sorted(new[groups == -1]) == sorted(z[groups == -1])
    assert seen == set(itertools.permutations((0, 1, 2)))
    inside = {tuple(z[permutation_within(z, groups, rng)][groups == -1]) for _ in range(50)}
    assert len(inside) > 5  # rows of that group exchange their labels
    assert sorted(permutation_within(z, None, rng)) == list(range(15))


def test_a_quantity_that_is_constant_in_groups_is_permuted_by_groups() -> None:
    rng = np.random.default_rng(0)
    groups = np.arange(30) // 3
    values = rng.normal(size=(10, 2))[groups]
    new = values[permutation_within(values, groups, rng)]
    assert not np.array_equal(new, values)
    assert np.array_equal(new[::3], new[2::3])
    values[:3, 1] += [0, 1, 2]  # one column varies in one group: its rows stay there
    for _ in range(20):
        new = values[permutation_within(values, groups, rng)]
        assert sorted(map(tuple, new[:3])) == sorted(map(tuple, values[:3]))
        assert np.array_equal(new[3::3], new[5::3])


def test_a_probe_permutes_a_quantity_within_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    groups, seen = np.arange(60) // 3, []

    def watched(values: Any, members: Any, generator: Any) -> Any:
        seen.append(members)
        return permutation_within(values, members, generator)

    monkeypatch.setattr(probes, "permutation_within", watched)
    X, z = rng.normal(size=(60, 3)), rng.normal(size=20)[groups]
    ev.leakage(X, z, probes=("linear",), n_permutations=4, groups=groups)
    assert len(seen) >= 4
    assert all(np.array_equal(members, groups) for members in seen)


def test_a_permutation_as_good_as_the_labels_counts_against_them() -> None:
    assert permutation_test(0.5, [0.5, 0.4, 0.6]) == (pytest.approx(0.5), 3 / 4)
    assert permutation_test(0.7, [0.5, 0.4, 0.6])[1] == 1 / 4
    assert all(map(math.isnan, permutation_test(0.5, [])))


def test_p_values_reject_null_problems_at_most_at_their_level() -> None:
    """False positives over 48 null problems: groups of alike rows at .1, balanced rows at .25."""
    hits = np.zeros(2)
    n, levels = 48, np.array([0.1, 0.25])
    for i in range(n):
        rng = np.random.default_rng(i)
        groups = np.arange(96) // 8
        z = rng.permutation(np.repeat([0, 1], 6))[groups]
        X = rng.normal(size=(12, 3))[groups] + 0.1 * rng.normal(size=(96, 3))
        by_group = ev.leakage(
            X, z, probes=("linear",), cv=2, n_permutations=9, groups=groups, random_state=i
        )
        balanced = ev.leakage(
            rng.normal(size=(60, 3)), np.repeat([0, 1], 30), probes=("linear",), cv=5,
            n_permutations=3, random_state=i,
        )  # fmt: skip
        found = np.array([by_group["linear"].p_value, balanced["linear"].p_value])
        hits += found <= levels
    assert (hits / n <= levels + 3 * np.sqrt(levels * (1 - levels) / n)).all()


def test_groups_too_few_for_a_permutation_test_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    z = np.tile([0, 1], 30)
    X = np.random.default_rng(0).normal(size=(60, 3))
    target_of = probes.target_of

    def only_true_labels(codes: Any, *more: Any) -> probes.ProbeTarget:
        target = target_of(codes, *more)
        return target if np.array_equal(codes, z) else target._replace(folds=[], reason="no fold")

    monkeypatch.setattr(probes, "target_of", only_true_labels)
    with pytest.raises(InputError, match="only 0 of 60 permutations"):
        ev.leakage(X, z, probes=("linear",), n_permutations=3)


def test_an_auc_far_below_one_half_hints_at_groups() -> None:
    rng = np.random.default_rng(0)
    twins = np.repeat(rng.normal(size=(150, 40)), 2, axis=0)
    z = np.tile([0, 1], 150)
    with pytest.warns(SplinceWarning, match="groups="):
        found = ev.leakage(twins, z, probes=("linear",))
    assert found["linear"].auc < 0.3
    assert "versions of one sentence" in str(found)
    fresh = ev.leakage(rng.normal(size=(300, 40)), z, probes=("linear",))  # control
    assert fresh.hint == ""
    assert "not seen" not in str(fresh)
    kept = ev.leakage(twins, z, probes=("linear",), groups=np.arange(300) // 2)
    assert kept.hint == ""


def test_a_feature_that_is_constant_in_a_fold_has_no_weight_there() -> None:
    rng = np.random.default_rng(0)
    z = np.tile([0, 1], 50)
    X = rng.normal(size=(100, 4))
    rare = np.zeros(100)
    rare[0] = 50.0
    plain = ev.leakage(X, z, probes=("linear",))["linear"]
    more = ev.leakage(np.c_[X, rare], z, probes=("linear",))["linear"]
    assert more.accuracy == pytest.approx(plain.accuracy, abs=0.03)
