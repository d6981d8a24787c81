"""Folds hold the bits of their rows, however they came; updates are whole; parts are removed."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import interrupt_reductions, state_bytes
from numpy.typing import NDArray

import splince_fast as sf
from splince_fast import Moments, NonFiniteError, sources
from splince_fast._runtime.rows import splitmix64
from splince_fast.exceptions import FileFormatError, IncompatibleMomentsError
from splince_fast.moments import Folds

N, D = 400, 5
LAYOUTS: dict[str, Any] = {
    "C": lambda X: X,
    "Fortran": np.asfortranarray,
    "strided": lambda X: np.repeat(X, 2, axis=1)[:, ::2],
    "half": lambda X: X.astype(np.float16),
    "integers": lambda X: np.rint(10 * X).astype(np.int16),
}


def table(seed: int = 0, dtype: Any = np.float32) -> tuple[NDArray[Any], dict[str, Any]]:
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 3, N)
    X = rng.normal(size=(N, D)) + z[:, None] * np.eye(D)[0]
    v = rng.normal(size=N)
    v[rng.random(N) < 0.1] = np.nan
    return X.astype(dtype), {"z": z, "y": rng.integers(0, 2, N).astype(str), "v": v}


@pytest.mark.parametrize("by", [None, "z"])
def test_classes_of_folds_are_sorted_by_value_whatever_the_order_of_the_labels(
    by: str | None,
) -> None:
    X, labels = table()
    labels["number"] = np.arange(N) % 12
    for names in (["z", "number"], ["number", "z"]):
        blocks = [(X, {name: labels[name] for name in names})]
        folds = Folds.from_blocks(blocks, folds=2, by=by)
        for moments in (folds.total, *folds):
            assert moments.classes("number") == tuple(range(12))
            assert moments.classes("z") == (0, 1, 2)


def part(labels: dict[str, Any], rows: Any) -> dict[str, Any]:
    return {name: column[rows] for name, column in labels.items()}


def fold_of(n: int, count: int) -> NDArray[np.intp]:
    return (splitmix64(np.arange(n, dtype=np.uint64)) % np.uint64(count)).astype(np.intp)


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
    X, labels = table()
    X = LAYOUTS[layout](X)
    weight = np.random.default_rng(1).uniform(0.5, 2, N) if weighted else None
    folds = Folds(count, block_rows=block_rows, **kind)
    for first, last in zip([0, *cuts], [*cuts, N], strict=True):
        rows = slice(first, last)
        given = None if weight is None else weight[rows]
        folds.update(X[rows], part(labels, rows), sample_weight=given)
    folds._sort_classes()
    fold_index = fold_of(N, count)
    for i, fold in enumerate(folds):
        chosen = np.flatnonzero(fold_index == i)
        twin = Folds(2, block_rows=block_rows, **kind)  # whose first fold takes all
        twin._fold_of_rows = lambda batch, n: np.zeros(n, np.intp)  # type: ignore[method-assign]
        for start in range(0, len(chosen), block_rows):
            rows = chosen[start : start + block_rows]
            given = None if weight is None else weight[rows]
            twin.update(np.array(X[rows]), part(labels, rows), sample_weight=given)
        assert state_bytes(fold) == state_bytes(twin._sort_classes()[0])
    assert state_bytes(folds[0]) != state_bytes(folds[1]), "the control"


def test_rows_are_assigned_to_folds_by_the_published_hash() -> None:
    """The first numbers that SplitMix64 gives from seed 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(np.arange(3, dtype=np.uint64)).tolist() == expected


def test_folds_of_direct_rows_equal_moments_of_them() -> None:
    """Where blocks are full, plain moments have the same bits."""
    X, labels = table(dtype=np.float64)
    folds = Folds(2, block_rows=32).update(X, labels)
    for i, fold in enumerate(folds):
        chosen = np.flatnonzero(fold_of(N, 2) == i)
        whole = chosen[: len(chosen) // 32 * 32]
        plain = Moments(block_rows=32).update(X[whole], part(labels, whole))
        rest = chosen[len(whole) :]
        plain.update(X[rest], part(labels, rest))
        assert fold.covariance().tobytes() == plain.covariance().tobytes()
        assert fold.mean.tobytes() == plain.mean.tobytes()


def test_bad_rows_change_no_fold() -> None:
    X, labels = table()
    folds = Folds(2, block_rows=16).update(X, labels)
    before = [state_bytes(fold) for fold in folds]
    X[-1, 2] = np.nan  # in the last block of one fold, after full ones of both
    with pytest.raises(NonFiniteError, match=f"row {N - 1}"):
        folds.update(X, labels)
    assert [state_bytes(fold) for fold in folds] == before


def test_an_update_of_folds_waits_for_a_thread_that_reads_one_of_them() -> None:
    X, labels = table()
    folds = Folds(2).update(X, labels)
    with ThreadPoolExecutor(1) as pool:
        with folds[1]._lock:
            update = pool.submit(folds.update, X, labels)
            with pytest.raises(TimeoutError):
                update.result(timeout=0.2)
            assert folds.n_rows == N
        update.result(timeout=60)
    assert folds.n_rows == 2 * N


def test_control_c_waits_until_every_fold_has_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a run with a checkpoint, which must not hold rows of one fold alone."""
    X, labels = table()
    folds = Folds(2, block_rows=16)
    interrupt_reductions(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        folds.update(X, labels)
    assert folds.n_rows == N
    folds.update(X, labels)
    plain = Folds(2, block_rows=16).update(X, labels).update(X, labels)
    for fold, whole in zip(folds, plain, strict=True):
        assert state_bytes(fold) == state_bytes(whole)


@pytest.mark.parametrize("folds", [None, 2])
def test_an_interrupted_run_resumes_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folds: int | None
) -> None:
    """Ctrl-C during a block: its rows count once."""
    X, labels = table()
    source = sources.from_arrays(X, labels, block_rows=100)
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_reductions(patch, 9)  # in the first fold of a block of the source
        with pytest.raises(KeyboardInterrupt):
            sf.Moments.from_blocks(source, folds=folds, block_rows=16, checkpoint=path)
    resumed = sf.Moments.from_blocks(source, folds=folds, block_rows=16, checkpoint=path)
    plain = sf.Moments.from_blocks(source, folds=folds, block_rows=16)
    assert resumed.n_rows == plain.n_rows == N
    if folds is None:
        resumed, plain = [resumed], [plain]
    for fold, whole in zip(resumed, plain, strict=True):
        assert state_bytes(fold) == state_bytes(whole)


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


@pytest.mark.parametrize("folds", [0, 1, 2.0, True, 10**9, "2"])
def test_a_number_of_folds_that_is_none_is_refused(folds: Any) -> None:
    with pytest.raises(sf.InputError, match="folds is"):
        sf.Moments.from_blocks([np.eye(3)], folds=folds)


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
    groups = {"groups": "group"} if grouped else {}
    labels = {"group": np.array([None] * 600, object)}
    found = Folds(3, **groups)
    for start in range(0, 600, 70):
        part = slice(start, start + 70)
        given = {"group": labels["group"][part]} if grouped else None
        found.update(X[part], given, sample_weight=weight[part])
    fold = fold_of(600, 3)
    for i, moments in enumerate(found):
        kept = (fold == i) & (weight > 0)
        assert moments.n_rows == kept.sum()
        np.testing.assert_allclose(moments.mean, X[kept].mean(axis=0), atol=1e-13)


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
