"""The erasers that the experiments compare: SAL, LEACE and SPLINCE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast.methods.table import METHODS

if TYPE_CHECKING:
    from splince_fast.moments import Moments
    from splince_fast.projection import Projection

# Methods by their labels in printed tables.
ERASERS = {METHODS[key].label: METHODS[key] for key in ("sal", "leace", "splince")}


def fit_method(label: str, moments: Moments, *, erase: str, keep: str) -> Projection:
    """Fit the eraser named `label` to moments; methods that keep no task ignore `keep`."""
    method = ERASERS[label]
    options = {"keep": keep} if method.needs_task else {}
    eraser: Projection = method.function(moments, erase=erase, **options)
    return eraser
