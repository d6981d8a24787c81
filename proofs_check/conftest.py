"""The pytest mark ``paper``, for checks that never call the library."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark ``paper``; ``-m "not paper"`` deselects these checks."""
    config.addinivalue_line("markers", "paper: a statement whose check never calls the library")
