"""Records of a comparison, their conversion to and from JSON, and the journal of a run."""

from __future__ import annotations

import base64
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
from splince_fast.exceptions import FileFormatError, InputError

Codes = NDArray[np.intp]
Json = dict[str, Any]

# Reserved names. ADVICE is the eraser name in a record of advice. ERASER_ROW is the head name in a
# record of an eraser itself. PATH is the head name of rows of the long format that hold the values
# at one alpha.
ADVICE, ERASER_ROW, PATH = "", "", "alphas"
_FORMAT = 3  # version of the file format of a comparison
_FILE = "cells.jsonl"  # file name of the journal
_CODES = np.dtype("<u2")  # dtype of predicted class codes in a record


class CellCount(NamedTuple):
    """Code of a cell, number of its test rows, and number of those predicted correctly."""

    cell: int
    n: int
    n_correct: int


class PathPoint(NamedTuple):
    """Metrics of the head "retrained" at one alpha."""

    alpha: float
    values: dict[str, float]


class RecordId(NamedTuple):
    """Seed, level, eraser and head of a record."""

    seed: int
    p: float | None
    eraser: str
    head: str


@dataclass(frozen=True, slots=True)
class Record:
    """Result of an eraser, of one head on erased rows, or of the advice, at one seed and level."""

    seed: int
    p: float | None  # None for the natural split
    sizes: tuple[int, int, int]  # numbers of training, validation and test rows
    eraser: str  # ADVICE in a record of advice
    head: str  # ERASER_ROW in a record of an eraser itself
    alpha: float | None = None
    values: dict[str, float] = field(default_factory=dict)  # by metric
    path: tuple[PathPoint, ...] = ()  # values at every alpha of the head "retrained"
    cells: tuple[CellCount, ...] = ()
    reason: str = ""  # reason of a failure
    notes: tuple[str, ...] = ()
    converged: bool = True
    # Predicted class codes of the test rows as little-endian uint16, if the split is fixed.
    y_pred: bytes = b""

    @property
    def id(self) -> RecordId:
        """Seed, level, eraser and head of the record."""
        return RecordId(self.seed, self.p, self.eraser, self.head)

    def with_predictions(self, codes: Codes) -> Record:
        """Return the record with the predicted class codes of the test rows."""
        return dataclasses.replace(self, y_pred=codes.astype(_CODES).tobytes())

    @property
    def predictions(self) -> Codes | None:
        """Predicted class codes of the test rows; None if the record has none."""
        return np.frombuffer(self.y_pred, _CODES).astype(np.intp) if self.y_pred else None

    def to_json(self) -> Json:
        """Convert to numbers, strings, lists and dictionaries, for JSON."""
        entry = dataclasses.asdict(self)
        entry["y_pred"] = base64.b64encode(self.y_pred).decode()
        return entry

    @classmethod
    def from_json(cls, entry: Json) -> Record:
        """Convert the result of `to_json` to a record."""
        fields = dict(entry)
        train, validation, test = fields.pop("sizes")
        return cls(
            sizes=(train, validation, test),
            path=tuple(PathPoint(alpha, values) for alpha, values in fields.pop("path")),
            cells=tuple(CellCount(*cell) for cell in fields.pop("cells")),
            notes=tuple(fields.pop("notes")),
            y_pred=base64.b64decode(fields.pop("y_pred")),
            **fields,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TestLabels:
    """True labels of the test rows as codes (n,); -1 is a missing label."""

    task: Codes
    concept: Codes | None  # joint classes of the concepts; None if one is a quantity
    cells: Codes | None  # joint classes of task and concepts; None if one is a quantity
    groups: Codes | None = None

    def take(self, rows: Codes) -> TestLabels:
        """Return the labels of the rows with the given numbers; a number may repeat."""
        others = (self.concept, self.cells, self.groups)
        return TestLabels(self.task[rows], *(None if c is None else c[rows] for c in others))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TestLabels) and self.to_json() == other.to_json()

    def to_json(self) -> dict[str, list[int] | None]:
        """Convert to a dictionary of lists of codes, for JSON."""
        columns = dataclasses.asdict(self)
        return {name: None if codes is None else codes.tolist() for name, codes in columns.items()}

    @classmethod
    def from_json(cls, entry: Json) -> TestLabels:
        """Convert the result of `to_json` to labels."""
        columns: Json = {
            name: None if codes is None else np.array(codes, np.intp)
            for name, codes in entry.items()
        }
        return cls(**columns)


