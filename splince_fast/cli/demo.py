"""``splince-fast demo``: the paper's profession experiment."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from splince_fast._runtime.arguments import require
from splince_fast.cli.options import check_outputs

_DEFAULT_FIGURE = "splince-fast-demo.png"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments to the parser."""
    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="run the paper's profession experiment on data in the package (15 seconds)",
        description="Erase the stereotype of occupations from the hidden states of SmolLM2, keep "
        "factual gender, and print how much the odds of 'he' to 'she' depend on each, for SAL, "
        "LEACE and SPLINCE. Needs no network.",
    )
    add = demo.add_argument
    add("--splits", type=int, default=20, metavar="N", help="number of random splits (default: 20)")
    add("--random-state", type=int, default=0, metavar="N", help="seed of the splits (default: 0)")
    add("--json", metavar="PATH", help="also write all numbers to a JSON file")
    add = demo.add_mutually_exclusive_group().add_argument
    add("--figure", metavar="PATH", help=f"file of the figure (default: {_DEFAULT_FIGURE})")
    add("--no-figure", action="store_true", help="write no figure")
    demo.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the experiment on all training prompts, and on prompts with the paper's correlation."""
    if args.figure is not None:
        require("matplotlib.figure", "demo")
    check_outputs({"--figure": args.figure, "--json": args.json}, force=True)
    from splince_fast.demo import experiment, table
    from splince_fast.demo.data import load

    data = load()
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
        print(f"\n{table.table(results)}\n{table.paper_comparison(results)}", flush=True)
    print(f"\n{table.notes(runs[-1])}")
    if args.json is not None:
        Path(args.json).write_text(json.dumps(table.to_dict(data, runs), indent=1) + "\n")
        print(f"numbers: {args.json}")
    if args.no_figure:
        return
    if args.figure is None and find_spec("matplotlib") is None:
        print('figure: not written; matplotlib comes with pip install "splince_fast[demo]"')
        return
    from splince_fast.demo.figure import draw

    path = Path(_DEFAULT_FIGURE if args.figure is None else args.figure)
    draw(data, runs, path)
    print(f"figure: {path}")
