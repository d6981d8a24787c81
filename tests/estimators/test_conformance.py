"""The official conformance suite of scikit-learn, and how much of it is run."""

from __future__ import annotations

from typing import Any

import pytest
import sklearn
from conformance import check_names
from sklearn.base import BaseEstimator
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks

from splince_fast import LEACE, SAL, SPLINCE, Identity, MeanProjection

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
]

# Checks that may fail, by estimator, each with its reason: none.
EXPECTED_FAILURES: dict[str, dict[str, str]] = {}


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    ESTIMATORS, expected_failed_checks=lambda e: EXPECTED_FAILURES.get(type(e).__name__, {})
)
def test_scikit_learn_conformance(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_green_suite_that_ran_one_check(estimator: BaseEstimator) -> None:
    """A tag that skips checks must not pass for conformance."""
    names = check_names(estimator)
    takes_sparse = estimator.get_params().get("covariance_type", "diag") == "diag"
    assert get_tags(estimator).input_tags.sparse == takes_sparse
    # What scikit-learn's own dense transformer with weights is asked, sparse and array API aside.
    reference = {
        name
        for name in check_names(StandardScaler())
        if not name.startswith("check_array_api")
        and (takes_sparse or not name.endswith("on_sparse_data"))
    }
    assert reference <= set(names)
    assert {"check_estimators_nan_inf", "check_transformer_preserve_dtypes"} <= set(names)
    assert "check_sample_weight_equivalence_on_dense_data" in names
    takes_y = get_tags(estimator).target_tags.required
    assert takes_y == (not isinstance(estimator, Identity))
    assert ("check_requires_y_none" in names) == takes_y
    assert get_tags(estimator).transformer_tags.preserves_dtype == ["float64", "float32", "float16"]
    assert names.total() >= 50
    if sklearn.__version__.startswith("1.9."):
        assert names.total() == 54 + takes_y + takes_sparse


def test_the_parametrized_test_runs_all_of_them() -> None:
    # Made anew: what scikit-learn 1.6 hands to pytest is a generator, spent on collection.
    mark = parametrize_with_checks(ESTIMATORS)
    assert mark.name == "parametrize"
    assert len(list(mark.args[1])) == sum(check_names(e).total() for e in ESTIMATORS)
    marks = [m.name for m in test_scikit_learn_conformance.pytestmark]
    assert marks.count("parametrize") == 1


def test_control_a_skip_tag_is_seen() -> None:
    class Skipping(LEACE):
        def __sklearn_tags__(self) -> Any:
            tags = super().__sklearn_tags__()
            tags._skip_test = True
            return tags

    with pytest.warns(Warning, match="[Ee]xplicit SKIP|_skip_test"):
        assert check_names(Skipping(concept_from="y")).total() < 50
