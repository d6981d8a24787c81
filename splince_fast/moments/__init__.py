"""First and second moments of x and of labelled variables, from which erasers are computed."""

from splince_fast.moments.moments import Folds, Moments

__all__ = ["Folds", "Moments"]
