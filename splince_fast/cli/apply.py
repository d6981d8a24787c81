"""``splince-fast apply``: apply an eraser to files of rows."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splince_fast._runtime.extras import require
from splince_fast._runtime.files import replacing
from splince_fast.cli import label_files, rows
from splince_fast.cli.paths import check_outputs
from splince_fast.exceptions import FileFormatError, InputError

if TYPE_CHECKING:
    from pyarrow import Table

    from splince_fast.eraser import Eraser


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments to the parser."""
    apply = commands.add_parser(
        "apply",
        allow_abbrev=False,
        help="apply an eraser to files of rows",
        description="Apply an eraser to the rows of files. A .npy file is memory-mapped and a "
        ".parquet file is read by row groups, so that neither needs to fit in memory. The other "
        "columns of a table are copied, and the other arrays of a file, if the output has the same "
        "format. Leading axes, such as (batch, token), are kept.",
    )
    add = apply.add_argument
    add("eraser", metavar="ERASER", help="eraser file, written by fit")
    add("rows", metavar="X", nargs="+",
        help=".npy, .npz, .safetensors, .pt or .parquet files, saved Hugging Face data sets, or "
        "folders of such files")  # fmt: skip
    output = apply.add_mutually_exclusive_group(required=True)
    output.add_argument("-o", "--output", metavar="PATH",
        help="output file, in the format of its suffix; for several files or a folder, the folder "
        "of the output files, which get the names of the inputs")  # fmt: skip
    output.add_argument("--in-place", action="store_true",
        help="overwrite .npy files; after an interruption run the command again: erasing a "
        "row twice gives the same as once. Erasers without this property (partial ones, and those "
        "that need labels) are refused")  # fmt: skip
    add("--embedding", metavar="COLUMN", help="column of vectors in a table")
    add("--key", metavar="NAME", help="name of the array of rows in a file of several arrays")
    add("--labels", action="append", default=[], metavar="[NAME=]FILE",
        help="labels, as for fit, if the eraser needs labels; for a single file of arrays. Labels "
        "of tables are columns of the same files")  # fmt: skip
    add("--jobs", type=int, default=1, metavar="N",
        help="number of files erased in parallel (default: 1)")  # fmt: skip
    add("--force", action="store_true", help="overwrite existing files")
    apply.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check all paths, then erase the rows of each file, up to ``--jobs`` files in parallel."""
    eraser = _load(args)
    if args.in_place:
        _check_idempotent(eraser)
    if args.jobs < 1:
        raise InputError(f"--jobs is {args.jobs}; it must be at least 1")
    several = len(args.rows) > 1 or (
        os.path.isdir(args.rows[0]) and not rows.is_dataset(args.rows[0])
    )
    paths = rows.expand_folders(args.rows)
    rows.check_key_and_embedding(paths, args.key, args.embedding)
    pairs = _path_pairs(args, paths, several)
    labels = _labels(args, eraser, pairs)
    if several and args.output is not None:
        os.makedirs(args.output, exist_ok=True)

    def erase(pair: tuple[str, str]) -> str:
        path, target = pair
        file_format = rows.format_of_rows(path)
        if file_format == "parquet":
            n = _erase_parquet(eraser, path, target, args.embedding)
        elif file_format == "dataset":
            n = _erase_dataset(eraser, path, target, args.embedding)
        else:
            n = _erase_arrays(eraser, path, target, args, labels)
        return f"{n:,} rows: {target}"

    if args.jobs == 1:
        for pair in pairs:
            print(erase(pair))
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(erase, pair) for pair in pairs]
        try:
            for future in futures:
                print(future.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _load(args: argparse.Namespace) -> Eraser:
    """Load the eraser.

    If the eraser and a file of rows are in the wrong order, the error message says so.
    """
    from splince_fast._runtime.files import kind_of
    from splince_fast.eraser import load_eraser

    if kind_of(args.eraser) in ("moments", "folds"):
        raise InputError(f"{args.eraser!r} holds moments; pass the eraser that fit wrote")
    try:
        return load_eraser(args.eraser)
    except FileFormatError as error:
        for path in args.rows:
            try:
                load_eraser(path)
            except (FileFormatError, OSError):
                continue
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
    args: argparse.Namespace, eraser: Eraser, pairs: list[tuple[str, str]]
) -> dict[str, Any] | None:
    """Read the labels that the eraser needs from the files of ``--labels``.

    The result is None if the eraser needs no labels, or if the rows are tables, which contain the
    labels as columns.

    Raises
    ------
    InputError
        ``--labels`` is passed but not needed, needed but not passed, or needed for several files.
    """
    kinds: Mapping[str, str] = getattr(eraser, "label_kinds", {})
    tables = any(rows.format_of_rows(path) != "array" for path, _ in pairs)
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
    if len(pairs) > 1:
        raise InputError("--labels is for one file of rows; apply the eraser to one file at a time")
    return label_files.read_label_files(args.labels, list(kinds), kinds)


def _path_pairs(args: argparse.Namespace, paths: list[str], several: bool) -> list[tuple[str, str]]:
    """Check the paths, and return a pair (input path, output path) for each file.

    Raises
    ------
    InputError
        An output cannot be written, or its format does not fit the input.
    """
    if args.in_place:
        for path in paths:
            if not path.endswith(".npy"):
                raise InputError(f"--in-place is for .npy files, not {path!r}; use -o")
        return [(path, path) for path in paths]
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
        targets = [os.path.join(args.output, os.path.basename(path.rstrip("/"))) for path in paths]
    if len(set(targets)) < len(targets):
        raise InputError("two files have the same name; apply the eraser to one folder at a time")
    inputs = [args.eraser, *label_files.paths_of(args.labels)]
    for path, target in zip(paths, targets, strict=True):
        file_format = rows.format_of_rows(path)
        replaces_input = target and os.path.realpath(path) == os.path.realpath(target)
        if file_format == "dataset" and target:
            if os.path.exists(target):
                raise InputError(f"{target!r} exists; name a new folder for the data set")
        elif not (several and not os.path.isdir(args.output)):
            # A file may replace its own input: the output has a temporary name until it is
            # complete.
            others = inputs if replaces_input else [*inputs, path]
            check_outputs({"--output": target}, others, force=args.force)
        _check_format(path, target, file_format)
        if file_format != "array" and args.embedding is None:
            raise rows.embedding_missing(path)
    return list(zip(paths, targets, strict=True))


def _check_format(path: str, target: str, file_format: str) -> None:
    """Raise InputError unless rows of `path`, of the given format, can be written to `target`."""
    allowed: tuple[str, ...] = rows.ARRAYS if file_format == "array" else rows.TABLES
    if file_format != "dataset" and Path(target).suffix not in allowed:
        raise InputError(
            f"-o {target!r}: the rows of {path!r} can be written only as {', '.join(allowed)}"
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

    progress = None if args.jobs == 1 else False
    arrays = rows.read_arrays(path, args.key, "r+" if args.in_place else "r")
    X = arrays.X
    if getattr(X, "ndim", 2) < 2:
        raise InputError(
            f"{path!r} has shape {tuple(X.shape)}; it must be (n, d), one row per sample"
        )
    try:
        empty = X[:0] if getattr(X, "ndim", 0) else X
    except RuntimeError:  # a sparse or nested tensor cannot be sliced; the eraser refuses it
        empty = X
    no_labels = None if labels is None else {name: column[:0] for name, column in labels.items()}
    dtype = eraser(empty, no_labels).dtype  # a wrong shape or dtype raises before any output
    if args.in_place:
        if dtype != X.dtype:
            raise InputError(f"{path!r} holds {X.dtype}, and the result is {dtype}; use -o FILE")
        eraser(X, labels, out=X, progress=progress)
        X.flush()
    elif target.endswith(".npy"):
        if not isinstance(X, np.ndarray):
            X = host_rows(X, path)
        with rows.new_npy(Path(target), eraser(X[:0], no_labels).dtype, X.shape) as out:
            eraser(X, labels, out=out, progress=progress)
    else:
        suffixes = {Path(path).suffix, Path(target).suffix}
        same_format = len(suffixes) == 1 or suffixes == {".pt", ".pth"}
        other_arrays = arrays.others if same_format else {}
        result = eraser(X, labels, progress=progress)
        rows.write_arrays(target, arrays._replace(X=result, others=other_arrays))
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


def _erase_dataset(eraser: Eraser, path: str, target: str, embedding: str) -> int:
    """Erase the rows of a saved data set, in all its splits; return the number of rows."""
    datasets = require("datasets", "datasets")
    data = rows.load_dataset(path)
    datasets.disable_progress_bars()
    splits = data if isinstance(data, Mapping) else {"": data}
    folder = Path(target).parent
    with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=folder) as scratch:
        results = {}
        for name, split in splits.items():
            if embedding not in split.column_names:
                raise InputError(
                    f"{path!r} has no column {embedding!r}; its columns are {split.column_names}"
                )

            def erase_batch(table: Table, place: str = f"{path!r} {name}".strip()) -> Table:
                return _erase_column(eraser, table, embedding, place)

            results[name] = split.with_format("arrow").map(
                erase_batch, batched=True, batch_size=4096, load_from_cache_file=False,
                cache_file_name=os.path.join(scratch, f"{name or 'rows'}.arrow"),
            )  # fmt: skip
            results[name].reset_format()
        erased_data = datasets.DatasetDict(results) if "" not in results else results[""]
        partial = os.path.join(scratch, "partial")
        erased_data.save_to_disk(partial)
        os.replace(partial, target)
    return sum(len(split) for split in splits.values())
