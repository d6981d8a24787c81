"""Checks: functions with evidence on one statement each, their verdicts and their mutants.

A check is a function that computes residuals, which are 0 where a formula holds, and reports them
to a :class:`Bench`. The bench derives a verdict from the residuals, and :func:`run_check` compares
this verdict with the expected verdict of the check. The formulas under test are keyword arguments
of the check. A mutant replaces some of them by wrong formulas; the check must then miss its
expected verdict. FINDINGS.md states, under the number of the check, the statement as printed in the
paper and its true form.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from proofs_check._families import FAMILIES, Rng, Sample, sample
from splince_fast.exceptions import PrecisionWarning, UnseenRowsWarning

FAR = 1e3
"""A refuting residual must exceed its tolerance by this factor, to exclude rounding errors."""


class Verdict(StrEnum):
    """Verdict on a statement of the paper."""

    HOLDS = "holds"
    CONDITIONAL = "holds with condition"
    FALSE = "false as stated"
    DEPLOYED = "false in the deployed reading"


class _Stopped(Exception):
    """Ends the run of a mutant when the evidence contradicts the expected verdict."""


def largest_ratio(residual: object, tolerance: float) -> float:
    """Return the largest |residual| / tolerance; inf if a residual is NaN.

    For tolerance 0, the result is 0 if all residuals are 0, else inf.
    """
    largest = 0.0
    for value in np.asarray(residual, dtype=object).flat:
        exact = 0.0 if value == 0 else np.inf
        ratio = abs(float(value)) / tolerance if tolerance else exact
        largest = max(largest, np.inf if np.isnan(ratio) else ratio)
    return largest


class Bench:
    """Collects the evidence of one check, and draws its random problems.

    Parameters
    ----------
    rng
        Generator of all random problems.
    quick
        Whether to draw fewer problems.
    expected
        Expected verdict. If not None, the run stops at the first evidence against it.
    """

    def __init__(self, rng: Rng, *, quick: bool, expected: Verdict | None = None) -> None:
        self.rng = rng
        self.quick = quick
        self._expected = expected
        self.cases = 0
        self.worst_ratio = 0.0
        self.failures: list[str] = []
        self.figures: list[str] = []
        self._ratios: list[float] = []
        self._violating_ratios: dict[str, list[float]] = {}
        self._deployed_ratios: list[float] = []

    def repeats(self, full: int, quick: int) -> range:
        """Return ``range(quick)`` for a quick run, else ``range(full)``."""
        return range(quick if self.quick else full)

    def samples(
        self, full: int, quick: int, families: tuple[str, ...] = tuple(FAMILIES)
    ) -> Iterator[Sample]:
        """Yield ``full`` random samples of each family, or ``quick`` samples in a quick run."""
        for i in self.repeats(full, quick):
            for family in families:
                yield sample(self.rng, family, 4 + i % 3)

    def add_corrected(self, residual: object, tolerance: float = 0.0, *, label: str = "") -> None:
        """Add evidence on the true form of the statement; it holds if |residual| <= tolerance."""
        self.cases += 1
        ratio = largest_ratio(residual, tolerance)
        self.worst_ratio = max(self.worst_ratio, ratio)
        if ratio > 1:
            self.failures.append(f"{label or 'residual'} is {ratio:.2g} x its tolerance")
            self._stop()

    def add_printed(
        self,
        residual: object,
        tolerance: float = 0.0,
        *,
        violates: str | None = None,
        deployed: bool = False,
    ) -> None:
        """Add evidence on the statement as printed in the paper.

        ``violates`` names a condition that the paper omits and that this case violates; the
        residual must then refute the statement. ``deployed`` marks a case of the deployed reading,
        in which the eraser maps x to Px (the paper applies P to the head); the residual must then
        refute that reading. All other cases meet all conditions.
        """
        self.cases += 1
        ratio = largest_ratio(residual, tolerance)
        if deployed:
            self._deployed_ratios.append(ratio)
            if ratio <= FAR:
                self._stop()
        elif violates is None:
            self._ratios.append(ratio)
            if ratio <= 1:
                self.worst_ratio = max(self.worst_ratio, ratio)
            elif self._expected is not Verdict.FALSE:
                self._stop()
        else:
            self._violating_ratios.setdefault(violates, []).append(ratio)
            if ratio <= FAR:
                self._stop()

    def require_quoted(self, *figures: object) -> None:
        """Record values that FINDINGS.md must contain; a test searches its text for them."""
        self.figures += map(str, figures)

    def _stop(self) -> None:
        if self._expected is not None:
            raise _Stopped

    def verdict(self) -> Verdict | None:
        """Return the verdict that follows from the evidence, or None if it is inconclusive."""
        inconclusive = [r for r in self._ratios if 1 < r <= FAR]
        inconclusive += [r for group in self._violating_ratios.values() for r in group if r <= FAR]
        inconclusive += [r for r in self._deployed_ratios if r <= FAR]
        if self.failures or inconclusive or not self._ratios:
            return None
        if any(r > FAR for r in self._ratios):
            return None if self._violating_ratios or self._deployed_ratios else Verdict.FALSE
        if self._deployed_ratios:
            return None if self._violating_ratios else Verdict.DEPLOYED
        return Verdict.CONDITIONAL if self._violating_ratios else Verdict.HOLDS


@dataclass(frozen=True)
class Check:
    """Check of one statement.

    Attributes
    ----------
    key
        Number of the statement in FINDINGS.md, such as ``"3.2"``.
    expected
        Verdict that must follow from the evidence.
    paper
        Whether the check examines the paper only and never calls the library.
    run
        Function that reports the evidence; its keyword arguments are the formulas under test.
    mutants
        Wrong formulas, by name of the mutant; they must not lead to the expected verdict.
    """

    key: str
    expected: Verdict
    paper: bool
    run: Callable[..., None]
    mutants: Mapping[str, Mapping[str, Callable[..., Any]]]


@dataclass(frozen=True)
class Outcome:
    """Result of one run of a check and its mutants."""

    check: Check
    verdict: Verdict | None
    worst_ratio: float
    cases: int
    caught: tuple[str, ...]
    figures: tuple[str, ...]
    seconds: float
    problems: tuple[str, ...] = field(default=())
    ran: bool = True  # False where an error of the library or of the check ended the run

    @property
    def reproduced(self) -> bool:
        """Return whether the expected verdict followed and the check rejected all mutants."""
        return not self.problems


REGISTRY: dict[str, Check] = {}


def check(
    key: str,
    expected: Verdict,
    *,
    paper: bool = False,
    mutants: Mapping[str, Mapping[str, Callable[..., Any]]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the check of statement ``key``."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        if key in REGISTRY:
            raise ValueError(f"two checks have the number {key}")
        REGISTRY[key] = Check(key, expected, paper, run, mutants)
        return run

    return register


def _bench(item: Check, seed: int, quick: bool, *, stop: bool) -> Bench:
    """Return a bench whose random problems depend only on the seed and the check's number."""
    rng = np.random.default_rng([seed, zlib.crc32(item.key.encode())])
    return Bench(rng, quick=quick, expected=item.expected if stop else None)


