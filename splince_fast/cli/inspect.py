"""``splince-fast inspect``: an eraser or moments in a file; ``splince-fast doctor``: the setup."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.files import kind_of

if TYPE_CHECKING:
    from splince_fast.moments import Moments
    from splince_fast.projection import Eraser
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
    inspect.add_argument(
        "--json",
        action="store_true",
        help="print the report or the variables, and the shapes of all arrays, as one JSON object",
    )
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

    loaded: Moments | Eraser
    if kind_of(args.file) in ("moments", "folds"):
        loaded = Moments.load(args.file)
        facts = _moments_facts(loaded)
    else:
        loaded = load_eraser(args.file)
        report = loaded.report
        facts = {
            "method": loaded.method,
            "n_features": loaded.n_features,
            "rank": getattr(loaded, "rank", None),
            "report": None if report is None else report.to_dict(),
        }
    with safe_open(args.file, framework="numpy") as file:
        header = file.metadata()
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    file_info = {key: header[key] for key in ("kind", "format_version", "library_version")}
    if args.json:
        print(json.dumps({**file_info, "tensors": shapes, **facts}, indent=1))
        return
    print(
        f"{loaded!r}\n  format {header['format_version']}, written by {header['library']} "
        f"{header['library_version']}"
    )
    if not isinstance(loaded, Moments):
        if loaded.report is None:
            print("no report: the eraser was not fitted by a method")
            return
        print_summary(loaded.report)
        print(f"\n{loaded.report}")
        return
    print(f"  weight {loaded.weight:,.10g}")
    for variable in facts["variables"]:
        text = variable["kind"]
        if "classes" in variable:
            counts = variable["classes"]
            examples = ", ".join(f"{name!r}: {rows:,}" for name, rows in counts[:10])
            text += f" ({len(counts)}) {{{examples}{', ...' if len(counts) > 10 else ''}}}"
        name = variable["name"]
        print(f"  variable {tuple(name) if isinstance(name, list) else name!r}: {text}")


def print_summary(report: Report) -> None:
    """Print a report in words."""
    for line in report.explain().splitlines():
        print(textwrap.fill(line, 88, subsequent_indent="  ", break_long_words=False))


def _moments_facts(moments: Moments) -> dict[str, Any]:
    """Return rows, weight and variables (classes with their numbers of rows) in types of JSON."""
    variables = []
    for name, kind in moments.variables.items():
        entry: dict[str, object] = {
            "name": list(name) if isinstance(name, tuple) else name,
            "kind": kind,
        }
        if kind == "classes":
            counts = moments.class_counts(name)
            entry["classes"] = [
                [list(c) if isinstance(c, tuple) else c, int(n)] for c, n in counts.items()
            ]
        variables.append(entry)
    return {
        "n_rows": moments.n_rows,
        "weight": moments.weight,
        "n_features": moments.n_features,
        "variables": variables,
    }
