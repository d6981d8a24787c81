"""Warnings name the line of the caller's program, however deep in the package they arise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import splince_fast as sf
from splince_fast._runtime.arguments import warn

X = np.random.default_rng(0).normal(size=(40, 3))
Z = np.repeat([0, 1], 20)
X -= np.where(Z[:, None], X[Z == 1].mean(axis=0), X[Z == 0].mean(axis=0))  # nothing to erase

CALLS: dict[str, Callable[[], Any]] = {
    "function": lambda: sf.leace(sf.Moments().update(X, {"z": Z}), erase="z"),
    "snapshot": lambda: sf.leace(sf.Moments().update(X, {"z": Z}).factored(), erase="z"),
    "erase": lambda: sf.erase(X, Z),
    "estimator": lambda: sf.LEACE().fit(X, concept=Z),
    "pipeline": lambda: make_pipeline(StandardScaler(), sf.LEACE(concept_from="y")).fit(X, Z),
    "partial fit": lambda: sf.LEACE().partial_fit(X, concept=Z).transform(X),
    "itself": lambda: warn("nothing", sf.NothingErasedWarning),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_warning_names_the_line_of_the_caller(call: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[call]()
    lines = [w.lineno for w in caught if w.category is sf.NothingErasedWarning]
    assert [w.filename for w in caught] == [__file__] * len(caught)
    assert lines == [CALLS[call].__code__.co_firstlineno]
