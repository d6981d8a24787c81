"""``splince-fast demo``: the paper's profession experiment."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from splince_fast._runtime.extras import require
from splince_fast.cli.paths import check_outputs

_DEFAULT_FIGURE = "splince-fast-demo.png"


def add(commands: Any) -> None:
    """Declare the command."""
    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="rerun the paper's profession experiment on activations of a language model",
        description="Erase occupational stereotypes from the states of a language model, keep "
        "factual gender, and see by which of them it still says he or she.",
    )
    demo.add_argument("--splits", type=int, default=20, help="random splits (default: 20)")
    demo.add_argument("--random-state", type=int, default=0, help="of the splits (default: 0)")
    figure = demo.add_mutually_exclusive_group()
    figure.add_argument(
        "--figure", metavar="PATH", help=f"where to draw it (default: {_DEFAULT_FIGURE})"
    )
    figure.add_argument("--no-figure", action="store_true", help="draw nothing")
    demo.add_argument("--json", metavar="PATH", help="write all figures there, too")
    demo.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the experiment twice, as the data are and as correlated as in the paper."""
    if args.figure is not None:
        require("matplotlib.figure", "demo")
    check_outputs({"--figure": args.figure, "--json": args.json}, force=True)
    from splince_fast.experiments.demo import experiment, professions, table

    data = professions.load()
    runs: list[experiment.Results] = []
    for correlation in (None, experiment.PAPER_CORRELATION):
        results = experiment.run(
            data,
            n_splits=args.splits,
            random_state=args.random_state,
            train_correlation=correlation,
            progress=True,
        )
        if not runs:
            print(table.heading(data, results))
        runs.append(results)
        print(f"\n{table.table(results)}\n{table.reading(results)}", flush=True)
    print(f"\n{table.notes(runs[-1])}")
    if args.json is not None:
        Path(args.json).write_text(json.dumps(table.to_dict(data, runs), indent=1) + "\n")
        print(f"all figures: {args.json}")
    if args.no_figure:
        return
    if args.figure is None and find_spec("matplotlib") is None:
        print('figure: not drawn; matplotlib comes with pip install "splince_fast[demo]"')
        return
    from splince_fast.experiments.demo.figure import draw

    path = Path(_DEFAULT_FIGURE if args.figure is None else args.figure)
    draw(data, runs, path)
    print(f"figure: {path}")
