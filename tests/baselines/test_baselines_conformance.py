"""The conformance suite of scikit-learn for the baselines, and how much of it is run."""

from __future__ import annotations

from typing import Any

import pytest
from conformance import check_names
from sklearn.base import BaseEstimator
from sklearn.utils.estimator_checks import parametrize_with_checks

from splince_fast.baselines import DFR, INLP, RLACE, GroupDRO

# The suite knows neither `concept` nor `groups`, so y takes their part.
QUICK = [
    INLP(concept_from="y"),
    RLACE(concept_from="y", max_steps=40, check_every=20),
    DFR(groups_from="y", C=1.0, penalty="l2", n_subsets=1),
    GroupDRO(groups_from="y", alpha=0.01),
]
FURTHER = [
    INLP(concept_from="y", validation_share=0),
    DFR(groups_from="y"),
    GroupDRO(groups_from="y"),
    GroupDRO(groups_from="y", alpha=0.01, solver="sgd"),
]
ESTIMATORS = QUICK + FURTHER

_DRAWN = "rows are drawn at random, so a weight of 2 is not the same draw as two rows"
_WEIGHTS = "check_sample_weight_equivalence_on_dense_data"


def expected_failures(estimator: Any) -> dict[str, str]:
    """Weights equal repetitions only where no row is drawn at random."""
    drawn = (
        isinstance(estimator, RLACE)
        or (isinstance(estimator, INLP) and estimator.validation_share)
        or (isinstance(estimator, GroupDRO) and estimator._needs_validation_rows())
    )
    return {_WEIGHTS: _DRAWN} if drawn else {}


# The suite has labels at random, too, in which validation rows show nothing to erase.
@pytest.mark.filterwarnings("ignore::splince_fast.NothingErasedWarning")
@parametrize_with_checks(QUICK, expected_failed_checks=expected_failures)  # type: ignore[untyped-decorator]
def test_scikit_learn_conformance(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::splince_fast.NothingErasedWarning")
@parametrize_with_checks(FURTHER, expected_failed_checks=expected_failures)  # type: ignore[untyped-decorator]
def test_scikit_learn_conformance_with_other_options(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_the_suite_is_not_skipped(estimator: Any) -> None:
    names = check_names(estimator)
    assert {"check_estimators_nan_inf", "check_fit_idempotent"} <= set(names)
    kind = (
        "check_classifiers_train" if hasattr(estimator, "predict") else "check_transformer_general"
    )
    assert kind in names
    assert (_WEIGHTS in names) == (not isinstance(estimator, DFR))
    assert names.total() >= 45
