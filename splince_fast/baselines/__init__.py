"""Baselines for comparison with the closed-form erasers: INLP, R-LACE, DFR and GroupDRO.

INLP and R-LACE are transformers like :class:`splince_fast.LEACE`; the fitted map ``projection_`` is
a :class:`splince_fast.Projection`. DFR and GroupDRO are linear classifiers that balance groups. The
baselines need NumPy, SciPy and scikit-learn only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast._runtime.lazy import lazy_names

if TYPE_CHECKING:
    from splince_fast.baselines.dfr import DFR
    from splince_fast.baselines.group_dro import GroupDRO
    from splince_fast.baselines.inlp import INLP
    from splince_fast.baselines.rlace import RLACE

__all__ = ["DFR", "INLP", "RLACE", "GroupDRO"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__, {"DFR": "dfr", "GroupDRO": "group_dro", "INLP": "inlp", "RLACE": "rlace"}
    )
