"""Rows one at a time: the fast path of a row like those that wait, against the general path."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
from naive_model import state_bytes

from splince_fast import Moments
from splince_fast.exceptions import LabelError
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.variables import ClassSums

D, BLOCK = 3, 8


def waiting(z: Any, **parameters: Any) -> Moments:
    """Four rows that wait, labelled z, and False and True; the last by the fast path."""
    X, y = np.arange(4.0 * D).reshape(4, D), np.array([True, False, False, True])
    moments = Moments(block_rows=BLOCK, **parameters)
    for rows in (slice(2), slice(2, 3), slice(3, 4)):
        moments.update(X[rows], {"z": z[rows], "y": y[rows]})
    return moments


def row(*values: float, dtype: Any = np.float64) -> Any:
    return np.array([values or range(D)], dtype)


def labels(z: Any = 1, y: Any = True) -> dict[str, Any]:
    return {"z": np.array([z]), "y": np.array([y])}


def without_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accumulator, "append_row", lambda *_: False)


LIKE = {
    "plain": (row(), labels()),
    "int8": (row(), labels(np.int8(1))),
    "uint64": (row(), labels(np.uint64(1))),
    "float32": (row(1.0, -3e18, 1e-40, dtype=np.float32), labels()),
    "labels in another order": (row(), {"y": np.array([False]), "z": np.array([0])}),
}
OTHER = {
    "NaN": (row(1.0, np.nan, 2.0), labels()),
    "infinity": (row(1.0, np.inf, 2.0), labels()),
    "minus infinity": (row(1.0, -np.inf, 2.0), labels()),
    "squares overflow": (row(1.0, 1.5e149, 2.0), labels()),
    "strided": (np.arange(2.0 * D)[None, ::2], labels()),
    "too wide": (row(*range(D + 1)), labels()),
    "two rows": (np.ones((2, D)), labels()),
    "one dimension": (row()[0], labels()),
    "three dimensions": (row()[None], labels()),
    "unaligned float32": (np.zeros(4 * D + 1, np.uint8)[1:].view(np.float32)[None], labels()),
    "strided float32": (np.arange(2.0 * D, dtype=np.float32)[None, ::2], labels()),
    "float32 that is too wide": (row(*range(D + 1), dtype=np.float32), labels()),
    "an infinite float32": (row(1.0, np.inf, 2.0, dtype=np.float32), labels()),
    "float16": (row(dtype=np.float16), labels()),
    "other bytes": (row(dtype=">f8"), labels()),
    "integers": (row(dtype=np.int64), labels()),
    "list": (row().tolist(), labels()),
    "masked": (np.ma.masked_invalid(row(1.0, np.nan, 2.0)), labels()),
    "new class": (row(), labels(2)),
    "a bool for an integer": (row(), labels(True)),
    "an integer for a bool": (row(), labels(1, 1)),
    "a float": (row(), labels(1.0)),
    "text": (row(), labels("1")),
    "a time": (row(), labels(np.datetime64(1, "ns"))),
    "a masked label": (row(), labels() | {"z": np.ma.array([1], mask=[True])}),
    "a list of labels": (row(), labels() | {"z": [1]}),
    "an object": (row(), labels() | {"z": np.array([None])}),
    "a scalar label": (row(), labels() | {"z": np.int64(1)}),
    "a column of labels": (row(), labels() | {"z": np.array([[1]])}),
    "two columns of labels": (row(), labels() | {"z": np.array([[1, 0]])}),
    "two labels": (row(), labels() | {"z": np.array([1, 0])}),
    "no label": (row(), labels() | {"z": np.array([], int)}),
    "one variable less": (row(), {"z": np.array([1])}),
    "one variable more": (row(), labels() | {"w": np.array([1])}),
    "another variable": (row(), {"z": np.array([1]), "w": np.array([1])}),
    "a name that is a number": (row(), {"z": np.array([1]), 0: np.array([1])}),
    "a bare column": (row(), np.array([1])),
    "no labels": (row(), None),
}


def outcome(moments: Moments, *given: Any, **options: Any) -> tuple[Any, ...]:
    """The error, if any, and the state to the last bit, before and after it is merged."""
    error = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            moments.update(*given, **options)
    except Exception as raised:
        error = type(raised), str(raised)
    return error, state_bytes(moments), moments.n_rows, moments._state().mean.tobytes()


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # parameters of the moments, and options of the update
    "a weight": ({}, {"sample_weight": [2.0]}),
    "weight zero": ({}, {"sample_weight": [0.0]}),
    "a mask": ({}, {"mask": np.array([False])}),
    "kinds": ({"kinds": {"z": "continuous", "y": "classes"}}, {}),
    "kind of one": ({"kinds": {"z": "classes"}}, {}),
    "joint classes": ({"joint": [("z", "y")]}, {}),
}


@cache
def declaring(library: str, names: str) -> Any:
    """A dtype that declares each letter as a class; the same object for the same names."""
    module: Any = pytest.importorskip(library)
    return (module.CategoricalDtype if library == "pandas" else module.Enum)(list(names))


def declared(library: str, names: str, values: Any) -> Any:
    return pytest.importorskip(library).Series(list(values), dtype=declaring(library, names))


# Labels of declared classes, of which "c" is of no row so far.
DECLARED = [
    (library, *label) for library in ("pandas", "polars")
    for label in [("abc", "b"), ("abc", "c"), ("abc", (None,)), ("abcd", "b"), ("ab", "b"),
                  ("abc", "ba"), ("abc", "")]
]  # fmt: skip


@pytest.mark.parametrize("case", [*LIKE, *OTHER, *OPTIONS, *DECLARED], ids=str)
def test_a_single_row_does_what_it_does_without_the_fast_path(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, options = OPTIONS.get(case, ({}, {}))
    given, z = (LIKE | OTHER).get(case, (row(), labels())), np.array([0, 1, 0, 1])
    if case in DECLARED:
        given, z = (row(), labels() | {"z": declared(*case)}), declared(case[0], "abc", "abab")

    def run() -> list[tuple[Any, ...]]:
        plain, weighted = (waiting(z, **parameters) for _ in range(2))
        weighted.update(row(), labels() | {"z": z[1:2]}, sample_weight=[3.0])
        return [outcome(some, *given, **options) for some in (plain, weighted)]

    found = run()
    without_the_fast_path(monkeypatch)
    assert found == run()


def test_a_kind_of_a_variable_that_is_not_there_is_told_for_a_single_row() -> None:
    """Also where no row that waits has a label of it, so that the others look alike."""
    moments = Moments(kinds={"z": "classes", "w": "classes"})
    for labels_of in ({"w": [None, None]}, {"w": [None]}):
        n = len(labels_of["w"])
        moments.update(np.ones((n, D)), {"z": np.arange(n), **labels_of})
    with pytest.raises(LabelError, match="kinds names 'w'"):
        moments.update(row(), {"z": np.array([0])})


def single(dtype: Any = np.float32) -> tuple[Any, dict[str, Any]]:
    return row(dtype=dtype), {"z": np.array(["a"])}


@pytest.mark.parametrize(
    ("interfere", "more"),
    [
        (lambda moments: moments.mean, 0),
        (lambda moments: [moments.mean, moments.update(*single())], 1),
        (lambda moments: moments.update(*single(np.float64)), 1),
        (lambda moments: moments.update(*single(), sample_weight=[2.0]), 1),
        (lambda moments: moments.update(single()[0], {"y": np.array([0])}), 1),
        (lambda moments: moments.update(*single()), 1),
    ],
    ids=["merged", "merged and begun", "widened", "weighted", "labelled", "one more"],
)
def test_rows_that_change_while_a_label_is_looked_up_lose_no_row(
    interfere: Any, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever other code runs before a row joins those that wait, such as a finalizer."""
    moments = Moments(block_rows=BLOCK)
    for _ in range(3):
        moments.update(*single())
    looked = []

    def code(*given: Any) -> int:
        looked.append(given)
        if len(looked) == 1:
            interfere(moments)
        return 0

    monkeypatch.setattr(ClassSums, "code_of", code)
    moments.update(single()[0], {"z": ["a"]})
    assert looked
    counts = {name: moments.class_counts(name) for name in moments.variables}
    assert moments.n_rows == 4 + more
    assert sum(sum(of.values()) for of in counts.values()) == 4 + more
    assert np.array_equal(moments.mean, row()[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "parameters", [{}, {"covariance_type": "diag"}, {"subsample": 0.5}], ids=str
)
def test_many_single_rows_have_the_bits_of_those_without_the_fast_path(
    dtype: Any, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3 * BLOCK + 2, D)).astype(dtype)
    z, y = rng.integers(0, 3, len(X)), rng.random(len(X)) < 0.5

    def run() -> list[Any]:
        moments, states = Moments(block_rows=BLOCK, **parameters), []
        for i in range(len(X)):
            moments.update(X[i : i + 1], {"z": z[i : i + 1], "y": y[i : i + 1]})
            if i >= 3 * BLOCK - 1:  # where none wait, and where some do
                states.append(state_bytes(moments))
        return states

    found = run()
    without_the_fast_path(monkeypatch)
    assert found == run()
