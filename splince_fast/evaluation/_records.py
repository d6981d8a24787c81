"""Records of a comparison: their types, their JSON, and the journal of a run."""

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

# Names that erasers and heads may not have. ADVICE: eraser of a record of advice. ERASER_ROW: head
# of a record of an eraser itself. PATH: head of the points of a path in the long form.
ADVICE, ERASER_ROW, PATH = "", "", "alphas"
_FORMAT = 2  # version of the file format of a comparison
_FILE = "cells.jsonl"
_CODES = np.dtype("<u2")  # dtype of predicted classes in a record


class CellCount(NamedTuple):
    """Test rows in one cell of task and concepts, and the rows predicted correctly."""

    cell: int
    n: int
    n_correct: int


class PathPoint(NamedTuple):
    """Metrics of a head at one alpha of its path."""

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
    """Outcome of an eraser, or of one head on the erased rows, at one seed and level.

    `eraser` is `ADVICE` for the advice from the moments, `head` is `ERASER_ROW` for the metrics of
    an eraser itself; `p` is None for the natural split. `sizes` are rows for training, validation
    and test. `values` are by metric, `path` holds those of every alpha, and `reason` is that of a
    failure, or empty. `y_pred` are codes, little-endian uint16, empty unless the split was the
    caller's own.
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
        """The record with the predicted codes of the test rows."""
        return dataclasses.replace(self, y_pred=codes.astype(_CODES).tobytes())

    @property
    def predictions(self) -> Codes | None:
        """Predicted codes of the test rows; None for a record without them."""
        return np.frombuffer(self.y_pred, _CODES).astype(np.intp) if self.y_pred else None

    def to_json(self) -> Json:
        """The record as numbers, strings, lists and dictionaries."""
        entry = dataclasses.asdict(self)
        if y_pred := entry.pop("y_pred"):
            entry["decided"] = base64.b64encode(y_pred).decode()
        return entry

    @classmethod
    def from_json(cls, entry: Json) -> Record:
        """The record that `to_json` wrote.

        Raises
        ------
        KeyError, TypeError, ValueError
            Fields that are not those of a record.
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
    """Codes (n,) of the test rows, which predictions are scored by.

    `concept` and `cells` are the joint classes of the concepts and the cells of task and concepts,
    -1 for none; None where a concept is a quantity.
    """

    task: Codes
    concept: Codes | None
    cells: Codes | None
    groups: Codes | None = None

    def take(self, rows: Codes) -> TestLabels:
        """Labels of some rows, with repetitions."""
        others = (self.concept, self.cells, self.groups)
        return TestLabels(self.task[rows], *(None if c is None else c[rows] for c in others))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TestLabels) and self.to_json() == other.to_json()

    def to_json(self) -> dict[str, list[int] | None]:
        """Lists of codes by name."""
        columns = dataclasses.asdict(self)
        return {name: None if codes is None else codes.tolist() for name, codes in columns.items()}

    @classmethod
    def from_json(cls, entry: Json) -> TestLabels:
        """The labels that `to_json` wrote."""
        columns: Json = {
            name: None if codes is None else np.array(codes, np.intp)
            for name, codes in entry.items()
        }
        return cls(**columns)


class OwnMetric(NamedTuple):
    """Label and direction of a metric of the caller's own."""

    label: str
    lower_is_better: bool | None


@dataclass(frozen=True, slots=True)
class Context:
    """Erasers, heads and data of a comparison.

    `levels` of (None,) are the natural split; `sizes` are training, validation and test rows of the
    first split. Roles are "LEACE", "frozen" and so on for erasers and heads of the library, which
    may have other names, and "" for the caller's own. `truth` holds the labels of the test rows if
    the split was the caller's own; `same_test` says whether a seed has the same test rows at every
    level.
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
        """Name of the first eraser of the library that is `role`, such as "LEACE"."""
        return dict(zip(self.eraser_roles[::-1], self.erasers[::-1], strict=True)).get(role)

    def head_as(self, role: str) -> str | None:
        """Name of the first head of the library that is `role`, such as "frozen"."""
        return dict(zip(self.head_roles[::-1], self.heads[::-1], strict=True)).get(role)

    def to_json(self) -> Json:
        """The context as numbers, strings, lists and dictionaries."""
        truth = {} if self.truth is None else self.truth.to_json()
        return dataclasses.asdict(dataclasses.replace(self, truth=None)) | {"truth": truth}

    @classmethod
    def from_json(cls, entry: Json) -> Context:
        """The context that `to_json` wrote.

        Raises
        ------
        KeyError, TypeError, ValueError
            Fields that are not those of a context.
        """
        fields: Json = {
            f.name: tuple(entry[f.name]) if isinstance(entry[f.name], list) else entry[f.name]
            for f in dataclasses.fields(cls)
        }
        fields["truth"] = TestLabels.from_json(fields["truth"]) if fields["truth"] else None
        own = fields["own_metrics"]
        fields["own_metrics"] = {name: OwnMetric(*metric) for name, metric in own.items()}
        return cls(**fields)


def to_text(records: list[Record], context: Context) -> str:
    """The file of a comparison."""
    return json.dumps(
        {
            "kind": "comparison",
            "format": _FORMAT,
            "context": context.to_json(),
            "records": [record.to_json() for record in records],
        }
    )


def from_text(text: str, name: str) -> tuple[list[Record], Context]:
    """Records and context of the file of a comparison.

    Raises
    ------
    FileFormatError
        Truncated, foreign, or written by a version with another format.
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
    """Finished records by key; in a folder also one fsynced JSON line each.

    The first line holds the fingerprint of the data.

    Raises
    ------
    InputError
        The folder belongs to other data.
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
        written = self.path.read_bytes() if self.path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):  # a torn last line: its record is computed again
            with open(self.path, "r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())
        for number, line in enumerate(whole.splitlines(), 1):
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
        if not whole:
            self._append([{"data": fingerprint}])

    def _check(self, stored: str, fingerprint: str) -> None:
        if stored != fingerprint:
            raise InputError(
                f"{self.path} holds a run over other data or other labels ({stored}, not "
                f"{fingerprint}); name another folder for run="
            )

    def add(self, records: Mapping[str, Record]) -> None:
        """Append finished records; they are on disk before this returns."""
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
