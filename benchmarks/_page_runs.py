"""The results of the four programs, read back strictly: what is missing ends the program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from benchmarks._model import Check, Rates
from benchmarks._profile import Profile
from benchmarks._rows import Fact, Job, Row
from benchmarks._timing import Ratio
from benchmarks.growth import Growth

PROGRAMS = ("targets", "peers", "growth", "profiles")
# What has to be equal for numbers of several runs to stand on one page.
_ALIKE = ("processor", "cores", "memory_gib", "system", "python", "splince_fast", "versions")

T = TypeVar("T", Row, Ratio, Job, Fact, Growth, Check, Profile)


class Entry(dict[str, Any]):
    """An object of a file of results."""

    program: str

    def __missing__(self, key: str) -> Any:
        """End the program where a key is not there."""
        raise SystemExit(
            f"the results of benchmarks.{self.program} have no {key!r}; they are of another "
            f"version: make them again with python -m benchmarks.{self.program} --json PATH"
        )


@dataclass(frozen=True, slots=True)
class Large:
    """What the model predicts of a large job: rows, features, seconds by part, rates assumed."""

    n: float
    d: float
    seconds: Mapping[str, float]
    rates: Rates


@dataclass(frozen=True, slots=True)
class Runs:
    """Everything that the page is made of.

    Attributes
    ----------
    heads : dict of str to Entry
        By program: its command, the machine, and whether sizes were tiny.
    targets : list of (Row, bool or None)
        Each with its verdict; None where it could not be measured.
    times : list of dict
        The jobs as they were read, for the figure.
    """

    heads: dict[str, Entry]
    targets: list[tuple[Row, bool | None]]
    times: list[dict[str, Any]]
    jobs: list[Job]
    facts: list[Fact]
    rates: Rates
    growth: list[Growth]
    checks: list[Check]
    large: Large
    profiles: list[Profile]

    @property
    def machine(self) -> Entry:
        """The machine that all of them ran on."""
        found: Entry = self.heads["targets"]["machine"]
        return found


def read(paths: Mapping[str, str]) -> Runs:
    """Read the results of every program.

    Raises
    ------
    SystemExit
        A key is missing, or the runs are of different machines, versions or sizes.
    """
    found = {program: _load(program, paths[program]) for program in PROGRAMS}
    _check_alike(found)
    targets, peers, growth, profiles = (found[program] for program in PROGRAMS)
    large = growth["prediction"]
    parts = {part: large["seconds"][part] for part in ("accumulate", "solve", "apply")}
    return Runs(
        heads=found,
        targets=[(_row(entry), entry["met"]) for entry in targets["rows"]],
        times=peers["times"],
        jobs=[_job(entry) for entry in peers["times"]],
        facts=[_restored(Fact, entry) for entry in peers["facts"]],
        rates=_rates(growth["rates"]),
        growth=[_restored(Growth, entry) for entry in growth["growth"]],
        checks=[_restored(Check, entry) for entry in growth["checks"]],
        large=Large(large["n"], large["d"], parts, _rates(large["rates"])),
        profiles=[_restored(Profile, entry) for entry in profiles["profiles"]],
    )


def _load(program: str, path: str) -> Entry:
    def entry(content: dict[str, Any]) -> Entry:
        made = Entry(content)
        made.program = program
        return made

    loaded: Entry = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=entry)
    return loaded


def _check_alike(found: Mapping[str, Entry]) -> None:
    first = found[PROGRAMS[0]]
    for program in PROGRAMS[1:]:
        other = found[program]
        pairs = {key: (first["machine"][key], other["machine"][key]) for key in _ALIKE}
        pairs["smoke"] = (first["smoke"], other["smoke"])
        for key, (here, there) in pairs.items():
            if here != there:
                raise SystemExit(
                    f"the runs of {PROGRAMS[0]} and {program} differ in {key} ({here} and {there});"
                    " run both in one environment on one machine"
                )


def _restored(kind: type[T], entry: Entry, **replaced: Any) -> T:
    """An object from its fields; keys beyond them are derived from these."""
    return kind(**({field.name: entry[field.name] for field in fields(kind)} | replaced))


def _ratio(entry: Entry) -> Ratio:
    return _restored(Ratio, entry)


def _row(entry: Entry) -> Row:
    measured = entry["measured"]
    return _restored(Row, entry, measured=None if measured is None else _ratio(measured))


def _job(entry: Entry) -> Job:
    others = {name: _ratio(ratio) for name, ratio in entry["others"].items()}
    return _restored(Job, entry, others=others)


def _rates(entry: Entry) -> Rates:
    return Rates(entry["syrk"], entry["potrf"], entry["copy"], entry.get("disk", float("inf")))
