"""Moments are a commutative group of rows: any split, order, removal and copy tells the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from entangled import normal
from hypothesis import given
from hypothesis import strategies as st
from naive_model import (
    U32,
    U64,
    Rows,
    Table,
    block_sizes,
    check,
    fed,
    flushed,
    no_rows,
    state_bytes,
    summed,
    tables,
)

from splince_fast import Moments, SplinceError
from splince_fast.exceptions import IncompatibleMomentsError, LabelError

same_width = st.integers(1, 4).flatmap(lambda d: st.lists(tables(width=d), min_size=2, max_size=4))


@given(tables(), block_sizes)
def test_empty_moments_are_the_identity(table: Table, block_rows: int | None) -> None:
    moments = fed(table, block_rows=block_rows)
    for same in (moments + Moments(), Moments() + moments, moments - Moments(), summed([moments])):
        check(same, table.rows)
        table.feed(same)
        check(same, table.rows + table.rows)
    check(moments, table.rows)


@given(same_width, block_sizes)
def test_any_order_and_grouping_of_parts(parts: list[Table], block_rows: int | None) -> None:
    whole = sum((part.rows for part in parts[1:]), parts[0].rows)
    states = [fed(part, block_rows=block_rows) for part in parts]
    for order in list(permutations(states))[:6]:
        check(summed(order), whole)
        grouped = order[-1]
        for state in reversed(order[:-1]):
            grouped = state + grouped
        check(grouped, whole)
    in_place = Moments()
    for state in states:
        in_place += state
    check(in_place, whole)
    check(fed(*parts, block_rows=block_rows), whole)
    for state, part in zip(states, parts, strict=True):
        check(state, part.rows)


@given(tables(), st.lists(st.floats(0, 1), max_size=4), block_sizes)
def test_split_anywhere(table: Table, cuts: list[float], block_rows: int | None) -> None:
    n = len(table.X)
    bounds = [0, *sorted(round(cut * n) for cut in cuts), n]
    one_by_one, merged = Moments(block_rows=block_rows), Moments()
    for a, b in pairwise(bounds):
        labels = {name: column[a:b] for name, column in table.labels.items()}
        weight = None if table.weight is None else table.weight[a:b]
        one_by_one.update(table.X[a:b], labels, sample_weight=weight)
        merged += Moments().update(table.X[a:b], labels, sample_weight=weight)
    check(one_by_one, table.rows)
    check(merged, table.rows)


@given(tables(), st.integers(0, 99))
def test_a_row_twice_weighs_two(table: Table, seed: int) -> None:
    times = np.random.default_rng(seed).integers(0, 4, len(table.X))
    index = np.repeat(np.arange(len(times)), times)
    labels = {
        name: column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]
        for name, column in table.labels.items()
    }
    repeated = Moments().update(table.X[index], labels)
    weighted = Moments().update(table.X, table.labels, sample_weight=times)
    model = Rows.of(table.X[index], labels)
    check(repeated, model)
    # Counts are of rows, weights are of mass: all else agrees.
    model_weighted = Rows.of(table.X, table.labels, times)
    check(weighted, model_weighted)
    if len(model):
        assert weighted.weight == repeated.weight == len(index)
        size = np.abs(model.x).max(axis=0)
        slack = 64 * (len(model) + 8) * (U32 if model.narrow else U64) * np.outer(size, size)
        both = weighted.covariance(ddof=0) - repeated.covariance(ddof=0)
        assert (np.abs(both) <= slack).all()


def test_weight_zero_is_absence_whatever_the_row_holds() -> None:
    X = normal(12, 3)
    labels = {"z": list("abcabcabcabc"), "y": np.arange(12.0)}
    weight = np.tile([1.0, 2.0, 0.0], 4)
    spoilt = X.copy()
    spoilt[2::3] = np.nan
    moments = Moments().update(spoilt, labels, sample_weight=weight)
    check(moments, Rows.of(X, labels, weight))
    assert moments.classes("z") == ("a", "b")  # no row of class c is there
    assert moments.cross_covariance("z").shape == (3, 2)
    nothing = Moments().update(spoilt, labels, sample_weight=np.zeros(12))
    assert state_bytes(nothing) == state_bytes(Moments())


@given(same_width, block_sizes)
def test_removing_undoes_merging(parts: list[Table], block_rows: int | None) -> None:
    """k-fold from one pass: the whole without a part is the other parts."""
    rows = [part.rows for part in parts]
    everything = sum(rows[1:], rows[0])
    total = fed(*parts, block_rows=block_rows)
    for i, part in enumerate(parts):
        others = sum(rows[:i] + rows[i + 1 :], no_rows(part.X.shape[1]))
        check(total - fed(part), others, everything)
    check(total, everything)
    nothing = total - total
    assert nothing.n_rows == 0
    check(nothing + total, everything, everything + everything)


def test_removal_of_what_is_no_part_is_refused() -> None:
    X = normal(10, 2)
    whole = Moments().update(X, {"z": [0] * 6 + [1] * 4, "y": X[:, 0]})
    kept = state_bytes(whole + Moments())
    strangers = {
        "more rows": Moments().update(normal(11, 2)),
        "more weight": Moments().update(X[:1], sample_weight=[11.0]),
        "other class": Moments().update(X[:1], {"z": [7]}),
        "more of a class": Moments().update(X[:7], {"z": [1] * 7}),
        "other variable": Moments().update(X[:1], {"new": ["a"]}),
        "other kind": Moments().update(X[:1], {"z": [0.5]}),
        "other width": Moments().update(normal(2, 3)),
        "larger spread": Moments().update(1e6 * X[:4]),
    }
    for what, stranger in strangers.items():
        with pytest.raises(IncompatibleMomentsError, match=r"were added|combined|kinds"):
            whole - stranger
        assert state_bytes(whole) == kept, what
    with pytest.raises(IncompatibleMomentsError, match="no labels of this variable were added"):
        Moments() - whole


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 7, 64, 4096])
@pytest.mark.parametrize("part_size", [pytest.param(1, marks=pytest.mark.slow), 7, 64, 4096])
def test_what_is_left_may_have_constant_columns(size: int, part_size: int) -> None:
    """The whole's roundings grow with its rows: they must not pass for "no part of the whole"."""
    steps = np.array([0.1, 0.2, 0.25, 0.5, 1.55])
    X = np.where(np.arange(20_000) % 2 == 0, 1, -1)[:, None] * steps
    rest = np.zeros((3, 5))
    whole = Moments(block_rows=size).update(np.concatenate([X, rest]))
    left = whole - Moments(block_rows=part_size).update(X)
    assert left.n_rows == 3
    check(left, Rows.of(rest), Rows.of(np.concatenate([X, rest])))


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e8])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("label", ["classes", "column", "constant column"])
def test_a_feature_that_is_left_constant_covaries_with_none(
    offset: float, scale: float, label: str
) -> None:
    """Exactly: labels differ in its mean by rounding alone, also of rows removed long before."""
    rng = np.random.default_rng(0)
    X, y = normal(400, 3) + offset, rng.normal(size=400)
    X[200:] = offset + scale * (X[200:] - offset)
    X[:40, 0] = offset + 0.1234567
    if label == "constant column":
        y[:40] = 0.7
    labels = np.arange(400) % 2 if label == "classes" else y

    def fed(rows: slice) -> Moments:
        return Moments(block_rows=64).update(X[rows], {"z": labels[rows]})

    left = fed(slice(None)) - fed(slice(200, 400)) - fed(slice(40, 200))
    assert left.n_rows == 40
    assert not left.covariance(ddof=0)[0].any()
    assert (left.covariance(ddof=0).diagonal()[1:] > 0.1).all()


