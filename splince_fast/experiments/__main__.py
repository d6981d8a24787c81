"""Command line of the experiments."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from splince_fast.exceptions import SplinceError
from splince_fast.experiments import (
    NAMES,
    alphas,
    association,
    balanced_heads,
    bios_full,
    covariance,
    images,
    layers,
    professions,
    winobias,
)
from splince_fast.experiments._common import Findings, RunOptions

EXPERIMENTS = {
    "bios": association.bios,
    "bios_full": bios_full.run,
    "multilingual": association.multilingual,
    "alphas": alphas.run,
    "covariance": covariance.run,
    "professions": professions.run,
    "winobias": winobias.run,
    "layers": layers.run,
    "images": images.run,
    "nlp_ood": balanced_heads.text,
    "vision_ood": balanced_heads.vision,
    "waterbirds": association.waterbirds,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m splince_fast.experiments",
        description="Run an experiment of the paper and print its table beside the paper's.",
        epilog="\n".join(f"  {name:<13}{text}" for name, text in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", choices=[*NAMES, "all"], metavar="NAME", help="see below, or all")
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


def run(name: str, options: RunOptions, output: Path | None) -> Findings:
    """Run one experiment, print its findings, and write figures and a JSON file to `output`."""
    start = time.perf_counter()
    findings = EXPERIMENTS[name](options)
    seconds = time.perf_counter() - start
    print(findings)
    if output is not None:
        for stem, figure in findings.figures.items():
            figure.savefig(output / f"{stem}.png", dpi=150)
        content = {"name": name, "data": findings.data.name, "values": findings.values}
        (output / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(f"\ntime    : {seconds:.1f} s{_peak_memory()}\n")
    return findings


def _peak_memory() -> str:
    """Return a text with the peak resident memory of the process; an empty text on Windows."""
    try:
        import resource
    except ImportError:
        return ""
    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes on macOS, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return f", at most {peak:.2f} GiB resident"


def main(argv: list[str] | None = None) -> int:
    """Run the experiments named by the arguments, and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.output is not None:
        try:
            args.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # an invalid folder: stop before an experiment runs
            parser.error(f"argument -o/--output: {error}")
    options = RunOptions(args.data, args.seeds, args.quick, args.jobs)
    status = 0
    for name in NAMES if args.name == "all" else [args.name]:
        try:
            run(name, options, args.output)
        except SplinceError as error:
            print(f"{name}: {error}", file=sys.stderr)
            # With "all", a missing data set does not change the exit status.
            status = status if args.name == "all" and isinstance(error, FileNotFoundError) else 2
    return status


if __name__ == "__main__":
    sys.exit(main())
