"""Fraction of the covariance between rows and task that erasers keep (paper, fig. removal_cov)."""

from __future__ import annotations

import numpy as np

from splince_fast.experiments._common import (
    ERASERS,
    LEVELS,
    Claim,
    Findings,
    RunOptions,
    combine_verdicts,
    compare_erasers,
    corrected_bounds,
    interval_note,
    means,
    paper_table,
)
from splince_fast.experiments.datasets import load


def run(options: RunOptions) -> Findings:
    """Run the experiment, and return its findings."""
    data = load("bios", options.data)
    result = compare_erasers(
        data, options, 5, erasers=ERASERS, heads=("frozen",), alphas=(0.01,), leakage=(),
        association=LEVELS[::4] if options.quick else LEVELS,
    )  # fmt: skip
    p = result.context.levels[-1]
    mean = {e: result.mean("kept_covariance", eraser=e, p=p) for e in ERASERS}
    ratios = {e: result.values("kept_covariance", eraser=e, p=p) for e in ("SAL", "LEACE")}
    test_ratio = result.test_ratio(p)
    bounds = {e: corrected_bounds([*values.values()], test_ratio) for e, values in ratios.items()}
    fractions = [ratios["SAL"][seed] / ratios["LEACE"][seed] for seed in ratios["SAL"]]
    fraction_bounds = corrected_bounds(fractions, test_ratio)
    claims = [
        Claim(
            "SPLINCE keeps all of the covariance with the task",
            abs(mean["SPLINCE"] - 1) < 1e-6,
            f"{mean['SPLINCE']:.6f}",
        ),
        Claim(
            "LEACE and SAL remove more of the covariance as p grows, and nearly all at p = .9",
            combine_verdicts([bounds[e].below(0.1) for e in bounds]),
            f"LEACE {mean['LEACE']:.3f} ({bounds['LEACE']}), SAL {mean['SAL']:.3f} "
            f"({bounds['SAL']})",
        ),
        Claim(
            "SAL keeps far less of the covariance than LEACE at p = .9 (in the paper, 1/70)",
            fraction_bounds.below(0.5),
            f"a fraction of {np.mean(fractions):.2f}, {fraction_bounds}",
        ),
    ]
    paper = paper_table(
        "text beside fig. removal_cov", ("eraser", "p = .9"),
        {"SAL": ["0.001"], "LEACE": ["0.07"], "SPLINCE": ["1"]},
    )  # fmt: skip
    return Findings(
        "Covariance with the task after erasure", data, [result.table("kept_covariance")], claims,
        [paper], {"covariance": result.plot("association", metric="kept_covariance")},
        [interval_note(len(result.context.seeds))], means(result),
    )  # fmt: skip
