"""Paths on the command line: inputs, and checks of outputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from splince_fast.exceptions import InputError


def check_outputs(
    outputs: Mapping[str, str | None],
    inputs: Iterable[str] = (),
    *,
    force: bool = False,
    resumed: Iterable[str] = (),
) -> None:
    """Raise InputError, before any work, for outputs that cannot or should not be written.

    Parameters
    ----------
    outputs : mapping
        From the option to the path of a new file; None is left out.
    inputs : iterable of str
        Files that are read.
    force : bool
        Existing files may be overwritten; files that are read may not.
    resumed : iterable of str
        Options whose file may exist, because the command resumes from it.

    Raises
    ------
    InputError
        An empty name, a folder, no folder for the file, an existing file, or one path twice.
    """
    taken = {_same(path): "an input" for path in inputs}
    for option, path in outputs.items():
        if path is None:
            continue
        if not path:
            raise InputError(f"{option} is empty; name a file (was a variable not set?)")
        check_folder(path)
        if os.path.isdir(path):
            raise InputError(f"{option}: {path!r} is a folder; name a file in it")
        if _same(path) in taken:
            raise InputError(f"{option}: {path!r} is {taken[_same(path)]}, too; name another file")
        if os.path.exists(path) and not force and option not in resumed:
            raise InputError(f"{path!r} exists; name another file, or overwrite it with --force")
        taken[_same(path)] = f"the file of {option}"


def _same(path: str) -> str:
    """A canonical spelling of a path."""
    return os.path.realpath(path)


def check_folder(path: str) -> None:
    """Raise InputError for a file whose folder does not exist."""
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"there is no folder for {path!r}; make it first")


def partial_name(target: Path) -> Path:
    """A name beside `target`, of bounded length, for the incomplete file."""
    return target.with_name(f".{target.name[:100]}.{os.getpid()}.partial")
