"""Log-odds of "he" to "she" after a profession, as in the demo (paper, tab. profession_main)."""

from __future__ import annotations

import numpy as np

from splince_fast.evaluation.text_table import Table
from splince_fast.experiments._common import (
    Bounds,
    Claim,
    Findings,
    RunOptions,
    combine_verdicts,
    corrected_bounds,
    paper_table,
)
from splince_fast.experiments.dataset import Dataset
from splince_fast.experiments.demo import experiment, professions, table
from splince_fast.experiments.erasers import ERASERS

PAPER = {
    "Original": ("3.59", "15.71", "3.84", "20.2", "3.98", "19.02"),
    "SAL": ("0.80", "5.90", "0.84", "4.81", "0.87", "3.50"),
    "LEACE": ("0.85", "12.14", "0.88", "16.32", "0.88", "7.68"),
    "SPLINCE": ("0.79", "24.27", "0.81", "33.24", "0.82", "13.43"),
}
COLUMNS = (
    "exp(stereotype), exp(factual)", "Llama 2 7B", "", "Llama 2 13B", "", "Llama 3 8B", "",
)  # fmt: skip


def run(options: RunOptions) -> Findings:
    """Run the experiment on the language-model states that ship with the package."""
    source = professions.load()
    n = max(2, options.seeds or (3 if options.quick else 20))
    results = experiment.run(source, n_splits=n, progress=options.progress)
    stereotype, factual = (
        {m: table.odds_factor(results, m, field) for m in experiment.METHODS}
        for field in ("stereotype", "factual")
    )
    distance = {m: np.abs(results.column(m, "stereotype")) for m in experiment.METHODS}
    reductions = {
        e: corrected_bounds(distance["Original"] - distance[e], results.test_ratio) for e in ERASERS
    }
    factual_leads = [
        corrected_bounds(
            results.column(a, "factual") - results.column(b, "factual"), results.test_ratio
        )
        for a, b in (("SPLINCE", "LEACE"), ("LEACE", "SAL"))
    ]
    claims = [
        Claim(
            "every eraser brings the stereotype's coefficient nearer to 1",
            combine_verdicts([bounds.above() for bounds in reductions.values()]),
            ", ".join(f"{m} {factor.mean:.2f}" for m, factor in stereotype.items())
            + "; reduction of |log odds|: "
            + ", ".join(f"{e} {bounds}" for e, bounds in reductions.items()),
        ),
        Claim(
            "every eraser brings the stereotype's coefficient below 1",
            combine_verdicts([Bounds(*stereotype[e][1:]).below(1.0) for e in ERASERS]),
            "95 % intervals "
            + ", ".join(
                f"{e} {stereotype[e].low:.2f} to {stereotype[e].high:.2f}" for e in ERASERS
            ),
        ),
        Claim(
            "SPLINCE keeps more of the factual coefficient than LEACE, and LEACE more than SAL",
            combine_verdicts([bounds.above() for bounds in factual_leads]),
            f"{', '.join(f'{m} {factor.mean:.2f}' for m, factor in factual.items())}; SPLINCE "
            f"against LEACE p = {table.factual_test(results).p:.2g} (one-tailed), LEACE against "
            f"SAL {factual_leads[1]} of log odds",
        ),
    ]
    data = Dataset(
        "240 nouns in 20 templates (shipped)", source.activations, {}, None, source.model,
        source.licence,
    )  # fmt: skip
    values = {
        f"{name}/{method}": factors[method].mean
        for method in experiment.METHODS
        for name, factors in (("stereotype", stereotype), ("factual", factual))
    }
    results_table = Table(
        f"{n} random splits by family of nouns, mean and 95 % interval",
        ("method", "exp(stereotype)", "exp(factual)"),
        tuple((m, str(stereotype[m]), str(factual[m])) for m in experiment.METHODS),
        (table.paper_comparison(results),),
    )
    return Findings(
        "Professions", data, [results_table], claims,
        [paper_table("tab. profession_main", COLUMNS, PAPER)],
        notes=["splince-fast demo draws the figure and prints the full table"], values=values,
    )  # fmt: skip
