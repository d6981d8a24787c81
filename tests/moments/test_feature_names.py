"""Columns of data frames: moments, erasers and heads refuse another order, or other names.

The control: the same numbers as arrays are accepted, and give another result.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splince_fast as sf

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

NAMES = ("a", "b", "c", "d")
rng = np.random.default_rng(0)
Z = rng.integers(0, 2, size=2000)
Y = np.where(rng.random(2000) < 0.8, Z, 1 - Z)
X = rng.normal(size=(2000, 4)) + np.outer(Z, [1, 2, 3, 4]) + np.outer(Y, [0, 0, 1, 1])
X[Z == 1, 0] *= 3  # class covariances that differ
LABELS = {"z": Z, "y": Y}
FRAME = pd.DataFrame(X, columns=NAMES)
REVERSED = FRAME[list(reversed(NAMES))]

STATES: dict[str, Callable[[], Any]] = {
    "moments": sf.Moments,
    "by": lambda: sf.Moments(by="z"),
    "subsample": lambda: sf.Moments(subsample=0.5),
    "diag": lambda: sf.Moments(covariance_type="diag"),
    "folds": lambda: sf.Folds(2),
}
ERASERS: dict[str, Callable[[Any], Any]] = {
    "splince": lambda m: sf.splince(m, erase="z", keep="y"),
    "leace": lambda m: sf.leace(m.factored(), erase="z"),
    "oracle": lambda m: sf.oracle(m, erase="z", keep="y"),
    "quadratic": lambda m: sf.quadratic(m, erase="z", shrinkage=0.5),
    "scaled": lambda m: sf.sal(m, erase="z").scaled(0.5),
    "float32": lambda m: sf.sal(m, erase="z").astype(np.float32),
    "composed": lambda m: sf.sal(m, erase="y") @ sf.sal(m, erase="z"),
}


def moments(rows: Any = FRAME, **parameters: Any) -> sf.Moments:
    return sf.Moments(**parameters).update(rows, LABELS)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("frame", [REVERSED, pl.DataFrame(REVERSED.to_dict("list"))])
def test_another_order_is_refused_before_anything_changes(name: str, frame: Any) -> None:
    state = STATES[name]().update(FRAME, LABELS)
    before = pickle.dumps(state) if name != "folds" else pickle.dumps(list(state))
    with pytest.raises(
        sf.exceptions.InputError, match=r"another order.*column 0 is 'd', and was 'a'"
    ):
        state.update(frame, LABELS)
    assert pickle.dumps(state if name != "folds" else list(state)) == before
    assert state.update(FRAME, LABELS).feature_names == NAMES
    assert state.update(REVERSED.to_numpy(), LABELS).n_rows == 6000  # the control


def test_other_columns_are_named() -> None:
    other = FRAME.rename(columns={"b": "e"})
    with pytest.raises(sf.exceptions.InputError, match=r"'e' new; 'b' missing.*to_numpy\(\)"):
        moments().update(other, LABELS)


@pytest.mark.parametrize("frame", [pd.DataFrame(X), pd.DataFrame({"embedding": list(X)})])
def test_numbered_columns_and_columns_of_vectors_have_no_names(frame: Any) -> None:
    state = moments(frame)
    assert state.feature_names is None
    assert state.update(FRAME, LABELS).feature_names == NAMES


def test_merging_compares_names() -> None:
    whole, other = moments(), moments(REVERSED)
    for combine in (lambda: whole + other, lambda: whole - other, lambda: other.__iadd__(whole)):
        with pytest.raises(sf.exceptions.IncompatibleMomentsError, match="another order"):
            combine()
    wide = pd.DataFrame(np.hstack([X, X[:, :1]]), columns=[*NAMES, "a"])
    with pytest.raises(sf.exceptions.IncompatibleMomentsError, match="5 features"):
        whole + moments(wide)
    arrays = moments(X)
    assert (arrays + whole).feature_names == (whole + arrays).feature_names == NAMES
    assert (whole + arrays - arrays).feature_names == whole.scaled(2).feature_names == NAMES
    assert sf.Moments().__iadd__(whole).feature_names == NAMES
    assert moments(by="z").by_class[0].feature_names == NAMES
    assert (moments(by="z") + moments(X, by="z")).copy().feature_names == NAMES


@pytest.mark.parametrize("name", ERASERS)
def test_erasers_refuse_frames_of_other_columns(name: str, tmp_path: Path) -> None:
    eraser = ERASERS[name](moments(by="z"))
    assert eraser.feature_names == NAMES
    expected = eraser(X, LABELS)
    assert np.array_equal(eraser(FRAME, LABELS), expected)
    assert not np.allclose(eraser(REVERSED.to_numpy(), LABELS), expected[:, ::-1])  # the control
    eraser.save(tmp_path / "eraser")
    for own in (eraser, type(eraser).load(tmp_path / "eraser"), pickle.loads(pickle.dumps(eraser))):
        with pytest.raises(sf.exceptions.InputError, match="another order"):
            own(REVERSED, LABELS)


def test_composition_and_repair_compare_names() -> None:
    first, second = sf.sal(moments(), erase="z"), sf.sal(moments(REVERSED), erase="y")
    with pytest.raises(
        sf.exceptions.InputError, match="the second projection are in another order"
    ):
        second @ first
    assert (sf.sal(moments(X), erase="y") @ first).feature_names == NAMES
    after = sf.Moments().update(first(X), LABELS)
    assert sf.repair(after, before=moments(), keep="y").feature_names == NAMES
    swapped = sf.Moments().update(pd.DataFrame(first(X), columns=NAMES[::-1]), LABELS)
    with pytest.raises(sf.exceptions.InputError, match="columns of the erased rows"):
        sf.repair(swapped, before=moments(), keep="y")
