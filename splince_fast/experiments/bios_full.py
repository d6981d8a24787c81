"""All professions at once, on their natural split (paper, tab. bios_all)."""

from __future__ import annotations

from splince_fast.evaluation import compare
from splince_fast.experiments._common import (
    ERASERS,
    Claim,
    Findings,
    Options,
    eraser_table,
    head_table,
    paper_table,
    summary,
)
from splince_fast.experiments.datasets import load

# Not retrained: accuracy, accuracy per class, TPR gap; retrained: the same; per cent.
PAPER = {
    "none": ("81.31", "65.52", "14.20", "81.55", "72.94", "14.24"),
    "SAL": ("78.35", "62.17", "13.26", "81.47", "72.30", "12.90"),
    "LEACE": ("81.07", "65.09", "12.12", "81.62", "72.74", "13.13"),
    "SPLINCE": ("81.11", "65.22", "12.36", "81.64", "73.08", "13.27"),
}
_COLUMNS = ("eraser", "frozen acc", "acc/class", "gap", "retrained acc", "acc/class", "gap")


def run(options: Options) -> Findings:
    """Run the experiment."""
    data = load("bios_full", options.data)
    result = compare(
        data.X, task=data.labels["task"], concept=data.labels["concept"], erasers=ERASERS,
        strengths=(1e-3,), n_seeds=options.n_seeds(2), n_jobs=options.n_jobs,
        progress=options.progress,
    )  # fmt: skip

    def mean(metric: str, eraser: str, head: str) -> float:
        return result.mean(metric, eraser=eraser, head=head)

    spread = [mean("accuracy", e, "retrained") for e in ERASERS]
    frozen = {e: mean("accuracy", e, "frozen") for e in ERASERS}
    gaps = {e: mean("tpr_gap", e, "retrained") for e in ERASERS}
    claims = [
        Claim(
            "with a retrained head the erasers' accuracies are alike (within a point)",
            max(spread) - min(spread) < 0.01,
            f"within {100 * (max(spread) - min(spread)):.2f} points",
        ),
        Claim(
            "every eraser makes the gap smaller",
            all(gaps[e] < gaps["none"] for e in ERASERS[1:]),
            ", ".join(f"{e} {gaps[e]:.3f}" for e in ERASERS),
        ),
        Claim(
            "with a frozen head SAL loses more than two points of accuracy",
            frozen["none"] - frozen["SAL"] > 0.02,
            f"{100 * (frozen['none'] - frozen['SAL']):.2f} points",
        ),
        Claim(
            "and LEACE and SPLINCE lose less than SAL",
            min(frozen["LEACE"], frozen["SPLINCE"]) > frozen["SAL"],
            ", ".join(f"{e} {frozen[e]:.3f}" for e in ERASERS),
        ),
    ]
    tables = [head_table(result, head, None, f"{head} head") for head in ("frozen", "retrained")]
    return Findings(
        "All professions", data, [*tables, eraser_table(result, None, "erasers")], claims,
        [paper_table("tab. bios_all, per cent", _COLUMNS, PAPER)],
        {"bios_full": result.plot("leakage")},
        ["the worst of all cells has accuracy 0 for every eraser where cells are small"],
        summary(result),
    )  # fmt: skip
