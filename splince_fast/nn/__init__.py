"""Concept erasure inside a torch model: collect moments, fit layer by layer, install, fold.

Names are imported on first use, because torch is an optional dependency (extra ``torch``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast._runtime.arguments import lazy_names
from splince_fast.exceptions import (
    FoldError,
    NeverCalledError,
    NotEnoughMemoryError,
    OnePassWarning,
    OtherTokensWarning,
    SiteError,
)

if TYPE_CHECKING:
    from splince_fast.nn.collection import Collected, collect, from_model
    from splince_fast.nn.effects import effect
    from splince_fast.nn.eraser import Eraser, Erasers
    from splince_fast.nn.folding import Folded, fold
    from splince_fast.nn.installed import Installed, install
    from splince_fast.nn.layers import fit_layers
    from splince_fast.nn.sites import Site

__all__ = [
    "Collected",
    "Eraser",
    "Erasers",
    "FoldError",
    "Folded",
    "Installed",
    "NeverCalledError",
    "NotEnoughMemoryError",
    "OnePassWarning",
    "OtherTokensWarning",
    "Site",
    "SiteError",
    "collect",
    "effect",
    "fit_layers",
    "fold",
    "from_model",
    "install",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Collected": "collection",
            "Eraser": "eraser",
            "Erasers": "eraser",
            "Folded": "folding",
            "Installed": "installed",
            "Site": "sites",
            "collect": "collection",
            "effect": "effects",
            "fit_layers": "layers",
            "fold": "folding",
            "from_model": "collection",
            "install": "installed",
        },
        extra="torch",
    )
