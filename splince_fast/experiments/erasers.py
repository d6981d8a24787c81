"""Erasers compared in the experiments, from the table of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast.methods.table import METHODS

if TYPE_CHECKING:
    from splince_fast.moments import Moments
    from splince_fast.projection import Projection

# keys: labels in printed tables
ERASERS = {METHODS[key].label: METHODS[key] for key in ("sal", "leace", "splince")}


def fit_method(label: str, moments: Moments, *, erase: str, keep: str) -> Projection:
    """Fit the eraser with this label to moments; `keep` is ignored by methods without a task."""
    method = ERASERS[label]
    options = {"keep": keep} if method.needs_task else {}
    eraser: Projection = method.function(moments, erase=erase, **options)
    return eraser
