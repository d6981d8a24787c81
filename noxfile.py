"""The version matrix: every Python at hand, with the newest and with the oldest dependencies.

``nox`` runs all of it, ``nox -s oldest`` one part; Pythons that are not installed are skipped.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
# The lower bounds of pyproject.toml: what they name is what is tested.
OLDEST = [
    "numpy==2.0.*",
    "scipy==1.13.*",
    "numba==0.61.*",
    "scikit-learn==1.6.*",
    "safetensors==0.4.3",
    "narwhals==2.0.1",
    "mpmath==1.3.*",
]
TESTS = ["pytest", "-q", "-p", "no:cacheprovider", "tests", "README.md"]


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """All tests with what pip installs today."""
    session.install(".[test]")
    session.run(*TESTS)


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """All tests with the oldest dependencies that are allowed."""
    session.install(".[test]", *OLDEST)
    session.run(*TESTS)
