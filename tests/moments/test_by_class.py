"""Moments(by=NAME): a scatter per class; contracts of merging, files, folds; refusals."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import splince_fast as sf
from splince_fast.moments.split import MOST_CLASSES

EPS = float(np.finfo(np.float64).eps)


def data(n: int = 900, d: int = 6, classes: int = 3, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Rows whose covariance depends on their class."""
    rng = np.random.default_rng(seed)
    z, y = rng.integers(0, classes, n), rng.integers(0, 2, n)
    X = rng.normal(size=(n, d)) * (1 + z[:, None]) + 3 * z[:, None] + np.outer(y, np.eye(d)[0])
    return X, {"z": np.array(["a", "b", "c", "d"])[z], "y": y}


def part(labels: dict[str, Any], chosen: Any) -> dict[str, Any]:
    return {name: column[chosen] for name, column in labels.items()}


def close(found: NDArray[Any], expected: NDArray[Any], X: NDArray[Any]) -> None:
    """Equal to the rounding of n products of entries of this size, about any reference point."""
    bound = 8 * len(X) * EPS * float(np.abs(X).max()) ** 2
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


def test_each_class_has_the_moments_of_its_rows() -> None:
    X, labels = data()
    moments = sf.Moments(by="z", block_rows=64)
    for start in range(0, len(X), 70):
        rows = slice(start, start + 70)
        moments.update(X[rows], part(labels, rows))
    assert sorted(moments.by_class) == ["a", "b", "c"]
    for name, own in moments.by_class.items():
        rows = labels["z"] == name
        close(own.covariance(), np.cov(X[rows].T), X)
        assert own.n_rows == rows.sum()
        twin = sf.Moments().update(X[rows], part(labels, rows))
        close(own.cross_covariance("y"), twin.cross_covariance("y"), X)
    pooled = np.cov(X.T)  # control: the classes differ
    assert np.abs(moments.by_class["a"].covariance() - pooled).max() > 1


def test_total_is_that_of_all_rows() -> None:
    X, labels = data()
    moments, plain = (sf.Moments(by=by).update(X, labels) for by in ("z", None))
    close(moments.covariance(), plain.covariance(), X)
    close(moments.mean, plain.mean, X)
    for name in ("z", "y"):
        assert moments.class_counts(name) == plain.class_counts(name)
        close(
            moments.cross_covariance(name),
            plain.cross_covariance(name)[
                :, [plain.classes(name).index(c) for c in moments.classes(name)]
            ],
            X,
        )
    found, expected = (sf.splince(m, erase="z", keep="y").matrix() for m in (moments, plain))
    np.testing.assert_allclose(found, expected, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), cut=st.integers(0, 120), size=st.integers(1, 60))
