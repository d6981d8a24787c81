"""Folds and classes: parts hold the bits of their rows; parts are removed."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import Rows, check, classed, fed_in_parts, laid_out, part, state_bytes
from numpy.typing import NDArray
from processes import script

import splince_fast as sf
from splince_fast import Folds, Moments
from splince_fast._runtime.rows import splitmix64
from splince_fast.exceptions import IncompatibleMomentsError, LabelError

N, D = 400, 5
data = partial(classed, N, D)


# --- folds ---------------------------------------------------------------------------------------


def fold_of(n: int, count: int) -> NDArray[np.intp]:
    return (splitmix64(np.arange(n, dtype=np.uint64)) % np.uint64(count)).astype(np.intp)


@pytest.mark.parametrize("arguments", [{}, {"by": "z"}, {"subsample": 0.3}], ids=str)
def test_classes_of_folds_are_sorted_by_value_whatever_the_order_of_the_labels(
    arguments: dict[str, Any],
) -> None:
    """Classes that come in descending order, and some that the first blocks lack."""
    X, labels = classed(1200, D, dtype=np.float32)
    order = np.argsort(labels["z"])[::-1]
    X, labels = X[order], part(labels, order)
    labels["number"] = np.sqrt(np.arange(1200.0)).astype(int) // 3
    for names in (["z", "number", "y"], ["number", "y", "z"]):
        blocks = [
            (X[i : i + 100], {name: labels[name][i : i + 100] for name in names})
            for i in range(0, 1200, 100)
        ]
        folds = Folds.from_blocks(blocks, folds=2, **arguments)
        for moments in (folds.total, *folds):
            assert moments.classes("number") == tuple(range(12))
            assert moments.classes("z") == ("a", "b", "c")
            counts = [list(moments.class_counts(name).values()) for name in ("z", "y")]
            cells = moments._flushed().label_products.cells["y", "z"].T
            assert [cells.sum(axis=1).tolist(), cells.sum(axis=0).tolist()] == counts


@pytest.mark.parametrize("make", [partial(Moments, by="z"), partial(Folds, 2)], ids=["by", "folds"])
def test_names_that_one_part_has_are_those_of_all(make: Any) -> None:
    """A part without names came between parts of other names, which could then not be summed."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    X, split = np.eye(2), make()
    named, other = ({"q": pandas.DataFrame(X, columns=list(names))} for names in ("pr", "st"))
    for z, labels in (("a", named), ("b", {"q": X}), ("a", named), ("c", {"q": X})):
        split.update(X, {"z": [z, z]} | labels)
    before = state_bytes(split)
    with pytest.raises(LabelError, match="columns"):
        split.update(X, {"z": ["d", "d"]} | other)
    assert state_bytes(split) == before
    if isinstance(split, Moments):
        with pytest.raises(IncompatibleMomentsError, match="columns"):
            split += make().update(X, {"z": ["d", "d"]} | other)
    assert (split.total if isinstance(split, Folds) else split).cross_covariance("q").shape == (
        2,
        2,
    )


@pytest.mark.parametrize(
    ("layout", "dtype"), [("C", "f4"), ("F", "f4"), ("strided", "f4"), ("C", "f2"), ("C", "i2")]
)
@given(
    cuts=st.lists(st.integers(0, N), max_size=5).map(sorted),
    count=st.integers(2, 3),
    block_rows=st.sampled_from([16, 64, 250]),
    weighted=st.booleans(),
    kind=st.sampled_from([{}, {"subsample": 0.3}]),
)
def test_a_fold_has_the_bits_of_its_rows_in_their_order(
    layout: str,
    dtype: str,
    cuts: list[int],
    count: int,
    block_rows: int,
    weighted: bool,
    kind: dict[str, Any],
) -> None:
    """Against moments of a copy of these rows, a block at a time; in updates of any size."""
    if "subsample" in kind:  # sums in the order in which classes came: all of them come at first
        cuts = [cut for cut in cuts if cut > 50]
    X, labels = data()
    X = laid_out((np.rint(10 * X) if dtype == "i2" else X).astype(dtype), layout)
    weight = np.random.default_rng(1).uniform(0.5, 2, N) if weighted else None
    folds = Folds(count, block_rows=block_rows, **kind)
    for rows in map(slice, [0, *cuts], [*cuts, N]):
        given = None if weight is None else weight[rows]
        folds.update(X[rows], part(labels, rows), sample_weight=given)
    folds._sort_classes()
    for i, fold in enumerate(folds):
        rows = np.flatnonzero(fold_of(N, count) == i)
        twin = Folds(2, block_rows=block_rows, **kind)  # whose first fold takes all
        twin._accumulator._folds_of_rows = lambda _, numbers: (range(2), 0 * numbers.astype(int))
        given = None if weight is None else weight[rows]
        fed_in_parts(twin, np.array(X[rows]), part(labels, rows), block_rows, given)
        assert state_bytes(fold) == state_bytes(twin._sort_classes()[0])
    assert state_bytes(folds[0]) != state_bytes(folds[1]), "the control"


