"""Folds and classes: parts hold the bits of their rows, updates are whole; parts are removed.

Modules: `moments.split`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_model import REDUCTION, interrupt_reductions, state_bytes
from numpy.typing import NDArray
from processes import script
from threadpoolctl import threadpool_limits

import splince_fast as sf
from splince_fast import Folds, Moments, sources
from splince_fast._runtime import files
from splince_fast._runtime.rows import splitmix64
from splince_fast.exceptions import FileFormatError, IncompatibleMomentsError, LabelError
from splince_fast.moments.split import MOST_CLASSES

N, D = 400, 5
EPS = float(np.finfo(np.float64).eps)
LAYOUTS: dict[str, Any] = {
    "C": lambda X: X,
    "Fortran": np.asfortranarray,
    "strided": lambda X: np.repeat(X, 2, axis=1)[:, ::2],
    "half": lambda X: X.astype(np.float16),
    "integers": lambda X: np.rint(10 * X).astype(np.int16),
}


def data(n: int = N, d: int = D, seed: int = 0, dtype: Any = np.float64) -> tuple[Any, Any]:
    """Rows whose covariance depends on their class."""
    rng = np.random.default_rng(seed)
    z, y, v = rng.integers(0, 3, n), rng.integers(0, 2, n), rng.normal(size=n)
    X = rng.normal(size=(n, d)) * (1 + z[:, None]) + 3 * z[:, None] + np.outer(y, np.eye(d)[0])
    v[rng.random(n) < 0.1] = np.nan
    return X.astype(dtype), {"z": np.array(["a", "b", "c"])[z], "y": y, "v": v}


def part(labels: dict[str, Any], rows: Any) -> dict[str, Any]:
    return {name: column[rows] for name, column in labels.items()}


def fed(state: Any, X: Any, labels: Any, size: int, weight: Any = None) -> Any:
    """Moments or folds after updates of this many rows."""
    for start in range(0, len(X), size):
        rows = slice(start, start + size)
        given = None if weight is None else weight[rows]
        state.update(X[rows], part(labels, rows), sample_weight=given)
    return state


def close(found: NDArray[Any], expected: NDArray[Any], X: NDArray[Any]) -> None:
    """Equal to the rounding of n products of entries of this size, about any reference point."""
    bound = 8 * len(X) * EPS * float(np.abs(X).max()) ** 2
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def bits(state: Any) -> list[dict[str, Any]]:
    return [state_bytes(moments) for moments in (state if isinstance(state, Folds) else [state])]


SPLITS: dict[str, Callable[..., Any]] = {
    "moments": Moments,
    "classes": lambda **more: Moments(by="z", **more),
    "folds": lambda **more: Folds(2, **more),
    "folds of classes": lambda **more: Folds(2, by="z", **more),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "moments": {}, "classes": {"by": "z"}, "folds": {"folds": 2},
    "folds of classes": {"folds": 2, "by": "z"},
}  # fmt: skip


# --- any split -----------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "a wrong width": (lambda X, y: (X[:, :4], y), sf.exceptions.InputError, "4 columns"),
    "NaN in the last row": (
        lambda X, y: (np.where(np.arange(N)[:, None] == N - 1, np.nan, X), y),
        sf.exceptions.NonFiniteError,
        f"row {N - 1}",
    ),
    "a variable of another kind": (
        lambda X, y: (X, {**y, "z": X[:, 0]}), sf.exceptions.LabelError, "cont",
    ),
    "classes of another type": (
        lambda X, y: (X, {**y, "z": np.arange(N) % 3}), sf.exceptions.LabelError, "one type",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_update_changes_no_part(name: str, reason: str) -> None:
    X, labels = data(dtype=np.float32)
    state = SPLITS[name](block_rows=16).update(X, labels)
    before, (change, error, text) = bits(state), REFUSED[reason]
    with pytest.raises(error, match=text):
        state.update(*change(X, labels))
    assert bits(state) == before


@pytest.mark.parametrize("name", ["classes", "folds of classes"])
def test_too_many_classes_change_no_part(name: str) -> None:
    """Also if they are too many for the last fold alone."""
    X, labels = data()
    state = SPLITS[name]().update(X, labels)
    before = bits(state)
    many = np.where(fold_of(N, 2) == 1, (np.arange(N) % (2 * MOST_CLASSES)).astype(str), "a")
    with pytest.raises(sf.exceptions.InputError, match=f"more than {MOST_CLASSES} classes"):
        state.update(X, {**labels, "z": many})
    assert bits(state) == before
    few = np.where(fold_of(N, 2) == 1, (np.arange(N) % 60).astype(str), "a")
    assert state.update(X, {**labels, "z": few}).n_rows == 2 * N  # control


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("call", [1, 2, 9])
def test_a_reduction_that_fails_changes_no_part(
    monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    X, labels = data(dtype=np.float32)
    state = SPLITS[name](block_rows=16).update(X, labels)
    before, original, calls = bits(state), getattr(*REDUCTION), list[int]()

    def failing(*arguments: Any) -> None:
        calls.append(len(calls) + 1)
        if calls[-1] == call:
            raise MemoryError
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(*REDUCTION, failing)
        with pytest.raises(MemoryError):
            state.update(X, labels)
    assert bits(state) == before


@pytest.mark.parametrize("name", SPLITS)
def test_files_pickles_and_copies_keep_every_bit(name: str, tmp_path: Path) -> None:
    X, labels = data(500)
    labels["z"] = np.where(np.arange(500) % 7 == 0, None, labels["z"])
    state = SPLITS[name](block_rows=128).update(X, labels)
    if isinstance(state, Folds):
        state._sort_classes()
        state._write_checkpoint(tmp_path / "state", {})
        others = [Folds._read_checkpoint(tmp_path / "state")[0]]
    else:
        state.save(tmp_path / "state")
        others = [Moments.load(tmp_path / "state"), state.copy()]
    for other in (*others, pickle.loads(pickle.dumps(state))):
        assert other.parameters == state.parameters
        assert bits(other) == bits(state)
        assert bits(other.update(X, labels)) == bits(
            pickle.loads(pickle.dumps(state)).update(X, labels)
        )


def test_parts_of_a_file_have_the_parameters_of_the_whole(tmp_path: Path) -> None:
    X, labels = data()
    path, moments = tmp_path / "state", Moments(by="z", block_rows=32).update(X, labels)
    moments.save(path)
    tensors, metadata = files.read(path, "moments", 1)
    metadata["part.1"] |= {"block_rows": 7, "kinds": {"z": "continuous"}}
    files.write(path, "moments", 1, tensors, metadata)
    assert bits(Moments.load(path).update(X, labels)) == bits(moments.update(X, labels))


@pytest.mark.parametrize("name", ["part.1", "classes", "unlabelled"])
def test_files_of_contradictory_parts_are_refused(tmp_path: Path, name: str) -> None:
    X, labels = data()
    Moments(by="z").update(X, labels).save(path := tmp_path / "state")
    tensors, metadata = files.read(path, "moments", 1)
    metadata[name] = {"part.1": {}, "classes": ["a", "b", "a"], "unlabelled": True}[name]
    files.write(path, "moments", 1, tensors, metadata)
    with pytest.raises(FileFormatError):
        Moments.load(path)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_interrupted_run_resumes_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Ctrl-C during a block: its rows count once."""
    X, labels = data(dtype=np.float32)
    source = sources.from_arrays(X, labels, block_rows=100)
    path, arguments = tmp_path / "run", {**ARGUMENTS[name], "block_rows": 16}
    with monkeypatch.context() as patch:
        interrupt_reductions(patch, 9)  # in the first part of a block of the source
        with pytest.raises(KeyboardInterrupt):
            Moments.from_blocks(source, **arguments, checkpoint=path)
    assert 0 < Moments.load(path).n_rows < N
    resumed = Moments.from_blocks(source, **arguments, checkpoint=path)
    plain = Moments.from_blocks(source, **arguments)
    assert resumed.n_rows == plain.n_rows == N
    assert bits(resumed) == bits(plain)


