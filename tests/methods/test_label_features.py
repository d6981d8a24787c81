"""Labels among the features, and quantities that were read as classes, are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from problems import told

import splince_fast as sf
from splince_fast.exceptions import LabelFeatureWarning, ManyClassesWarning

N = 600
RNG = np.random.default_rng(0)
Z, CODE = RNG.integers(0, 2, N), RNG.integers(0, 3, N)
AGE = RNG.normal(40, 10, N)
LABELS: dict[str, Any] = {"z": Z, "job": np.array(["b", "a", "c"])[CODE], "age": AGE}
X = RNG.normal(size=(N, 4)) + Z[:, None] + 0.1 * AGE[:, None] + np.eye(4)[CODE]


def named(
    columns: Any, erase: str, keep: str | None = None, labels: Any = LABELS,
    dtype: Any = np.float64, **options: Any,
) -> list[str]:  # fmt: skip
    """Warnings of labels in x, which ends with `columns`, accumulated in blocks."""
    frame = pd.DataFrame(X[: len(columns)].astype(dtype), columns=list("abcd"))
    if not isinstance(columns, pd.DataFrame):
        columns = pd.DataFrame({"copy": columns})
    frame = pd.concat([frame, columns.astype(dtype)], axis=1)
    moments = sf.Moments(**options)
    for part in np.array_split(np.arange(len(frame)), 7):
        moments.update(frame.iloc[part], {name: label[part] for name, label in labels.items()})
    method, more = (sf.leace, {}) if keep is None else (sf.splince, {"keep": keep})
    eraser, caught = told(method, moments, erase=erase, **more)
    texts = [str(entry) for entry in caught if isinstance(entry, LabelFeatureWarning)]
    assert set(texts) <= set(eraser.report.warnings)
    return texts


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("options", [{}, {"covariance_type": "diag"}, {"subsample": 0.5}], ids=str)
def test_labels_in_any_affine_coding_are_named(dtype: Any, options: Any) -> None:
    for column, erase in (
        (Z, "z"),
        (3 - 2 * Z / 7, "z"),
        (CODE, "job"),
        (np.array([0.5, -1, 7])[CODE], "job"),
        (AGE, "age"),
        (7 - AGE / 30, "age"),
    ):
        (text,) = named(column, erase, dtype=dtype, **options)
        assert f"feature(s) 'copy' equal the label {erase!r}" in text
        assert "would not be erased" in text
    (text,) = named(AGE, "z", "age", dtype=dtype, **options)
    assert "models read the task" in text


def test_features_that_do_not_give_the_label_are_not() -> None:
    within = X - np.stack([X[c == CODE].mean(axis=0) for c in range(3)])[CODE]
    for column, erase in (
        (AGE + RNG.normal(size=N) * 0.1, "age"),
        (np.where(np.arange(N) < 1, 1 - Z, Z), "z"),  # one row differs
        (CODE == 1, "job"),  # one of three classes
        (Z, "job"),
        (np.ones(N), "z"),
        (within[:, 0], "job"),
    ):
        assert not named(column, erase)
    assert not named(Z, "z", labels={"z": np.where(np.arange(N) % 5 == 0, None, Z)})
    # One class, or one row, holds nearly all of the variance; the other rows tell them apart.
    for far, dtype in ((-999.0, np.float64), (-99_999.0, np.float32)):
        assert not named(np.where(CODE == 2, far, CODE + RNG.random(N)), "job", dtype=dtype)
    outlier = np.where(np.arange(N) == 5, 1e6, AGE)
    column = np.where(outlier == 1e6, outlier, X[:, 0])
    assert not named(column, "age", labels={"age": outlier})


@pytest.mark.parametrize("options", [{}, {"subsample": 0.5}], ids=str)
@pytest.mark.parametrize("classes", [3, 5])
def test_indicators_of_the_classes_are_named_together(classes: int, options: Any) -> None:
    z = RNG.integers(0, classes, N)
    indicators = 3 - 2 * pd.get_dummies(z, dtype=float).add_prefix("z")
    for n_columns in range(1, classes + 1):
        columns = indicators.iloc[:, :n_columns]
        texts = named(columns, "z", labels={"z": z}, **options)
        # Control: fewer columns leave classes alike.
        assert len(texts) == (n_columns >= classes - 1)
        for text in texts:
            names = ", ".join(repr(name) for name in columns)
            assert f"feature(s) {names} equal the label 'z'" in text


@pytest.mark.parametrize("rare", [1, 9, 10])
def test_fewer_than_ten_rows_of_a_class_are_no_evidence(rare: int) -> None:
    one = (np.arange(N) < rare).astype(float)
    few = np.array([0] * 30 + [1] * rare)
    assert bool(named(few, "z", labels={"z": few})) == (rare == 10)
    for indicators in (np.column_stack([one, Z, np.ones(N)]), 1.0 - one[:, None]):
        assert bool(named(one, "z", labels={"z": indicators})) == (rare == 10)


def test_snapshots_and_estimators_warn_once() -> None:
    rows = np.column_stack([X, Z])
    kept = sf.Moments().update(rows, {"z": Z}).factored()
    for call, name in (
        (lambda: sf.leace(kept, erase="z"), "z"),
        (lambda: sf.SPLINCE().fit(rows, AGE, concept=Z), "concept"),
        (lambda: sf.SPLINCE().fit(rows, Z, concept=AGE), "task"),
    ):
        with pytest.warns(LabelFeatureWarning, match=rf"feature\(s\) 4 .*'{name}'") as seen:
            call()
        assert len(seen) == 1


# --- quantities ----------------------------------------------------------------------------------


def rows(d: int, values: int, n: int = 3000) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rows on which a quantity has a linear effect."""
    rng = np.random.default_rng(0)
    quantity = np.concatenate([np.arange(values), rng.integers(0, values, n - values)])
    return rng.normal(size=(n, d)) + 3 * (quantity / values)[:, None], quantity


