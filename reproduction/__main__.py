"""Command line of the experiments."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from reproduction.data import load
from reproduction.experiments import EXPERIMENTS
from reproduction.findings import Findings, Options
from splince_fast import SplinceError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reproduction",
        description="Run an experiment of the paper and print its table beside the paper's.",
        epilog="\n".join(f"  {name:<13}{e.subject}" for name, e in EXPERIMENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", choices=[*EXPERIMENTS, "all"], metavar="NAME", help="see below, or all")
    add("--data", choices=("offline", "paper"), default="offline")
    add("--seeds", type=_positive_integer, help="number of seeds")
    add("--quick", action="store_true", help="the smallest setting that runs")
    add("--jobs", type=int, default=1, help="processes (default: 1)")
    add("-o", "--output", type=Path, metavar="FOLDER", help="folder for figures and JSON")
    return parser


def _positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is no positive number of seeds")
    return value


def run(name: str, options: Options, output: Path | None) -> Findings:
    """Run one experiment, print its findings, and write figures and a JSON file to `output`."""
    start = time.perf_counter()
    experiment = EXPERIMENTS[name]
    findings = experiment.run(options, *(load(data, options.data) for data in experiment.data))
    seconds = time.perf_counter() - start
    print(f"{name}: {experiment.subject}\n{findings}")
    if output is not None:
        for stem, draw in findings.figures.items():
            draw().savefig(output / f"{stem}.png", dpi=150)
        names = ", ".join(data.name for data in findings.data)
        content = {"name": name, "data": names, "values": findings.values}
        (output / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(f"\ntime    : {seconds:.1f} s\n", flush=True)
    return findings


def main(argv: list[str] | None = None) -> int:
    """Run the experiments named by the arguments, and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.output is not None:
        try:
            args.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # an invalid folder: stop before an experiment runs
            parser.error(f"argument -o/--output: {error}")
    options = Options(args.data, args.seeds, args.quick, args.jobs)
    status = 0
    for name in EXPERIMENTS if args.name == "all" else [args.name]:
        try:
            run(name, options, args.output)
        except ModuleNotFoundError as error:
            print(f'{name}: {error}; pip install "splince_fast[experiments]"', file=sys.stderr)
            status = 2
        except SplinceError as error:
            print(f"{name}: {error}", file=sys.stderr)
            # With "all", a missing data set does not change the exit status.
            status = status if args.name == "all" and isinstance(error, FileNotFoundError) else 2
    return status


if __name__ == "__main__":
    sys.exit(main())
