"""A label among the features is named, once; nothing else is."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

import splince_fast as sf

N = 600
RNG = np.random.default_rng(0)
Z, CODE = RNG.integers(0, 2, N), RNG.integers(0, 3, N)
AGE = RNG.normal(40, 10, N)
LABELS: dict[str, Any] = {"z": Z, "job": np.array(["b", "a", "c"])[CODE], "age": AGE}
X = RNG.normal(size=(N, 4)) + Z[:, None] + 0.1 * AGE[:, None] + np.eye(4)[CODE]


def told(
    column: NDArray[Any], erase: str, keep: str | None = None, labels: Any = LABELS,
    dtype: Any = np.float64, **options: Any,
) -> list[str]:  # fmt: skip
    """Warnings of labels in x, which end with `column`, accumulated in blocks."""
    rows = np.column_stack([X[: len(column)], column]).astype(dtype)
    moments = sf.Moments(**options)
    for part in np.array_split(np.arange(len(rows)), 7):
        frame = pd.DataFrame(rows[part], columns=["a", "b", "c", "d", "copy"])
        moments.update(frame, {name: label[part] for name, label in labels.items()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if keep is None:
            eraser = sf.leace(moments, erase=erase)
        else:
            eraser = sf.splince(moments, erase=erase, keep=keep)
    texts = [str(w.message) for w in caught if w.category is sf.exceptions.LabelFeatureWarning]
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
        (text,) = told(column, erase, dtype=dtype, **options)
        assert f"feature(s) 'copy' equal the label {erase!r}" in text
        assert "would not be erased" in text
    (text,) = told(AGE, "z", "age", dtype=dtype, **options)
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
        assert not told(column, erase)


@pytest.mark.parametrize("options", [{}, {"subsample": 0.5}], ids=str)
@pytest.mark.parametrize("classes", [3, 5])
def test_indicators_of_the_classes_are_named_together(classes: int, options: Any) -> None:
    z = RNG.integers(0, classes, N)
    rows = pd.DataFrame(X + np.outer(z, np.arange(4)), columns=list("abcd"))
    dummies = pd.get_dummies(z, dtype=float).add_prefix("z")
    for n_columns in range(1, classes + 1):
        frame = pd.concat([rows, 3 - 2 * dummies.iloc[:, :n_columns]], axis=1)
        moments = sf.Moments(**options).update(frame, {"z": z})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sf.leace(moments, erase="z")
        texts = [str(w.message) for w in caught if w.category is sf.exceptions.LabelFeatureWarning]
        determines = n_columns >= classes - 1  # control: fewer columns leave classes alike
        assert len(texts) == determines
        if determines:
            named = ", ".join(repr(name) for name in dummies.columns[:n_columns])
            assert f"feature(s) {named} equal the label 'z'" in texts[0]


def test_few_rows_and_missing_labels_are_no_evidence() -> None:
    few = np.array([0] * 30 + [1] * 9)
    assert not told(few, "z", labels={"z": few})
    assert told(np.r_[few, 1], "z", labels={"z": np.r_[few, 1]})  # control: ten rows of each class
    known = np.where(np.arange(N) % 5 == 0, None, Z)
    assert not told(Z, "z", labels={"z": known})


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_outliers_that_label_and_feature_share_are_no_evidence(dtype: Any) -> None:
    """One class, or one row, holds nearly all of the variance; the other rows tell them apart."""
    code = np.where(CODE == 2, -999.0 if dtype is np.float64 else -99_999.0, CODE + RNG.random(N))
    assert not told(code, "job", dtype=dtype)
    far = np.where(np.arange(N) == 5, 1e6, AGE)
    if dtype is np.float64:  # float32 rows do not resolve the others beside it
        assert not told(np.where(far == 1e6, far, X[:, 0]), "age", labels={"age": far})


@pytest.mark.parametrize("rare", [1, 9, 10])
def test_indicators_of_a_rare_class_are_no_evidence(rare: int) -> None:
    one = (np.arange(N) < rare).astype(float)
    for indicators in (np.column_stack([one, Z, np.ones(N)]), 1.0 - one[:, None]):
        assert bool(told(one, "z", labels={"z": indicators})) == (rare == 10)


def test_snapshots_are_compared_too() -> None:
    kept = sf.Moments().update(np.column_stack([X, Z]), {"z": Z}).factored()
    with pytest.warns(sf.exceptions.LabelFeatureWarning, match=r"feature\(s\) 4 "):
        sf.leace(kept, erase="z")


def test_estimators_warn_once() -> None:
    rows = np.column_stack([X, Z])
    with pytest.warns(
        sf.exceptions.LabelFeatureWarning, match=r"feature\(s\) 4 .*'concept'"
    ) as seen:
        sf.SPLINCE().fit(rows, AGE, concept=Z)
    assert len(seen) == 1
    with pytest.warns(sf.exceptions.LabelFeatureWarning, match=r"feature\(s\) 4 .*'task'"):
        sf.SPLINCE().fit(rows, Z, concept=AGE)
