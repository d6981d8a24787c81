"""``splince-fast inspect``: an eraser or moments in a file; ``splince-fast doctor``: the setup."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.files import kind_of

if TYPE_CHECKING:
    from splince_fast.report import Report


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands and their arguments to the parser."""
    inspect = commands.add_parser(
        "inspect",
        allow_abbrev=False,
        help="print the report of an eraser, or the contents of a file of moments",
        description="Print the report of an eraser in words and as a table, or the rows and "
        "variables of a file of moments.",
    )
    inspect.add_argument("file", metavar="FILE", help="an eraser, moments or a checkpoint")
    inspect.add_argument("--json", action="store_true",
        help="print the report or the variables, and the shapes of all arrays, as one JSON "
        "object")  # fmt: skip
    inspect.set_defaults(run=run)
    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="print versions, BLAS, speed and advice",
        description="Print the versions of the package and its dependencies, the BLAS and the "
        "instruction set in use, two measured speeds, and advice for a faster setup. Add the "
        "output to a bug report.",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    from splince_fast.config import show_config

    print(show_config())


def run(args: argparse.Namespace) -> None:
    """Print the version of the file's format, and the eraser's report or the moments' variables."""
    from safetensors import safe_open

    from splince_fast.conditional import load_eraser
    from splince_fast.moments import Moments

    is_moments = kind_of(args.file) in ("moments", "folds")
    loaded: Any = Moments.load(args.file) if is_moments else load_eraser(args.file)
    with safe_open(args.file, framework="numpy") as file:
        header = file.metadata()
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    report = None if is_moments else loaded.report
    if args.json:
        facts = {key: header[key] for key in ("kind", "format_version", "library_version")}
        names = ("n_rows", "weight") if is_moments else ("method", "rank")
        facts |= {name: getattr(loaded, name, None) for name in ("n_features", *names)}
        if is_moments:
            facts["variables"] = [
                {"name": name, "kind": kind} | ({"classes": list(loaded.class_counts(name).items())}
                                                if kind == "classes" else {})
                for name, kind in loaded.variables.items()
            ]  # fmt: skip
        else:
            facts["report"] = None if report is None else report.to_dict()
        print(json.dumps({**facts, "tensors": shapes}, indent=1))
        return
    print(
        f"{loaded!r}\n  format {header['format_version']}, written by {header['library']} "
        f"{header['library_version']}"
    )
    if report is not None:
        print_summary(report)
        print(f"\n{report}")
    elif not is_moments:
        print("no report: the eraser was not fitted by a method")
    else:
        print(f"  weight {loaded.weight:,.10g}")
        for name, kind in loaded.variables.items():
            counts = list(loaded.class_counts(name).items()) if kind == "classes" else []
            shown = [f"{c!r}: {n:,}" for c, n in counts[:10]] + ["..."] * (len(counts) > 10)
            text = f" ({len(counts)}) {{{', '.join(shown)}}}" if counts else ""
            print(f"  variable {name!r}: {kind}{text}")


def print_summary(report: Report) -> None:
    """Print a report in words."""
    for line in report.explain().splitlines():
        print(textwrap.fill(line, 88, subsequent_indent="  ", break_long_words=False))
