"""Erasers on all professions, at the data's own association with gender (paper, tab. bios_all)."""

from __future__ import annotations

from itertools import combinations

from splince_fast.evaluation.statistics import MIN_SEEDS
from splince_fast.experiments._common import (
    ERASERS,
    Bounds,
    Claim,
    Findings,
    RunOptions,
    combine_verdicts,
    compare_erasers,
    difference_bounds,
    eraser_table,
    head_table,
    means,
    paper_table,
)
from splince_fast.experiments.datasets import load

# Values of the paper in per cent: accuracy, mean accuracy per class and TPR gap of the frozen head,
# then of the retrained head.
PAPER = {
    "none": ("81.31", "65.52", "14.20", "81.55", "72.94", "14.24"),
    "SAL": ("78.35", "62.17", "13.26", "81.47", "72.30", "12.90"),
    "LEACE": ("81.07", "65.09", "12.12", "81.62", "72.74", "13.13"),
    "SPLINCE": ("81.11", "65.22", "12.36", "81.64", "73.08", "13.27"),
}
_COLUMNS = ("eraser", "frozen acc", "acc/class", "gap", "retrained acc", "acc/class", "gap")


def run(options: RunOptions) -> Findings:
    """Run the experiment, and return its findings."""
    data = load("bios_full", options.data)
    result = compare_erasers(data, options, 2, erasers=ERASERS, alphas=(1e-3,))

    def mean(metric: str, eraser: str, head: str) -> float:
        return result.mean(metric, eraser=eraser, head=head)

    def bounds(metric: str, eraser: str, reference: str, head: str) -> Bounds:
        return difference_bounds(result, metric, eraser, reference, head=head)

    accuracies = [mean("accuracy", e, "retrained") for e in ERASERS]
    pairs = [bounds("accuracy", a, b, "retrained") for a, b in combinations(ERASERS, 2)]
    gap_reductions = [bounds("tpr_gap", "none", e, "retrained") for e in ERASERS[1:]]
    sal_loss = bounds("accuracy", "none", "SAL", "frozen")
    leads = [bounds("accuracy", e, "SAL", "frozen") for e in ("LEACE", "SPLINCE")]
    frozen = {e: mean("accuracy", e, "frozen") for e in ERASERS}
    gaps = {e: mean("tpr_gap", e, "retrained") for e in ERASERS}
    test = "corrected t tests" if len(result.context.seeds) >= MIN_SEEDS else "no test"
    claims = [
        Claim(
            "with a retrained head the erasers' accuracies are alike (within a point)",
            combine_verdicts([pair.within(0.01) for pair in pairs]),
            f"within {100 * (max(accuracies) - min(accuracies)):.2f} points, {test}",
        ),
        Claim(
            "every eraser reduces the TPR gap of a retrained head",
            combine_verdicts([reduction.above() for reduction in gap_reductions]),
            ", ".join(f"{e} {gaps[e]:.3f}" for e in ERASERS) + f", {test}",
        ),
        Claim(
            "with a frozen head SAL loses more than two points of accuracy",
            sal_loss.above(0.02),
            f"{100 * (frozen['none'] - frozen['SAL']):.2f} points, {sal_loss}",
        ),
        Claim(
            "with a frozen head LEACE and SPLINCE lose less accuracy than SAL",
            combine_verdicts([lead.above() for lead in leads]),
            ", ".join(f"{e} {frozen[e]:.3f}" for e in ERASERS) + f", {test}",
        ),
    ]
    tables = [head_table(result, head, None, f"{head} head") for head in ("frozen", "retrained")]
    return Findings(
        "All professions", data, [*tables, eraser_table(result, None, "erasers")], claims,
        [paper_table("tab. bios_all, per cent", _COLUMNS, PAPER)],
        {"bios_full": result.plot("trade-off")},
        ["the worst-group accuracy can be 0 for every eraser, because some cells have few rows"],
        means(result),
    )  # fmt: skip
