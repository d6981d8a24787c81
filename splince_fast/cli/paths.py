"""Checks of output paths."""

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
    """Raise InputError for an output path that cannot be written; commands call this first.

    `outputs` are paths by option, such as ``--output``. With `force` existing files may be
    overwritten, except inputs; the files of options in `resumed` may exist.
    """
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
