"""scikit-learn estimators: SPLINCE, LEACE, SAL, mean projection, and the identity."""

from splince_fast.estimators.erasers import LEACE, SAL, SPLINCE, Identity, MeanProjection

__all__ = ["LEACE", "SAL", "SPLINCE", "Identity", "MeanProjection"]
