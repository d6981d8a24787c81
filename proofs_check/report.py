"""Command line: run the checks, and print each verdict with the title of its statement."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from proofs_check._check import REGISTRY, Check, Outcome, run_check

MODULES = (
    "s1_eraser",
    "s2_lemmas",
    "s3_retrained_head",
    "s4_frozen_squared_error",
    "s5_frozen_log_loss",
    "s6_remarks",
    "s7_floating_point",
    "s8_beyond",
    "s8_labels",
)
FINDINGS = Path(__file__).with_name("FINDINGS.md")


class Statement(NamedTuple):
    """One entry of FINDINGS.md; ``source`` holds source and convention."""

    title: str
    source: str
    verdict: str
    text: str


def statements(document: str) -> dict[str, Statement]:
    """Return the entries of FINDINGS.md by number.

    An entry is ``### 1.2 title``, then a paragraph ``*source; convention.* **Verdict.**``, then
    its text, up to the next heading.
    """
    entry = re.compile(
        r"^### (\d+\.\d+) (.+)\n\n\*(.+)\.\* \*\*(.+)\.\*\*\n\n((?:(?!#).*\n)+)", re.MULTILINE
    )
    return {
        key: Statement(title, source, verdict.lower(), text.strip())
        for key, title, source, verdict, text in entry.findall(document)
    }


def checks(keys: Sequence[str] = ()) -> list[Check]:
    """Return the registered checks in order of number; ``keys`` selects statements or sections.

    Raises
    ------
    ValueError
        A key is neither a statement nor a section.
    """
    for name in MODULES:
        import_module(f"proofs_check.{name}")
    everything = [
        REGISTRY[key] for key in sorted(REGISTRY, key=lambda k: [*map(int, k.split("."))])
    ]
    unknown = [k for k in keys if not any(f"{c.key}.".startswith(f"{k}.") for c in everything)]
    if unknown:
        raise ValueError(f"no statement is numbered {', '.join(unknown)}")
    prefixes = tuple(f"{key}." for key in keys) or ("",)
    return [c for c in everything if f"{c.key}.".startswith(prefixes)]


def residual(worst: float) -> str:
    """Format the largest |residual| / tolerance by an upper bound, the next power of ten."""
    if worst == 0:
        return "0"
    return f"< 1e{math.floor(math.log10(worst)) + 1}" if math.isfinite(worst) else "wrong"


def table(outcomes: Sequence[Outcome], entries: dict[str, Statement]) -> str:
    """Return a plain-text table; the reasons follow a verdict that was not reproduced."""
    layout = "{:<4} {:<29} {:>8} {:>6} {:>8} {:>6}  {}"
    lines = [layout.format("no.", "verdict", "residual", "cases", "mutants", "s", "statement")]
    for o in outcomes:
        failure = "NOT REPRODUCED" if o.ran else "COULD NOT RUN"
        verdict = str(o.verdict) if o.reproduced else failure
        mutants = f"{len(o.caught)}/{len(o.check.mutants)}"
        lines.append(
            layout.format(
                o.check.key,
                verdict,
                residual(o.worst_ratio),
                o.cases,
                mutants,
                f"{o.seconds:.1f}",
                entries[o.check.key].title,
            ).rstrip()
        )
        lines += [f"     ! {problem}" for problem in o.problems]
    n_reproduced = sum(o.reproduced for o in outcomes)
    caught = sum(len(o.caught) for o in outcomes)
    planted = sum(len(o.check.mutants) for o in outcomes)
    lines += [
        "",
        f"{n_reproduced} of {len(outcomes)} verdicts reproduced, "
        f"{caught} of {planted} mutants caught, "
        f"{sum(o.cases for o in outcomes):,} cases, {sum(o.seconds for o in outcomes):.0f} s.",
        "residual: largest |residual| / tolerance; 0 where equalities are exact and inequalities",
        "hold beyond their error bounds. A mutant is a wrong formula that the check must reject.",
    ]
    return "\n".join(lines)


def as_json(
    outcomes: Sequence[Outcome], entries: dict[str, Statement], *, seed: int, quick: bool
) -> str:
    """Return evidence and text of every statement as JSON."""
    rows = [
        {
            "key": o.check.key,
            **entries[o.check.key]._asdict(),
            "expected": o.check.expected,
            "verdict": o.verdict,
            "reproduced": o.reproduced,
            "uses_library": not o.check.paper,
            "worst_residual_over_tolerance": o.worst_ratio
            if math.isfinite(o.worst_ratio)
            else None,
            "cases": o.cases,
            "mutants": list(o.check.mutants),
            "caught": list(o.caught),
            "figures": list(o.figures),
            "seconds": round(o.seconds, 3),
            "problems": list(o.problems),
        }
        for o in outcomes
    ]
    all_reproduced = all(o.reproduced for o in outcomes)
    return json.dumps(
        {"reproduced": all_reproduced, "seed": seed, "quick": quick, "checks": rows}, indent=2
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, print the results, and return 0 if every verdict was reproduced, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs_check",
        description="Check the theory of SPLINCE statement by statement.",
    )
    parser.add_argument("numbers", nargs="*", help="statements or sections, such as 4 or 1.2")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases; without numbers, only the statements that call the library",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random problems")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        selected = checks(options.numbers)
    except ValueError as error:
        parser.error(str(error))
    if options.quick and not options.numbers:
        selected = [item for item in selected if not item.paper]
    entries = statements(FINDINGS.read_text(encoding="utf-8"))

    outcomes = []
    for number, item in enumerate(selected):
        if sys.stderr.isatty():
            line = f"{number}/{len(selected)} {item.key} {entries[item.key].title}"
            print(f"\r\x1b[2K{line[:78]}", end="", file=sys.stderr, flush=True)
        outcomes.append(run_check(item, seed=options.seed, quick=options.quick))
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    if options.json:
        print(as_json(outcomes, entries, seed=options.seed, quick=options.quick))
    else:
        print(table(outcomes, entries))
    return 0 if all(outcome.reproduced for outcome in outcomes) else 1
