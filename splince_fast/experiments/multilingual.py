"""Toxicity in three languages: a concept of three classes (paper, fig. classification)."""

from __future__ import annotations

from splince_fast.experiments._common import LEVELS, Findings, Options
from splince_fast.experiments.bios import report, sweep
from splince_fast.experiments.datasets import load


def run(options: Options) -> Findings:
    """Run the experiment."""
    data = load("multilingual", options.data)
    return report("Multilingual toxicity", data, sweep(data, options, 5, levels=LEVELS))
