"""``splince-fast fit``: fit an eraser to embeddings and labels in files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from splince_fast._runtime.arguments import check_keywords
from splince_fast._runtime.files import eraser_path
from splince_fast._solve.options import MOMENT_OPTIONS, OPTIONS, Option, check_moment_options
from splince_fast.cli import labels, rows
from splince_fast.cli.inspect import print_summary
from splince_fast.cli.options import add_shared, check_outputs, named_file, with_flags
from splince_fast.exceptions import InputError

EXAMPLES = """examples:
  splince-fast fit X.npy --labels people.csv --erase gender --keep job -o gender.safetensors
  splince-fast fit people.parquet --embedding vector --erase gender -o gender.safetensors
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments to the parser."""
    fit = commands.add_parser(
        "fit",
        allow_abbrev=False,
        help="fit an eraser to embeddings and labels in files",
        description="Read embeddings and labels once, solve for the eraser, and write it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLES,
    )
    data, eraser, moments, output = map(
        fit.add_argument_group, ("data", "eraser", "moments", "output")
    )
    data.add_argument("embeddings", nargs="+", metavar="EMBEDDINGS",
        help=f"{rows.FORMATS}; or folders of all but word vectors, sorted by name. Several files "
        "are shards, read in this order")  # fmt: skip
    add_shared(data, "--embedding", "--key", "--labels", "--kind")
    add_shared(eraser, "--erase")
    eraser.add_argument("--keep", action="append", metavar="NAME", help="task to keep; repeatable")
    eraser.add_argument("--method", metavar="NAME",
        help="splince, leace, sal, mean_projection, fair_pca (components with 95 %% of the "
        "variance), or oracle, which needs labels when it is applied (default: splince with "
        "--keep, else leace)")  # fmt: skip
    for group, options in ((eraser, OPTIONS), (moments, MOMENT_OPTIONS)):
        for option in options.values():
            _add_flag(group, option)
    add_shared(moments, "--groups")
    moments.add_argument("--checkpoint", type=named_file, metavar="FILE",
        help="file for the state of the pass, written at intervals; the same command resumes from "
        "it, and deletes it when the eraser is written")  # fmt: skip
    add = output.add_argument
    add("-o", "--output", type=named_file, required=True, metavar="FILE",
        help=".safetensors file of the eraser")  # fmt: skip
    add("--save-moments", type=named_file, metavar="FILE",
        help="also write the moments, to fit other erasers")  # fmt: skip
    add_shared(output, "--force")
    fit.set_defaults(run=run)


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    def value(text: str) -> object:
        try:
            return option.parse(text)
        except InputError as error:
            message = with_flags(str(error), [option.name], {})
            raise argparse.ArgumentTypeError(f"invalid value: {message}") from error

    default = "" if option.default is None else f" (default: {option.default})"
    number = {float: ["A"], int: ["N"], None: []}[option.number]
    metavar = "|".join([*number, *option.choices])
    group.add_argument(option.flag, type=value, metavar=metavar, help=option.help + default)


def run(args: argparse.Namespace) -> None:
    """Check the arguments, read the files, fit the eraser, and write it."""
    from splince_fast.methods.table import method_of
    from splince_fast.moments import Moments

    paths = rows.expand_folders(args.embeddings, ordered=bool(args.labels))
    label_paths = labels.paths_of(args.labels)
    outputs = {
        "--output": args.output,
        "--save-moments": args.save_moments,
        "--checkpoint": args.checkpoint,
    }
    check_outputs(outputs, [*paths, *label_paths], force=args.force, resumed=("--checkpoint",))
    eraser_path(args.output)  # a wrong suffix is an error before the pass
    method = method_of(args.method, args.keep)
    passed = {
        name: value for name in ("keep", *OPTIONS, *MOMENT_OPTIONS)
        if (value := getattr(args, name)) is not None
    }  # fmt: skip
    of_moments = {name: passed.pop(name) for name in MOMENT_OPTIONS if name in passed}
    refine = ["refine"] if "passes" in of_moments else []
    check_keywords([*passed, *refine], method.function, where=method.label)
    check_moment_options(
        **{name: option.default for name, option in MOMENT_OPTIONS.items()} | of_moments,
        shrinkage=args.shrinkage, solver=args.solver or OPTIONS["solver"].default,
        groups=args.groups,
    )  # fmt: skip
    passes = of_moments.pop("passes", 0)
    variables = list(dict.fromkeys([*args.erase, *(args.keep or [])]))
    if args.groups in variables:
        raise InputError(
            f"--groups names {args.groups!r}, which is erased or kept; name another variable"
        )
    columns = variables if args.groups is None else [*variables, args.groups]
    kinds = labels.parse_kinds(args.kind, columns)
    reader, name = rows.row_options(args, paths)
    source = reader.source(
        paths, name, columns,
        lambda: labels.read_labels(args.labels, columns, kinds, by_word=reader.by_word),
    )  # fmt: skip
    source.files += tuple(label_paths)
    parameters: dict[str, Any] = {"checkpoint": args.checkpoint, "kinds": kinds, **of_moments}
    if args.shrinkage == "cv":
        parameters |= {"folds": 2, "groups": args.groups}
    data: Any = Moments.from_blocks(source, **parameters)
    if args.save_moments is not None:
        (data.total if args.shrinkage == "cv" else data).save(args.save_moments)
        print(f"moments: {args.save_moments}")
    passed |= {"refine": source, "passes": passes} if passes else {}
    eraser = method.function(data, erase=args.erase, **passed)
    eraser.save(args.output)
    if args.checkpoint is not None:
        Path(args.checkpoint).unlink(missing_ok=True)
    print_summary(eraser.report)
    print(f"eraser: {args.output} (its report: splince-fast inspect {args.output})")
