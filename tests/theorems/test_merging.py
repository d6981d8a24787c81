"""Moments are a commutative group of rows: any split, order, removal and copy tells the same."""

from __future__ import annotations

from itertools import pairwise, permutations

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
    no_rows,
    state_bytes,
    summed,
    tables,
)

from splince_fast import Moments
from splince_fast.exceptions import IncompatibleMomentsError, LabelError

same_width = st.integers(1, 4).flatmap(lambda d: st.lists(tables(width=d), min_size=2, max_size=4))


@given(same_width, block_sizes)
def test_any_order_and_grouping_of_parts(parts: list[Table], block_rows: int | None) -> None:
    whole = sum((part.rows for part in parts[1:]), parts[0].rows)
    states = [fed(part, block_rows=block_rows) for part in parts]
    for order in list(permutations([*states, Moments()]))[:6]:  # the identity among them
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
    X, y = normal(10, 2), np.arange(10.0)
    whole = Moments().update(X, {"z": [0] * 6 + [1] * 4, "y": y})
    heavy = Moments().update(X[:4], {"z": [0, 0, 1, 1]}, sample_weight=[1, 1, 1000, 1000])
    columns = Moments().update(X[:4], {"y": [0.0, 1.0, None, None]}, sample_weight=[1, 1, 1e3, 1e3])
    cases = {
        "more rows": (whole, Moments().update(normal(11, 2))),
        "more weight": (whole, Moments().update(X[:1], sample_weight=[11.0])),
        "other class": (whole, Moments().update(X[:1], {"z": [7]})),
        "more of a class": (whole, Moments().update(X[:7], {"z": [1] * 7})),
        "other variable": (whole, Moments().update(X[:1], {"new": ["a"]})),
        "other kind": (whole, Moments().update(X[:1], {"z": [0.5]})),
        "other width": (whole, Moments().update(normal(2, 3))),
        "larger spread": (whole, Moments().update(1e6 * X[:4])),
        "all rows without their labels": (whole, Moments().update(X)),
        "rows without their labels": (whole, Moments().update(X[:8])),
        "more than a class weighs": (
            heavy, Moments().update(X[:1], {"z": [0]}, sample_weight=[500])
        ),
        "more than the labels weigh": (
            columns, Moments().update(X[:1], {"y": [0.0]}, sample_weight=[500])
        ),
        "nothing": (Moments(), whole),
    }  # fmt: skip
    for what, (moments, stranger) in cases.items():
        before = state_bytes(moments + Moments())
        with pytest.raises(IncompatibleMomentsError):
            moments - stranger
        assert state_bytes(moments) == before, what


def test_labels_that_do_not_go_together_do_not_merge() -> None:
    """Age added to height is a wrong number, in a merge as in an update."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    X, y = normal(6, 2), normal(6, 2)
    named, swapped = (pandas.DataFrame(y, columns=names) for names in (["a", "h"], ["h", "a"]))
    first, unnamed = Moments().update(X, {"y": named}), Moments().update(X, {"y": y})
    with pytest.raises(IncompatibleMomentsError):
        first + Moments().update(X, {"y": swapped})
    for moments in (first, unnamed.update(X, {"y": named})):  # which gives the columns their names
        with pytest.raises(LabelError):
            moments.update(X, {"y": swapped})


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


def test_a_sum_has_the_rounding_of_its_coarsest_rows() -> None:
    X = normal(50, 3)
    fine, coarse = Moments().update(X), Moments().update(X.astype(np.float32))
    for total in (fine + coarse, coarse + fine, coarse.copy().update(X)):
        assert total._state().row_eps == np.finfo(np.float32).eps > fine._state().row_eps
