"""``splince-fast compare``: compare erasers on files of embeddings and labels."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from splince_fast._runtime.arguments import require
from splince_fast.cli.label_files import (
    parse_kinds,
    paths_of,
    read_label_files,
    refuse_labels_of_tables,
)
from splince_fast.cli.paths import check_outputs
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassName, encode_one


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments to the parser."""
    compare = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="compare erasers on your own data: table and report",
        description="Compare erasers by task accuracy, leakage of the concept and distortion, with "
        "intervals over several random splits.",
    )
    add = compare.add_argument
    add(
        "embeddings",
        metavar="EMBEDDINGS",
        help="a .npy file; with --embedding, a .parquet file or a folder of .parquet files",
    )
    add("--labels", action="append", default=[], metavar="[NAME=]FILE",
        help="labels of a .npy file of embeddings, one entry per row, as for fit: .npy, .csv, "
        ".tsv or .parquet; repeatable")  # fmt: skip
    add("--embedding", metavar="COLUMN", help="column of vectors in a .parquet file")
    add("--erase", action="append", required=True, metavar="NAME",
        help="concept to erase; repeatable")  # fmt: skip
    add("--keep", required=True, metavar="NAME", help="task to keep")
    add("--groups", metavar="NAME",
        help="variable, such as a document or a person; rows of the same value stay in one part of "
        "a split and in one fold")  # fmt: skip
    add("--test", metavar="NAME",
        help="column with your own split: each entry is train, validation or test")  # fmt: skip
    add("--kind", action="append", default=[], metavar="NAME=KIND",
        help="KIND is 'classes' or 'continuous'; by default the type of the labels "
        "decides")  # fmt: skip
    add("--eraser", action="append", metavar="NAME",
        help="none, SAL, LEACE, SPLINCE, MeanProjection, INLP, RLACE or random; oracle or "
        "quadratic, which need the concept label of every row; repeatable (default: the first "
        "four)")  # fmt: skip
    add("--head", action="append", metavar="NAME",
        help="retrained, frozen or unregularised; repeatable (default: the first two)")  # fmt: skip
    add("--association", type=_parse_numbers, metavar="P,P,...",
        help="levels of the association of concept and task in training rows, such as .5,.7,.9 "
        "(default: that of the data)")  # fmt: skip
    add("--aligned-class", metavar="CLASS",
        help="class of the concept that is associated with the second class of the "
        "task")  # fmt: skip
    add("--sizes", type=_parse_numbers, metavar="N,N,N",
        help="numbers of training, validation and test rows")  # fmt: skip
    add("--seeds", type=int, metavar="N",
        help="number of random splits (default: 5; 1 with --test)")  # fmt: skip
    add("--random-state", type=int, default=0, metavar="N", help="first seed (default: 0)")
    add("--alphas", type=_parse_numbers, metavar="A,A,...",
        help="candidate L2 penalties of the heads; validation rows select one")  # fmt: skip
    add("--jobs", type=int, default=1, metavar="N",
        help="number of processes; -1 is one per processor (default: 1)")  # fmt: skip
    add("--run", dest="folder", metavar="FOLDER",
        help="folder of finished results: the same command resumes from it")  # fmt: skip
    add("--save", metavar="FILE", help="write all results to a JSON file")
    add("-o", "--output", metavar="FILE", help="write the report to an .html file")
    add("--force", action="store_true", help="overwrite existing files")
    compare.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check the arguments, read the files, compare the erasers, and write the results."""
    inputs = [args.embeddings, *paths_of(args.labels)]
    check_outputs({"--output": args.output, "--save": args.save}, inputs, force=args.force)
    if args.output is not None and Path(args.output).suffix.lower() not in ("", ".html", ".htm"):
        raise InputError(
            f"--output {args.output!r}: the report is HTML; name a file that ends in .html"
        )
    if args.folder is not None and Path(args.folder).is_file():
        raise InputError(f"--run {args.folder!r} is a file; name a folder")
    sizes = _sizes(args.sizes)
    if args.output is not None:  # report a missing package before the comparison runs
        require("matplotlib.figure", "evaluate")
        require("jinja2", "evaluate")
    if args.keep in args.erase:
        raise InputError(f"{args.keep!r} is both erased and kept; name two variables")
    for option, name, content in (
        ("--groups", args.groups, "groups"),
        ("--test", args.test, "train, validation and test"),
    ):
        if name == args.keep or name in args.erase:
            use = "kept" if name == args.keep else "erased"
            raise InputError(
                f"{option} names {name!r}, which is also {use}; name a column of {content}"
            )
    args.variables = {
        name: variable
        for name, variable in (("task", args.keep), ("groups", args.groups), ("test", args.test))
        if variable is not None and name not in args.erase
    }
    split_columns = [name for name in (args.groups, args.test) if name is not None]
    X, labels = _read(args, list(dict.fromkeys([*args.erase, args.keep, *split_columns])))
    from splince_fast.evaluation import compare

    concept = {name: labels[name] for name in args.erase}
    seeds = args.seeds if args.seeds is not None else 1 if args.test else 5
    result = compare(
        X,
        task=labels[args.keep],
        concept=concept,
        groups=None if args.groups is None else labels[args.groups],
        test=None if args.test is None else labels[args.test],
        erasers=tuple(args.eraser or ("none", "SAL", "LEACE", "SPLINCE")),
        heads=tuple(args.head or ("retrained", "frozen")),
        association=args.association,
        aligned_class=_aligned_class(args.aligned_class, concept),
        sizes=sizes,
        n_seeds=seeds,
        random_state=args.random_state,
        **({} if args.alphas is None else {"alphas": args.alphas}),
        n_jobs=args.jobs,
        run=args.folder,
    )
    print(result)
    if args.save is not None:
        result.save(args.save)
        print(f"results: {args.save}")
    if args.output is not None:
        result.to_html(args.output)
        print(f"report: {args.output}")


def _read(args: argparse.Namespace, names: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return the rows, or the path of their .npy file, and the named columns of labels."""
    kinds = parse_kinds(args.kind, names)
    X: Any = args.embeddings
    if args.embedding is None:
        if not X.endswith(".npy"):
            if Path(X).is_dir() or Path(X).suffix == ".parquet":
                remedy = f"name the column of vectors of {X!r} with --embedding"
            else:
                remedy = f"save the array of rows of {X!r} with numpy.save"
            raise InputError(f"compare reads .npy and .parquet files; {remedy}")
        columns = read_label_files(args.labels, names, kinds)
        if not Path(X).exists():
            raise InputError(f"there is no file {X!r}")
    else:
        refuse_labels_of_tables(args.labels)
        from splince_fast.sources import from_parquet

        source = from_parquet(X, embedding=args.embedding, labels=names)
        blocks = [(np.array(block.X), block.labels) for block in source]
        if not blocks:
            raise InputError(f"{X!r} has no rows")
        columns = {
            name: [value for _, labels in blocks for value in labels[name].to_pylist()]
            for name in names
        }
        X = np.concatenate([rows for rows, _ in blocks])
    for name, kind in kinds.items():
        columns[name] = encode_one(columns[name], len(columns[name]), name=name, kind=kind)
    return X, columns


def _aligned_class(text: str | None, concept: Mapping[str, object]) -> ClassName | None:
    """Return the class of the concept whose name, as a string, equals `text`.

    Names of classes may be integers or booleans. If no class matches, `text` itself is returned; if
    `text` is None, the result is None.
    """
    from splince_fast.evaluation.data import class_codes

    if text is None:
        return None
    if len(concept) > 1:
        raise InputError("--aligned-class is for one concept; with several use compare() in Python")
    names = class_codes(next(iter(concept.values())), "concept").classes
    return next((name for name in names if str(name) == text), text)


def _parse_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no comma-separated list of numbers, such as .5,.7,.9"
        ) from None


def _sizes(sizes: tuple[float, ...] | None) -> tuple[int, int, int] | None:
    """Return the value of ``--sizes`` as three integers; raise InputError if this is impossible."""
    if sizes is None:
        return None
    if len(sizes) != 3 or not all(math.isfinite(size) and size == int(size) for size in sizes):
        raise InputError("--sizes needs three whole numbers: training, validation and test rows")
    train, validation, test = map(int, sizes)
    return train, validation, test
