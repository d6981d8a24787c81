"""Log-odds of he and she after a profession: the demonstration (paper, tab. profession_main)."""

from __future__ import annotations

import numpy as np

from splince_fast.evaluation._tables import Table
from splince_fast.experiments._common import (
    Claim,
    Findings,
    Options,
    all_of,
    decided,
    in_words,
    limits,
    paper_table,
    reverse,
)
from splince_fast.experiments.dataset import Dataset
from splince_fast.experiments.demo import experiment, professions, table

PAPER = {
    "Original": ("3.59", "15.71", "3.84", "20.2", "3.98", "19.02"),
    "SAL": ("0.80", "5.90", "0.84", "4.81", "0.87", "3.50"),
    "LEACE": ("0.85", "12.14", "0.88", "16.32", "0.88", "7.68"),
    "SPLINCE": ("0.79", "24.27", "0.81", "33.24", "0.82", "13.43"),
}
COLUMNS = (
    "exp(stereotype), exp(factual)", "Llama 2 7B", "", "Llama 2 13B", "", "Llama 3 8B", "",
)  # fmt: skip


def run(options: Options) -> Findings:
    """Run the experiment on the states that ship with the package."""
    source = professions.load()
    n = max(2, options.seeds or (3 if options.quick else 20))
    results = experiment.run(source, n_splits=n, progress=options.progress)
    found = {m: [table.exponents(results, m, f) for f in ("stereotype", "factual")]
             for m in experiment.METHODS}  # fmt: skip
    rows = [(m, *map(str, found[m])) for m in found]
    test = table.factual_test(results)
    erasers = list(experiment.ERASERS)
    stereo = {m: results.column(m, "stereotype") for m in found}
    factual = {m: results.column(m, "factual") for m in found}
    nearer = {
        m: limits(np.abs(stereo["Original"]) - np.abs(stereo[m]), results.test_ratio)
        for m in erasers
    }
    order = [
        limits(factual[a] - factual[b], results.test_ratio)
        for a, b in (("SPLINCE", "LEACE"), ("LEACE", "SAL"))
    ]
    claims = [
        Claim(
            "every eraser brings the stereotype's coefficient nearer to 1",
            all_of([decided(*nearer[m]) for m in erasers]),
            ", ".join(f"{m} {found[m][0].mean:.2f}" for m in found)
            + "; |log odds| less by: "
            + ", ".join(f"{m} {in_words(*nearer[m])}" for m in erasers),
        ),
        Claim(
            "and to less than 1",
            all_of([reverse(decided(found[m][0].low, found[m][0].high, 1.0)) for m in erasers]),
            "95 % intervals "
            + ", ".join(f"{m} {found[m][0].low:.2f} to {found[m][0].high:.2f}" for m in erasers),
        ),
        Claim(
            "SPLINCE keeps more of the factual one than LEACE, and LEACE more than SAL",
            all_of([decided(*pair) for pair in order]),
            f"{', '.join(f'{m} {found[m][1].mean:.2f}' for m in found)}; SPLINCE against LEACE "
            f"p = {test.p:.2g} (one-tailed), LEACE against SAL {in_words(*order[1])} of log odds",
        ),
    ]
    data = Dataset(
        "240 nouns in 20 templates (shipped)", source.activations, {}, None, source.model,
        source.licence,
    )  # fmt: skip
    values = {
        f"{name}/{m}": interval.mean
        for m in found
        for name, interval in zip(("stereotype", "factual"), found[m], strict=True)
    }
    ours = Table(
        f"{n} random splits by family of nouns, mean and 95 % interval",
        ("method", "exp(stereotype)", "exp(factual)"),
        tuple(rows),
        (table.reading(results),),
    )
    return Findings(
        "Professions", data, [ours], claims, [paper_table("tab. profession_main", COLUMNS, PAPER)],
        notes=["splince-fast demo draws the figure and prints the full table"], values=values,
    )  # fmt: skip
