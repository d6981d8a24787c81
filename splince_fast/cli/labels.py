"""Files of labels (.npy, .csv, .tsv and .parquet), and the options that name them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from splince_fast._runtime.arguments import require
from splince_fast.exceptions import InputError, LabelError, UnknownVariableError
from splince_fast.labels import KINDS, ClassCodes, encode_one

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[nN][aA][nN]")

# Names of all columns of a file, and the columns that are wanted.
Contents = tuple[list[str], dict[str, Any]]


def read_labels(
    options: Sequence[str], variables: Sequence[str], kinds: Mapping[str, str], *, by_word: bool
) -> dict[str, Any]:
    """Read columns of labels; with `by_word`, as mappings from the column "word" to labels."""
    if not by_word:
        return read_label_files(options, variables, kinds)
    if len(options) != 1:
        raise InputError("word vectors take one --labels FILE, a table with a column 'word'")
    columns = read_label_files(options, ["word", *variables], {**kinds, "word": "classes"})
    words, *lists = (as_list(columns[name]) for name in ("word", *variables))
    first_lines: dict[str, int] = {}
    for line, word in enumerate(words, 2):  # below the header
        if first_lines.setdefault(word, line) != line:
            raise LabelError(
                f"{options[0]!r} has the word {word!r} in lines {first_lines[word]} and {line}; "
                "keep one of them"
            )
    return {n: dict(zip(words, c, strict=True)) for n, c in zip(variables, lists, strict=True)}


def as_list(column: Any) -> list[Any]:
    """Convert a column of labels; a missing label is None, or NaN among floats."""
    if isinstance(column, ClassCodes):
        names = (*column.classes, None)  # -1 is the code of a missing label
        return [names[code] for code in column.codes]
    convert = getattr(column, "to_pylist", None) or getattr(column, "tolist", None)
    return column if convert is None else list(convert())


def read_label_files(
    options: Sequence[str], variables: Sequence[str], kinds: Mapping[str, str]
) -> dict[str, Any]:
    """Read the columns `variables` from the files that the values of ``--labels`` name."""
    columns: dict[str, Any] = {}
    all_names: list[str] = []
    for option in options:
        name, path = _name_and_path(option)
        if path.suffix not in FORMATS or (name is not None and path.suffix != ".npy"):
            raise InputError(
                f"--labels {option!r}: labels come from {', '.join(FORMATS)} files, and NAME=FILE "
                "is for .npy files, whose column has no name"
            )
        names, contents = FORMATS[path.suffix](path, name or path.stem, variables, kinds)
        all_names += names
        columns |= contents
    for name in variables:
        if all_names.count(name) > 1:
            raise LabelError(
                f"the label files have {all_names.count(name)} columns {name!r}; pass one of them"
            )
        if name not in columns:
            raise UnknownVariableError(
                f"no label file has the variable {name!r}; the variables are "
                f"{', '.join(map(repr, all_names)) or 'none'}; pass --labels FILE, or "
                f"--labels {name}=FILE for a .npy file"
            )
    return {name: columns[name] for name in variables}


def parse_kinds(options: Sequence[str], variables: Sequence[str]) -> dict[str, str]:
    """Parse the values ``NAME=KIND`` of ``--kind``; return the kind of each named variable."""
    kinds = {}
    for option in options:
        name, _, kind = option.rpartition("=")
        if kind not in KINDS or name not in variables:
            raise InputError(
                f"--kind {option!r} must be NAME=classes or NAME=continuous; the variables are "
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
    path: Path, _: str, variables: Sequence[str], kinds: Mapping[str, str], *, delimiter: str
) -> Contents:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            text = file.read().rstrip("\r\n")
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names = [name.strip() for name in next(lines, [])]
        rows: list[list[str]] = []
        for row in lines:
            if len(row) != len(names):
                raise LabelError(
                    f"{str(path)!r} has {len(row)} fields in line {lines.line_num}, and "
                    f"{len(names)} in its header; a missing label is an empty field between "
                    'delimiters, or "" on a line of its own'
                )
            rows.append(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error}. Save it as a comma- or tab-separated file in "
            "UTF-8 with a header"
        ) from error
    return names, {
        name: _parse_column([row[i] for row in rows], name, path, kinds.get(name))
        for i, name in enumerate(names) if name in variables
    }  # fmt: skip


def _parse_column(texts: list[str], name: str, path: Path, kind: str | None) -> object:
    """Convert text to integers, else to floats, else to classes; an empty text is missing."""
    blanks = " " if name == "word" else None  # words may end in other spaces, such as U+00A0
    texts = [text.strip(blanks) for text in texts]
    present = [text for text in texts if text]
    numbers = [text for text in present if _NUMBER.fullmatch(text)]
    if kind != "classes" and len(numbers) == len(present):
        if not all(map(_INTEGER.fullmatch, present)):
            return np.array([float(text or "nan") for text in texts])
        missing = np.array([not text for text in texts], dtype=np.bool_)
        try:
            integers = np.array([int(text or 0) for text in texts], dtype=np.int64)
        except (ValueError, OverflowError) as error:  # Python limits the digits of int()
            raise LabelError(
                f"column {name!r} of {str(path)!r} holds an integer beyond 64 bits; pass --kind "
                f"{name}=classes if these are names"
            ) from error
        return np.ma.masked_array(integers, missing) if missing.any() else integers
    if numbers and kind is None:
        text = next(text for text in present if not _NUMBER.fullmatch(text))
        raise LabelError(
            f"column {name!r} of {str(path)!r} holds numbers and text such as {text!r}; leave "
            f"missing labels empty, or pass --kind {name}=classes if all of them are names"
        )
    # With kind "classes", "01" and "1" are different.
    return encode_one([text or None for text in texts], len(texts), name=name, kind=kind)


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
    ".csv": partial(_read_csv, delimiter=","),
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
}
