"""Accuracy and worst-group accuracy at increasing association of task and concept.

Paper, section "Classification where the last layer is re-trained" (figs. classification and
vision_proj). These figures print no values, so the statements of the text are tested instead.
"""

from __future__ import annotations

import numpy as np

from splince_fast.evaluation.result import Comparison
from splince_fast.experiments._common import (
    ERASERS,
    LEVELS,
    Claim,
    Findings,
    RunOptions,
    best_claim,
    compare_erasers,
    corrected_bounds,
    eraser_table,
    head_table,
    means,
    seed_differences,
)
from splince_fast.experiments.dataset import Dataset
from splince_fast.experiments.datasets import load


def compare_levels(
    data: Dataset, options: RunOptions, n_seeds: int, levels: tuple[float, ...] = LEVELS
) -> Comparison:
    """Compare the erasers at several levels of association."""
    association = (levels[0], levels[-1]) if options.quick else levels
    return compare_erasers(data, options, n_seeds, erasers=ERASERS, association=association)


def findings(title: str, data: Dataset, result: Comparison) -> Findings:
    """Return tables, figures, and tests of the paper's claims at the strongest association."""
    levels = [level for level in result.context.levels if level is not None]
    low, p = min(levels), max(levels)
    text = f"SPLINCE has the best {{}} with a retrained head at p = {p}"
    lead = {q: seed_differences(result, "worst_group", "SPLINCE", "LEACE", p=q) for q in (low, p)}
    growth = [lead[p][s] - lead[low][s] for s in lead[p] if s in lead[low]]
    bounds = corrected_bounds(growth, result.test_ratio(p))
    claims = [
        best_claim(result, "accuracy", "retrained", p, text.format("accuracy")),
        best_claim(result, "worst_group", "retrained", p, text.format("worst group")),
        Claim(
            f"SPLINCE's lead over LEACE in the worst group is larger at p = {p} than at {low}",
            bounds.above(),
            f"{np.mean(growth):+.3f}, {bounds}",
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
        title, data, tables, claims, figures=figures, values=means(result),
        notes=[str(result.differences("worst_group", p=p))],
    )  # fmt: skip


def bios(options: RunOptions) -> Findings:
    """Run the experiment on biographies."""
    data = load("bios", options.data)
    return findings("Bias in Bios", data, compare_levels(data, options, 3))


def multilingual(options: RunOptions) -> Findings:
    """Run the experiment on toxicity in three languages: a concept of three classes."""
    data = load("multilingual", options.data)
    return findings("Multilingual toxicity", data, compare_levels(data, options, 5))


def waterbirds(options: RunOptions) -> Findings:
    """Run the experiment on Waterbirds; the concept is the background of the bird.

    The data set has no offline stand-in: use ``--data paper``.
    """
    data = load("waterbirds", options.data)
    return findings("Waterbirds", data, compare_levels(data, options, 5))