def test_rows_are_assigned_to_folds_by_the_published_hash() -> None:
    """The first numbers that SplitMix64 gives from seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(np.arange(3, dtype=np.uint64)).tolist() == expected


def test_rows_without_a_group_are_spread_over_the_folds() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 2))
    group = np.array([f"g{i % 50}" if i % 2 else None for i in range(4000)], object)
    folds = Folds(4, groups="group").update(X, {"group": group})
    of_group = Folds(4, groups="group").update(X[1::2], {"group": group[1::2]})
    alone = [a.n_rows - b.n_rows for a, b in zip(folds, of_group, strict=True)]
    # Binomial counts of 2,000 rows: a mean of 500, within five deviations of 19.
    assert sum(alone) == 2000
    assert all(abs(count - 500) < 100 for count in alone)


@pytest.mark.parametrize("grouped", [False, True])
def test_rows_of_weight_zero_keep_their_place_between_folds(grouped: bool) -> None:
    """A row goes to its fold by its position, whatever precedes it weighs."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 3))
    weight = (rng.random(600) < 0.6) * 1.0
    labels = {"group": np.array([None] * 600, object)} if grouped else {}
    found = fed_in_parts(Folds(3, groups="group" if grouped else None), X, labels, 70, weight)
    fold = fold_of(600, 3)
    for i, moments in enumerate(found):
        kept = (fold == i) & (weight > 0)
        assert moments.n_rows == kept.sum()
        np.testing.assert_allclose(moments.mean, X[kept].mean(axis=0), atol=1e-13)


# --- classes -------------------------------------------------------------------------------------


def test_each_class_has_the_moments_of_its_rows() -> None:
    """Weighted, and with missing labels."""
    X, labels = data()
    weight = np.random.default_rng(1).integers(0, 3, N) + 0.0
    labels["z"] = np.where(np.arange(N) % 7 == 0, None, labels["z"])
    moments = fed_in_parts(Moments(by="z", block_rows=64), X, labels, 70, weight)
    check(moments, Rows.of(X, labels, weight))
    assert set(moments.by_class) == {"a", "b", "c", None}
    assert moments.by_class[None].variables == {"y": "classes", "v": "continuous"}
    pooled = np.cov(X.T)  # control: the classes differ
    assert np.abs(moments.by_class["a"].covariance() - pooled).max() > 1


def test_total_is_that_of_all_rows() -> None:
    X, labels = data()
    moments, plain = (Moments(by=by).update(X, labels) for by in ("z", None))
    for state in (moments, plain):
        check(state, Rows.of(X, labels))
    found, expected = (sf.splince(m, erase="z", keep="y").matrix() for m in (moments, plain))
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_late_classes_and_late_labels() -> None:
    X, labels = classed(300, D)
    order = np.argsort(labels["z"], kind="stable")
    moments = Moments(by="z").update(X[:0]).update(X[:50])
    for rows in np.array_split(order, 5):
        moments.update(X[rows], part(labels, rows))
    assert set(moments.by_class) == {"a", "b", "c", None}
    assert moments.n_rows == 350


