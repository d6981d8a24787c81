"""Options shared by several commands, checks of output paths, and messages that name options."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from splince_fast.cli import labels, rows
from splince_fast.exceptions import InputError


def named_file(text: str) -> str:
    """Return the path of a file to write; an empty one is an error of the arguments."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty (was a variable not set?)")
    return text


# Settings of argparse for the options that `fit`, `apply` and `compare` share.
SHARED: Final[dict[str, dict[str, Any]]] = {
    "--embedding": {"metavar": "COLUMN", "help": "column of vectors; in .h5ad, X or a key of obsm"},
    "--key": {"metavar": "NAME", "help": "name of the array of rows in a file of several arrays"},
    "--labels": {
        "action": "append",
        "default": [],
        "metavar": "[NAME=]FILE",
        "help": "labels of files of arrays, one entry per row of all files: .csv, .tsv or .parquet "
        "(one variable per column) or .npy (one variable, NAME or the name of the file); "
        "repeatable. An empty field is a missing label, and NA is a class. Labels of tables are "
        "columns of the same files. Labels of word vectors are in one table with a column 'word', "
        "and other words have missing labels",
    },
    "--kind": {
        "action": "append",
        "default": [],
        "metavar": "NAME=KIND",
        "help": "KIND is 'classes' or 'continuous'; by default text and integers are classes, and "
        "floats are continuous. With NAME=classes, 01 and 1 in a text file are different classes",
    },
    "--erase": {
        "action": "append",
        "required": True,
        "metavar": "NAME",
        "help": "concept to erase; repeatable: several are erased jointly",
    },
    "--groups": {
        "metavar": "NAME",
        "help": "variable, such as a document or a person, whose rows stay in one part of a split "
        "and in one fold (in fit: of --shrinkage cv)",
    },
    "--force": {"action": "store_true", "help": "overwrite existing files"},
}


def add_shared(parser: Any, *names: str) -> None:
    """Add options of `SHARED` to a parser or a group of one."""
    for name in names:
        parser.add_argument(name, **SHARED[name])


# Suffixes of known formats. Files of any kind may end in those of word vectors.
_SUFFIXES = {".html", *labels.FORMATS, *(s for s, r in rows.READERS.items() if not r.by_word)}


def check_outputs(
    outputs: Mapping[str, str | None],
    inputs: Iterable[str] = (),
    *,
    force: bool = False,
    resumed: Iterable[str] = (),
    suffixes: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise InputError for a path that cannot be written; `resumed` options may name old files."""
    # A known suffix of another format is refused; formats are safetensors by default.
    uses = {os.path.realpath(path): "an input" for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        if not Path(path).absolute().parent.is_dir():
            raise InputError(f"there is no folder for {path!r}; make it first")
        if os.path.isdir(path):
            raise InputError(f"{option}: {path!r} is a folder; name a file in it")
        real_path = os.path.realpath(path)
        if real_path in uses:
            raise InputError(f"{option}: {path!r} is {uses[real_path]}, too; name another file")
        if os.path.exists(path) and not force and option not in resumed:
            raise InputError(f"{path!r} exists; name another file, or overwrite it with --force")
        suffix = suffixes.get(option, ".safetensors")
        if Path(path).suffix in _SUFFIXES - {suffix}:
            raise InputError(f"{option}: {path!r} must end in {suffix}, the format of the file")
        uses[real_path] = f"the file of {option}"


# Parameters of Python whose option has another name.
_RENAMED = {
    "alpha": "alphas", "erasers": "eraser", "heads": "head", "n_jobs": "jobs", "n_seeds": "seeds",
    "refine": "passes",
}  # fmt: skip


def with_flags(text: str, names: Iterable[str], variables: Mapping[str, str]) -> str:
    """Replace parameters of Python by options of a command: ``rank_tol=1`` by ``--rank-tol 1``."""
    # `variables` maps names of the library, such as "task", to those of the command line.
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    flags |= {name: flags[other] for name, other in _RENAMED.items() if other in flags}
    if "kind" in flags:
        text = re.sub(r"(?:Moments\()?kinds=\{'(\w+)': '(\w+)'\}\)?", r"--kind \1=\2", text)
    text = re.sub(
        r"((?:variable '|--kind ))(\w+)\b", lambda m: m[1] + variables.get(m[2], m[2]), text
    )
    # A parameter after a slash, a quote or a hyphen may be part of a path, and is not replaced.
    any_name = "|".join(map(re.escape, flags))
    return re.sub(
        rf"(?<![\w/'\"-])({any_name})=('?)((?:[\w+-]+(?:\.\w+)*)?)\2|^({any_name})(?= is\b)",
        lambda m: f"{flags[m[1] or m[4]]} {m[3] or ''}".rstrip(),
        text,
    )