class CustomMetric(NamedTuple):
    """Label and direction of a custom metric."""

    label: str
    lower_is_better: bool | None


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
    select: str
    probes: tuple[str, ...]
    concepts: tuple[str, ...]
    cells: tuple[str, ...]
    fingerprint: str
    version: str
    notes: tuple[str, ...]
    test_labels: TestLabels | None  # of the test rows if the split is fixed
    eraser_roles: tuple[str, ...]  # names in the library; "" for a transformer or function
    head_roles: tuple[str, ...]
    custom_metrics: dict[str, CustomMetric]
    same_test: bool  # whether each seed has the same test rows at all levels
    concept_sizes: tuple[int, ...]  # number of classes of each concept, 0 for a quantity

    def eraser_as(self, role: str) -> str | None:
        """Return the name of the first eraser with a role, such as "LEACE", or None."""
        return dict(zip(self.eraser_roles[::-1], self.erasers[::-1], strict=True)).get(role)

    def to_json(self) -> Json:
        """Convert to numbers, strings, lists and dictionaries, for JSON."""
        fields = dataclasses.asdict(dataclasses.replace(self, test_labels=None))
        labels = None if self.test_labels is None else self.test_labels.to_json()
        return {**fields, "test_labels": labels}

    @classmethod
    def from_json(cls, entry: Json) -> Context:
        """Convert the result of `to_json` to a context."""
        fields: Json = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        labels, custom = fields["test_labels"], fields["custom_metrics"]
        fields["test_labels"] = TestLabels.from_json(labels) if labels else None
        fields["custom_metrics"] = {name: CustomMetric(*metric) for name, metric in custom.items()}
        return cls(**fields)


def to_text(records: list[Record], context: Context) -> str:
    """Return the JSON text of a comparison, for a file."""
    return json.dumps(
        {
            "kind": "comparison",
            "format": _FORMAT,
            "context": context.to_json(),
            "records": [record.to_json() for record in records],
        }
    )


def from_text(text: str, name: str) -> tuple[list[Record], Context]:
    """Return the records and context in the JSON text of a comparison; errors cite `name`."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        if content["kind"] != "comparison" or content["format"] != _FORMAT:
            raise ValueError(f"kind {content['kind']!r}, format {content['format']!r}")
        records = [Record.from_json(entry) for entry in content["records"]]
        return records, Context.from_json(content["context"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it lacks the field {error}" if isinstance(error, KeyError) else error
        raise FileFormatError(
            f"{name!r} is not a comparison of this version ({reason}); the file may be truncated, "
            "or of another kind"
        ) from error


class Journal:
    """Finished records by key, in a file of JSON lines, so that an interrupted run can go on."""

    # The first line holds the fingerprint of the data. An incomplete last line is dropped.

    def __init__(self, folder: str | os.PathLike[str] | None, fingerprint: str) -> None:
        self.records: dict[str, Record] = {}
        self.path: Path | None = None
        if folder is None:
            return
        self.path = as_path(folder) / _FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise InputError(f"run={str(folder)!r} is a file; pass a folder") from None
        content = self.path.read_bytes() if self.path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):  # drop a last line that is incomplete
            with open(self.path, "r+b") as file:
                file.truncate(len(complete))
                os.fsync(file.fileno())
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                entry = json.loads(line)
                if number == 1:
                    self._check_fingerprint(entry["data"], fingerprint)
                else:
                    key = entry.pop("key")
                    self.records[key] = Record.from_json(entry)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if isinstance(error, InputError):
                    raise
                raise FileFormatError(
                    f"line {number} of {self.path} is damaged; delete the file to start again"
                ) from error
        if not complete:
            self._append([{"data": fingerprint}])

    def _check_fingerprint(self, stored: str, fingerprint: str) -> None:
        if stored != fingerprint:
            raise InputError(
                f"{self.path} is of a run on other data or other labels (fingerprint {stored}, not "
                f"{fingerprint}); pass another folder as run="
            )

    def add(self, records: Mapping[str, Record]) -> None:
        """Add finished records to memory and to the file, which is synchronised to disk."""
        new = {key: record for key, record in records.items() if key not in self.records}
        self._append([{"key": key, **record.to_json()} for key, record in new.items()])
        self.records |= new

    def _append(self, entries: list[Json]) -> None:
        if self.path is None or not entries:
            return
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        with open(self.path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
