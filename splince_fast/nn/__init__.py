"""Concept erasure inside a torch model: collect moments, fit layer by layer, install, fold.

>>> from splince_fast import nn as snn
>>> snn.__all__[:4]
['Collected', 'Effect', 'Eraser', 'Erasers']

Names are imported on first use, because torch is an optional dependency (extra ``torch``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splince_fast.exceptions import (
    FoldError,
    MissingExtraError,
    NeverCalledError,
    NotEnoughMemoryError,
    OnePassWarning,
    OtherTokensWarning,
    SiteError,
)

if TYPE_CHECKING:
    from splince_fast.nn.collected import Collected
    from splince_fast.nn.collection import collect
    from splince_fast.nn.effects import Effect, effect
    from splince_fast.nn.eraser import Eraser
    from splince_fast.nn.erasers import Erasers
    from splince_fast.nn.folding import Folded, fold
    from splince_fast.nn.installed import Installed, install
    from splince_fast.nn.layers import fit_layers
    from splince_fast.nn.spec import Site
    from splince_fast.nn.text import TextBatches, text_batches

_LAZY = {
    "Collected": "collected",
    "Effect": "effects",
    "Eraser": "eraser",
    "Erasers": "erasers",
    "Folded": "folding",
    "Installed": "installed",
    "Site": "spec",
    "TextBatches": "text",
    "collect": "collection",
    "effect": "effects",
    "fit_layers": "layers",
    "fold": "folding",
    "install": "installed",
    "text_batches": "text",
}

__all__ = [
    "Collected",
    "Effect",
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
    "TextBatches",
    "collect",
    "effect",
    "fit_layers",
    "fold",
    "install",
    "text_batches",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'splince_fast.nn' has no attribute {name!r}")
    try:
        module = import_module(f"splince_fast.nn.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            f"torch could not be imported ({error}); it comes with the extra 'torch': pip install "
            '"splince_fast[torch]"'
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