def notes_of(method: Any, moments: Any, erase: str) -> tuple[sf.Projection, list[str]]:
    """The eraser of a method and its warnings, which its report states as well."""
    eraser, caught = told(method, moments, erase=erase)
    assert all(isinstance(entry, ManyClassesWarning) for entry in caught)
    assert eraser.report.warnings == tuple(map(str, caught))
    return eraser, list(map(str, caught))


@pytest.mark.parametrize("values", [62, 500])
@pytest.mark.parametrize("method", [sf.leace, sf.sal])
def test_ages_and_identifiers_in_eight_dimensions(method: Any, values: int) -> None:
    x, quantity = rows(8, values)
    moments = sf.Moments().update(x, {"age": quantity})
    sources: list[Any] = [moments] if method is sf.sal else [moments, moments.factored()]
    for source in sources:
        eraser, (note,) = notes_of(method, source, "age")
        assert eraser.rank == 8
        for part in (
            f"'age' was read as {values} classes",
            "8 of 8 dimensions",
            "100% of its variance",
            "kinds={'age': 'continuous'} or cast it to float",
        ):
            assert part in note
        assert note in str(eraser.report)
    # The remedies, and classes that are meant.
    for kinds, column, rank in (
        ({"age": "continuous"}, quantity, 1),
        ({}, quantity + 0.5, 1),
        ({"age": "classes"}, quantity, 8),
    ):
        eraser, notes = notes_of(method, sf.Moments(kinds=kinds).update(x, {"age": column}), "age")
        assert (eraser.rank, notes) == (rank, [])
    assert sf.MeanProjection().fit(x, concept=quantity).projection_.rank == 8  # without a warning


def test_half_of_the_rank_or_of_the_variance() -> None:
    """30 classes take 29 dimensions."""
    x, quantity = rows(64, 30)
    x -= 3 * (quantity / 30)[:, None]
    for d, told_of in ((58, True), (59, False)):
        moments = sf.Moments().update(x[:, :d], {"ids": quantity})
        assert bool(notes_of(sf.leace, moments, "ids")[1]) == told_of
    # 29 of 64 dimensions, with a variance that classes carry.
    for size, told_of in ((1.0, True), (0.1, False)):
        moved = x + size * np.random.default_rng(1).normal(size=(30, 64))[quantity]
        eraser, notes = notes_of(sf.leace, sf.Moments().update(moved, {"ids": quantity}), "ids")
        assert eraser.report is not None
        assert (eraser.report.distortion > 0.5) == bool(notes) == told_of
    for values, told_of in ((24, False), (25, True)):  # few integers are classes
        x, quantity = rows(4, values)
        notes = notes_of(sf.leace, sf.Moments().update(x, {"grade": quantity}), "grade")[1]
        assert ("was read as" in notes[0]) == told_of
        assert ("removes all 4 dimensions" in notes[0]) != told_of
