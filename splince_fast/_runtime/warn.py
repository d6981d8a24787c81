"""Warnings that point to the line of the caller's program."""

from __future__ import annotations

import sys
import warnings

# A warning points to a line outside these packages. Pipelines and searches of scikit-learn call
# estimators of this package.
_PACKAGES = ("splince_fast", "sklearn")


def warn(text: str, category: type[Warning]) -> None:
    """Issue a warning that points to the innermost frame outside this package and scikit-learn."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
