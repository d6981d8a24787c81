"""``splince-fast apply``: apply an eraser to files of rows."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splince_fast._runtime.arguments import require
from splince_fast._runtime.files import partial_files, replacing
from splince_fast.cli import label_files, rows
from splince_fast.cli.paths import check_outputs
from splince_fast.exceptions import FileFormatError, InputError

if TYPE_CHECKING:
    from pyarrow import Table

    from splince_fast.eraser import Eraser

# Number of rows at the start, in the middle and at the end that --resume erases again.
_COMPARED_ROWS = 64


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
    add("--embedding", metavar="COLUMN", help="column of vectors in a table")
    add("--key", metavar="NAME", help="name of the array of rows in a file of several arrays")
    add("--labels", action="append", default=[], metavar="[NAME=]FILE",
        help="labels, as for fit, if the eraser needs labels; for a single file of arrays. Labels "
        "of tables are columns of the same files")  # fmt: skip
    add("--force", action="store_true", help="overwrite existing files")
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
    tables = rows.check_options(paths, args.key, args.embedding)
    for path in paths if args.in_place else ():
        if not path.endswith(".npy"):
            raise InputError(f"--in-place is for .npy files, not {path!r}; use -o")
    targets = paths if args.in_place else _targets(args, paths, several)
    labels = _labels(args, eraser, len(paths), tables)
    finished = {
        target
        for path, target in zip(paths, targets, strict=True)
        if args.resume and _is_finished(eraser, path, target, args, labels)
    }
    if not args.in_place:
        _check_targets(args, paths, [t for t in targets if t not in finished], several)
    if several and args.output is not None:
        os.makedirs(args.output, exist_ok=True)
    for partial in partial_files(map(Path, targets)) if args.resume else ():
        partial.unlink()
    for path, target in zip(paths, targets, strict=True):
        if target in finished:
            print(f"finished before: {target}")
            continue
        if tables:
            n = _erase_parquet(eraser, path, target, args.embedding)
        else:
            n = _erase_arrays(eraser, path, target, args, labels)
        print(f"{n:,} rows: {target}")


def _load(args: argparse.Namespace) -> Eraser:
    """Load the eraser; the error names the order of arguments if a file of rows is the eraser."""
    from splince_fast._runtime.files import kind_of
    from splince_fast.eraser import load_eraser

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
    """Raise InputError unless the eraser r is idempotent, r(r(x)) = r(x).

    If ``--in-place`` is repeated after an interruption, some rows are erased twice.
    """
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
    """Read the labels that the eraser needs; None where it needs none or tables hold them.

    Raises InputError where ``--labels`` is passed but not needed, needed but not passed, or needed
    for several files.
    """
    kinds: Mapping[str, str] = getattr(eraser, "label_kinds", {})
    if not kinds or tables:
        if args.labels:
            raise InputError(
                "--labels does not apply to tables: labels are columns of the same files"
                if tables
                else f"--labels does not apply: this eraser ({eraser.method}) needs no labels"
            )
        return None
    if not args.labels:
        raise InputError(
            f"this eraser ({eraser.method}) needs the labels of {', '.join(map(repr, kinds))} for "
            "every row; pass --labels [NAME=]FILE"
        )
    if n_files > 1:
        raise InputError("--labels is for one file of rows; apply the eraser to one file at a time")
    return label_files.read_label_files(args.labels, list(kinds), kinds)


def _targets(args: argparse.Namespace, paths: list[str], several: bool) -> list[str]:
    """Return the output path of each file; raise InputError where it does not fit the input."""
    if not several:
        targets = [args.output]
    elif not args.output:
        raise InputError("--output is empty; name a folder (was a variable not set?)")
    elif os.path.exists(args.output) and not os.path.isdir(args.output):
        raise InputError(f"-o {args.output!r} is a file; several files need a folder")
    elif not os.path.exists(args.output) and Path(args.output).suffix in rows.SUFFIXES:
        raise InputError(
            f"-o {args.output!r} is the name of a file; several files go into a folder, such as "
            f"{os.path.splitext(args.output)[0]!r}"
        )
    else:
        targets = [os.path.join(args.output, os.path.basename(path)) for path in paths]
    if len(set(targets)) < len(targets):
        raise InputError("two files have the same name; apply the eraser to one folder at a time")
    for path, target in zip(paths, targets, strict=True):
        suffix = Path(path).suffix
        allowed = [suffix] if rows.is_table(path) else list(dict.fromkeys([suffix, ".npy"]))
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
    inputs = [args.eraser, *label_files.paths_of(args.labels), *paths]
    for target in targets:
        # A file may replace its own input: the output has a temporary name until it is complete.
        own = os.path.realpath(target) if target else None
        others = [path for path in inputs if path not in paths or os.path.realpath(path) != own]
        check_outputs({"--output": target}, others, force=args.force)


def _is_finished(
    eraser: Eraser,
    path: str,
    target: str,
    args: argparse.Namespace,
    labels: Mapping[str, Any] | None,
) -> bool:
    """Return whether `target` is no older than `path` and holds its rows, erased.

    Output files are whole, since they are renamed when they are complete. Rows at both ends and in
    the middle are erased again and compared bit for bit.
    """
    if not os.path.isfile(target) or os.stat(target).st_mtime_ns < os.stat(path).st_mtime_ns:
        return False
    if rows.is_table(path):
        return _is_erased_parquet(eraser, path, target, args.embedding)
    X = rows.read_arrays(path, args.key).X
    erased = rows.read_arrays(target, None if target.endswith(".npy") else args.key).X
    if tuple(X.shape) != tuple(erased.shape):
        return False
    for start in {0, max(0, len(X) // 2), max(0, len(X) - _COMPARED_ROWS)}:
        part = slice(start, start + _COMPARED_ROWS)
        part_labels = labels and {name: column[part] for name, column in labels.items()}
        expected = eraser(X[part], part_labels)
        if not _equal_bits(expected, erased[part]):
            return False
    return True


def _equal_bits(a: Any, b: Any) -> bool:
    from splince_fast.sources._sharded import host_rows

    a, b = host_rows(a, "the result"), host_rows(b, "the file")
    return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())


def _is_erased_parquet(eraser: Eraser, path: str, target: str, embedding: str) -> bool:
    """Return whether the first and the last row group of `target` are those of `path`, erased."""
    parquet = require("pyarrow.parquet", "parquet")
    with parquet.ParquetFile(path) as file, parquet.ParquetFile(target) as erased:
        groups = [
            i for i in range(file.metadata.num_row_groups) if file.metadata.row_group(i).num_rows
        ]
        if (file.metadata.num_rows, len(groups)) != (
            erased.metadata.num_rows,
            erased.metadata.num_row_groups,
        ):
            return False
        return all(
            _erase_column(eraser, file.read_row_group(groups[i]), embedding, f"{path!r}").equals(
                erased.read_row_group(i)
            )
            for i in ({0, len(groups) - 1} if groups else ())
        )


def _erase_arrays(
    eraser: Eraser,
    path: str,
    target: str,
    args: argparse.Namespace,
    labels: Mapping[str, Any] | None,
) -> int:
    """Erase the rows of one file of arrays; return the number of rows."""
    from splince_fast.sources._sharded import host_rows

    arrays = rows.read_arrays(path, args.key, writable=args.in_place)
    X = arrays.X
    if getattr(X, "ndim", 2) < 2:
        raise InputError(
            f"{path!r} has shape {tuple(X.shape)}; it must be (n, d), one row per sample"
        )
    try:
        empty = X[:0] if getattr(X, "ndim", 0) else X
    except RuntimeError:  # a sparse or nested tensor cannot be sliced; the eraser refuses it
        empty = X
    no_labels = labels and {name: column[:0] for name, column in labels.items()}
    dtype = eraser(empty, no_labels).dtype  # a wrong shape or dtype raises before any output
    if args.in_place:
        if dtype != X.dtype:
            raise InputError(f"{path!r} holds {X.dtype}, and the result is {dtype}; use -o FILE")
        eraser(X, labels, out=X, progress=None)
        X.flush()
    elif target.endswith(".npy"):
        if not isinstance(X, np.ndarray):
            X = host_rows(X, path)
        with rows.new_npy(Path(target), eraser(X[:0], no_labels).dtype, X.shape) as out:
            eraser(X, labels, out=out, progress=None)
    else:
        rows.write_arrays(target, arrays._replace(X=eraser(X, labels, progress=None)))
    return int(np.prod(X.shape[:-1]))


def _erase_column(eraser: Eraser, table: Table, embedding: str, place: str) -> Table:
    """Return the table with its embedding column erased; integer vectors become float64."""
    from splince_fast.sources._arrow import column_matrix, row_namer

    pa = require("pyarrow", "parquet")
    index = table.column_names.index(embedding)
    field = table.schema.field(index)
    if not table.num_rows:
        return table
    labels = {}
    for name in getattr(eraser, "label_kinds", ()):
        if name not in table.column_names:
            raise InputError(
                f"{place} has no column {name!r}, whose labels this eraser needs; its columns are "
                f"{table.column_names}"
            )
        labels[name] = table.column(name)
    X = column_matrix(table.column(index), embedding, eraser.n_features, row_namer(place, 0))
    X = eraser(X, labels or None)
    values = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), X.shape[1])
    storage = getattr(field.type, "storage_type", field.type)
    # The column keeps its type, except that erased integer vectors are float64.
    if storage.value_type == values.type.value_type:
        values = values.cast(storage)
        if storage is not field.type and storage != field.type:
            values = pa.ExtensionArray.from_storage(field.type, values)
    return table.set_column(index, field.with_type(values.type), values)


def _erase_parquet(eraser: Eraser, path: str, target: str, embedding: str) -> int:
    """Erase one Parquet file, one row group at a time; return the number of rows."""
    pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    n, writer = 0, None
    try:
        with parquet.ParquetFile(path) as file, replacing(Path(target)) as partial:
            if embedding not in file.schema_arrow.names:
                raise InputError(
                    f"{path!r} has no column {embedding!r}; its columns are "
                    f"{file.schema_arrow.names}"
                )
            for group in range(file.metadata.num_row_groups):
                # Skip empty row groups: the first erased rows determine the type of the column.
                if not file.metadata.row_group(group).num_rows:
                    continue
                place = f"row group {group} of {path!r}"
                table = _erase_column(eraser, file.read_row_group(group), embedding, place)
                writer = writer or parquet.ParquetWriter(partial, table.schema)
                writer.write_table(table, row_group_size=max(1, table.num_rows))
                n += table.num_rows
            writer = writer or parquet.ParquetWriter(partial, file.schema_arrow)
            writer.close()
    except pa.ArrowException as error:
        raise InputError(f"{path!r} cannot be read as Parquet: {error}") from error
    return n
