"""The official conformance suite of scikit-learn, and how much of it is run."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import sklearn
from problems import ignored
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

from splince_fast import LEACE, SAL, SPLINCE, Identity, MeanProjection
from splince_fast.baselines import INLP, RLACE

# The suite knows no keyword `concept`, so y is made the concept. It passes classes as the floats
# 0.0 and 1.0, too, which MeanProjection refuses unless told that they are classes.
ESTIMATORS = [
    SPLINCE(concept_from="y"),
    LEACE(concept_from="y"),
    SAL(concept_from="y"),
    MeanProjection(concept_from="y", kinds={"concept": "classes"}),
    # Moments without a covariance, which take sparse rows, too.
    SPLINCE(concept_from="y", covariance_type="diag"),
    LEACE(concept_from="y", covariance_type="diag"),
    SAL(concept_from="y", covariance_type="diag"),
    Identity(),
    INLP(concept_from="y"),
    INLP(concept_from="y", validation_share=0),
    RLACE(concept_from="y", max_steps=40, check_every=20),
]

WEIGHTS = "check_sample_weight_equivalence_on_dense_data"
DRAWN = "rows are drawn at random, so a weight of 2 is not the same draw as two rows"


def check_names(estimator: BaseEstimator) -> Counter[str]:
    """Names of the checks that the suite holds for an estimator."""
    names: Counter[str] = Counter()
    for _, check in estimator_checks_generator(estimator):
        while isinstance(check, partial):
            check = check.func
        names[check.__name__] += 1
    return names


def expected_failures(estimator: Any) -> dict[str, str]:
    """Weights equal repetitions only where no row is drawn at random."""
    drawn = isinstance(estimator, RLACE) or getattr(estimator, "validation_share", 0)
    return {WEIGHTS: DRAWN} if drawn else {}


# The suite has random labels, too, which the probes do not predict in validation rows.
@ignored("NothingErasedWarning")
@parametrize_with_checks(ESTIMATORS, expected_failed_checks=expected_failures)  # type: ignore[untyped-decorator]
def test_scikit_learn_conformance(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_green_suite_that_ran_one_check(estimator: BaseEstimator) -> None:
    """A tag that skips checks must not pass for conformance."""
    names, tags = check_names(estimator), get_tags(estimator)
    takes_sparse = tags.input_tags.sparse
    assert takes_sparse == (isinstance(estimator, Identity) or "diag" in repr(estimator))
    # What scikit-learn's own dense transformer with weights is asked, sparse and array API aside.
    reference = {
        name
        for name in check_names(StandardScaler())
        if not name.startswith("check_array_api")
        and (takes_sparse or not name.endswith("on_sparse_data"))
    }
    assert reference <= set(names)
    assert {"check_estimators_nan_inf", "check_transformer_preserve_dtypes", WEIGHTS} <= set(names)
    takes_y = tags.target_tags.required
    assert takes_y == (not isinstance(estimator, Identity))
    assert ("check_requires_y_none" in names) == takes_y
    assert tags.transformer_tags.preserves_dtype == ["float64", "float32", "float16"]
    assert names.total() >= 50
    if sklearn.__version__.startswith("1.9."):
        assert names.total() == 54 + takes_y + takes_sparse


def test_control_a_skip_tag_is_seen() -> None:
    class Skipping(LEACE):
        def __sklearn_tags__(self) -> Any:
            tags = super().__sklearn_tags__()
            tags._skip_test = True
            return tags

    with pytest.warns(Warning, match="[Ee]xplicit SKIP|_skip_test"):
        assert check_names(Skipping(concept_from="y")).total() < 50
