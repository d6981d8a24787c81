"""Comparison of erasers by :func:`compare`, and its metrics, splits, heads and probes.

A submodule is imported when one of its public names is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splince_fast.evaluation.heads import fit_head, select_head
    from splince_fast.evaluation.metrics import (
        class_accuracy,
        covariance_ratio,
        group_accuracy,
        tpr_gap,
        worst_group_accuracy,
    )
    from splince_fast.evaluation.probes import leakage
    from splince_fast.evaluation.regression import log_odds_regression
    from splince_fast.evaluation.result import Comparison
    from splince_fast.evaluation.run import compare
    from splince_fast.evaluation.scoring import Metric
    from splince_fast.evaluation.splits import spurious_split

_LAZY = {
    "group_accuracy": "metrics",
    "worst_group_accuracy": "metrics",
    "class_accuracy": "metrics",
    "tpr_gap": "metrics",
    "covariance_ratio": "metrics",
    "leakage": "probes",
    "log_odds_regression": "regression",
    "spurious_split": "splits",
    "fit_head": "heads",
    "select_head": "heads",
    "compare": "run",
    "Comparison": "result",
    "Metric": "scoring",
}

__all__ = [
    "Comparison",
    "Metric",
    "class_accuracy",
    "compare",
    "covariance_ratio",
    "fit_head",
    "group_accuracy",
    "leakage",
    "log_odds_regression",
    "select_head",
    "spurious_split",
    "tpr_gap",
    "worst_group_accuracy",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'splince_fast.evaluation' has no attribute {name!r}")
    value = getattr(import_module(f"splince_fast.evaluation.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
