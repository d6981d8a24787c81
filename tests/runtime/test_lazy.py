"""Public names that are imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from processes import run, script

import splince_fast as sf
from splince_fast import baselines, evaluation, nn

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


def test_the_top_level_has_few_names_and_two_of_the_errors() -> None:
    assert len(sf.__all__) <= 32
    errors = {name for name in sf.__all__ if name in vars(sf.exceptions)}
    assert errors == {"SplinceError", "SplinceWarning"}


def test_without_the_optional_dependency_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from splince_fast import nn\n"
        "from splince_fast.exceptions import MissingExtraError\n"
        "try: nn.fold\n"
        "except MissingExtraError as error: print(error)"
    )
    assert 'pip install "splince_fast[torch]"' in script(code)
