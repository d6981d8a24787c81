"""Records of a comparison: types, conversion to JSON, and the journal of a run."""

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

# Reserved names. ADVICE: eraser name in a record of advice. ERASER_ROW: head name in a record of
# an eraser itself. PATH: head name, in the long format, of the values at each alpha.
ADVICE, ERASER_ROW, PATH = "", "", "alphas"
_FORMAT = 2  # version of the file format of a comparison
_FILE = "cells.jsonl"  # file of the journal
_CODES = np.dtype("<u2")  # dtype of the predicted classes in a record


class CellCount(NamedTuple):
    """Code of a cell, number of test rows in it, and number of rows predicted correctly."""

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
    """Result of an eraser, or of one head on erased rows, at one seed and association level.

    `eraser` is `ADVICE` in a record of advice, and `head` is `ERASER_ROW` in a record of an eraser
    itself. `p` is None for the natural split. `sizes` are the numbers of training, validation and
    test rows. `values` maps metrics to values, `path` holds the values at every alpha, and `reason`
    is the reason of a failure, or empty. `y_pred` holds the predicted codes of the test rows as
    little-endian uint16; it is empty unless the split is fixed (argument `test` of `compare`).
    """

    seed: int
    p: float | None
    sizes: tuple[int, int, int]
    eraser: str
    head: str
    alpha: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    path: tuple[PathPoint, ...] = ()
    cells: tuple[CellCount, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    converged: bool = True
    y_pred: bytes = b""

    @property
    def id(self) -> RecordId:
        """Seed, level, eraser and head of the record."""
        return RecordId(self.seed, self.p, self.eraser, self.head)

    def with_predictions(self, codes: Codes) -> Record:
        """Return the record with the predicted codes of the test rows."""
        return dataclasses.replace(self, y_pred=codes.astype(_CODES).tobytes())

    @property
    def predictions(self) -> Codes | None:
        """Predicted codes of the test rows; None for a record without them."""
        return np.frombuffer(self.y_pred, _CODES).astype(np.intp) if self.y_pred else None

    def to_json(self) -> Json:
        """Convert to numbers, strings, lists and dictionaries, for JSON."""
        entry = dataclasses.asdict(self)
        if y_pred := entry.pop("y_pred"):
            entry["decided"] = base64.b64encode(y_pred).decode()
        return entry

    @classmethod
    def from_json(cls, entry: Json) -> Record:
        """Convert the result of `to_json` to a record.

        Raises
        ------
        KeyError, TypeError, ValueError
            The fields are not the fields of a record.
        """
        fields = dict(entry)
        train, validation, test = fields.pop("sizes")
        return cls(
            sizes=(train, validation, test),
            path=tuple(PathPoint(alpha, values) for alpha, values in fields.pop("path")),
            cells=tuple(CellCount(*cell) for cell in fields.pop("cells")),
            notes=tuple(fields.pop("notes")),
            y_pred=base64.b64decode(fields.pop("decided", "")),
            **fields,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TestLabels:
    """True labels of the test rows as codes (n,).

    `concept` holds the joint classes of the concepts, and `cells` the joint classes of task and
    concepts; both are None if a concept is a quantity. Code -1 is a missing label.
    """

    task: Codes
    concept: Codes | None
    cells: Codes | None
    groups: Codes | None = None

    def take(self, rows: Codes) -> TestLabels:
        """Labels of the rows with the given numbers, which may repeat."""
        others = (self.concept, self.cells, self.groups)
        return TestLabels(self.task[rows], *(None if c is None else c[rows] for c in others))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TestLabels) and self.to_json() == other.to_json()

    def to_json(self) -> dict[str, list[int] | None]:
        """Convert to lists of codes by name, for JSON."""
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


class OwnMetric(NamedTuple):
    """Label and direction of a custom metric."""

    label: str
    lower_is_better: bool | None


@dataclass(frozen=True, slots=True)
class Context:
    """Settings and data of a comparison.

    `levels` is (None,) for the natural split. `sizes` are the numbers of training, validation and
    test rows of the first split. `eraser_roles` and `head_roles` are the library's names of erasers
    and heads, such as "LEACE" and "frozen", which the caller may have renamed; "" for estimators
    and functions. `truth` holds the labels of the test rows if the split is fixed (argument `test`
    of `compare`), else None. `same_test` is True if each seed has the same test rows at all levels.
    """

    n: int
    d: int
    erasers: tuple[str, ...]
    heads: tuple[str, ...]
    levels: tuple[float | None, ...]
    seeds: tuple[int, ...]
    sizes: tuple[int, int, int]
    aligned_class: str
    association_method: str
    alphas: tuple[float, ...]
    select: str
    probes: tuple[str, ...]
    concepts: tuple[str, ...]
    cells: tuple[str, ...]
    fingerprint: str
    version: str
    notes: tuple[str, ...]
    truth: TestLabels | None
    eraser_roles: tuple[str, ...]
    head_roles: tuple[str, ...]
    own_metrics: dict[str, OwnMetric]
    same_test: bool

    def eraser_as(self, role: str) -> str | None:
        """Name of the first eraser with a role, such as "LEACE"; None if there is none."""
        return dict(zip(self.eraser_roles[::-1], self.erasers[::-1], strict=True)).get(role)

    def head_as(self, role: str) -> str | None:
        """Name of the first head with a role, such as "frozen"; None if there is none."""
        return dict(zip(self.head_roles[::-1], self.heads[::-1], strict=True)).get(role)

    def to_json(self) -> Json:
        """Convert to numbers, strings, lists and dictionaries, for JSON."""
        truth = {} if self.truth is None else self.truth.to_json()
        return dataclasses.asdict(dataclasses.replace(self, truth=None)) | {"truth": truth}

    @classmethod
    def from_json(cls, entry: Json) -> Context:
        """Convert the result of `to_json` to a context.

        Raises
        ------
        KeyError, TypeError, ValueError
            The fields are not the fields of a context.
        """
        fields: Json = {
            f.name: tuple(entry[f.name]) if isinstance(entry[f.name], list) else entry[f.name]
            for f in dataclasses.fields(cls)
        }
        fields["truth"] = TestLabels.from_json(fields["truth"]) if fields["truth"] else None
        custom = fields["own_metrics"]
        fields["own_metrics"] = {name: OwnMetric(*metric) for name, metric in custom.items()}
        return cls(**fields)


def to_text(records: list[Record], context: Context) -> str:
    """JSON text of a comparison, for a file."""
    return json.dumps(
        {
            "kind": "comparison",
            "format": _FORMAT,
            "context": context.to_json(),
            "records": [record.to_json() for record in records],
        }
    )


def from_text(text: str, name: str) -> tuple[list[Record], Context]:
    """Records and context from the JSON text of a comparison; `name` is the file, for messages.

    Raises
    ------
    FileFormatError
        The text is truncated, no comparison, or of another version of the format.
    """
    try:
        content = json.loads(text)
        if content["kind"] != "comparison" or content["format"] != _FORMAT:
            raise ValueError(f"kind {content['kind']!r}, format {content['format']!r}")
        records = [Record.from_json(entry) for entry in content["records"]]
        return records, Context.from_json(content["context"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(
            f"{name!r} holds no comparison of this version ({error}); it may be truncated or "
            "foreign"
        ) from error


class Journal:
    """Finished records by key; with a folder, also in a file with one JSON line per record.

    The first line of the file holds the fingerprint of the data.

    Raises
    ------
    InputError
        The file has another fingerprint.
    FileFormatError
        A line other than the last is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, fingerprint: str) -> None:
        self.records: dict[str, Record] = {}
        self.path: Path | None = None
        if folder is None:
            return
        self.path = as_path(folder) / _FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if len(complete) < len(content):  # incomplete last line: the record is computed again
            with open(self.path, "r+b") as file:
                file.truncate(len(complete))
                os.fsync(file.fileno())
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                entry = json.loads(line)
                if number == 1:
                    self._check(entry["data"], fingerprint)
                else:
                    key = entry.pop("key")
                    self.records[key] = Record.from_json(entry)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if isinstance(error, InputError):
                    raise
                raise FileFormatError(
                    f"line {number} of {self.path} is damaged; delete the file to start anew"
                ) from error
        if not complete:
            self._append([{"data": fingerprint}])

    def _check(self, stored: str, fingerprint: str) -> None:
        if stored != fingerprint:
            raise InputError(
                f"{self.path} holds a run over other data or other labels ({stored}, not "
                f"{fingerprint}); name another folder for run="
            )

    def add(self, records: Mapping[str, Record]) -> None:
        """Append finished records; the file is synchronised to disk before the return."""
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
