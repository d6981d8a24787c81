"""The conformance suite of scikit-learn for the baselines, and how much of it is run."""

from __future__ import annotations

from typing import Any

import pytest
from conformance import check_names
from sklearn.base import BaseEstimator
from sklearn.utils.estimator_checks import parametrize_with_checks

from splince_fast.baselines import INLP, RLACE

# The suite knows no `concept`, so y takes its part.
QUICK = [INLP(concept_from="y"), RLACE(concept_from="y", max_steps=40, check_every=20)]
FURTHER = [INLP(concept_from="y", validation_share=0)]
ESTIMATORS = QUICK + FURTHER

_DRAWN = "rows are drawn at random, so a weight of 2 is not the same draw as two rows"
_WEIGHTS = "check_sample_weight_equivalence_on_dense_data"


def expected_failures(estimator: Any) -> dict[str, str]:
    """Weights equal repetitions only where no row is drawn at random."""
    drawn = isinstance(estimator, RLACE) or estimator.validation_share
    return {_WEIGHTS: _DRAWN} if drawn else {}


# The suite has labels at random, too, in which validation rows show nothing to erase.
@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.NothingErasedWarning")
@parametrize_with_checks(QUICK, expected_failed_checks=expected_failures)  # type: ignore[untyped-decorator]
def test_scikit_learn_conformance(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::splince_fast.exceptions.NothingErasedWarning")
@parametrize_with_checks(FURTHER, expected_failed_checks=expected_failures)  # type: ignore[untyped-decorator]
def test_scikit_learn_conformance_with_other_options(estimator: BaseEstimator, check: Any) -> None:
    check(estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_the_suite_is_not_skipped(estimator: Any) -> None:
    names = check_names(estimator)
    wanted = {"check_estimators_nan_inf", "check_fit_idempotent", "check_transformer_general"}
    assert wanted | {_WEIGHTS} <= set(names)
    assert names.total() >= 45
