"""Reading of label files (.npy, .csv, .tsv and .parquet) into memory."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import require
from splince_fast.exceptions import InputError, LabelError, UnknownVariableError
from splince_fast.labels import KINDS, encode_one

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[nN][aA][nN]")
# Integers with at most this many digits fit into int64.
_MAX_DIGITS = 18


def read_label_files(
    options: Sequence[str], variables: Sequence[str], kinds: Mapping[str, str]
) -> dict[str, Any]:
    """Read the columns `variables` from the files of ``--labels``, each ``FILE`` or ``NAME=FILE``.

    `kinds` maps variables to "classes" or "continuous". Numbers become arrays (masked arrays if
    integers are missing), text becomes class codes, and Parquet columns remain Arrow data.
    """
    columns: dict[str, Any] = {}
    all_names: list[str] = []
    for option in options:
        name, path = _name_and_path(option)
        if path.suffix == ".npy":
            contents: Mapping[str, object] = {name or path.stem: _read_npy(path)}
            all_names += contents
        elif name is not None:
            raise InputError(
                f"--labels {option!r}: NAME=FILE is for .npy files; the columns of other files "
                "have names; pass FILE alone"
            )
        elif path.suffix in (".csv", ".tsv"):
            names, contents = _read_csv(path, variables, kinds)
            all_names += names
        elif path.suffix == ".parquet":
            names, contents = _read_parquet(path, variables)
            all_names += names
        else:
            raise InputError(f"labels come from .npy, .csv, .tsv or .parquet files, not {option!r}")
        columns |= contents
    for name, n_columns in Counter(all_names).items():
        if n_columns > 1 and name in variables:
            raise LabelError(
                f"the label files have {n_columns} columns {name!r}; pass one of the files"
            )
    for name in variables:
        if name not in columns:
            if not options:
                raise InputError(f"no labels of {name!r}; pass --labels FILE")
            is_array = any(option.endswith(".npy") for option in options)
            hint = f"; name that of a .npy file by --labels {name}=FILE" if is_array else ""
            raise UnknownVariableError(
                f"no label file has the variable {name!r}; the variables are "
                f"{', '.join(map(repr, all_names)) or 'none'}{hint}"
            )
    return {name: columns[name] for name in variables}


def parse_kinds(options: Sequence[str], variables: Sequence[str]) -> dict[str, str]:
    """Parse the values ``NAME=KIND`` of ``--kind``; return the kind of each named variable."""
    kinds = {}
    for option in options:
        name, separator, kind = option.rpartition("=")
        if not separator or kind not in KINDS:
            raise InputError(f"--kind {option!r} must be NAME=classes or NAME=continuous")
        if name not in variables:
            raise UnknownVariableError(
                f"--kind names {name!r}, which no other option names; the variables are "
                f"{', '.join(map(repr, variables))}"
            )
        kinds[name] = kind
    return kinds


def refuse_labels_of_tables(options: Sequence[str]) -> None:
    """Raise InputError if ``--labels`` has values; for commands with ``--embedding``."""
    if options:
        raise InputError(
            "--labels and --embedding exclude each other: labels are columns of the same files, "
            "as embeddings.merge(labels, on='id').to_parquet(path) makes them in pandas"
        )


def paths_of(options: Sequence[str]) -> list[str]:
    """Return the paths in the values of ``--labels``."""
    return [str(_name_and_path(option)[1]) for option in options]


def _name_and_path(option: str) -> tuple[str | None, Path]:
    """Split ``NAME=FILE``; the name is None without "=" and for the path of an existing file."""
    name, separator, path = option.partition("=")
    return (name, Path(path)) if separator and not Path(option).exists() else (None, Path(option))


def _read_npy(path: Path) -> NDArray[np.generic]:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read as labels: {error}. Save them as an array of strings, "
            "integers or floats, not of Python objects"
        ) from error


def _read_csv(
    path: Path, variables: Sequence[str], kinds: Mapping[str, str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the names of all columns of a .csv or .tsv file, and the columns in `variables`."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            names = [name.strip() for name in next(rows, [])]
            positions = {name: i for i, name in enumerate(names) if name in variables}
            cells: dict[str, list[str]] = {name: [] for name in positions}
            # Line number of the first empty line, 0 if there is none. An empty line may only be
            # followed by other empty lines.
            empty_line = 0
            for row in rows:
                if not row:
                    empty_line = empty_line or rows.line_num
                    continue
                if empty_line or len(row) != len(names):
                    raise _row_error(
                        path, empty_line, empty_line or rows.line_num, len(row), len(names)
                    )
                for name, position in positions.items():
                    cells[name].append(row[position].strip())
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error}. Save it as a comma- or tab-separated file in "
            "UTF-8 with a header"
        ) from error
    return names, {n: _parse_column(texts, n, path, kinds.get(n)) for n, texts in cells.items()}


def _row_error(
    path: Path, empty_line: int, line_number: int, n_fields: int, n_expected: int
) -> LabelError:
    """Return the error for an empty line before a row, or for a row with a wrong number of fields.

    `empty_line` is the line number of the empty line, or 0 if the number of fields is wrong.
    """
    if empty_line:
        advice = (
            'a missing label is "" on a line of its own'
            if n_expected == 1
            else "delete it, or write the delimiters of missing labels"
        )
        return LabelError(f"{str(path)!r} has an empty line {line_number} among its rows; {advice}")
    return LabelError(
        f"{str(path)!r} has {n_fields} fields in line {line_number}, and {n_expected} in its "
        'header; a missing label is an empty field between delimiters, or ""'
    )


def _parse_column(texts: list[str], name: str, path: Path, kind: str | None) -> object:
    """Convert a column of text to integers, floats or classes; an empty text is a missing label.

    If `kind` is "classes", the text is not parsed, so that "01" and "1" are different classes.
    """
    if kind == "classes":
        return encode_one([text or None for text in texts], len(texts), name=name)
    present = [text for text in texts if text]
    if all(map(_INTEGER.fullmatch, present)):
        longest = max(present, key=len, default="")
        if len(longest) > _MAX_DIGITS:
            raise LabelError(
                f"column {name!r} of {str(path)!r} holds an integer of {len(longest)} digits, "
                f"{longest[:20]}...; pass --kind {name}=classes if these are names"
            )
        integers = np.array([int(text or 0) for text in texts], dtype=np.int64)
        missing = np.array([not text for text in texts], dtype=np.bool_)
        return np.ma.masked_array(integers, missing) if missing.any() else integers
    numbers = [bool(_NUMBER.fullmatch(text)) for text in present]
    if all(numbers):
        return np.array([float(text) if text else np.nan for text in texts])
    if any(numbers) and kind is None:
        raise LabelError(
            f"column {name!r} of {str(path)!r} holds numbers and text such as "
            f"{present[numbers.index(False)]!r}; leave missing labels empty, or pass "
            f"--kind {name}=classes if all of them are names"
        )
    return encode_one([text or None for text in texts], len(texts), name=name, kind=kind)


def _read_parquet(path: Path, variables: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of all columns of a Parquet file, and the columns in `variables`."""
    from splince_fast.sources._arrow import label_column

    pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    try:
        names = list(parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=[name for name in names if name in variables])
    except pa.ArrowException as error:
        raise InputError(f"{str(path)!r} cannot be read as Parquet: {error}") from error
    return names, {name: label_column(table, name) for name in table.column_names}
