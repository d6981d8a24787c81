"""The version matrix: every Python at hand, with the newest and with the oldest dependencies.

``nox`` runs all of it, ``nox -s oldest`` one part, ``nox -s oldest -- tests/cli`` a part of that;
Pythons that are not installed are skipped.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
TESTS = ["tests", "README.md"]


def lower_bounds() -> list[str]:
    """What the package and its tests need, each pinned to the bound that pyproject.toml states:
    ``>=1.2`` to the series ``==1.2.*``, ``>=1.2.3`` to that release."""
    text = (Path(__file__).parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    pins = []
    for requirement in project["dependencies"] + project["optional-dependencies"]["test"]:
        name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
        pins.append(f"{name}=={bound}" + ".*" * (bound.count(".") < 2))
    return pins


def run_tests(session: nox.Session) -> None:
    """The tests that the command line names, or all that need no other extra."""
    session.run("pytest", "-q", "-p", "no:cacheprovider", "-m", "", *(session.posargs or TESTS))


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """All tests with what pip installs today."""
    session.install(".[test]")
    run_tests(session)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """All tests with the oldest dependencies that are allowed."""
    session.install(".[test]", *lower_bounds())
    run_tests(session)
