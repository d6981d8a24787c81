"""``splince-fast compare``: compare erasers on files of embeddings and labels."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from splince_fast._runtime.arguments import require
from splince_fast.cli import rows
from splince_fast.cli.labels import as_list, parse_kinds, paths_of, read_labels
from splince_fast.cli.options import add_shared, check_outputs, named_file
from splince_fast.exceptions import InputError
from splince_fast.labels import ClassName, encode_one

if TYPE_CHECKING:
    from splince_fast.sources import Block


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
        help="a file or folder, as for fit; of word vectors, the words with labels are compared",
    )
    add_shared(compare, "--labels", "--embedding", "--key", "--erase")
    add_shared(compare, "--groups", "--kind", "--force")
    add("--keep", required=True, metavar="NAME", help="task to keep")
    add("--test", metavar="NAME",
        help="column with your own split: each entry is train, validation or test")  # fmt: skip
    add("--eraser", action="append", metavar="NAME",
        help="none, SAL, LEACE, SPLINCE, MeanProjection, FairPCA, INLP, RLACE or random; oracle "
        "or quadratic, which need the concept label of every row; repeatable (default: the first "
        "four)")  # fmt: skip
    add("--head", action="append", metavar="NAME",
        help="retrained, frozen or unregularised; repeatable (default: the first two)")  # fmt: skip
    add("--association", type=_numbers(float), metavar="P,P,...",
        help="levels of the association of concept and task in training rows, such as .5,.7,.9 "
        "(default: that of the data)")  # fmt: skip
    add("--aligned-class", metavar="CLASS",
        help="class of the concept that is aligned with the second class of the task")  # fmt: skip
    add("--sizes", type=_numbers(int), metavar="N,N,N",
        help="numbers of training, validation and test rows")  # fmt: skip
    add("--seeds", type=int, metavar="N",
        help="number of random splits (default: 5; 1 with --test)")  # fmt: skip
    add("--random-state", type=int, default=0, metavar="N", help="first seed (default: 0)")
    add("--alphas", type=_numbers(float), metavar="A,A,...",
        help="candidate L2 penalties of the heads; validation rows select one")  # fmt: skip
    add("--jobs", type=int, default=1, metavar="N",
        help="number of processes; -1 is one per processor (default: 1)")  # fmt: skip
    add("--run", dest="folder", metavar="FOLDER",
        help="folder of finished results: the same command resumes from it")  # fmt: skip
    add("--save", type=named_file, metavar="FILE", help="write all results to a JSON file")
    add("-o", "--output", type=named_file, metavar="FILE", help="write the report as HTML")
    compare.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check the arguments, read the files, compare the erasers, and write the results."""
    inputs = [args.embeddings, *paths_of(args.labels)]
    outputs = {"--output": args.output, "--save": args.save}
    check_outputs(outputs, inputs, force=args.force, suffixes={"--output": ".html"})
    if args.output is not None:  # report a missing package before the comparison runs
        require("matplotlib.figure", "evaluate")
        require("jinja2", "evaluate")
    others = {"task": args.keep, "groups": args.groups, "test": args.test}
    others = {role: name for role, name in others.items() if name is not None}
    names = [*args.erase, *others.values()]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"{name!r} is named twice; --erase, --keep, --groups and --test name a column each"
            )
    # Messages of the library name roles, and those of the command the columns of the files.
    args.variables = {role: name for role, name in others.items() if role not in args.erase}
    X, labels = _read(args, names)
    from splince_fast.evaluation import compare

    options: dict[str, Any] = {
        "concept": {name: labels[name] for name in args.erase},
        "random_state": args.random_state, "n_jobs": args.jobs,
        "erasers": args.eraser, "heads": args.head, "association": args.association,
        "alphas": args.alphas, "sizes": args.sizes, "run": args.folder,
        "n_seeds": 1 if args.test and args.seeds is None else args.seeds,
        "aligned_class": _aligned_class(args.aligned_class, labels[args.erase[0]]),
        **{role: labels[name] for role, name in others.items()},
    }  # fmt: skip
    result = compare(X, **{name: value for name, value in options.items() if value is not None})
    print(result)
    if args.save is not None:
        result.save(args.save)
        print(f"results: {args.save}")
    if args.output is not None:
        result.to_html(args.output)
        print(f"report: {args.output}")


def _read(args: argparse.Namespace, names: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return the rows and the named columns of labels."""
    kinds = parse_kinds(args.kind, names)
    X: Any = args.embeddings
    columns: dict[str, Any]

    def file_labels() -> dict[str, Any]:
        return read_labels(args.labels, names, kinds, by_word=reader.by_word)

    paths = rows.expand_folders([X], ordered=bool(args.labels))
    reader, name = rows.row_options(args, paths)
    if reader.is_table or reader.by_word:
        source = reader.source(paths, name, names, file_labels)
        blocks = [_read_block(block, labelled=reader.by_word) for block in source]
        if not blocks:
            raise InputError(f"{X!r} has no rows")
        columns = {
            name: [label for _, labels in blocks for label in labels[name]] for name in names
        }
        X = np.concatenate([rows for rows, _ in blocks])
    else:
        columns = file_labels()
        if reader.option is not None or paths != [X]:  # each process maps a .npy file
            X = reader.source(paths, name, (), dict)
    for variable, kind in kinds.items():
        column = columns[variable]
        columns[variable] = encode_one(column, len(column), name=variable, kind=kind)
    return X, columns


def _read_block(block: Block, *, labelled: bool) -> tuple[Any, dict[str, list[Any]]]:
    """Return rows and labels of a block; with `labelled`, only of the rows that have a label."""
    labels = {name: as_list(column) for name, column in block.labels.items()}
    if not labelled:
        return np.array(block.X), labels
    # A missing label is None, or NaN, which equals nothing.
    rows = [
        i for i, row in enumerate(zip(*labels.values(), strict=True))
        if any(label is not None and label == label for label in row)
    ]  # fmt: skip
    return block.X[rows], {name: [column[i] for i in rows] for name, column in labels.items()}


def _aligned_class(text: str | None, concept: object) -> ClassName | None:
    """Return the class, possibly an integer or boolean, with the name `text`; else `text`."""
    from splince_fast.evaluation.data import class_codes

    if text is None:
        return None
    names = class_codes(concept, "concept").classes
    return next((name for name in names if str(name) == text), text)


def _numbers(kind: type[float]) -> Callable[[str], tuple[float, ...]]:
    """Return the reader of a comma-separated list of numbers."""

    def numbers(text: str) -> tuple[float, ...]:
        try:
            return tuple(kind(part) for part in text.split(",") if part.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no comma-separated list of {'whole ' * (kind is int)}numbers"
            ) from None

    return numbers
