"""Rows of the tables: promises beside measurements, and comparisons with peers."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks._sizes import smoke
from benchmarks._timing import Ratio

_AT_LEAST, _AT_MOST = ">=", "<="


@dataclass(frozen=True, slots=True)
class Row:
    """One promise.

    Attributes
    ----------
    what : str
    sense : {">=", "<="}
    target : float
    measured : Ratio or None
        None where it could not be measured; `note` then says why.
    note : str
    """

    what: str
    sense: str
    target: float
    measured: Ratio | None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median keeps the promise; None without a meaningful number."""
        if self.measured is None or smoke():
            return None
        kept = self.measured.median >= self.target
        return kept if self.sense == _AT_LEAST else self.measured.median <= self.target

    def cells(self) -> list[str]:
        verdict = {True: "met", False: "MISSED", None: "-"}[self.met]
        number = "-" if self.measured is None else str(self.measured)
        return [self.what, f"{self.sense} {self.target:g}", number, verdict, self.note]


def at_least(what: str, target: float, measured: Ratio | None, note: str = "") -> Row:
    return Row(what, _AT_LEAST, target, measured, note)


def at_most(what: str, target: float, measured: Ratio | None, note: str = "") -> Row:
    return Row(what, _AT_MOST, target, measured, note)


def exactly(value: float) -> Ratio:
    """A number without spread: an error, or bytes over bytes."""
    return Ratio(value, value, value)


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the table of times.

    Attributes
    ----------
    group, what : str
    unit : str
        What the seconds are for: "row" or "call".
    ours : float or None
        Seconds per unit of splince_fast; None if nothing could run.
    others : dict of str to Ratio
        How many times longer each contender takes.
    left_out : dict of str to str
        Contenders without a number, and why.
    """

    group: str
    what: str
    unit: str
    ours: float | None
    others: dict[str, Ratio] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a table of memory or accuracy: a number by contender, smaller is better."""

    group: str
    what: str
    unit: str
    values: dict[str, float]
    left_out: dict[str, str] = field(default_factory=dict)
