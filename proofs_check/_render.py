"""Outcomes as a table, as JSON and as the findings document."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence

from proofs_check._check import Outcome, Verdict
from proofs_check._guide import GUIDE, INTRODUCTION, METHOD
from proofs_check._run import SECTIONS

WIDTHS = (4, 42, 32, 20, 9, 6, 8, 6)
HEADINGS = (
    "no.", "statement", "convention", "verdict", "residual", "cases", "mutants", "s"
)  # fmt: skip


def residual(worst: float) -> str:
    """Worst residual over its tolerance, as the power of ten above it."""
    if worst == 0:
        return "0"
    return f"< 1e{math.floor(math.log10(worst)) + 1}" if math.isfinite(worst) else "wrong"


def _row(outcome: Outcome) -> tuple[str, ...]:
    item = outcome.check
    return (
        item.key,
        item.statement,
        item.convention,
        str(outcome.verdict or "NOT REPRODUCED") if outcome.reproduced else "NOT REPRODUCED",
        residual(outcome.worst),
        str(outcome.cases),
        f"{len(outcome.caught)}/{len(item.mutants)}",
        f"{outcome.seconds:.1f}",
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """Plain-text table; a row that was not reproduced is followed by the reasons."""
    lines = []

    def add(cells: Sequence[str]) -> None:
        wrapped = [textwrap.wrap(c, w) or [""] for c, w in zip(cells, WIDTHS, strict=True)]
        for i in range(max(map(len, wrapped))):
            parts = [w[i] if i < len(w) else "" for w in wrapped]
            line = "  ".join(p.ljust(n) for p, n in zip(parts, WIDTHS, strict=True))
            lines.append(line.rstrip())

    add(HEADINGS)
    section = ""
    for outcome in outcomes:
        if outcome.check.key.split(".")[0] != section:
            section = outcome.check.key.split(".")[0]
            lines += ["", SECTIONS[section], "-" * len(SECTIONS[section])]
        add(_row(outcome))
        lines += [f"      ! {problem}" for problem in outcome.problems]
    good = sum(o.reproduced for o in outcomes)
    mutants = sum(len(o.check.mutants) for o in outcomes)
    caught = sum(len(o.caught) for o in outcomes)
    lines += [
        "",
        f"{good} of {len(outcomes)} verdicts reproduced, {caught} of {mutants} mutants caught, "
        f"{sum(o.cases for o in outcomes):,} cases, {sum(o.seconds for o in outcomes):.0f} s.",
        "residual: largest |residual| / tolerance; 0 where equalities are exact and inequalities",
        "hold beyond their error bounds. A mutant is a wrong formula that the check must reject.",
    ]
    return "\n".join(lines)


def as_json(outcomes: Sequence[Outcome], *, seed: int, quick: bool) -> str:
    """Everything the table and the findings hold, for machines."""
    rows = [
        {
            "key": o.check.key,
            "statement": o.check.statement,
            "source": o.check.source,
            "convention": o.check.convention,
            "expected": o.check.expected,
            "verdict": o.verdict,
            "reproduced": o.reproduced,
            "worst_residual_over_tolerance": o.worst if math.isfinite(o.worst) else None,
            "cases": o.cases,
            "mutants": list(o.check.mutants),
            "caught": list(o.caught),
            "seconds": round(o.seconds, 3),
            "true_form": o.check.truth,
            "meaning": o.check.meaning,
            "examples": list(o.examples),
            "problems": list(o.problems),
        }
        for o in outcomes
    ]
    whole = {
        "reproduced": all(o.reproduced for o in outcomes),
        "seed": seed,
        "quick": quick,
        "checks": rows,
    }
    return json.dumps(whole, indent=2)


def findings(outcomes: Sequence[Outcome], *, seed: int, quick: bool) -> str:
    """The findings document: one paragraph per line, so that no wrapped line starts a list."""
    good = all(o.reproduced for o in outcomes)
    state = "every verdict was reproduced" if good else "SOME VERDICTS WERE NOT REPRODUCED"
    out = [INTRODUCTION.format(run=f"seed {seed}{', quick' if quick else ''}; {state}")]
    out += ["| what follows the eraser | what holds | choice |", "|---|---|---|"]
    out += [_cells(row) for row in GUIDE]
    out += ["", METHOD, "## All verdicts", ""]
    out += ["| no. | statement | verdict | residual / tolerance | cases | mutants caught |"]
    out += ["|---|---|---|---|---|---|"]
    out += [_cells([*_row(o)[:2], *_row(o)[3:7]]) for o in outcomes]
    section = ""
    for o in outcomes:
        item = o.check
        if item.key.split(".")[0] != section:
            section = item.key.split(".")[0]
            out += ["", f"## {SECTIONS[section]}"]
        verdict = str(o.verdict) if o.reproduced else "not reproduced"
        label = "Counterexample" if item.expected is Verdict.FALSE else "Example"
        out += ["", f"### {item.key} {item.statement}", ""]
        out += [f"*{item.source}; {item.convention}.* **{verdict.capitalize()}.**", "", item.truth]
        if o.examples:
            out += ["", *(f"- {label}: {text}" for text in o.examples)]
        if item.meaning:
            out += ["", f"What it means: {item.meaning}"]
        out += [f"\n**Not reproduced:** {problem}" for problem in o.problems]
    return "\n".join(out) + "\n"


def _cells(cells: Sequence[str]) -> str:
    """One row of a Markdown table; bars inside a cell are escaped."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