def test_an_update_without_rows_needs_no_label_of_the_class() -> None:
    X, labels = data()
    moments = Moments(by="z").update(X, labels)
    moments.mean  # noqa: B018
    before = state_bytes(moments)
    moments.update(X[:0], {"y": labels["y"][:0]})
    assert state_bytes(moments) == before
    with pytest.raises(LabelError, match="pass labels of 'z'"):  # control
        moments.update(X[:1], {"y": labels["y"][:1]})


CLASSES_IN_ORDER = """
import numpy as np, splince_fast as sf
X = np.random.default_rng(0).normal(size=(50, 3))
z = np.array(["d", "a", "e", "b", "c"])[np.arange(50) % 5]
print(list(sf.Moments(by="z").update(X, {"z": z}).by_class))
"""


def test_the_order_of_classes_depends_on_no_hash() -> None:
    found = {script(CLASSES_IN_ORDER, PYTHONHASHSEED=seed) for seed in ("1", "2", "3")}
    assert len(found) == 1


def test_repr_counts_the_classes_of_all_parts_before_they_are_merged() -> None:
    rng = np.random.default_rng(0)
    z, y = np.repeat([0, 1], 20), rng.integers(0, 3, size=40)
    y[:20] %= 2  # the first class of z lacks a class of y
    moments = Moments(by="z").update(rng.normal(size=(40, 3)), {"z": z, "y": y})
    assert "'z': 2 classes, 'y': 3 classes" in repr(moments)
    assert moments.class_counts("y").keys() == {0, 1, 2}  # merges the parts
    assert "'z': 2 classes, 'y': 3 classes" in repr(moments)


# --- removals, one after the other ---------------------------------------------------------------


def chain(seed: int, far: float) -> tuple[list[Moments], Any]:
    """Parts of which some lie far away, and the order in which they are removed."""
    rng = np.random.default_rng(seed)
    count, d = int(rng.integers(3, 7)), int(rng.integers(1, 5))
    parts = []
    for _ in range(count):
        n = int(rng.integers(5, 60))
        mean = rng.normal(size=d) * (far if rng.random() < 0.4 else 1.0)
        X = rng.normal(size=(n, d)) * 10.0 ** rng.uniform(-2, 2) + mean
        parts.append(Moments().update(X, {"z": rng.integers(0, 2, n), "v": rng.normal(size=n)}))
    return parts, rng.permutation(count)


@pytest.mark.parametrize("far", [1e8, 1e10, 1e13])
@pytest.mark.parametrize("stored", [False, True])
def test_parts_far_away_are_removed_and_so_are_those_after_them(far: float, stored: bool) -> None:
    """A part takes digits with it; what it leaves behind is no reason to refuse another part."""
    for seed in range(60):
        parts, order = chain(seed, far)
        left = sum(parts)
        for i in order:
            left -= parts[i]
            if stored:
                left = pickle.loads(pickle.dumps(left))
        assert left.n_rows == 0


def test_what_is_no_part_is_refused_all_the_same() -> None:
    """The control: after a removal nearby, a variance below zero is an error still."""
    rng = np.random.default_rng(0)
    near, other, part = (Moments().update(rng.normal(size=(n, 3))) for n in (40, 30, 20))
    left = (near + other + part) - part
    with pytest.raises(IncompatibleMomentsError, match="would become negative"):
        left - Moments().update(100.0 * rng.normal(size=(20, 3)))


@pytest.mark.parametrize("right", [False, True])
def test_what_a_removal_lost_counts_in_either_place_of_a_sum(right: bool) -> None:
    """A part from which one far away was taken has its rounding, also as the right-hand side."""
    rng = np.random.default_rng(0)
    near, other = (Moments().update(rng.normal(size=(40, 3))) for _ in range(2))
    far = Moments().update(1e10 + rng.normal(size=(40, 3)))
    spoilt = (near + far) - far
    lost = spoilt.__getstate__()["tensors"]["lost"]
    assert (lost > 0).all()
    total = other + spoilt if right else spoilt + other
    np.testing.assert_array_equal(total.__getstate__()["tensors"]["lost"], lost)
    both = spoilt + spoilt
    np.testing.assert_array_equal(both.__getstate__()["tensors"]["lost"], 2 * lost)
