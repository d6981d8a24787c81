"""``splince-fast apply``: apply an eraser to files of rows."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.files import partial_files
from splince_fast.cli import labels, rows
from splince_fast.cli.options import add_shared, check_outputs, named_file
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from splince_fast.projection import Eraser


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments to the parser."""
    apply = commands.add_parser(
        "apply",
        allow_abbrev=False,
        help="apply an eraser to files of rows",
        description="Apply an eraser to the rows of files. Files of .npy, HDF5, parquet and word "
        "vectors are read in parts, so that none needs to fit in memory. The other columns of a "
        "table are copied, and the other arrays of a file, unless the output is .npy. Leading "
        "axes, such as (batch, token), are kept. --labels are those that the eraser needs, if "
        "any, for a single file of arrays or of word vectors.",
    )
    add = apply.add_argument
    add("eraser", metavar="ERASER", help="eraser file, written by fit")
    add("rows", metavar="X", nargs="+",
        help=f"{rows.FORMATS}, or folders of all but word vectors")  # fmt: skip
    output = apply.add_mutually_exclusive_group(required=True)
    output.add_argument("-o", "--output", type=named_file, metavar="PATH",
        help="output file, of the input's format, or .npy for .npz, .safetensors and .pt; for "
        "several files or a folder, the folder of the output files, which get the names of the "
        "inputs")  # fmt: skip
    output.add_argument("--in-place", action="store_true",
        help="overwrite .npy files; after an interruption run the command again: erasing a "
        "row twice gives the same as once. Erasers without this property (partial ones, and those "
        "that need labels) are refused")  # fmt: skip
    add_shared(apply, "--embedding", "--key", "--labels", "--force")
    add("--resume", action="store_true",
        help="go on after an interruption: skip output files that are newer than their inputs and "
        "erased by this eraser, and delete incomplete ones")  # fmt: skip
    apply.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check all paths, then erase the rows of each file."""
    from splince_fast.conditional import load_eraser

    if args.resume and args.in_place:
        raise InputError("--resume is for -o; with --in-place run the command again")
    eraser = load_eraser(args.eraser)
    several = len(args.rows) > 1 or os.path.isdir(args.rows[0])
    paths = rows.expand_folders(args.rows)
    reader, name = rows.row_options(args, paths)
    if args.in_place:
        _check_in_place(eraser, paths)
        targets = paths
    elif several:
        if os.path.isfile(args.output) or rows.suffix_of(args.output) in rows.READERS:
            raise InputError(f"-o {args.output!r} is a file; several files of rows need a folder")
        targets = [os.path.join(args.output, os.path.basename(path)) for path in paths]
    else:
        targets = [args.output]
    if len(set(targets)) < len(targets):
        raise InputError("two files have the same name; apply the eraser to one folder at a time")
    columns = _labels(args, eraser, len(paths), reader)
    kinds = getattr(eraser, "label_kinds", ())
    erasures = [
        rows.Erasure(eraser, path, to, name, columns or rows.reader_of(path).labels(path, kinds))
        for path, to in zip(paths, targets, strict=True)
    ]
    finished = {erasure.target for erasure in erasures if args.resume and _is_finished(erasure)}
    if not args.in_place:
        if several:
            os.makedirs(args.output, exist_ok=True)
        for erasure in erasures:
            _check_target(args, erasure, force=args.force or erasure.target in finished)
    for partial in partial_files(map(Path, targets)) if args.resume else ():
        partial.unlink()
    for erasure in erasures:
        if erasure.target in finished:
            print(f"finished before: {erasure.target}")
            continue
        reader = rows.reader_of(erasure.path)
        erase = (args.in_place and reader.in_place) or reader.erase
        print(f"{erase(erasure):,} rows: {erasure.target}")


def _check_in_place(eraser: Eraser, paths: list[str]) -> None:
    """Raise InputError for other formats, and unless r(r(x)) = r(x): a repetition erases twice."""
    from splince_fast.projection import Projection

    if not (isinstance(eraser, Projection) and eraser._idempotent):
        raise InputError(
            f"this eraser ({eraser.method}) changes erased rows again, and --in-place erases some "
            "rows twice if it is repeated after an interruption; pass -o FILE"
        )
    for path in paths:
        if rows.reader_of(path).in_place is None:
            raise InputError(f"--in-place is for .npy files, not {path!r}; use -o")


def _labels(
    args: argparse.Namespace, eraser: Eraser, n_files: int, reader: rows.Reader
) -> dict[str, Any] | None:
    """Read the labels that the eraser needs; None where it needs none or tables hold them."""
    kinds: Mapping[str, str] = getattr(eraser, "label_kinds", {})
    if reader.is_table or not (kinds or args.labels):
        return None
    if not (kinds and args.labels):
        needed = f"the labels of {', '.join(map(repr, kinds))}" if kinds else "no labels"
        raise InputError(f"this eraser ({eraser.method}) needs {needed}, given by --labels")
    if n_files > 1:
        raise InputError("--labels is for one file of rows; apply the eraser to one file at a time")
    return labels.read_labels(args.labels, list(kinds), kinds, by_word=reader.by_word)


def _check_target(args: argparse.Namespace, erasure: rows.Erasure, *, force: bool) -> None:
    """Raise InputError for an output that cannot be written, or not in its format."""
    path, target = erasure.path, erasure.target
    # A file may replace its own input: the output has a temporary name until it is complete.
    inputs = [args.eraser, *labels.paths_of(args.labels)]
    own_suffix = Path(target).suffix
    check_outputs({"--output": target}, inputs, force=force, suffixes={"--output": own_suffix})
    allowed = rows.reader_of(path).outputs
    if rows.suffix_of(target) not in allowed:
        raise InputError(
            f"-o {target!r}: the rows of {path!r} can be written only as {', '.join(allowed)}"
        )


def _is_finished(erasure: rows.Erasure) -> bool:
    """Return whether the target, which is whole if it exists, holds the erased rows."""
    if not os.path.isfile(erasure.target):
        return False
    is_newer = os.stat(erasure.target).st_mtime_ns >= os.stat(erasure.path).st_mtime_ns
    return is_newer and rows.reader_of(erasure.path).is_erased(erasure)
