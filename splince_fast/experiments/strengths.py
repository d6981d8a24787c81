"""Differences between erasers by the strength of the head's penalty.

Paper, appendix "Comparing the projections for different levels of regularization" (figs.
SPLINCE_LEACE_per_lambda and SPLINCE_SAL_per_lambda). Theorem 2: without a penalty all erasers of
one concept give the same head.
"""

from __future__ import annotations

from splince_fast.evaluation._tables import Table
from splince_fast.evaluation.heads import STRENGTHS
from splince_fast.experiments._common import LEVELS, Claim, Findings, Options, over, texts
from splince_fast.experiments.bios import sweep
from splince_fast.experiments.datasets import load


def run(options: Options) -> Findings:
    """Run the experiment."""
    data = load("bios", options.data)
    result = sweep(data, options, 3, levels=LEVELS[-2:])
    p = result.level()
    tables, claims, values = [], [], {}
    for metric in ("accuracy", "worst_group"):
        rows = []
        for strength in STRENGTHS:
            where = {"p": p, "head": "retrained", "strength": strength}
            means = {e: result.interval(metric, eraser=e, **where) for e in ("SAL", "LEACE")}
            ours = result.interval(metric, eraser="SPLINCE", **where)
            gaps = {e: ours.mean - means[e].mean for e in means}
            rows.append((f"{strength:g}", *texts(*means.values(), ours, *gaps.values())))
            values |= {f"{metric}/{e}/{strength:g}": gaps[e] for e in gaps}
            values |= {f"{metric}/mean/{e}/{strength:g}": means[e].mean for e in means}
            values[f"{metric}/mean/SPLINCE/{strength:g}"] = ours.mean
        columns = ("lambda", "SAL", "LEACE", "SPLINCE", "SPLINCE - LEACE", "SPLINCE - SAL")
        rows = [(*row[:4], row[5], row[4]) for row in rows]
        tables.append(Table(f"{metric}, p = {p}, one strength for all", columns, tuple(rows)))
        least, most = (values[f"{metric}/LEACE/{s:g}"] for s in (min(STRENGTHS), max(STRENGTHS)))
        claims += [
            Claim(
                f"{metric}: with the weakest penalty SPLINCE and LEACE do not differ",
                abs(least) < 0.005,
                f"{least:+.4f}",
            ),
            Claim(f"{metric}: with a strong one SPLINCE is ahead", most > 0, f"{most:+.4f}"),
        ]
    return Findings(
        "Strength of the penalty", data, tables, claims, notes=[over(result)], values=values,
        figures={f"strengths_{e}": result.plot("strengths", reference=e) for e in ("LEACE", "SAL")},
    )  # fmt: skip
