"""Files of labels (.npy, .csv, .tsv and .parquet), and the options that name them."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from splince_fast._runtime.arguments import require
from splince_fast.exceptions import InputError, LabelError, UnknownVariableError
from splince_fast.labels import KINDS, encode_one

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[nN][aA][nN]")
# Integers with at most this many digits fit into int64.
_MAX_DIGITS = 18

# Names of all columns of a file, and the columns that are wanted.
Contents = tuple[list[str], dict[str, Any]]


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
        if name is not None and path.suffix != ".npy":
            raise InputError(
                f"--labels {option!r}: NAME=FILE is for .npy files; the columns of other files "
                "have names; pass FILE alone"
            )
        if path.suffix not in FORMATS:
            *others, last = FORMATS
            raise InputError(
                f"labels come from {', '.join(others)} or {last} files, not {option!r}"
            )
        names, contents = FORMATS[path.suffix](path, name or path.stem, variables, kinds)
        all_names += names
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


def paths_of(options: Sequence[str]) -> list[str]:
    """Return the paths in the values of ``--labels``."""
    return [str(_name_and_path(option)[1]) for option in options]


def _name_and_path(option: str) -> tuple[str | None, Path]:
    """Split ``NAME=FILE``; the name is None without "=" and for the path of an existing file."""
    name, separator, path = option.partition("=")
    return (name, Path(path)) if separator and not Path(option).exists() else (None, Path(option))


def _read_npy(path: Path, name: str, variables: Sequence[str], kinds: object) -> Contents:
    try:
        return [name], {name: np.asarray(np.load(path, allow_pickle=False))}
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read as labels: {error}. Save them as an array of strings, "
            "integers or floats, not of Python objects"
        ) from error


def _read_csv(
    path: Path, _: str, variables: Sequence[str], kinds: Mapping[str, str], delimiter: str = ","
) -> Contents:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(lines, [])]
            positions = {name: i for i, name in enumerate(names) if name in variables}
            rows: list[list[str]] = []
            empty_line = 0  # number of the first empty line, which only empty lines may follow
            for row in lines:
                if row and (empty_line or len(row) != len(names)):
                    raise _row_error(path, empty_line, lines.line_num, len(row), len(names))
                if row:
                    rows.append([row[i].strip() for i in positions.values()])
                elif not empty_line:
                    empty_line = lines.line_num
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error}. Save it as a comma- or tab-separated file in "
            "UTF-8 with a header"
        ) from error
    return names, {
        name: _parse_column([row[i] for row in rows], name, path, kinds.get(name))
        for i, name in enumerate(positions)
    }


def _read_tsv(
    path: Path, name: str, variables: Sequence[str], kinds: Mapping[str, str]
) -> Contents:
    return _read_csv(path, name, variables, kinds, "\t")


def _row_error(
    path: Path, empty_line: int, line: int, n_fields: int, n_expected: int
) -> LabelError:
    if not empty_line:
        return LabelError(
            f"{str(path)!r} has {n_fields} fields in line {line}, and {n_expected} in its header; "
            'a missing label is an empty field between delimiters, or ""'
        )
    advice = (
        'a missing label is "" on a line of its own'
        if n_expected == 1
        else "delete it, or write the delimiters of missing labels"
    )
    return LabelError(f"{str(path)!r} has an empty line {empty_line} among its rows; {advice}")


def _parse_column(texts: list[str], name: str, path: Path, kind: str | None) -> object:
    """Convert text to integers, else to floats, else to classes; an empty text is missing."""
    classes = [text or None for text in texts]
    present = [text for text in texts if text]
    if kind == "classes":  # "01" and "1" are different
        return encode_one(classes, len(texts), name=name)
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
        return np.array([float(text or "nan") for text in texts])
    if any(numbers) and kind is None:
        raise LabelError(
            f"column {name!r} of {str(path)!r} holds numbers and text such as "
            f"{present[numbers.index(False)]!r}; leave missing labels empty, or pass "
            f"--kind {name}=classes if all of them are names"
        )
    return encode_one(classes, len(texts), name=name, kind=kind)


def _read_parquet(path: Path, _: str, variables: Sequence[str], kinds: object) -> Contents:
    from splince_fast.sources._arrow import label_column

    pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    try:
        names = list(parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=[name for name in names if name in variables])
    except pa.ArrowException as error:
        raise InputError(f"{str(path)!r} cannot be read as Parquet: {error}") from error
    return names, {name: label_column(table, name) for name in table.column_names}


FORMATS: dict[str, Callable[[Path, str, Sequence[str], Mapping[str, str]], Contents]] = {
    ".npy": _read_npy,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
