"""The mark of the statements that examine the paper's mathematics alone."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark; ``-m "not paper"`` leaves out statements that never call the library."""
    config.addinivalue_line("markers", "paper: a statement whose check never calls the library")
