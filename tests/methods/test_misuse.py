"""Calls with typical mistakes: the error or warning names the mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import ignored, told

import splince_fast as sf
from splince_fast.exceptions import (
    InfeasibleError,
    InputError,
    LabelError,
    ManyClassesWarning,
    NonFiniteError,
    NothingErasedWarning,
    UnseenRowsWarning,
)

rng = np.random.default_rng(0)
Z, Y = rng.integers(0, 2, size=(2, 400))
X = rng.normal(size=(400, 6)) + np.outer(Z, np.eye(6)[0]) + np.outer(Y, np.eye(6)[1])
IDS = np.arange(400).astype(str)
MOMENTS = sf.Moments().update(X, {"z": Z, "y": Y})
LEACE = sf.leace(MOMENTS, erase="z")
HOLED = np.where(np.arange(18).reshape(6, 3) == 7, np.nan, 1.0)

METHODS: dict[str, Callable[..., Any]] = {
    "splince": lambda moments, erase: sf.splince(moments, erase=erase, keep="y"),
    "leace": lambda moments, erase: sf.leace(moments, erase=erase),
    "sal": lambda moments, erase: sf.sal(moments, erase=erase),
    "mean_projection": lambda moments, erase: sf.mean_projection(moments, erase=erase),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_arrays_in_place_of_moments_and_names(method: Any) -> None:
    for moments, erase, text in (
        (X, "z", r"moments is an ndarray; .*sf\.erase\(X"),
        (MOMENTS, Z, r"erase is an ndarray of shape \(400,\); it must be"),
        (MOMENTS, Z.tolist(), r"erase is \[.*\.\.\.\]; it must"),
    ):
        with pytest.raises(InputError, match=text) as refused:
            method(moments, erase)
        assert len(str(refused.value)) < 300


def no_certificate(eraser: Any) -> Callable[[], Any]:
    return lambda: eraser.report.certificate()


ROWS = [
    (None, "X is None"),
    ("x.npy", "X is a string; load the file"),
    (Path("x.npy"), "X is a path; load the file"),
    ([[1, 2], [3]], r"[^.]\. Rows of unequal length"),
]
MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: sf.splince(MOMENTS, erase="z", keep=HOLED), NonFiniteError,
     r"1 of 3 directions \(column 1\); pass finite"),
    *((lambda method=method: method(MOMENTS, erase="z", keep=["y", "z"]), InfeasibleError,
       r"^'z' is to be erased and to be kept") for method in (sf.splince, sf.oracle)),
    *((lambda call=call, rows=rows: call(rows), InputError, text)
      for rows, text in ROWS for call in (LEACE, sf.Moments().update)),
    (lambda: LEACE(X[:, :3]), InputError, r"3 columns.* as in the rows of the fit"),
    *((product, TypeError, re.escape("P(X), not P @ X or X @ P"))
      for product in (lambda: LEACE @ X, lambda: X @ LEACE, lambda: LEACE @ X.T)),
    (lambda: LEACE @ 3, TypeError, "unsupported operand"),
    (no_certificate(LEACE.scaled(0.5)), InputError, "certificate of this eraser: .*alpha = 0.5"),
    (no_certificate(sf.oracle(MOMENTS, erase="z")), InputError, "no certif.*depends on labels"),
    (no_certificate(sf.leace(MOMENTS, erase="z", rank_tol=0.5)), InputError, "no cert.*rank_tol="),
    (lambda: sf.repair(sf.Moments().update(X, {"z": IDS}), before=MOMENTS, keep="z"), InputError,
     r"class '0' \(str\)"),
    (lambda: sf.leace(MOMENTS, erase="z", refine=X), InputError, r"^refine is an ndarray"),
    (lambda: sf.Moments(by="q").update(X, {"z": Z}), LabelError,
     "by is 'q', which is not among the variables 'z'"),
    (lambda: sf.Moments(kinds={"z": "class"}), InputError, "kinds has 'class' for 'z'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), MISTAKES)
def test_the_error_names_the_mistake(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", ["leace", "sal", "mean_projection"])
def test_an_eraser_of_all_dimensions_warns(name: str) -> None:
    ids = {"z": IDS}
    with pytest.warns(ManyClassesWarning, match="removes all 6 dimensions"):
        eraser = METHODS[name](sf.Moments().update(X, ids), "z")
    assert np.ptp(eraser(X), axis=0).max() < 1e-9
    for moments in (MOMENTS, sf.Moments(kinds={"z": "classes"}).update(X, ids)):  # controls
        assert not told(METHODS[name], moments, "z")[1]


@ignored("ManyClassesWarning")
def test_few_rows_and_constant_rows_are_named() -> None:
    constant = sf.Moments().update(np.full((400, 6), 0.1), {"z": Z})
    with pytest.warns(UnseenRowsWarning, match="only 2 rows per dimension"):
        sf.leace(sf.Moments().update(X[:2], {"z": ["a", "b"]}), erase="z")
    for name in ("leace", "sal"):
        with pytest.warns(NothingErasedWarning, match="all features of x are constant"):
            METHODS[name](constant, "z")