def test_merging_and_removing(seed: int, cut: int, size: int) -> None:
    X, labels = data(120, 4, seed=seed)
    whole = sf.Moments(by="z", block_rows=32)
    for start in range(0, 120, size):
        rows = slice(start, start + size)
        whole.update(X[rows], part(labels, rows))
    first, second = (
        sf.Moments(by="z").update(X[rows], part(labels, rows))
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
    moments = sf.Moments(by="z").update(X, {"z": z, "y": labels["y"]}, sample_weight=weight)
    repeated = np.repeat(np.arange(300), weight.astype(int))
    close(moments.covariance(), np.cov(X[repeated].T), X)
    missing = [i for i in repeated if z[i] is None]
    close(moments.by_class[None].covariance(), np.cov(X[missing].T), X)
    assert moments.by_class[None].variables == {"y": "classes"}


def test_files_pickles_and_copies_keep_every_bit(tmp_path: Path) -> None:
    X, labels = data(500)
    moments = sf.Moments(by="z", block_rows=128).update(X, labels)
    moments.save(tmp_path / "state")
    loaded = sf.Moments.load(tmp_path / "state")
    for other in (loaded, pickle.loads(pickle.dumps(moments)), moments.copy()):
        assert other.parameters == moments.parameters
        other.update(X, labels)
    moments.update(X, labels)
    assert loaded.covariance().tobytes() == moments.covariance().tobytes()
    for name, own in moments.by_class.items():
        assert loaded.by_class[name].covariance().tobytes() == own.covariance().tobytes()


def test_an_interrupted_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    X, labels = data(1000)
    path = tmp_path / "run.moments"

    def blocks(stop: int) -> Any:
        for start in range(0, 1000, 100):
            if start == stop:
                raise KeyboardInterrupt
            yield X[start : start + 100], part(labels, slice(start, start + 100))

    whole = sf.Moments.from_blocks(blocks(-1), by="z")
    with pytest.raises(KeyboardInterrupt):
        sf.Moments.from_blocks(blocks(500), by="z", checkpoint=path, checkpoint_seconds=0)
    resumed = sf.Moments.from_blocks(blocks(-1), by="z", checkpoint=path)
    assert resumed.covariance().tobytes() == whole.covariance().tobytes()


def test_threads_change_no_bit_of_a_class() -> None:
    X, labels = data(4000, 70)

    def bits() -> list[bytes]:
        moments = sf.Moments(by="z").update(X, labels)
        parts = moments.by_class
        return [m.covariance().tobytes() for m in (moments, *(parts[c] for c in sorted(parts)))]

    found = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            found.append(bits())
    assert found[0] == found[1]


def test_masked_rows_are_in_no_class() -> None:
    X, labels = data(300)
    mask = np.arange(300) % 3 > 0
    moments = sf.Moments(by="z").update(X, labels, mask=mask)
    twin = sf.Moments(by="z").update(X[mask], part(labels, mask))
    for own, expected in ((moments, twin), (moments.by_class["a"], twin.by_class["a"])):
        assert own.n_rows == expected.n_rows
        close(own.covariance(), expected.covariance(), X)


def test_folds_have_a_scatter_per_class() -> None:
    X, labels = data(2000)
    folds = sf.Folds.from_blocks([(X, labels)], folds=2, by="z")
    assert [sorted(fold.by_class) for fold in folds] == [["a", "b", "c"]] * 2
    total = folds.total
    close(total.by_class["b"].covariance(), np.cov(X[labels["z"] == "b"].T), X)
    assert sf.leace(folds, erase="z").report.held_out is not None


def test_scaling_weighs_every_class() -> None:
    X, labels = data(200)
    moments = sf.Moments(by="z").update(X, labels).scaled(3)
    assert moments.weight == 600
    close(moments.by_class["a"].covariance(ddof=0), np.cov(X[labels["z"] == "a"].T, ddof=0), X)


def test_late_classes_and_late_labels() -> None:
    X, labels = data(300)
    order = np.argsort(labels["z"], kind="stable")
    moments = sf.Moments(by="z").update(X[:0]).update(X[:50])
    for rows in np.array_split(order, 5):
        moments.update(X[rows], part(labels, rows))
    assert set(moments.by_class) == {"a", "b", "c", None}
    assert moments.n_rows == 350


def test_refusals_change_nothing() -> None:
    X, labels = data(100)
    moments = sf.Moments(by="z").update(X, labels)
    with pytest.raises(sf.InputError, match="5 columns"):  # before the parts are added
        moments.update(X[:, :5], labels)
    before = moments.covariance().tobytes()
    many = np.arange(100) % (MOST_CLASSES + 1)
    for y, error, text in (
        ({"z": X[:, 0]}, sf.LabelError, "continuous"),
        ({"z": np.arange(100) % 3}, sf.LabelError, "one type"),
        ({"z": many.astype(str)}, sf.InputError, f"more than {MOST_CLASSES} classes"),
    ):
        with pytest.raises(error, match=text):
            moments.update(X, y)
    with pytest.raises(sf.NonFiniteError):
        moments.update(np.full((2, 6), np.nan), {"z": ["a", "b"]})
    with pytest.raises(sf.IncompatibleMomentsError, match="by='z'"):
        moments + sf.Moments().update(X, labels)
    with pytest.raises(sf.IncompatibleMomentsError, match="were added"):
        moments - sf.Moments(by="z").update(X[:3], {"z": ["q"] * 3})
    assert moments.covariance().tobytes() == before


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"by": 3}, "name of a class-coded"),
        ({"by": "z", "subsample": 0.5}, "omit subsample="),
        ({"by": "z", "covariance_type": "diag"}, "omit subsample="),
    ],
)
def test_parameters_that_exclude_each_other(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(sf.InputError, match=text):
        sf.Moments(**parameters)


def test_moments_without_classes_say_how_to_make_them() -> None:
    with pytest.raises(sf.InputError, match=r"Moments\(by=NAME\)"):
        _ = sf.Moments().update(*data(50)).by_class


def test_repr_counts_the_classes_of_all_parts_before_they_are_merged() -> None:
    rng = np.random.default_rng(0)
    z, y = np.repeat([0, 1], 20), rng.integers(0, 3, size=40)
    y[:20] %= 2  # the first class of z lacks a class of y
    moments = sf.Moments(by="z").update(rng.normal(size=(40, 3)), {"z": z, "y": y})
    assert "'z': 2 classes, 'y': 3 classes" in repr(moments)
    assert moments.class_counts("y").keys() == {0, 1, 2}  # merges the parts
    assert "'z': 2 classes, 'y': 3 classes" in repr(moments)
