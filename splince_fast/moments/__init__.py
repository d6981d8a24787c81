"""The mergeable state: everything that erasers need to know of the data."""

from splince_fast.moments.moments import Folds, Moments

__all__ = ["Folds", "Moments"]
