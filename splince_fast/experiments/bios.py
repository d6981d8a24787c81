"""Bias in Bios: accuracy and worst group as task and concept come to go together.

Paper, section "Classification where the last layer is re-trained" (fig. classification). The
figure has no printed numbers; its statements are checked.
"""

from __future__ import annotations

import numpy as np

from splince_fast.evaluation import compare
from splince_fast.evaluation.result import Comparison
from splince_fast.experiments._common import (
    ERASERS,
    LEVELS,
    Claim,
    Findings,
    Options,
    ahead,
    by_seed,
    decided,
    eraser_table,
    head_table,
    in_words,
    limits,
    ratio_of,
    summary,
)
from splince_fast.experiments.dataset import Dataset
from splince_fast.experiments.datasets import load


def sweep(data: Dataset, options: Options, usual: int, *, levels: tuple[float, ...]) -> Comparison:
    """The association protocol on a data set."""
    return compare(
        data.X, task=data.labels["task"], concept=data.labels["concept"], erasers=ERASERS,
        association=(levels[0], levels[-1]) if options.quick else levels,
        aligned_class=data.aligned_class,
        sizes=data.sizes, n_seeds=options.n_seeds(usual), n_jobs=options.n_jobs,
        progress=options.progress,
    )  # fmt: skip


def report(title: str, data: Dataset, result: Comparison) -> Findings:
    """Tables at the strongest association, the figure, and what the paper says of it."""
    p = max(q for q in result.context.levels if q is not None)
    low = min(q for q in result.context.levels if q is not None)
    text = f"SPLINCE has the best {{}} with a retrained head at p = {p}"
    lead = {q: by_seed(result, "worst_group", "SPLINCE", "LEACE", p=q) for q in (low, p)}
    growth = [lead[p][s] - lead[low][s] for s in lead[p] if s in lead[low]]
    interval = limits(growth, ratio_of(result))
    claims = [
        ahead(result, "accuracy", "retrained", p, text.format("accuracy")),
        ahead(result, "worst_group", "retrained", p, text.format("worst group")),
        Claim(
            f"its lead over LEACE in the worst group is larger at p = {p} than at {low}",
            decided(*interval),
            f"{np.mean(growth):+.3f}, {in_words(*interval)}",
        ),
    ]
    tables = [head_table(result, head, p, f"p = {p}, {head} head") for head in result.context.heads]
    tables += [eraser_table(result, p, f"p = {p}, erasers")]
    tables += [result.table(metric, head="retrained") for metric in ("accuracy", "worst_group")]
    figures = {
        f"{data.name.split()[0]}_{metric}": result.plot("association", metric=metric)
        for metric in ("accuracy", "worst_group")
    }
    return Findings(
        title, data, tables, claims, figures=figures, values=summary(result),
        notes=[str(line) for line in (result.differences("worst_group", p=p),)],
    )  # fmt: skip


def run(options: Options) -> Findings:
    """Run the experiment."""
    data = load("bios", options.data)
    return report("Bias in Bios", data, sweep(data, options, 3, levels=LEVELS))
