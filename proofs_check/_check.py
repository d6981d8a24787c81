"""What a check is, how its verdict follows from evidence, and how its mutants are run.

A check is a function that receives a :class:`Bench` and reports residuals to it. It never states
its verdict: the bench derives one from the residuals, and the run compares it with the verdict
that the check was registered with. The formulas a check examines are its keyword arguments, so
that a mutant is a set of replacements for them. The statement and its true form stand in
FINDINGS.md under the same number.
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
from splince_fast import PrecisionWarning

FAR = 1e3
"""A refutation must exceed its tolerance by this factor, so that no rounding can cause one."""


class Verdict(StrEnum):
    """The verdict on a statement."""

    HOLDS = "holds"
    CONDITIONAL = "holds with condition"
    FALSE = "false as stated"
    DEPLOYED = "false in the deployed reading"


class _Stopped(Exception):
    """The evidence already contradicts the expected verdict; a mutant needs no more."""


def excess(residual: object, tolerance: float) -> float:
    """Largest |residual| / tolerance; with tolerance 0, zero or infinity by exact comparison."""
    worst = 0.0
    for value in np.asarray(residual, dtype=object).flat:
        exact = 0.0 if value == 0 else np.inf
        ratio = abs(float(value)) / tolerance if tolerance else exact
        worst = max(worst, np.inf if np.isnan(ratio) else ratio)
    return worst


class Bench:
    """Collects the evidence of one check and hands it random problems.

    Parameters
    ----------
    rng
        Source of all random problems.
    quick
        Ask for fewer of them.
    expected
        The verdict to compare with; given only where the run may stop at the first contradiction.
    """

    def __init__(self, rng: Rng, *, quick: bool, expected: Verdict | None = None) -> None:
        self.rng = rng
        self.quick = quick
        self._expected = expected
        self.cases = 0
        self.worst = 0.0
        self.failures: list[str] = []
        self.figures: list[str] = []
        self._within: list[float] = []
        self._without: dict[str, list[float]] = {}
        self._deployed: list[float] = []

    def repeats(self, full: int, quick: int) -> range:
        """``range`` over the number of random problems to try."""
        return range(quick if self.quick else full)

    def samples(
        self, full: int, quick: int, families: tuple[str, ...] = tuple(FAMILIES)
    ) -> Iterator[Sample]:
        """Random samples of the named families, ``full`` or ``quick`` of each."""
        for i in self.repeats(full, quick):
            for family in families:
                yield sample(self.rng, family, 4 + i % 3)

    def corrected(self, residual: object, tolerance: float = 0.0, *, label: str = "") -> None:
        """Evidence for the true form of the statement: must not exceed the tolerance."""
        self.cases += 1
        ratio = excess(residual, tolerance)
        self.worst = max(self.worst, ratio)
        if ratio > 1:
            self.failures.append(f"{label or 'residual'} is {ratio:.2g} x its tolerance")
            self._stop()

    def printed(
        self,
        residual: object,
        tolerance: float = 0.0,
        *,
        lacking: str | None = None,
        deployed: bool = False,
    ) -> None:
        """Evidence on the statement as printed.

        ``lacking`` names the condition, absent from the print, that this case does not meet: such
        a case must refute the statement. ``deployed`` says that the case reads the statement of the
        map x -> Px where the print applies P to the head: it must refute that reading. Any other
        case lies within the hypotheses.
        """
        self.cases += 1
        ratio = excess(residual, tolerance)
        if deployed:
            self._deployed.append(ratio)
            if ratio <= FAR:
                self._stop()
        elif lacking is None:
            self._within.append(ratio)
            if ratio <= 1:
                self.worst = max(self.worst, ratio)
            elif self._expected is not Verdict.FALSE:
                self._stop()
        else:
            self._without.setdefault(lacking, []).append(ratio)
            if ratio <= FAR:
                self._stop()

    def cited(self, *figures: object) -> None:
        """Figures that the text of FINDINGS.md quotes; a test looks for them there."""
        self.figures += map(str, figures)

    def _stop(self) -> None:
        if self._expected is not None:
            raise _Stopped

    def verdict(self) -> Verdict | None:
        """Verdict by the evidence; ``None`` where that is not clear (see ``failures``)."""
        doubtful = [r for r in self._within if 1 < r <= FAR]
        doubtful += [r for group in self._without.values() for r in group if r <= FAR]
        doubtful += [r for r in self._deployed if r <= FAR]
        if self.failures or doubtful or not self._within:
            return None
        if any(r > FAR for r in self._within):
            return None if self._without or self._deployed else Verdict.FALSE
        if self._deployed:
            return None if self._without else Verdict.DEPLOYED
        return Verdict.CONDITIONAL if self._without else Verdict.HOLDS


@dataclass(frozen=True)
class Check:
    """One statement with its evidence.

    Attributes
    ----------
    key
        Number of the statement in FINDINGS.md, such as ``"3.2"``.
    expected
        The verdict that the evidence must lead to.
    paper
        True where the evidence is on the paper alone and never calls the library.
    run
        The evidence; keyword arguments are the formulas under test.
    mutants
        Name -> replacement formulas under which the verdict must not be reproduced.
    """

    key: str
    expected: Verdict
    paper: bool
    run: Callable[..., None]
    mutants: Mapping[str, Mapping[str, Callable[..., Any]]]


@dataclass(frozen=True)
class Outcome:
    """Result of one run of one check."""

    check: Check
    verdict: Verdict | None
    worst: float
    cases: int
    caught: tuple[str, ...]
    figures: tuple[str, ...]
    seconds: float
    problems: tuple[str, ...] = field(default=())

    @property
    def reproduced(self) -> bool:
        """True iff the expected verdict follows and every mutant was caught."""
        return not self.problems


REGISTRY: dict[str, Check] = {}


def check(
    key: str,
    expected: Verdict,
    *,
    paper: bool = False,
    mutants: Mapping[str, Mapping[str, Callable[..., Any]]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated function as the evidence on one statement."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        if key in REGISTRY:
            raise ValueError(f"two checks carry the number {key}")
        REGISTRY[key] = Check(key, expected, paper, run, mutants)
        return run

    return register


def _bench(item: Check, seed: int, quick: bool, *, stop: bool) -> Bench:
    """A bench whose random problems depend on the seed and the check only."""
    rng = np.random.default_rng([seed, zlib.crc32(item.key.encode())])
    return Bench(rng, quick=quick, expected=item.expected if stop else None)


def survives(item: Check, mutant: str, *, seed: int) -> bool:
    """True iff the check reaches its verdict although a formula in it is wrong."""
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
    verdict = None
    try:
        # the matrices are small: more threads would only cost time
        with threadpool_limits(1), warnings.catch_warnings():
            # Families of uneven units are sensitive by design.
            warnings.filterwarnings("ignore", "the eraser is sensitive", PrecisionWarning)
            item.run(bench)
            verdict = bench.verdict()
            problems += bench.failures
            for name in item.mutants:
                if survives(item, name, seed=seed):
                    problems.append(f"mutant survived: {name}")
                else:
                    caught.append(name)
    except Exception as error:  # one broken check must not hide the verdicts of the others
        problems.append(f"{type(error).__name__}: {error}")
    if verdict is not item.expected and not problems:
        problems.append(f"the evidence says {verdict or 'nothing clear'}, not {item.expected}")
    if not item.mutants:
        problems.append("no mutant: a check that cannot fail is no evidence")
    return Outcome(
        check=item,
        verdict=verdict,
        worst=bench.worst,
        cases=bench.cases,
        caught=tuple(caught),
        figures=tuple(bench.figures),
        seconds=time.perf_counter() - start,
        problems=tuple(problems),
    )
