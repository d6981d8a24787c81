"""Calls with mistakes: the error or warning names the mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from problems import METHODS, erase, ignored, report

import splince_fast as sf
from splince_fast.exceptions import (
    ConstantVariableError,
    IncompatibleMomentsError,
    InfeasibleError,
    InputError,
    LabelError,
    NonFiniteError,
    NotEnoughDataError,
    SplinceError,
    UnknownVariableError,
)

N = 400
rng = np.random.default_rng(0)
Z, Y = rng.integers(0, 2, size=(2, N))
X = rng.normal(size=(N, 6)) + np.outer(Z, np.eye(6)[0]) + np.outer(Y, np.eye(6)[1])
S = X @ rng.normal(size=6) + rng.normal(size=N)
ROW, IDS = np.arange(N), np.arange(N).astype(str)
LABELS = {"z": Z, "y": Y, "s": S}


def updated(rows: Any = X, labels: Any = None, **parameters: Any) -> sf.Moments:
    """Moments of the first rows, with other labels of some variables."""
    labels = {name: column[: len(rows)] for name, column in (LABELS | (labels or {})).items()}
    return sf.Moments(**parameters).update(rows, labels)


def unread() -> Iterator[Any]:
    raise AssertionError("a row was read")
    yield


def of_classes(**parameters: Any) -> dict[str, sf.Moments]:
    return {name: sf.Moments(**parameters).update(X[c == Z]) for c, name in enumerate("ab")}


MOMENTS, BY, VARIANCES = updated(), updated(by="z"), updated(covariance_type="diag")
SNAPSHOT, FEW = MOMENTS.factored(), updated(X[:5])
LEACE = sf.leace(MOMENTS, erase="z")
T = sf.sal(MOMENTS, erase="z")(X)
ONE_DIMENSION = updated(X[:, :1], {"three": np.digitize(S, np.quantile(S, [0.3, 0.6]))}, by="z")
HOLED = np.where(np.arange(18).reshape(6, 3) == 7, np.nan, 1.0)


@pytest.mark.parametrize("method", METHODS)
def test_arrays_in_place_of_moments_and_names(method: str) -> None:
    for moments, z, text in (
        (X, "z", r"moments is an ndarray; .*sf\.erase\(X"),
        (MOMENTS, Z, r"erase is an ndarray of shape \(400,\); it must be"),
        (MOMENTS, Z.tolist(), r"erase is \[.*\.\.\.\]; it must"),
    ):
        with pytest.raises(InputError, match=text) as refused:
            erase(method, moments, z)
        assert len(str(refused.value)) < 300


Mistake = tuple[Callable[[], Any], Any, str]


def of(call: Any, *cases: Any) -> Iterator[Mistake]:
    """Calls with keyword arguments in place of the right ones; an error is InputError or named."""
    for arguments, text, *error in cases:
        yield partial(call, **arguments), (error or [InputError])[0], text


def certified(eraser: Any, delta: Any = 0.05) -> Callable[[], Any]:
    return lambda: report(eraser).certificate(delta)


def selections() -> Iterator[Mistake]:
    yield from of(
        partial(sf.leace, moments=MOMENTS, erase="z"),
        *(({"erase": z}, "erase is") for z in ([], None, 3, {"z"}, ["z", 3], np.ones(1))),
        ({"erase": "gender"}, r"'gender'.*'z'.*'y'", UnknownVariableError),
        ({"erase": ()}, r"\(\)", UnknownVariableError),
        ({"erase": ("z", "y")}, "joint=", UnknownVariableError),
        ({"moments": updated(X, {"z": [None] * N})}, "'z'", SplinceError),
        ({"shrinkage": "cv"}, "chosen on folds"),
        ({"refine": X}, "^refine is an ndarray"),
    )
    yield from of(
        partial(sf.splince, MOMENTS, erase="z"),
        ({"keep": ["y", "gender"]}, r"'gender'.*'z'.*'y'", UnknownVariableError),
        *(
            ({"keep": y}, "keep|directions")
            for y in (
                {"y": 1}, [["a"]] * 6, [[1.0, 2.0], [3.0]], 3.0, ["y", np.ones(6)], None,
                np.ones((5, 2)), np.ones((6, 2, 2)), np.ones((6, 1)) * 1j, np.ones((6, 0)),
            )
        ),
        ({"keep": np.zeros((6, 1))}, "keep|directions", ConstantVariableError),
        ({"keep": HOLED}, r"1 of 3 directions \(column 1\); pass finite", NonFiniteError),
    )  # fmt: skip
    for method in (sf.splince, sf.oracle):
        same = "^'z' is to be erased and to be kept"
        yield partial(method, MOMENTS, erase="z", keep=["y", "z"]), InfeasibleError, same
    yield from of(
        partial(sf.mean_projection, MOMENTS),
        ({"erase": "gender"}, r"'gender'.*'z'.*'y'", UnknownVariableError),
        ({"erase": "s"}, r"'s'.*sal", LabelError),
    )
    yield from of(
        partial(sf.erase, X, concept=Z),
        ({"method": "inlp"}, "must be one of 'splince'"),
        ({"method": "leece"}, "did you mean 'leace'"),
        ({"method": "splince"}, "SPLINCE needs keep="),
        ({"method": "LEACE", "keep": Y}, "LEACE keeps nothing"),
        ({"method": "none", "keep": Y}, "none keeps nothing"),
        ({"method": 3}, "must be a name,? or a function"),
        ({"method": sf.SPLINCE}, "is the class SPLINCE; "),
        ({"keep": {"concept": Y}}, "two names"),
        ({"keep": [0, 1]}, "2 labels but the block has 400 rows"),
        ({"rank": 1}, "leace takes no rank="),
        ({"erase": "z"}, "leace takes no erase="),
        *(
            ({role: columns}, "two columns have the name '1'", LabelError)
            for columns in ({1: Z, "1": Y}, pd.DataFrame({1: Z, "1": Y}))
            for role in ("concept", "keep")
        ),
    )
    parts = [[updated(X[:, :d]) for d in widths] for widths in ((), (6,), (6, 3), (4, 4, 5))]
    yield from of(
        partial(sf.cross_report, erase="z"),
        *(({"folds": folds}, "two or more") for folds in parts[:2]),
        *(
            ({"folds": folds}, r"\d (features )?and of \d", (InputError, IncompatibleMomentsError))
            for folds in parts[2:]
        ),
    )


def states() -> Iterator[Mistake]:
    """Moments and snapshots that do not do."""
    part = updated(X, {"w": S})
    emptied = (sf.Moments().update(X) + part) - part
    yield from of(
        partial(sf.concept_strength, name="z"),
        ({"moments": X}, "update"),
        ({"moments": sf.Moments()}, "update", NotEnoughDataError),
        ({"moments": MOMENTS, "name": "w"}, "'w'", UnknownVariableError),
        ({"moments": MOMENTS, "name": ["z"]}, "z", UnknownVariableError),
        *(
            ({"moments": emptied, "name": name}, "no label", ConstantVariableError)
            for name in ("z", "w")
        ),
    )
    yield partial(sf.leace, SNAPSHOT, erase="w"), UnknownVariableError, "'z', 'y'"
    yield sf.Moments().factored, NotEnoughDataError, "update"
    one_row = sf.Moments().update(np.ones((1, 4)), {"z": [1], "y": [0.5]})
    yield partial(sf.leace, one_row, erase="z"), ConstantVariableError, "'z'"
    yield partial(MOMENTS.factored, solver="qr"), InputError, "solver"
    yield partial(MOMENTS.factored, "cv"), InputError, "chosen on folds"
    yield partial(FEW.factored, solver="cholesky"), SplinceError, "solver='auto'"
    solve = partial(sf.leace, FEW, erase="z", solver="cholesky")
    yield solve, SplinceError, r"solver='auto'.*shrinkage"
    estimator = sf.LEACE(shrinkage="cv")
    yield partial(estimator.partial_fit, X, concept=Z), InputError, "chosen on folds"
    from_moments = partial(sf.LEACE.from_moments, MOMENTS, erase="z", shrinkage="cv")
    yield from_moments, InputError, "chosen on folds"
    kinds = partial(sf.Moments, kinds={"z": "class"})
    yield kinds, InputError, "kinds has 'class' for 'z'"
    by = "by is 'q', which is not among the variables 'z'"
    yield partial(updated, by="q"), LabelError, by
    yield from of(
        partial(sf.leace, moments=VARIANCES, erase="z", refine=unread()),
        ({"moments": MOMENTS}, "covariance_type="),
        ({"moments": SNAPSHOT}, "leave it out"),
        ({"moments": VARIANCES.factored()}, "not a snapshot"),
        ({"shrinkage": 0.1}, "shrinkage"),
        ({"passes": 2}, "only once"),
        *(({"passes": passes}, "passes") for passes in (0, 1.5)),
        ({"refine": None, "passes": 2}, "source"),
        ({"refine": sf.sources.from_arrays(X[:10])}, "10 rows"),
        ({"refine": X}, "not blocks"),
    )


def with_labels() -> Iterator[Mistake]:
    """Of oracle and quadratic."""
    yield from of(
        partial(sf.oracle, MOMENTS, erase="z", keep="y"),
        ({"missing": "mean"}, "missing is"),
        ({"erase": [("z", "y")]}, "one by one"),
    )
    apart = sf.Moments().update(X, {"z": Z}).update(X, {"y": Y})
    few, many = ({"z": z} for z in (np.where(ROW < 7, None, Z), ROW % 300))
    yield from of(
        partial(sf.oracle, erase="z"),
        ({"moments": apart, "keep": "y"}, "weight 400 carry a label of 'z', of 800"),
        ({"moments": updated(X, few)}, "weight 393 carry a label of 'z', of 400"),
        ({"moments": updated(X, many), "keep": "y"}, "or of more than 256 classes"),
    )
    yield from of(
        partial(sf.quadratic, BY, erase="z"),
        ({"erase": "y"}, r"those of 'z'.*by='y'"),
        ({"keep": "nothing"}, "'nothing'", UnknownVariableError),
        *(({"shrinkage": share}, "shrinkage") for share in (2, "oas", "cv")),
        *(({"erase": z}, "erase") for z in (["z", "y"], ("z", "y"), 3)),
        *(({"keep": y}, "keep") for y in (np.eye(6), [])),
    )
    every = r"covariance_type='diag' or subsample="
    yield from of(
        partial(sf.quadratic, erase="z"),
        ({"moments": MOMENTS}, r"sf\.Moments\(by='z'\)"),
        ({"moments": MOMENTS, "erase": "s"}, "bin it", LabelError),
        ({"moments": {0.0: MOMENTS, 1.0: MOMENTS}}, "cannot name a class", LabelError),
        ({"moments": of_classes(covariance_type="diag")}, every),
        ({"moments": of_classes(subsample=0.5)}, every),
        ({"moments": 3}, r"moments is an int; pass Moments\(by='z'\)"),
        ({"moments": {"a": 3}}, "a mapping must hold"),
        ({"moments": {"a": MOMENTS, "b": SNAPSHOT}}, "a mapping must hold"),
        ({"moments": SNAPSHOT}, r"pass Moments\(by='z'\)"),
        ({"moments": {"a": MOMENTS}}, "1 class", ConstantVariableError),
        ({"moments": {"a": MOMENTS, "b": sf.Moments()}}, "1 class", ConstantVariableError),
        ({"moments": ONE_DIMENSION, "keep": "three"}, r"sf\.oracle", InfeasibleError),
        (
            {"moments": updated(X, {"s": np.where(ROW < 7, np.nan, S)}, by="z"), "keep": "s"},
            "7 of 400 rows",
        ),
        (
            {"moments": updated(X, {"same": 1 - Z}, by="z"), "keep": "same"},
            r"\[same = \d\]",
            InfeasibleError,
        ),
    )


def repairs() -> Iterator[Mistake]:
    """Erased rows and labels that do not belong to the rows before."""
    constant = updated(T, {"s": np.ones(N)})
    two, other = np.column_stack([S, S**2]), S + 1e-3 * S**2
    same_rows = "150 erased rows .* and 400 rows .* differ by 250"
    yield from of(
        partial(sf.repair, updated(T), before=MOMENTS, keep="s"),
        ({"keep": "profession"}, "profession", UnknownVariableError),
        ({"keep": np.eye(6)[:, :1]}, "keep is an ndarray"),
    )
    yield from of(
        partial(sf.repair, before=MOMENTS, keep="s"),
        ({"after": updated(T[:150])}, same_rows),
        ({"after": updated(T, {"s": other})}, "another mean, standard deviation"),
        ({"after": updated(T, {"s": Z})}, "classes on one side", IncompatibleMomentsError),
        ({"after": updated(T, {"s": two})}, "columns", IncompatibleMomentsError),
        ({"after": updated(T, {"z": Z * (ROW > 9)}), "keep": "z"}, "rows with a label of 'z'"),
        ({"after": updated(T, {"z": IDS}), "keep": "z"}, r"class '0' \(str\)"),
        ({"after": updated(T[:, :4])}, "4 features and those before"),
        ({"after": sf.Moments().update(T, {"z": Z})}, "'s'", UnknownVariableError),
        ({"after": [MOMENTS]}, "pass sf.Moments"),
        ({"after": sf.Moments()}, "empty", NotEnoughDataError),
        ({"after": updated(T, covariance_type="diag")}, "='diag' do not keep"),
        ({"after": constant, "before": constant}, "single value", ConstantVariableError),
    )


def uses() -> Iterator[Mistake]:
    """Erasers and rows; certificates."""
    for call in (LEACE, sf.Moments().update):
        yield from of(
            lambda X, call=call: call(X),
            ({"X": None}, "X is None"),
            ({"X": "x.npy"}, "X is a string; load the file"),
            ({"X": Path("x.npy")}, "X is a path; load the file"),
            ({"X": [[1, 2], [3]]}, r"[^.]\. Rows of unequal length"),
        )
    yield lambda: LEACE(X[:, :3]), InputError, r"3 columns.* as in the rows of the fit"
    for product in (lambda: LEACE @ X, lambda: X @ LEACE, lambda: LEACE @ X.T):
        yield product, TypeError, re.escape("P(X), not P @ X or X @ P")
    yield lambda: LEACE @ 3, TypeError, "unsupported operand"
    for delta in (0, 1, -1, "a", True, float("nan")):
        yield certified(LEACE, delta), InputError, "between 0 and 1"
    for eraser, text in (
        (LEACE.scaled(0.5), "certificate of this eraser: .*alpha = 0.5"),
        (sf.oracle(MOMENTS, erase="z"), "no certif.*depends on labels"),
        (sf.leace(MOMENTS, erase="z", rank_tol=0.5), "no cert.*rank_tol="),
        (sf.repair(updated(T), before=MOMENTS, keep="s"), "erases nothing itself"),
    ):
        yield certified(eraser), InputError, text


MISTAKES = [*selections(), *states(), *with_labels(), *repairs(), *uses()]


@ignored("UnseenRowsWarning")
@pytest.mark.parametrize(("call", "error", "text"), MISTAKES)
def test_the_error_names_the_mistake(call: Any, error: Any, text: str) -> None:
    for _ in range(2):  # the first refusal leaves the arguments as they were
        with pytest.raises(error, match=text):
            call()
