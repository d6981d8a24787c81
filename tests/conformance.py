"""The checks of scikit-learn's conformance suite, by name."""

from __future__ import annotations

from collections import Counter
from functools import partial

from sklearn.base import BaseEstimator
from sklearn.utils.estimator_checks import estimator_checks_generator


def check_names(estimator: BaseEstimator) -> Counter[str]:
    """Names of the checks that the suite holds for an estimator."""
    names: Counter[str] = Counter()
    for _, check in estimator_checks_generator(estimator):
        while isinstance(check, partial):
            check = check.func
        names[check.__name__] += 1
    return names
