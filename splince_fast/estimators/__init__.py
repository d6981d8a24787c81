"""scikit-learn estimators: SPLINCE, LEACE, SAL and mean projection."""

from splince_fast.estimators.erasers import LEACE, SAL, SPLINCE, MeanProjection

__all__ = ["LEACE", "SAL", "SPLINCE", "MeanProjection"]
