"""Birds on land and water: erase the background, keep the bird (paper, fig. vision_proj)."""

from __future__ import annotations

from splince_fast.experiments._common import LEVELS, Findings, Options
from splince_fast.experiments.bios import report, sweep
from splince_fast.experiments.datasets import load


def run(options: Options) -> Findings:
    """Run the experiment; there is no stand-in, so only with ``--data paper``."""
    data = load("waterbirds", options.data)
    return report("Waterbirds", data, sweep(data, options, 5, levels=LEVELS))
