"""Findings of an experiment: tables, and claims of the paper with the tests that decide them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import stats

from reproduction.data import Dataset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_SEEDS = 3  # smallest number of seeds for a test or an interval
LEVEL = 0.05
_MAX_SEEDS = 200  # where more seeds would be needed, the rows are too few


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command."""

    data: str = "offline"  # "offline" or "paper"
    seeds: int | None = None  # None: the default of the experiment
    quick: bool = False  # the smallest settings with which every step still runs
    n_jobs: int = 1

    def n_seeds(self, default: int) -> int:
        """Return `seeds` if it is set; otherwise 1 for a quick run, else `default`."""
        return self.seeds if self.seeds is not None else (1 if self.quick else default)


class Part(NamedTuple):
    """Test of one part of a claim."""

    holds: bool  # whether the estimate agrees with the claim
    p: float  # two-sided p value; NaN without a test
    # p value at another number of seeds, at the same mean and deviation; None without seeds.
    p_of: Callable[[int], float] | None = None


def judge(parts: Sequence[Part]) -> bool | None:
    """Return True if every part holds, False if one does not, None if the tests do not decide.

    A conjunction holds if each test is significant by itself. It fails if one of its parts fails:
    the p values of all parts are adjusted by Holm's method.
    """
    if all(part.holds and part.p < LEVEL for part in parts):
        return True
    adjusted = holm([part.p for part in parts])
    pairs = zip(parts, adjusted, strict=True)
    return False if any(not part.holds and p < LEVEL for part, p in pairs) else None


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper, the results, and the tests of its parts, all of which must hold."""

    text: str
    evidence: str
    parts: Sequence[Part]

    @property
    def agrees(self) -> bool | None:
        """Whether the results agree with the statement; None if it is not decided."""
        return judge(self.parts)

    @property
    def seeds(self) -> int | None:
        """Smallest number of seeds that would decide the claim, if means and deviations stay."""
        for n in range(MIN_SEEDS, _MAX_SEEDS + 1):
            parts = [part._replace(p=part.p_of(n)) for part in self.parts if part.p_of]
            if len(parts) == len(self.parts) and judge(parts) is not None:
                return n
        return None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for multiple tests by Holm's method; NaN counts as 1."""
    p = np.nan_to_num(np.asarray(p_values, dtype=np.float64), nan=1.0)
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    return [float(value) for value in np.minimum(adjusted, 1.0)]


def above(values: Iterable[float], threshold: float, ratio: float) -> Part:
    """Test whether the mean of `values`, one per seed, is above a threshold.

    The test is the corrected resampled t-test (Nadeau and Bengio, Machine Learning 52, 2003), since
    the splits of one data set share rows; `ratio` is n_test / n_train.
    """
    excess = np.array([*values]) - threshold
    n, mean = len(excess), float(excess.mean())
    if n < MIN_SEEDS:
        return Part(mean > 0, math.nan, lambda n: 0.0)
    deviation = float(excess.std(ddof=1))

    def p_value(n: int) -> float:
        if deviation == 0:  # of few test rows: the variance is not known
            return math.nan
        t = mean / deviation / math.sqrt(1 / n + ratio)
        return 2 * float(stats.t.sf(abs(t), n - 1))

    return Part(mean > 0, p_value(n), p_value)


def below(values: Iterable[float], threshold: float, ratio: float) -> Part:
    """Test whether the mean of `values` is below a threshold; see :func:`above`."""
    return above([-value for value in values], -threshold, ratio)


def exactly(holds: bool) -> list[Part]:
    """Return the part of a claim that holds or fails without an error of sampling."""
    return [Part(holds, 0.0)]


def interval(values: Iterable[float], ratio: float) -> str:
    """Return the 95 % interval of the test of :func:`above` as a text."""
    array = np.array([*values])
    n = len(array)
    if n < MIN_SEEDS or not array.std():
        return "no test"
    half = stats.t.ppf(0.975, n - 1) * array.std(ddof=1) * math.sqrt(1 / n + ratio)
    return f"95 % interval {array.mean() - half:+.3f} to {array.mean() + half:+.3f}"


def number(value: float) -> str:
    """Format a number with three digits, without the zero before the point."""
    text = f"{value:.3f}"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text


def cell(values: float | Iterable[float]) -> str:
    """Format one value, or the mean of values by seed with half a 95 % t interval."""
    array = np.atleast_1d([*values] if isinstance(values, Iterable) else values)
    if len(array) < MIN_SEEDS:
        return number(float(array.mean()))
    half = stats.t.ppf(0.975, len(array) - 1) * stats.sem(array)
    return f"{number(float(array.mean()))} ±{number(float(half))}"


def interval_note(n_seeds: int) -> str:
    """Return the definition of the intervals in a table."""
    if n_seeds < MIN_SEEDS:
        return f"{n_seeds} seed{'s' if n_seeds > 1 else ''}, no interval"
    return f"± is half a 95 % interval over {n_seeds} resamplings of one data set"


def table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table as text; the keys of `rows` are the first column."""
    lines = [tuple(columns), *((name, *cells) for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [title]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


@dataclass(slots=True)
class Findings:
    """Results of an experiment."""

    data: Sequence[Dataset]
    tables: list[str]  # those of the results, then those of the paper
    claims: list[Claim]
    notes: list[str] = field(default_factory=list)
    # Programs that draw figures, by file name without suffix.
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)  # for tests and the JSON file

    def verdicts(self) -> str:
        """Return the claims by verdict, and the seeds that would decide the undecided ones."""
        lines = []
        for heading, verdict in (("agrees", True), ("differs", False), ("not decided", None)):
            claims = [f"{c.text} ({c.evidence})" for c in self.claims if c.agrees is verdict]
            lines.append(f"{heading:<8}: {'; '.join(claims) or 'nothing'}")
        open_claims = [claim for claim in self.claims if claim.agrees is None]
        if open_claims:
            lines.append(f"seeds   : {_seeds([claim.seeds for claim in open_claims])}")
        return "\n".join(lines)

    def __str__(self) -> str:
        head = "\n".join(
            f"data    : {data.name}; {data.provenance}\nlicence : {data.licence}"
            for data in self.data
        )
        parts = [head, *self.tables, self.verdicts()]
        if self.notes:
            parts.append("\n".join(f"note    : {text}" for text in self.notes))
        return "\n\n".join(parts)


def _seeds(needed: list[int | None]) -> str:
    """Return the seeds that would decide the claims that are not decided."""
    seeds = [n for n in needed if n is not None]
    if not seeds:
        return "more seeds of these rows do not decide the claims above; it takes more rows"
    if max(seeds) <= MIN_SEEDS:
        return f"nothing is tested below --seeds {MIN_SEEDS}"
    text = ", ".join(f"--seeds {n}" for n in sorted(set(seeds)))
    text = f"at the means and deviations of this run, it takes at least {text}"
    others = len(needed) - len(seeds)
    return text + (f", and more rows for {others} of the claims above" if others else "")