def survives(item: Check, mutant: str, *, seed: int) -> bool:
    """Return whether the check reaches its expected verdict despite the mutant's formulas."""
    bench = _bench(item, seed, True, stop=True)
    try:
        item.run(bench, **item.mutants[mutant])
    except _Stopped:
        return False
    return bench.verdict() is item.expected


def run_check(item: Check, *, seed: int = 0, quick: bool = False) -> Outcome:
    """Run one check and all its mutants."""
    start = time.perf_counter()
    bench = _bench(item, seed, quick, stop=False)
    caught: list[str] = []
    problems: list[str] = []
    verdict, ran = None, True
    try:
        # one thread, because the matrices are small
        with threadpool_limits(1), warnings.catch_warnings():
            # By design, some samples have features of very different scales, or few rows.
            warnings.filterwarnings("ignore", "the eraser is sensitive", PrecisionWarning)
            warnings.filterwarnings("ignore", "there are only", UnseenRowsWarning)
            item.run(bench)
            verdict = bench.verdict()
            problems += bench.failures
            for name in item.mutants:
                if survives(item, name, seed=seed):
                    problems.append(f"mutant survived: {name}")
                else:
                    caught.append(name)
    except Exception as error:  # report the error and continue with other checks
        problems.append(f"{type(error).__name__}: {error}")
        ran = False
    if verdict is not item.expected and not problems:
        problems.append(f"verdict {verdict or 'inconclusive'}; expected {item.expected}")
    if not item.mutants:
        problems.append(
            "the check has no mutant, so nothing shows that it can fail; add a wrong formula"
        )
    return Outcome(
        check=item,
        verdict=verdict,
        worst_ratio=bench.worst_ratio,
        cases=bench.cases,
        caught=tuple(caught),
        figures=tuple(bench.figures),
        seconds=time.perf_counter() - start,
        problems=tuple(problems),
        ran=ran,
    )
