"""Differences between erasers by the penalty of the head.

Paper, appendix "Comparing the projections for different levels of regularization" (figs.
SPLINCE_LEACE_per_lambda and SPLINCE_SAL_per_lambda). Theorem 2: without a penalty all erasers of
one concept give the same head.
"""

from __future__ import annotations

from splince_fast.evaluation._tables import Table
from splince_fast.experiments._common import (
    LEVELS,
    Claim,
    Findings,
    Options,
    all_of,
    by_seed,
    decided,
    in_words,
    limits,
    over,
    ratio_of,
    reverse,
    texts,
)
from splince_fast.experiments.bios import sweep
from splince_fast.experiments.datasets import load


def run(options: Options) -> Findings:
    """Run the experiment."""
    data = load("bios", options.data)
    result = sweep(data, options, 3, levels=LEVELS[-2:])
    p, alphas = result.level(), result.context.alphas
    tables, claims = [], []
    values: dict[str, float] = {}
    for metric in ("accuracy", "worst_group"):
        rows = []
        for alpha in alphas:
            where = {"p": p, "head": "retrained", "alpha": alpha}
            means = {e: result.interval(metric, eraser=e, **where) for e in ("SAL", "LEACE")}
            ours = result.interval(metric, eraser="SPLINCE", **where)
            gaps = {e: ours.mean - means[e].mean for e in means}
            rows.append((f"{alpha:g}", *texts(*means.values(), ours, *gaps.values())))
            values |= {f"{metric}/{e}/{alpha:g}": gaps[e] for e in gaps}
            values |= {f"{metric}/mean/{e}/{alpha:g}": means[e].mean for e in means}
            values[f"{metric}/mean/SPLINCE/{alpha:g}"] = ours.mean
        columns = ("lambda", "SAL", "LEACE", "SPLINCE", "SPLINCE - LEACE", "SPLINCE - SAL")
        rows = [(*row[:4], row[5], row[4]) for row in rows]
        tables.append(Table(f"{metric}, p = {p}, one alpha for all", columns, tuple(rows)))
        least, most = (values[f"{metric}/LEACE/{s:g}"] for s in (min(alphas), max(alphas)))
        low, high = (
            limits(
                by_seed(result, metric, "SPLINCE", "LEACE", p=p, head="retrained", alpha=alpha),
                ratio_of(result),
            )
            for alpha in (min(alphas), max(alphas))
        )
        same = all_of([decided(*low, -0.005), reverse(decided(*low, 0.005))])
        claims += [
            Claim(
                f"{metric}: with the weakest penalty SPLINCE and LEACE do not differ (by .005)",
                same,
                f"{least:+.4f}, {in_words(*low)}",
            ),
            Claim(
                f"{metric}: with a strong one SPLINCE is ahead",
                decided(*high),
                f"{most:+.4f}, {in_words(*high)}",
            ),
        ]
    return Findings(
        "Strength of the penalty", data, tables, claims, notes=[over(result)], values=values,
        figures={f"strengths_{e}": result.plot("alphas", reference=e) for e in ("LEACE", "SAL")},
    )  # fmt: skip
