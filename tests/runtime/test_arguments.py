"""_runtime.arguments: misspelt options, names imported on first use, lines of warnings."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from processes import run, script
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import splince_fast as sf
from splince_fast import baselines, evaluation, nn
from splince_fast._runtime.arguments import warn

Z = np.repeat([0, 1], 20)
X = np.random.default_rng(0).normal(size=(40, 3)) + Z[:, None]


# --- misspelt options -----------------------------------------------------------------------------


def folds() -> list[sf.Moments]:
    return [sf.Moments().update(X[i::2], {"z": Z[i::2]}) for i in range(2)]


MISSPELT: list[tuple[Callable[[], Any], str]] = [
    (lambda: sf.erase(X, Z, colour="red"), "takes no colour= .it takes .*shrinkage"),
    (lambda: sf.erase(X, Z, shrinkge=1), "leace takes no shrinkge=; did you mean shrinkage="),
    (lambda: sf.cross_report(folds(), erase="z", rank_tool=1.0),
     "LEACE takes no rank_tool=; did you mean rank_tol="),
    (lambda: sf.cross_report(folds(), erase="z", max_amplification=1e3),
     "LEACE takes no max_amplification="),
    (lambda: sf.Moments.from_blocks([(X, Z)], block_row=2),
     "Moments takes no block_row=; did you mean block_rows="),
    (lambda: sf.Folds(2, block_row=2), "Moments takes no block_row=; did you mean block_rows"),
    (lambda: draw(None, "association", metrc="accuracy"),  # type: ignore[arg-type]
     "'association' takes no metrc=; did you mean metric="),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), MISSPELT)
def test_the_nearest_option_is_suggested(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(sf.exceptions.InputError, match=text):
        call()


def draw(*arguments: Any, **options: Any) -> Any:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from splince_fast.evaluation.figures import draw

    return draw(*arguments, **options)


# --- names imported on first use ------------------------------------------------------------------

PACKAGES = [sf, baselines, evaluation, nn]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.__name__))
def test_a_misspelt_name_is_an_error_that_suggests_the_right_one(package: ModuleType) -> None:
    name = max(package.__all__, key=len)
    code = f"import {package.__name__} as package; package.{name[:-2]}{name[-1]}{name[-2]}"
    told = run(code).stderr
    assert f"module {package.__name__!r} has no attribute" in told
    assert f"Did you mean: {name!r}?" in told


@pytest.mark.parametrize("package", PACKAGES[:3], ids=lambda package: str(package.__name__))
def test_names_are_listed_and_are_those_of_their_modules(package: ModuleType) -> None:
    assert {name for name in dir(package) if not name.startswith("__")} == set(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        assert getattr(package, name) is value
        if hasattr(value, "__module__"):
            assert getattr(importlib.import_module(value.__module__), name) is value


def test_without_the_optional_dependency_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from splince_fast import nn\n"
        "from splince_fast.exceptions import MissingExtraError\n"
        "try: nn.fold\n"
        "except MissingExtraError as error: print(error)"
    )
    assert 'pip install "splince_fast[torch]"' in script(code)


# --- lines of warnings ----------------------------------------------------------------------------

MEANS = np.where(Z[:, None], X[Z == 1].mean(axis=0), X[Z == 0].mean(axis=0))
ERASED = X - MEANS  # nothing to erase
CALLS: dict[str, Callable[[], Any]] = {
    "function": lambda: sf.leace(sf.Moments().update(ERASED, {"z": Z}), erase="z"),
    "snapshot": lambda: sf.leace(sf.Moments().update(ERASED, {"z": Z}).factored(), erase="z"),
    "erase": lambda: sf.erase(ERASED, Z),
    "estimator": lambda: sf.LEACE().fit(ERASED, concept=Z),
    "pipeline": lambda: make_pipeline(StandardScaler(), sf.LEACE(concept_from="y")).fit(ERASED, Z),
    "partial fit": lambda: sf.LEACE().partial_fit(ERASED, concept=Z).transform(ERASED),
    "itself": lambda: warn("nothing", sf.exceptions.NothingErasedWarning),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_warning_names_the_line_of_the_caller(call: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[call]()
    lines = [w.lineno for w in caught if w.category is sf.exceptions.NothingErasedWarning]
    assert [w.filename for w in caught] == [__file__] * len(caught)
    assert lines == [CALLS[call].__code__.co_firstlineno]


def test_the_top_level_has_few_names_and_two_of_the_errors() -> None:
    assert len(sf.__all__) <= 32
    errors = {name for name in sf.__all__ if name in vars(sf.exceptions)}
    assert errors == {"SplinceError", "SplinceWarning"}
