"""Differences between erasers as a function of the L2 penalty alpha of the head.

Paper, appendix "Comparing the projections for different levels of regularization" (figs.
SPLINCE_LEACE_per_lambda and SPLINCE_SAL_per_lambda). Theorem 2 of the paper: without a penalty,
retrained heads give the same predictions for all erasers of the concept.
"""

from __future__ import annotations

from splince_fast.evaluation.text_table import Table
from splince_fast.experiments._common import (
    LEVELS,
    Claim,
    Findings,
    RunOptions,
    cell_texts,
    difference_bounds,
    interval_note,
)
from splince_fast.experiments.association import compare_levels
from splince_fast.experiments.datasets import load


def run(options: RunOptions) -> Findings:
    """Run the experiment, and return its findings."""
    data = load("bios", options.data)
    result = compare_levels(data, options, 3, LEVELS[-2:])
    p, alphas = result.level(), result.context.alphas
    tables, claims = [], []
    values: dict[str, float] = {}
    for metric in ("accuracy", "worst_group"):
        rows = []
        for alpha in alphas:
            selection = {"p": p, "head": "retrained", "alpha": alpha}
            sal, leace, splince = (
                result.interval(metric, eraser=e, **selection) for e in ("SAL", "LEACE", "SPLINCE")
            )
            gaps = {"LEACE": splince.mean - leace.mean, "SAL": splince.mean - sal.mean}
            rows.append((f"{alpha:g}", *cell_texts(sal, leace, splince, *gaps.values())))
            values |= {f"{metric}/{e}/{alpha:g}": gap for e, gap in gaps.items()}
            intervals = {"SAL": sal, "LEACE": leace, "SPLINCE": splince}
            values |= {f"{metric}/mean/{e}/{alpha:g}": i.mean for e, i in intervals.items()}
        columns = ("alpha", "SAL", "LEACE", "SPLINCE", "SPLINCE - LEACE", "SPLINCE - SAL")
        tables.append(Table(f"{metric}, p = {p}, one alpha for all", columns, tuple(rows)))
        weakest, strongest = min(alphas), max(alphas)
        weak, strong = (
            difference_bounds(
                result, metric, "SPLINCE", "LEACE", p=p, head="retrained", alpha=alpha
            )
            for alpha in (weakest, strongest)
        )
        claims += [
            Claim(
                f"{metric}: with the weakest penalty SPLINCE and LEACE do not differ (by .005)",
                weak.within(0.005),
                f"{values[f'{metric}/LEACE/{weakest:g}']:+.4f}, {weak}",
            ),
            Claim(
                f"{metric}: with the strongest penalty SPLINCE is better than LEACE",
                strong.above(),
                f"{values[f'{metric}/LEACE/{strongest:g}']:+.4f}, {strong}",
            ),
        ]
    return Findings(
        "Penalty alpha", data, tables, claims,
        notes=[interval_note(len(result.context.seeds))], values=values,
        figures={"alphas": result.plot("association")},
    )  # fmt: skip
