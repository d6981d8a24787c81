"""Baselines for comparison with the closed-form erasers: INLP and R-LACE.

Both are transformers like :class:`splince_fast.LEACE`; the fitted map ``projection_`` is a
:class:`splince_fast.Projection`. They need NumPy, SciPy and scikit-learn only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast._runtime.arguments import lazy_names

if TYPE_CHECKING:
    from splince_fast.baselines.inlp import INLP
    from splince_fast.baselines.rlace import RLACE

__all__ = ["INLP", "RLACE"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"INLP": "inlp", "RLACE": "rlace"})
