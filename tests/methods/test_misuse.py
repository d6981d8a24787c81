"""Calls with typical mistakes: the error or warning names the mistake."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import splince_fast as sf


@pytest.fixture(scope="module")
def data() -> tuple[Any, Any, sf.Moments]:
    rng = np.random.default_rng(0)
    z, y = rng.integers(0, 2, size=(2, 400))
    X = rng.normal(size=(400, 6)) + np.outer(z, np.eye(6)[0]) + np.outer(y, np.eye(6)[1])
    return X, z, sf.Moments().update(X, {"z": z, "y": y})


@pytest.mark.parametrize("name", ["splince", "leace", "sal", "mean_projection"])
def test_arrays_in_place_of_moments_and_names(name: str, data: tuple[Any, Any, sf.Moments]) -> None:
    X, z, moments = data
    method, options = getattr(sf, name), {"keep": z} if name == "splince" else {}
    with pytest.raises(sf.exceptions.InputError, match=r"moments is an ndarray; .*sf\.erase\(X"):
        method(X, erase=z, **options)
    with pytest.raises(
        sf.exceptions.InputError, match=r"erase is an ndarray of shape \(400,\); it must be"
    ):
        method(moments, erase=z, **options)
    with pytest.raises(
        sf.exceptions.InputError, match=r"erase is \[.*\.\.\.\]; it must"
    ) as refused:
        method(moments, erase=z.tolist(), **options)
    assert len(str(refused.value)) < 300


def test_directions_that_are_not_finite(data: tuple[Any, Any, sf.Moments]) -> None:
    directions = np.ones((6, 3))
    directions[2, 1] = np.nan
    with pytest.raises(
        sf.exceptions.NonFiniteError, match=r"1 of 3 directions \(column 1\); pass finite"
    ):
        sf.splince(data[2], erase="z", keep=directions)


@pytest.mark.parametrize("name", ["leace", "sal", "mean_projection"])
def test_an_eraser_of_all_dimensions_warns(name: str, data: tuple[Any, Any, sf.Moments]) -> None:
    X, method = data[0], getattr(sf, name)
    ids = np.arange(400).astype(str)
    with pytest.warns(sf.exceptions.ManyClassesWarning, match="removes all 6 dimensions"):
        eraser = method(sf.Moments().update(X, {"z": ids}), erase="z")
    assert np.ptp(eraser(X), axis=0).max() < 1e-9
    with warnings.catch_warnings():
        warnings.simplefilter("error", sf.exceptions.ManyClassesWarning)
        method(data[2], erase="z")
        method(sf.Moments(kinds={"z": "classes"}).update(X, {"z": ids}), erase="z")


@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.ManyClassesWarning")
def test_two_rows_are_few(data: tuple[Any, Any, sf.Moments]) -> None:
    moments = sf.Moments().update(data[0][:2], {"z": ["a", "b"]})
    with pytest.warns(sf.exceptions.UnseenRowsWarning, match="only 2 rows per dimension"):
        sf.leace(moments, erase="z")


@pytest.mark.parametrize("name", ["leace", "sal"])
def test_constant_rows_are_named(name: str, data: tuple[Any, Any, sf.Moments]) -> None:
    moments = sf.Moments().update(np.full((400, 6), 0.1), {"z": data[1]})
    with pytest.warns(sf.exceptions.NothingErasedWarning, match="all features of x are constant"):
        getattr(sf, name)(moments, erase="z")


def test_one_variable_to_erase_and_to_keep(data: tuple[Any, Any, sf.Moments]) -> None:
    for method in (sf.splince, sf.oracle):
        with pytest.raises(
            sf.exceptions.InfeasibleError, match=r"^'z' is to be erased and to be kept"
        ):
            method(data[2], erase="z", keep=["y", "z"])


def test_products_with_rows_name_the_call(data: tuple[Any, Any, sf.Moments]) -> None:
    X, _, moments = data
    eraser: Any = sf.leace(moments, erase="z")
    for product in (lambda: eraser @ X, lambda: X @ eraser, lambda: eraser @ X.T):
        with pytest.raises(TypeError, match=re.escape("P(X), not P @ X or X @ P")):
            product()
    with pytest.raises(TypeError, match="unsupported operand"):
        eraser @ 3


def test_rows_that_are_no_array(data: tuple[Any, Any, sf.Moments]) -> None:
    X, _, moments = data
    eraser = sf.leace(moments, erase="z")
    for value, text in (
        (None, "X is None"),
        ("x.npy", "X is a string; load the file"),
        (Path("x.npy"), "X is a path; load the file"),
        ([[1, 2], [3]], r"[^.]\. Rows of unequal length"),
    ):
        for call in (eraser, sf.Moments().update):
            with pytest.raises(sf.exceptions.InputError, match=text):
                call(value)
    with pytest.raises(sf.exceptions.InputError, match=r"3 columns.* as in the rows of the fit"):
        eraser(X[:, :3])


def test_the_cause_of_a_missing_certificate(data: tuple[Any, Any, sf.Moments]) -> None:
    moments = data[2]
    for eraser, text in (
        (sf.leace(moments, erase="z").scaled(0.5), "alpha = 0.5"),
        (sf.oracle(moments, erase="z"), "depends on labels"),
        (sf.leace(moments, erase="z", rank_tol=0.5), "rank_tol="),
    ):
        report: Any = eraser.report
        with pytest.raises(
            sf.exceptions.InputError, match=f"no certificate of this eraser: .*{text}"
        ):
            report.certificate()


def test_a_class_that_occurs_only_after_erasing(data: tuple[Any, Any, sf.Moments]) -> None:
    X, z, moments = data
    after = sf.Moments().update(X, {"z": z.astype(str)})
    with pytest.raises(
        sf.exceptions.InputError, match=r"'z' and the class '0' \(str\) weigh .*, and 0 before"
    ):
        sf.repair(after, before=moments, keep="z")


def test_rows_as_refine_argument(data: tuple[Any, Any, sf.Moments]) -> None:
    with pytest.raises(sf.exceptions.InputError, match=r"^refine is an ndarray"):
        sf.leace(data[2], erase="z", refine=data[0])


def test_names_and_kinds_of_variables(data: tuple[Any, Any, sf.Moments]) -> None:
    X, z, _ = data
    moments = sf.Moments(by="q")
    with pytest.raises(
        sf.exceptions.LabelError, match="by is 'q', which is not among the variables 'z'"
    ):
        moments.update(X, {"z": z})
    assert moments.n_rows == 0
    with pytest.raises(sf.exceptions.InputError, match="kinds has 'class' for 'z'"):
        sf.Moments(kinds={"z": "class"})