def test_removal_cannot_leave_labels_of_no_rows() -> None:
    """The part came without the labels that its rows had in the whole."""
    X = normal(6, 2)
    whole = Moments().update(X, {"z": [0, 1] * 3, "y": np.arange(6.0)})
    for n in (6, 4):
        with pytest.raises(IncompatibleMomentsError):
            whole - Moments().update(X[:n])


@pytest.mark.parametrize(
    "labels", [{"z": [0, 0, 1, 1]}, {"y": np.array([0.0, 1.0, np.nan, np.nan])}], ids=["z", "y"]
)
def test_removal_cannot_leave_a_variable_with_negative_weight(labels: dict[str, Any]) -> None:
    X = np.zeros((4, 2))
    whole = Moments().update(X, labels, sample_weight=[1, 1, 1000, 1000])
    first = {name: column[:1] for name, column in labels.items()}
    with pytest.raises(IncompatibleMomentsError):
        whole - Moments().update(X[:1], first, sample_weight=[500])


def test_columns_of_other_names_do_not_merge() -> None:
    """Age added to height is a wrong number, in a merge as in an update."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    X, y = normal(6, 2), normal(6, 2)
    first = Moments().update(X, {"y": pandas.DataFrame({"age": y[:, 0], "height": y[:, 1]})})
    swapped = pandas.DataFrame({"height": y[:, 1], "age": y[:, 0]})
    with pytest.raises(LabelError):
        first.copy().update(X, {"y": swapped})
    with pytest.raises(IncompatibleMomentsError):
        first + Moments().update(X, {"y": swapped})
    unnamed = Moments().update(X, {"y": y}).update(X, {"y": swapped[["age", "height"]]})
    with pytest.raises(LabelError):  # the columns keep the names that a later block gave them
        unnamed.update(X, {"y": swapped})


def test_classes_absent_from_the_first_block_or_from_one_worker() -> None:
    X = normal(40, 3)
    z = np.array(["b"] * 10 + ["c", "a"] * 10 + ["d"] * 10)
    parts = [Moments().update(X[i : i + 10], {"z": z[i : i + 10]}) for i in range(0, 40, 10)]
    whole = Moments().update(X, {"z": z})
    for moments in (
        summed(parts),
        summed(reversed(parts)),
        parts[2] + parts[0] + parts[3] + parts[1],
    ):
        check(moments, Rows.of(X, {"z": z}))
        order = [moments.classes("z").index(name) for name in whole.classes("z")]
        np.testing.assert_allclose(
            moments.cross_covariance("z")[:, order], whole.cross_covariance("z"), rtol=1e-11
        )


def test_kinds_that_differ_do_not_merge() -> None:
    X = normal(6, 2)
    classes, numbers = Moments().update(X, {"z": [0] * 6}), Moments().update(X, {"z": X[:, 0]})
    for a, b in ((classes, numbers), (numbers, classes)):
        with pytest.raises(IncompatibleMomentsError, match="kinds="):
            a + b
    flags = Moments().update(X, {"z": [True] * 6})
    with pytest.raises((IncompatibleMomentsError, LabelError)):  # True is not 1
        classes + flags


@pytest.mark.parametrize("other", [3, "text", None, np.ones((2, 2)), [1]])
def test_moments_combine_with_moments_only(other: Any) -> None:
    moments = Moments().update(normal(4, 2))
    before = state_bytes(moments)
    with pytest.raises((TypeError, SplinceError)):
        moments + other
    with pytest.raises((TypeError, SplinceError)):
        moments - other
    with pytest.raises((TypeError, SplinceError)):
        moments += other
    assert state_bytes(moments) == before


@pytest.mark.parametrize("left", [None, 3, 64])
@pytest.mark.parametrize("right", [None, 5, 7])
def test_states_of_other_block_sizes_merge_and_go_on(left: int | None, right: int | None) -> None:
    """Work buffers belong to a block size: one state must never go on with the other's."""
    X = normal(5000, 4, np.float32)
    other = Moments(block_rows=right).update(X[:4])
    moments = Moments(block_rows=left) + other
    moments.update(X[4:])
    check(moments, Rows.of(X))
    in_place = Moments(block_rows=left)
    in_place += Moments(block_rows=right).update(X[:4])
    check(in_place.update(X[4:]), Rows.of(X))


