"""Pytest mark of the checks that examine the mathematics of the paper only."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark; ``-m "not paper"`` deselects checks that never call the library."""
    config.addinivalue_line("markers", "paper: a statement whose check never calls the library")
