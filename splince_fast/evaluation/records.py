"""Records of a comparison, their conversion to and from JSON, and the journal of a run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.files import as_path
from splince_fast.evaluation.data import Codes
from splince_fast.exceptions import FileFormatError, InputError

Json = dict[str, Any]
RecordId = tuple[int, float | None, str, str]  # seed, level, eraser and head

# Reserved names of heads: of the record of an eraser itself, and of the rows of the long format
# that hold the values at one alpha.
ERASER_ROW, PATH = "", "alphas"
_FORMAT = 5  # version of the file format of a comparison
_FILE = "cells.jsonl"  # file name of the journal


class CellCount(NamedTuple):
    """Code of a cell, number of its test rows, and number of those predicted correctly."""

    cell: int
    n: int
    n_correct: int


@dataclass(frozen=True, slots=True)
class Record:
    """Result of an eraser, or of one head on erased rows, at one seed and level."""

    seed: int
    p: float | None  # None for the natural split
    sizes: tuple[int, int, int]  # numbers of training, validation and test rows
    eraser: str
    head: str  # ERASER_ROW in a record of an eraser itself
    alpha: float | None = None
    values: dict[str, float] = field(default_factory=dict)  # by metric
    path: tuple[tuple[float, dict[str, float]], ...] = ()  # (alpha, values) of head "retrained"
    cells: tuple[CellCount, ...] = ()
    reason: str = ""  # reason of a failure
    notes: tuple[str, ...] = ()
    converged: bool = True
    y_pred: tuple[int, ...] = ()  # predicted class codes of the test rows, if the split is fixed

    @property
    def id(self) -> RecordId:
        return self.seed, self.p, self.eraser, self.head

    @classmethod
    def from_json(cls, entry: Json) -> Record:
        """Convert the fields of a record, read from JSON."""
        train, validation, test = entry["sizes"]
        fields = entry | {
            "sizes": (train, validation, test),
            "path": tuple((alpha, values) for alpha, values in entry["path"]),
            "cells": tuple(CellCount(*cell) for cell in entry["cells"]),
            "notes": tuple(entry["notes"]),
            "y_pred": tuple(entry["y_pred"]),
        }
        return cls(**fields)


@dataclass(frozen=True, slots=True, eq=False)
class PartLabels:
    """Labels of the rows of one part of a split, as codes (n,); -1 is a missing label."""

    task: NDArray[Any]  # values (n, k) of a quantity
    concept: Codes | None  # joint classes of the concepts; None if one is a quantity
    cells: Codes | None  # joint classes of task and concepts; None if one is a quantity
    groups: Codes | None = None

    def take(self, rows: NDArray[Any]) -> PartLabels:
        """Return the labels of the rows of a mask, or of numbers, which may repeat."""
        others = (self.concept, self.cells, self.groups)
        return PartLabels(self.task[rows], *(None if c is None else c[rows] for c in others))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartLabels) and all(
            map(np.array_equal, dataclasses.astuple(self), dataclasses.astuple(other))
        )


@dataclass(frozen=True, slots=True)
class Context:
    """Settings and data of a comparison."""

    n: int
    d: int
    erasers: tuple[str, ...]  # names that the caller uses
    heads: tuple[str, ...]
    levels: tuple[float | None, ...]  # (None,) for the natural split
    seeds: tuple[int, ...]
    sizes: tuple[int, int, int]  # training, validation and test rows of the first split
    aligned_class: str
    alphas: tuple[float, ...]
    probes: tuple[str, ...]
    concepts: tuple[str, ...]
    cells: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...]
    test_labels: PartLabels | None  # of the test rows if the split is fixed
    eraser_roles: tuple[str, ...]  # names in the library; "" for a transformer or function
    head_roles: tuple[str, ...]
    custom_metrics: dict[str, tuple[str, bool | None]]  # label, and whether lower is better

    def eraser_as(self, role: str) -> str | None:
        """Return the name of the first eraser with a role, such as "LEACE", or None."""
        return dict(zip(self.eraser_roles[::-1], self.erasers[::-1], strict=True)).get(role)

    @classmethod
    def from_json(cls, entry: Json) -> Context:
        """Convert the fields of a context, read from JSON."""
        fields: Json = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        labels = fields["test_labels"]
        columns: Json = {k: c and np.array(c, np.intp) for k, c in (labels or {}).items()}
        fields["test_labels"] = PartLabels(**columns) if labels else None
        fields["custom_metrics"] = {k: tuple(v) for k, v in fields["custom_metrics"].items()}
        return cls(**fields)


def to_text(records: list[Record], context: Context) -> str:
    """Return the JSON text of a comparison, for a file."""
    content = {
        "kind": "comparison",
        "format": _FORMAT,
        "context": dataclasses.asdict(context),
        "records": [dataclasses.asdict(record) for record in records],
    }
    return json.dumps(content, default=np.ndarray.tolist)


def from_text(text: bytes, name: str) -> tuple[list[Record], Context]:
    """Return the records and context in the JSON text of a comparison; errors cite `name`."""
    try:
        content = json.loads(text)
        if content["kind"] != "comparison" or content["format"] != _FORMAT:
            raise ValueError("another kind or format")
        records = [Record.from_json(entry) for entry in content["records"]]
        return records, Context.from_json(content["context"])
    except (ValueError, KeyError, TypeError) as error:
        message = f"{name!r} is not a comparison of this version, or truncated: {error!r}"
        raise FileFormatError(message) from error


class Journal:
    """Finished records by key, in a file of JSON lines, so that an interrupted run can go on."""

    # The first line holds the fingerprint of the data. An incomplete last line is dropped.

    def __init__(self, folder: str | os.PathLike[str] | None, fingerprint: str) -> None:
        self.records: dict[str, Record] = {}
        self.path: Path | None = None
        if folder is None:
            return
        self.path = as_path(folder) / _FILE
        if self.path.parent.is_file():
            raise InputError(f"run={str(folder)!r} is a file; pass a folder")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        content = self.path.read_bytes()
        size = content.rfind(b"\n") + 1
        os.truncate(self.path, size)
        if not size:
            self._append([{"data": fingerprint}])
            return
        try:
            first, *entries = map(json.loads, content[:size].splitlines())
            stored = first["data"]
            self.records = {entry.pop("key"): Record.from_json(entry) for entry in entries}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{self.path} is damaged; delete the file to start again"
            raise FileFormatError(text) from error
        if stored != fingerprint:
            raise InputError(
                f"{self.path} is of a run on other data or other labels (fingerprint {stored}, not "
                f"{fingerprint}); pass another folder as run="
            )

    def add(self, records: Mapping[str, Record]) -> None:
        """Add finished records to memory and to the file, which is synchronised to disk."""
        new = {key: record for key, record in records.items() if key not in self.records}
        self._append([{"key": key, **dataclasses.asdict(r)} for key, r in new.items()])
        self.records |= new

    def _append(self, entries: list[Json]) -> None:
        if self.path is not None and entries:
            with open(self.path, "ab") as file:
                file.write("".join(json.dumps(entry) + "\n" for entry in entries).encode())
                file.flush()
                os.fsync(file.fileno())
