"""``splince-fast apply``: apply an eraser to files of rows."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splince_fast._runtime.files import kind_of, partial_files
from splince_fast.cli import labels, rows
from splince_fast.cli.options import add_shared, check_outputs
from splince_fast.exceptions import FileFormatError, InputError

if TYPE_CHECKING:
    from splince_fast.projection import Eraser


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments to the parser."""
    apply = commands.add_parser(
        "apply",
        allow_abbrev=False,
        help="apply an eraser to files of rows",
        description="Apply an eraser to the rows of files. A .npy file is memory-mapped and a "
        ".parquet file is read by row groups, so that neither needs to fit in memory. The other "
        "columns of a table are copied, and the other arrays of a file, unless the output is "
        ".npy. Leading axes, such as (batch, token), are kept.",
    )
    add = apply.add_argument
    add("eraser", metavar="ERASER", help="eraser file, written by fit")
    add("rows", metavar="X", nargs="+",
        help=".npy, .npz, .safetensors, .pt or .parquet files, or folders of such "
        "files")  # fmt: skip
    output = apply.add_mutually_exclusive_group(required=True)
    output.add_argument("-o", "--output", metavar="PATH",
        help="output file, of the input's suffix or .npy; for several files or a folder, the "
        "folder of the output files, which get the names of the inputs")  # fmt: skip
    output.add_argument("--in-place", action="store_true",
        help="overwrite .npy files; after an interruption run the command again: erasing a "
        "row twice gives the same as once. Erasers without this property (partial ones, and those "
        "that need labels) are refused")  # fmt: skip
    help_of_labels = "labels as for fit, if the eraser needs them; for a single file of arrays"
    add_shared(add, "--embedding", "--key")
    add_shared(add, "--labels", help=help_of_labels)
    add_shared(add, "--force")
    add("--resume", action="store_true",
        help="go on after an interruption: skip output files that hold the rows of their inputs, "
        "erased by this eraser, and delete incomplete ones")  # fmt: skip
    apply.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check all paths, then erase the rows of each file."""
    eraser = _load(args)
    if args.in_place:
        _check_idempotent(eraser)
        if args.resume:
            raise InputError("--resume is for -o; with --in-place run the command again")
    several = len(args.rows) > 1 or os.path.isdir(args.rows[0])
    paths = rows.expand_folders(args.rows)
    reader, name = rows.row_options(args, paths)
    targets = _targets(args, paths, several)
    columns = _labels(args, eraser, len(paths), reader.labels_in_columns)
    erasures = [
        rows.Erasure(eraser, *pair, name, columns) for pair in zip(paths, targets, strict=True)
    ]
    finished = {erasure.target for erasure in erasures if args.resume and _is_finished(erasure)}
    if not args.in_place:
        _check_targets(args, paths, [t for t in targets if t not in finished], several)
    if several and args.output is not None:
        os.makedirs(args.output, exist_ok=True)
    for partial in partial_files(map(Path, targets)) if args.resume else ():
        partial.unlink()
    for erasure in erasures:
        if erasure.target in finished:
            print(f"finished before: {erasure.target}")
            continue
        reader = rows.reader_of(erasure.path)
        erase = (args.in_place and reader.in_place) or reader.erase
        print(f"{erase(erasure):,} rows: {erasure.target}")


def _load(args: argparse.Namespace) -> Eraser:
    """Load the eraser; the error names the order of arguments if a file of rows is the eraser."""
    from splince_fast.conditional import load_eraser

    if kind_of(args.eraser) in ("moments", "folds"):
        raise InputError(f"{args.eraser!r} holds moments; pass the eraser that fit wrote")
    try:
        return load_eraser(args.eraser)
    except FileFormatError as error:
        for path in args.rows:
            if kind_of(path) is not None:
                raise InputError(
                    f"{path!r} is an eraser and {args.eraser!r} is not; pass the eraser first: "
                    f"splince-fast apply {path} {args.eraser} ..."
                ) from error
        raise


def _check_idempotent(eraser: Eraser) -> None:
    """Raise InputError unless r(r(x)) = r(x): an interrupted ``--in-place`` erases rows twice."""
    from splince_fast.projection import Projection

    if isinstance(eraser, Projection) and eraser._idempotent:
        return
    raise InputError(
        f"this eraser ({eraser.method}) changes erased rows again, and --in-place erases some rows "
        "twice if it is repeated after an interruption; pass -o FILE"
    )


def _labels(
    args: argparse.Namespace, eraser: Eraser, n_files: int, tables: bool
) -> dict[str, Any] | None:
    """Read the labels that the eraser needs; None where it needs none or tables hold them."""
    kinds: Mapping[str, str] = getattr(eraser, "label_kinds", {})
    if args.labels and not kinds:
        raise InputError(f"--labels does not apply: this eraser ({eraser.method}) needs no labels")
    if tables or not kinds:
        return None
    if not args.labels:
        raise InputError(
            f"this eraser ({eraser.method}) needs the labels of {', '.join(map(repr, kinds))} for "
            "every row; pass --labels [NAME=]FILE"
        )
    if n_files > 1:
        raise InputError("--labels is for one file of rows; apply the eraser to one file at a time")
    return labels.read_label_files(args.labels, list(kinds), kinds)


def _targets(args: argparse.Namespace, paths: list[str], several: bool) -> list[str]:
    """Return the output path of each file; raise InputError where it does not fit the input."""
    if args.in_place:
        for path in paths:
            if rows.reader_of(path).in_place is None:
                suffixes = (suffix for suffix, r in rows.READERS.items() if r.in_place)
                raise InputError(
                    f"--in-place is for {' and '.join(suffixes)} files, not {path!r}; use -o"
                )
        return paths
    targets = [args.output]
    if several:
        if not args.output:
            raise InputError("--output is empty; name a folder (was a variable not set?)")
        if os.path.exists(args.output) and not os.path.isdir(args.output):
            raise InputError(f"-o {args.output!r} is a file; several files need a folder")
        if not os.path.exists(args.output) and Path(args.output).suffix in rows.READERS:
            raise InputError(
                f"-o {args.output!r} is the name of a file; several files go into a folder, such "
                f"as {os.path.splitext(args.output)[0]!r}"
            )
        targets = [os.path.join(args.output, os.path.basename(path)) for path in paths]
    if len(set(targets)) < len(targets):
        raise InputError("two files have the same name; apply the eraser to one folder at a time")
    for path, target in zip(paths, targets, strict=True):
        allowed = rows.reader_of(path).outputs
        if target and Path(target).suffix not in allowed and not os.path.isdir(target):
            raise InputError(
                f"-o {target!r}: the rows of {path!r} can be written only as {', '.join(allowed)}"
            )
    return targets


def _check_targets(
    args: argparse.Namespace, paths: list[str], targets: list[str], several: bool
) -> None:
    """Raise InputError for output files that cannot be written."""
    if several and not os.path.isdir(args.output):
        return
    inputs = [args.eraser, *labels.paths_of(args.labels), *paths]
    for target in targets:
        # A file may replace its own input: the output has a temporary name until it is complete.
        own = os.path.realpath(target) if target else None
        others = [path for path in inputs if path not in paths or os.path.realpath(path) != own]
        check_outputs({"--output": target}, others, force=args.force)


def _is_finished(erasure: rows.Erasure) -> bool:
    """Return whether the target, which is whole if it exists, holds the erased rows."""
    if not os.path.isfile(erasure.target):
        return False
    is_newer = os.stat(erasure.target).st_mtime_ns >= os.stat(erasure.path).st_mtime_ns
    return is_newer and rows.reader_of(erasure.path).is_erased(erasure)
