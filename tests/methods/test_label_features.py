"""A label among the features is named, once; nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from problems import told

import splince_fast as sf
from splince_fast.exceptions import LabelFeatureWarning

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


def test_few_rows_and_missing_labels_are_no_evidence() -> None:
    for rare, known in ((9, False), (10, True)):  # control: ten rows of each class
        few = np.array([0] * 30 + [1] * rare)
        assert bool(named(few, "z", labels={"z": few})) == known
    assert not named(Z, "z", labels={"z": np.where(np.arange(N) % 5 == 0, None, Z)})


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_outliers_that_label_and_feature_share_are_no_evidence(dtype: Any) -> None:
    """One class, or one row, holds nearly all of the variance; the other rows tell them apart."""
    code = np.where(CODE == 2, -999.0 if dtype is np.float64 else -99_999.0, CODE + RNG.random(N))
    assert not named(code, "job", dtype=dtype)
    far = np.where(np.arange(N) == 5, 1e6, AGE)
    if dtype is np.float64:  # float32 rows do not resolve the others beside it
        assert not named(np.where(far == 1e6, far, X[:, 0]), "age", labels={"age": far})


@pytest.mark.parametrize("rare", [1, 9, 10])
def test_indicators_of_a_rare_class_are_no_evidence(rare: int) -> None:
    one = (np.arange(N) < rare).astype(float)
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
