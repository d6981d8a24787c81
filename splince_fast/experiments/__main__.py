"""The command line of the experiments."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from importlib import import_module
from pathlib import Path

from splince_fast.exceptions import SplinceError
from splince_fast.experiments import NAMES
from splince_fast.experiments._common import Findings, Options


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        prog="python -m splince_fast.experiments",
        description="Run an experiment of the paper and print its table beside the paper's.",
        epilog="\n".join(f"  {name:<13}{what}" for name, what in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("name", choices=[*NAMES, "all"], metavar="NAME", help="see below, or all")
    made.add_argument("--data", choices=("offline", "paper"), default="offline")
    made.add_argument("--seeds", type=_positive, help="number of seeds")
    made.add_argument("--quick", action="store_true", help="the smallest setting that runs")
    made.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    made.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="figures and JSON go here"
    )
    return made


def _positive(text: str) -> int:
    """A positive number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is no positive number of seeds")
    return value


def run(name: str, options: Options, output: Path | None) -> Findings:
    """Run one experiment, print it, write its files."""
    started = time.perf_counter()
    found: Findings = import_module(f"splince_fast.experiments.{name}").run(options)
    seconds = time.perf_counter() - started
    print(found)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for stem, figure in found.figures.items():
            figure.savefig(output / f"{stem}.png", dpi=150)
        text = json.dumps({"name": name, "data": found.data.name, "values": found.values}, indent=1)
        (output / f"{name}.json").write_text(text, encoding="utf-8")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\ntime    : {seconds:.1f} s, at most {peak:.2f} GB resident\n")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run and return the exit status."""
    given = parser().parse_args(arguments)
    options = Options(given.data, given.seeds, given.quick, given.jobs)
    status = 0
    for name in NAMES if given.name == "all" else [given.name]:
        try:
            run(name, options, given.output)
        except SplinceError as error:
            print(f"{name}: {error}", file=sys.stderr)
            # In a run of all, a set that is not here is told and passed over.
            status = status if given.name == "all" and isinstance(error, FileNotFoundError) else 2
    return status


if __name__ == "__main__":
    sys.exit(main())