def test_copies_are_independent() -> None:
    X, labels = normal(10, 3), {"z": [0, 1] * 5, "y": np.arange(10.0)}
    original = Moments(block_rows=4).update(X, labels)
    sums = original + Moments()
    expected = state_bytes(original)
    copies = [original.copy(), copy.copy(original), copy.deepcopy(original), sums]
    for one in copies:
        one.update(X * 2, {"z": [2] * 10})
        one += one
        one.covariance()
    assert state_bytes(original) == expected
    original.update(X)
    check(copies[0] - copies[0] + Moments().update(X), Rows.of(X))


@given(st.data(), block_sizes)
def test_every_way_to_store_a_state_continues_to_the_same_bytes(
    data: st.DataObject, block_rows: int | None
) -> None:
    width = data.draw(st.integers(1, 4))
    first, second = data.draw(tables(width=width)), data.draw(tables(width=width))
    original = fed(first, block_rows=block_rows)
    ways: dict[str, Callable[[Moments], Moments]] = {
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "deepcopy": copy.deepcopy,
        "copy": Moments.copy,
    }
    twins = {name: way(original) for name, way in ways.items()}
    reference = state_bytes(second.feed(original))
    read = state_bytes(flushed(original))
    for name, twin in twins.items():
        assert state_bytes(second.feed(twin)) == reference, name
        assert state_bytes(flushed(twin)) == read, name
        check(twin, first.rows + second.rows)