WRONG: list[tuple[Callable[[], Any], str]] = [
    *((partial(Moments.from_blocks, [np.eye(3)], folds=n), "folds is")
      for n in (0, 1, 2.0, True, 10**9, "2")),
    (lambda: Folds(2, groups=3), "groups is"),
    (lambda: Moments(by=3), "name of a class-coded"),
    (lambda: Moments(by="z", subsample=0.5), "omit subsample="),
    (lambda: Moments(by="z", covariance_type="diag"), "omit subsample="),
    (lambda: Moments().update(*data(50)).by_class, r"Moments\(by=NAME\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), WRONG)
def test_parameters_that_are_none_or_exclude_each_other(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(sf.exceptions.InputError, match=text):
        call()


# --- folds ---------------------------------------------------------------------------------------


def fold_of(n: int, count: int) -> NDArray[np.intp]:
    return (splitmix64(np.arange(n, dtype=np.uint64)) % np.uint64(count)).astype(np.intp)


@pytest.mark.parametrize("by", [None, "z"])
def test_classes_of_folds_are_sorted_by_value_whatever_the_order_of_the_labels(
    by: str | None,
) -> None:
    X, labels = data(dtype=np.float32)
    labels["number"] = np.arange(N) % 12
    for names in (["z", "number"], ["number", "z"]):
        blocks = [(X, {name: labels[name] for name in names})]
        folds = Folds.from_blocks(blocks, folds=2, by=by)
        for moments in (folds.total, *folds):
            assert moments.classes("number") == tuple(range(12))
            assert moments.classes("z") == ("a", "b", "c")


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    cuts=st.lists(st.integers(0, N), max_size=5).map(sorted),
    count=st.integers(2, 3),
    block_rows=st.sampled_from([16, 64, 250]),
    weighted=st.booleans(),
    kind=st.sampled_from([{}, {"subsample": 0.3}]),
)
def test_a_fold_has_the_bits_of_its_rows_in_their_order(
    layout: str, cuts: list[int], count: int, block_rows: int, weighted: bool, kind: dict[str, Any]
) -> None:
    """Against moments of a copy of these rows, a block at a time; in updates of any size."""
    if "subsample" in kind:  # sums in the order in which classes came: all of them come at first
        cuts = [cut for cut in cuts if cut > 50]
    X, labels = data(dtype=np.float32)
    X = LAYOUTS[layout](X)
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
        fed(twin, np.array(X[rows]), part(labels, rows), block_rows, given)
        assert state_bytes(fold) == state_bytes(twin._sort_classes()[0])
    assert state_bytes(folds[0]) != state_bytes(folds[1]), "the control"


def test_rows_are_assigned_to_folds_by_the_published_hash() -> None:
    """The first numbers that SplitMix64 gives from seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(np.arange(3, dtype=np.uint64)).tolist() == expected


def test_folds_of_direct_rows_equal_moments_of_them() -> None:
    """Where blocks are full, plain moments have the same bits."""
    X, labels = data()
    folds = Folds(2, block_rows=32).update(X, labels)
    for i, fold in enumerate(folds):
        rows = np.flatnonzero(fold_of(N, 2) == i)
        plain = fed(Moments(block_rows=32), X[rows], part(labels, rows), 32)
        assert fold.covariance().tobytes() == plain.covariance().tobytes()
        assert fold.mean.tobytes() == plain.mean.tobytes()


def test_an_update_of_folds_waits_for_a_thread_that_reads_one_of_them() -> None:
    X, labels = data(dtype=np.float32)
    folds = Folds(2).update(X, labels)
    with ThreadPoolExecutor(1) as pool:
        with folds[1]._lock:
            update = pool.submit(folds.update, X, labels)
            with pytest.raises(TimeoutError):
                update.result(timeout=0.2)
            assert folds.n_rows == N
        update.result(timeout=60)
    assert folds.n_rows == 2 * N


def test_control_c_leaves_the_rows_in_all_folds_or_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a run with a checkpoint, which must not hold rows of one fold alone."""
    X, labels = data(dtype=np.float32)
    folds = Folds(2, block_rows=16)
    interrupt_reductions(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        folds.update(X, labels)
    assert folds.n_rows in (0, N)
    while folds.n_rows < 2 * N:
        folds.update(X, labels)
    assert bits(folds) == bits(Folds(2, block_rows=16).update(X, labels).update(X, labels))


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
    found = fed(Folds(3, groups="group" if grouped else None), X, labels, 70, weight)
    fold = fold_of(600, 3)
    for i, moments in enumerate(found):
        kept = (fold == i) & (weight > 0)
        assert moments.n_rows == kept.sum()
        np.testing.assert_allclose(moments.mean, X[kept].mean(axis=0), atol=1e-13)


# --- classes -------------------------------------------------------------------------------------


def test_each_class_has_the_moments_of_its_rows() -> None:
    X, labels = data()
    moments = fed(Moments(by="z", block_rows=64), X, labels, 70)
    assert sorted(moments.by_class) == ["a", "b", "c"]
    for name, own in moments.by_class.items():
        rows = labels["z"] == name
        close(own.covariance(), np.cov(X[rows].T), X)
        assert own.n_rows == rows.sum()
        twin = Moments().update(X[rows], part(labels, rows))
        close(own.cross_covariance("y"), twin.cross_covariance("y"), X)
    pooled = np.cov(X.T)  # control: the classes differ
    assert np.abs(moments.by_class["a"].covariance() - pooled).max() > 1


def test_total_is_that_of_all_rows() -> None:
    X, labels = data()
    moments, plain = (Moments(by=by).update(X, labels) for by in ("z", None))
    close(moments.covariance(), plain.covariance(), X)
    close(moments.mean, plain.mean, X)
    for name in ("z", "y"):
        assert moments.class_counts(name) == plain.class_counts(name)
        order = [plain.classes(name).index(c) for c in moments.classes(name)]
        close(moments.cross_covariance(name), plain.cross_covariance(name)[:, order], X)
    found, expected = (sf.splince(m, erase="z", keep="y").matrix() for m in (moments, plain))
    np.testing.assert_allclose(found, expected, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), cut=st.integers(0, 120), size=st.integers(1, 60))
def test_merging_and_removing(seed: int, cut: int, size: int) -> None:
    X, labels = data(120, 4, seed=seed)
    whole = fed(Moments(by="z", block_rows=32), X, labels, size)
    first, second = (
        Moments(by="z").update(X[rows], part(labels, rows))
        for rows in (slice(0, cut), slice(cut, None))
    )
    for merged in (first + second, second + first):
        close(merged.covariance(), whole.covariance(), X)
        for name, own in whole.by_class.items():
            if own.n_rows > 1:
                close(merged.by_class[name].covariance(), own.covariance(), X)
    if cut < 118:
        close((whole - first).covariance(), second.covariance(), X)


def test_weights_and_missing_labels() -> None:
    X, labels = data(300)
    z = labels["z"].astype(object)
    z[::7] = None
    weight = np.random.default_rng(1).integers(0, 3, 300).astype(float)
    moments = Moments(by="z").update(X, {"z": z, "y": labels["y"]}, sample_weight=weight)
    repeated = np.repeat(np.arange(300), weight.astype(int))
    close(moments.covariance(), np.cov(X[repeated].T), X)
    missing = [i for i in repeated if z[i] is None]
    close(moments.by_class[None].covariance(), np.cov(X[missing].T), X)
    assert moments.by_class[None].variables == {"y": "classes"}


def test_threads_change_no_bit_of_a_class() -> None:
    X, labels = data(4000, 70)
    found = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            moments = Moments(by="z").update(X, labels)
            found.append((moments.covariance().tobytes(), bits(moments)))
    assert found[0] == found[1]


def test_masked_rows_are_in_no_class() -> None:
    X, labels = data(300)
    mask = np.arange(300) % 3 > 0
    moments = Moments(by="z").update(X, labels, mask=mask)
    twin = Moments(by="z").update(X[mask], part(labels, mask))
    for own, expected in ((moments, twin), (moments.by_class["a"], twin.by_class["a"])):
        assert own.n_rows == expected.n_rows
        close(own.covariance(), expected.covariance(), X)


def test_folds_have_a_scatter_per_class() -> None:
    X, labels = data(2000)
    folds = Folds.from_blocks([(X, labels)], folds=2, by="z")
    assert [sorted(fold.by_class) for fold in folds] == [["a", "b", "c"]] * 2
    total = folds.total
    close(total.by_class["b"].covariance(), np.cov(X[labels["z"] == "b"].T), X)
    assert sf.leace(folds, erase="z").report.held_out is not None


def test_scaling_weighs_every_class() -> None:
    X, labels = data(200)
    moments = Moments(by="z").update(X, labels).scaled(3)
    assert moments.weight == 600
    close(moments.by_class["a"].covariance(ddof=0), np.cov(X[labels["z"] == "a"].T, ddof=0), X)


def test_late_classes_and_late_labels() -> None:
    X, labels = data(300)
    order = np.argsort(labels["z"], kind="stable")
    moments = Moments(by="z").update(X[:0]).update(X[:50])
    for rows in np.array_split(order, 5):
        moments.update(X[rows], part(labels, rows))
    assert set(moments.by_class) == {"a", "b", "c", None}
    assert moments.n_rows == 350


def test_moments_that_do_not_combine_are_refused() -> None:
    X, labels = data(100)
    moments = Moments(by="z").update(X, labels)
    before = moments.covariance().tobytes()
    with pytest.raises(IncompatibleMomentsError, match="by='z'"):
        moments + Moments().update(X, labels)
    with pytest.raises(IncompatibleMomentsError, match="5 features and of 4"):
        moments + Moments(by="z").update(X[:, :4], {"z": ["q"] * 100})
    with pytest.raises(IncompatibleMomentsError, match="were added"):
        moments - Moments(by="z").update(X[:3], {"z": ["q"] * 3})
    assert moments.covariance().tobytes() == before


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((["x"] * 9, [0] * 9), ([1] * 9, [0] * 9)),
        ((["x"] * 9, [0] * 9), (["y"] * 9, np.arange(9.0))),
        ((["x"] * 9, [0] * 9), (["y"] * 9, ["s"] * 9)),
        ((["x"] * 9, np.ones((9, 2))), (["y"] * 9, np.ones((9, 3)))),
    ],
    ids=["type of classes", "kind of a variable", "type of a variable", "columns"],
)
def test_variables_of_other_classes_that_do_not_combine_are_refused(ours: Any, theirs: Any) -> None:
    X = np.random.default_rng(0).normal(size=(9, 3))
    first, second = (
        Moments(by="a").update(X, {"a": a, "b": b}) for a, b in (ours, theirs)
    )  # fmt: skip
    assert first.mean.any()  # no rows wait
    before = state_bytes(first)
    with pytest.raises(IncompatibleMomentsError):
        first + second
    with pytest.raises(IncompatibleMomentsError):
        first += second
    assert state_bytes(first) == before
    assert (first + first.copy()).n_rows == 18  # control


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


def test_what_removals_lose_is_stored_and_checked() -> None:
    parts, _ = chain(2, 1e13)
    left = sum(parts)
    for part in parts[:-1]:
        left -= part
    state = left.__getstate__()
    assert (state["tensors"]["lost"] > 0).any()
    assert "lost" not in parts[0].__getstate__()["tensors"], "the control: no removal, no loss"
    state["tensors"]["lost"] = -state["tensors"]["lost"]
    with pytest.raises(FileFormatError, match="lost"):
        Moments().__setstate__(state)


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
