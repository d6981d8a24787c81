"""Options shared by several commands, checks of output paths, and messages that name options."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from splince_fast.exceptions import InputError

# Settings of argparse for the options that `fit`, `apply` and `compare` share.
SHARED: Final[dict[str, dict[str, Any]]] = {
    "--embedding": {"metavar": "COLUMN", "help": "column of vectors in a table"},
    "--key": {"metavar": "NAME", "help": "name of the array of rows in a file of several arrays"},
    "--labels": {
        "action": "append",
        "default": [],
        "metavar": "[NAME=]FILE",
        "help": "labels of files of arrays, one entry per row of all files: .csv, .tsv or .parquet "
        "(one variable per column) or .npy (one variable, NAME or the name of the file); "
        "repeatable. An empty field is a missing label, and NA is a class. Labels of tables are "
        "columns of the same files",
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
    "--force": {"action": "store_true", "help": "overwrite existing files"},
}


def add_shared(add: Callable[..., object], *names: str, **settings: str) -> None:
    """Add options of `SHARED`, with other `settings`, by ``add_argument`` of a parser or group."""
    for name in names:
        add(name, **SHARED[name] | settings)


def check_outputs(
    outputs: Mapping[str, str | None],
    inputs: Iterable[str] = (),
    *,
    force: bool = False,
    resumed: Iterable[str] = (),
) -> None:
    """Raise InputError for a path that cannot be written; `resumed` options may name old files."""
    uses = {os.path.realpath(path): "an input" for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        if not path:
            raise InputError(f"{option} is empty; name a file (was a variable not set?)")
        if not Path(path).absolute().parent.is_dir():
            raise InputError(f"there is no folder for {path!r}; make it first")
        if os.path.isdir(path):
            raise InputError(f"{option}: {path!r} is a folder; name a file in it")
        real_path = os.path.realpath(path)
        if real_path in uses:
            raise InputError(f"{option}: {path!r} is {uses[real_path]}, too; name another file")
        if os.path.exists(path) and not force and option not in resumed:
            raise InputError(f"{path!r} exists; name another file, or overwrite it with --force")
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise InputError(f"{path!r} is read-only; name another file")
        uses[real_path] = f"the file of {option}"


# Parameters of Python whose option has another name.
_RENAMED = {
    "alpha": "alphas", "erasers": "eraser", "heads": "head", "n_jobs": "jobs", "n_seeds": "seeds"
}  # fmt: skip
# Advice that applies to Python alone, and its replacement.
_PYTHON = (
    (r", e\.g\. (\w+) = \1\[np\.isfinite\(\1\)\.all\(axis=1\)\]", ""),
    (r",? or a function of moments\b", ""),
    (r"; Moments, estimators and sf\.erase take kinds=", ""),
    (r"(must be )None(?:,| or) ", r"\1"),
    (r",? or None for ", "; by default "),
    (r"\blabels\[('[^']*')\]", r"column \1 of the labels"),
)
_KIND = re.compile(
    r"(?:Moments\()?kinds=\{(?:'(?P<name>[^']*)'|\.\.\.): '(?P<kind>\w+)'\}\)?"
    r"|labels\.encode_one\([^=]*name='(?P<column>[^']*)', kind='(?P<read_as>\w+)'\)"
)


def with_flags(
    text: str, parameters: Iterable[str], variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Replace parameters of Python by options of a command: ``rank_tol=1`` by ``--rank-tol 1``.

    `variables` maps names of the library, such as "task", to those of the command line.
    """
    # A parameter after a slash, a quote or a hyphen may be part of a path, and is not replaced. A
    # parameter without "=" is replaced at the beginning of the message, or if its name has an
    # underscore.
    flags = {name: f"--{name.replace('_', '-')}" for name in parameters}
    flags |= {name: flags[other] for name, other in _RENAMED.items() if other in flags}
    for pattern, replacement in _PYTHON:
        text = re.sub(pattern, replacement, text)
    if "kind" in flags:
        text = re.sub(r" \(on the command line: [^)]*\)", "", text)

        def kind_flag(match: re.Match[str]) -> str:
            name = match["name"] or match["column"] or "NAME"
            return f"--kind {variables.get(name, name)}={match['kind'] or match['read_as']}"

        text = _KIND.sub(kind_flag, text)
    text = re.sub(
        r"\bvariable '(\w+)'", lambda match: f"variable {variables.get(match[1], match[1])!r}", text
    )
    any_name = "|".join(map(re.escape, flags))
    words = "|".join(re.escape(name) for name in flags if "_" in name) or "(?!)"
    start = r"(?<![\w/'\"-])"
    text = re.sub(
        rf"\b(?:pass ({any_name})=None\b|leave ({any_name}) out\b)",
        lambda match: f"leave {flags[match[1] or match[2]]} out",
        text,
    )
    text = re.sub(
        rf"{start}({any_name})=('?)((?:[\w+-]+(?:\.\w+)*)?)\2",
        lambda match: f"{flags[match[1]]} {match[3]}".rstrip(),
        text,
    )
    return re.sub(
        rf"^({any_name})(?= (?:is|assigns)\b)|{start}(?<!= )({words})\b(?![/'\"=.-]\w)",
        lambda match: flags[match[1] or match[2]],
        text,
    )
