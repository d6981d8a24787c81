"""scikit-learn estimators: SPLINCE, LEACE, SAL, mean projection, o-SPLINCE, and the identity."""

from splince_fast.estimators.erasers import LEACE, SAL, SPLINCE, MeanProjection
from splince_fast.estimators.identity import Identity

__all__ = ["LEACE", "SAL", "SPLINCE", "Identity", "MeanProjection"]
