"""Outcomes as a table, as JSON and as the findings document."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence

from proofs_check._check import Outcome, Verdict
from proofs_check._run import SECTIONS

WIDTHS = (4, 42, 32, 20, 9, 6, 8, 6)
HEADINGS = (
    "no.", "statement", "convention", "verdict", "residual", "cases", "mutants", "s"
)  # fmt: skip


def residual(worst: float) -> str:
    """Worst residual over its tolerance, as the power of ten above it; 0 is an exact equality."""
    if worst == 0:
        return "exact"
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
        "residual: largest |residual| / tolerance (exact: equal as rational numbers); a mutant is "
        "a wrong formula under which the verdict must not come out.",
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


INTRODUCTION = """\
# What is true in the theory of SPLINCE, and what it means for you

Holstege, Ravfogel and Wouters, "Preserving Task-Relevant Information Under Linear Concept
Removal" (NeurIPS 2025, arXiv 2506.10703), propose SPLINCE: an eraser of a concept z that keeps the
covariance with a task y. This page goes through the paper's statements one by one. It is written
by `python -m proofs_check --markdown` from the evidence of that run{state}.

**In short.** The method is sound and Theorem 1 is right: the formula is the optimal eraser under
its constraints, in more generality than the paper claims, and its one assumption is exactly the
needed one. Theorem 2 is right under the hypothesis it names, a unique minimiser. Theorems 3 and 4,
which the authors themselves call an initial investigation, are about another map than the eraser:
they apply P to the head instead of to the features. For the eraser that one deploys, the order of
LEACE and SPLINCE behind an unregularised, well-fitted frozen head is the opposite. There is
nevertheless a range of heads for which SPLINCE wins, and it can be told from moments alone.

## Which eraser to choose

Compute rho first: the squared correlation of the best linear predictions of z and of y (the
library's report gives it). At rho = 0 SPLINCE and LEACE are the same map.

| what follows the eraser | what holds | choice |
|---|---|---|
| a head refitted without penalty, classes not separable, more rows than dimensions | same predictions for SPLINCE, LEACE and SAL (3.1-3.3) | any; LEACE changes the features least |
| a head refitted with a ridge penalty | whitened features: SPLINCE at lambda equals LEACE at lambda (1 - rho) (6.2); otherwise either can win (6.1, 6.2) | SPLINCE where the penalty is fixed and strong; no difference where it is tuned, whitened |
| n <= d, or classes separable after erasure | predictions depend on the range even without penalty (3.4) | compare on held-out data |
| a frozen least-squares head | same ranking; excess risk of SPLINCE is 1 / (1 - rho) that of LEACE (4.2) | LEACE, or SPLINCE with scores times 1 - rho |
| a frozen, well-fitted logistic head, Gaussian features | same ranking; log-loss of SPLINCE is larger (5.3) | LEACE |
| a frozen head shrunk by a factor g, or fitted with a penalty | SPLINCE has the smaller squared error iff g < 2 (1 - rho) / (2 - rho) (4.3) | compare g with the threshold in the report |
| a frozen head trained for something else (language models) | the sign of (q / H)(2 v - q - 2 H) decides (4.3) | measure q and v, then decide |
| class means, steering vectors, nearest centroids, mean log-odds per group | SPLINCE keeps them exactly, LEACE shifts them (4.4) | SPLINCE |

## How it was checked

Algebraic statements are checked in exact rational arithmetic on random problems, so their residual
is zero or the statement is wrong. Logistic and softmax heads are fitted to 40 digits with a
certificate that the minimiser exists; Gaussian integrals are computed by quadrature with a proven
error bound; nothing rests on simulation. The library is held against the exact results on the same
problems, with tolerances from a rounding analysis. Every check is repeated with wrong formulas put
in (mutants), and counts only if each of them changes the verdict.

"Holds with condition" means: confirmed where the added condition is met and refuted in cases where
it is not. "False as stated" means: refuted within the statement's own hypotheses.

Notation: S = Cov(x), Sz = Cov(x, z), Sy = Cov(x, y), C_ab = Sa^T S^+ Sb, E = I - P,
G = C_zz - C_zy C_yy^+ C_yz, H = C_yy - C_yz C_zz^+ C_zy, X = E_LEACE Sy. "Literal" applies P to
the head as the printed proofs of Theorems 3 and 4 do, "deployed" replaces x by Px.
"""


def findings(outcomes: Sequence[Outcome], *, seed: int, quick: bool) -> str:
    """The findings document."""
    good = all(o.reproduced for o in outcomes)
    state = f" (seed {seed}{', quick' if quick else ''}; "
    state += "every verdict was reproduced)" if good else "SOME VERDICTS WERE NOT REPRODUCED)"
    out = [INTRODUCTION.format(state=state), "## All verdicts", ""]
    out += ["| no. | statement | verdict | residual / tolerance | cases | mutants caught |"]
    out += ["|---|---|---|---|---|---|"]
    for o in outcomes:
        cells = _row(o)
        out.append(f"| {cells[0]} | {cells[1]} | {' | '.join(cells[3:7])} |")
    section = ""
    for o in outcomes:
        item = o.check
        if item.key.split(".")[0] != section:
            section = item.key.split(".")[0]
            out += ["", f"## {SECTIONS[section]}"]
        verdict = o.verdict if o.reproduced and o.verdict else "not reproduced"
        out += ["", f"### {item.key} {item.statement}", ""]
        out += [f"*{item.source}; {item.convention}.* **{str(verdict).capitalize()}.**", ""]
        out += [_filled(item.truth)]
        label = "Counterexample" if item.expected is not Verdict.HOLDS else "Figures"
        out += ["", *(_filled(f"- {label}: {text}", hang="  ") for text in o.examples)] * bool(
            o.examples
        )
        if item.meaning:
            out += ["", _filled(f"For the choice: {item.meaning}")]
        out += [f"\n**Not reproduced:** {problem}" for problem in o.problems]
    return "\n".join(out) + "\n"


def _filled(text: str, hang: str = "") -> str:
    """Wrapped to 100 columns; characters that Markdown would read are escaped."""
    for sign in "*_<":
        text = text.replace(sign, f"\\{sign}")
    return textwrap.fill(
        text, 100, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )
