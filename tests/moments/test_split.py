"""Folds and classes: parts hold the bits of their rows; what removals of parts leave."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import Rows, check, classed, fed_in_parts, laid_out, part, state_bytes
from numpy.typing import NDArray

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
    rng = np.random.default_rng(1)
    weight = rng.uniform(0.5, 2, N) * (rng.random(N) < 0.8) if weighted else None
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


def test_rows_without_a_group_go_to_the_folds_of_their_positions() -> None:
    """Whatever the rows that precede them weigh."""
    rng = np.random.default_rng(0)
    X, weight = rng.normal(size=(600, 2)), rng.integers(0, 2, 600) * 1.0
    group = np.array([f"g{i % 50}" if i % 2 else None for i in range(600)], object)
    folds = fed_in_parts(Folds(3, groups="group"), X, {"group": group}, 70, weight)
    grouped = part({"group": group}, slice(1, None, 2))
    of_group = Folds(3, groups="group").update(X[1::2], grouped, sample_weight=weight[1::2])
    for i, (fold, others) in enumerate(zip(folds, of_group, strict=True)):
        alone = (fold_of(600, 3) == i) & (weight > 0) & (np.arange(600) % 2 == 0)
        check(fold - others, Rows.of(X[alone]), Rows.of(X))


# --- classes -------------------------------------------------------------------------------------


def test_late_classes_and_late_labels() -> None:
    X, labels = classed(300, D)
    order = np.argsort(labels["z"], kind="stable")
    moments = Moments(by="z").update(X[:0]).update(X[:50])
    for rows in np.array_split(order, 5):
        moments.update(X[rows], part(labels, rows))
    assert set(moments.by_class) == {"a", "b", "c", None}
    assert moments.by_class[None].variables == {}
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


def test_classes_are_in_the_order_of_their_names() -> None:
    """An order of hashes would differ from one process to the next, one of blocks between feeds."""
    z = np.array(list("dhaegbfc"))[np.arange(80) % 8]
    X = np.random.default_rng(0).normal(size=(80, 3))
    moments = Moments(by="z").update(X, {"z": z})
    assert list(moments.by_class) == list("abcdefgh")
    late, early = Moments(by="z"), Moments(by="z")
    for names, state in (("abcdefgh", early), ("hgfedcba", late)):
        for name in names:
            state.update(X[z == name], {"z": z[z == name]})
    assert late.covariance().tobytes() == early.covariance().tobytes()


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
    """The control: after a removal nearby, a variance below zero; more rows, however light."""
    rng = np.random.default_rng(0)
    near, other, part = (Moments().update(rng.normal(size=(n, 3))) for n in (40, 30, 20))
    left = (near + other + part) - part
    with pytest.raises(IncompatibleMomentsError, match="would become negative"):
        left - Moments().update(100.0 * rng.normal(size=(20, 3)))
    with pytest.raises(IncompatibleMomentsError, match="60 rows"):
        near - Moments().update(rng.normal(size=(60, 3)), sample_weight=np.full(60, 0.1))


def test_what_a_removal_lost_counts_in_sums_and_scales() -> None:
    """A part from which one far away was taken has its rounding on either side of a sum."""
    rng = np.random.default_rng(0)
    near, other = (Moments().update(rng.normal(size=(40, 3))) for _ in range(2))
    far = Moments().update(1e10 + rng.normal(size=(40, 3)))

    def lost(moments: Moments) -> Any:
        return moments.__getstate__()["tensors"]["lost"]

    spoilt = (near + far) - far
    assert (lost(spoilt) > 0).all()
    for moments, factor in (
        (other + spoilt, 1.0),
        (spoilt + other, 1.0),
        (spoilt + spoilt, 2.0),
        (spoilt.scaled(2.0**-20), 2.0**-20),
    ):
        np.testing.assert_array_equal(lost(moments), factor * lost(spoilt))


# --- what a removal leaves -----------------------------------------------------------------------


def drawn_part(
    rng: np.random.Generator, n: int = 50, constant: Any = None, dtype: Any = "f8", **labels: Any
) -> Any:
    X = rng.normal(size=(n, 3))
    if constant is not None:
        X[:, 2] = constant
    return X.astype(dtype), labels


# Parts of a state, drawn by a random generator: the first stays, the others are removed.
REMOVALS: dict[str, Callable[[np.random.Generator], list[Any]]] = {
    **{
        f"a feature of {value} in {dtype}": lambda rng, value=value, dtype=dtype: [
            drawn_part(rng, 200, value, dtype, z=rng.integers(0, 2, 200)),
            drawn_part(rng, 100, None, dtype, z=rng.integers(0, 2, 100)),
        ]
        for value in (0.0, 0.1, 333.0) for dtype in ("f4", "f8")
    },
    **{
        f"features at {offset}": lambda rng, offset=offset: [
            (np.full((100, 3), offset + 0.1 * rng.integers(3)), {}),
            (rng.normal(size=(100, 3)) + offset, {}),
        ]
        for offset in (1e8, 1e12)
    },
    "a constant label": lambda rng: [
        drawn_part(rng, z=np.zeros(50)),
        *(drawn_part(rng, z=rng.normal(size=50) * 10.0**k) for k in (0, 3, 6)),
    ],
    "a constant label far from those that go": lambda rng: [
        drawn_part(rng, z=np.full(50, 0.3)), drawn_part(rng, z=1e3 * rng.normal(size=50)),
    ],
    "a label that varies far from those that go": lambda rng: [
        drawn_part(rng, z=0.3 + rng.normal(size=50)), drawn_part(rng, z=1e3 * rng.normal(size=50)),
    ],
    "a class that goes": lambda rng: [
        drawn_part(rng, z=["a", "b"] * 25), *(drawn_part(rng, z=["b", "c"] * 25) for _ in range(3))
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", REMOVALS)
def test_what_a_removal_leaves_is_constant_where_the_rest_is(case: str) -> None:
    """Rounding left by a removal is no variance: it is exactly 0, and no eraser whitens it."""
    for seed in range(30):
        (X, labels), *rest = REMOVALS[case](np.random.default_rng(seed))
        goes = [Moments(block_rows=7).update(*part) for part in rest]
        stays = Moments(block_rows=16).update(X, labels)
        whole = sum(goes, stays) if seed % 2 else sum([*goes, stays], Moments(block_rows=16))
        left = whole - sum(goes[::-1][1:], goes[-1])
        assert state_bytes(pickle.loads(pickle.dumps(left))) == state_bytes(left)
        constant = np.ptp(X, axis=0) == 0
        covariance = left.covariance(ddof=0)
        assert (covariance[constant] == 0).all()
        assert (np.diag(covariance)[~constant] > 0.1).all()
        if not labels:
            continue
        if len(set(labels["z"])) == 1:
            with pytest.raises(sf.exceptions.ConstantVariableError):
                sf.leace(left, erase="z")
            # More rows are added about the value of the label.
            found, expected = ((own + goes[0]).cross_covariance("z") for own in (left, stays))
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
            continue
        report = sf.leace(left, erase="z").report
        assert (report.rank_covariance, report.rank) == ((~constant).sum(), 1)
        if case == "a class that goes":
            gone = left.classes("z").index("c")
            assert (left.cross_covariance("z")[:, gone] == 0).all()
