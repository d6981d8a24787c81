"""Baselines for comparison with the closed-form erasers: INLP, R-LACE, DFR and GroupDRO.

INLP and R-LACE are transformers like :class:`splince_fast.LEACE`; the fitted map ``projection_`` is
a :class:`splince_fast.Projection`. DFR and GroupDRO are linear classifiers that balance groups. The
baselines need NumPy, SciPy and scikit-learn only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splince_fast.baselines.dfr import DFR
    from splince_fast.baselines.group_dro import GroupDRO
    from splince_fast.baselines.inlp import INLP
    from splince_fast.baselines.rlace import RLACE

__all__ = ["DFR", "INLP", "RLACE", "GroupDRO"]

_MODULES = {"DFR": "dfr", "GroupDRO": "group_dro", "INLP": "inlp", "RLACE": "rlace"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'splince_fast.baselines' has no attribute {name!r}")
    value = getattr(import_module(f"splince_fast.baselines.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
