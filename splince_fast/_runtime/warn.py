"""Warnings at the line of the caller's program."""

from __future__ import annotations

import sys
import warnings

# Its estimators and pipelines call those of this package.
_PACKAGES = ("splince_fast", "sklearn")


def warn(text: str, category: type[Warning]) -> None:
    """Warn, naming the first line on the stack that is of neither this package nor scikit-learn."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
