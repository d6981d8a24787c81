"""Comparison of erasers by :func:`compare`, and its metrics, splits, heads and probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splince_fast._runtime.arguments import lazy_names

if TYPE_CHECKING:
    from splince_fast.evaluation.heads import fit_head
    from splince_fast.evaluation.metrics import (
        Metric,
        group_accuracy,
        tpr_gap,
        worst_group_accuracy,
    )
    from splince_fast.evaluation.probes import leakage
    from splince_fast.evaluation.result import Comparison
    from splince_fast.evaluation.run import compare
    from splince_fast.evaluation.splits import spurious_split

__all__ = [
    "Comparison",
    "Metric",
    "compare",
    "fit_head",
    "group_accuracy",
    "leakage",
    "spurious_split",
    "tpr_gap",
    "worst_group_accuracy",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "group_accuracy": "metrics",
            "worst_group_accuracy": "metrics",
            "tpr_gap": "metrics",
            "leakage": "probes",
            "spurious_split": "splits",
            "fit_head": "heads",
            "compare": "run",
            "Comparison": "result",
            "Metric": "metrics",
        },
    )
