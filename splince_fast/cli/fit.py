"""``splince-fast fit``: fit an eraser to embeddings and labels in files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splince_fast._solve.options import MOMENT_OPTIONS, OPTIONS, Option, check_moment_options
from splince_fast.cli import labels, rows
from splince_fast.cli.inspect import print_summary
from splince_fast.cli.options import add_shared, check_outputs, with_flags
from splince_fast.exceptions import InputError

if TYPE_CHECKING:
    from splince_fast.methods.table import Method

# Suffixes that would misname the files that the command writes.
_OTHER_FORMATS = {*rows.READERS, *labels.FORMATS, ".pth"} - {".safetensors"}

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
    add = fit.add_argument_group("data").add_argument
    add("embeddings", nargs="+", metavar="EMBEDDINGS",
        help=".npy, .npz, .safetensors or .pt files; with --embedding, .parquet files; or folders "
        "of such files, sorted by name. Several files are shards, read in this order")  # fmt: skip
    add_shared(add, "--embedding", "--key", "--labels", "--kind")
    add = fit.add_argument_group("eraser").add_argument
    add_shared(add, "--erase")
    add("--keep", action="append", metavar="NAME", help="task to keep; repeatable")
    add("--method", metavar="NAME",
        help="splince, leace, sal, mean_projection, or oracle, which needs labels when it is "
        "applied (default: splince with --keep, else leace)")  # fmt: skip
    for option in OPTIONS.values():
        _add_flag(add, option)
    add = fit.add_argument_group("moments").add_argument
    for option in MOMENT_OPTIONS.values():
        _add_flag(add, option)
    add("--groups", metavar="NAME",
        help="for --shrinkage cv: variable, such as a document or a person; rows of the same value "
        "stay in one of the two folds on which the intensity is chosen. By default a hash of the "
        "position of a row chooses its fold")  # fmt: skip
    add("--checkpoint", metavar="FILE",
        help="file for the state of the pass, written at intervals; the same command resumes from "
        "it, and deletes it when the eraser is written")  # fmt: skip
    add = fit.add_argument_group("output").add_argument
    add("-o", "--output", required=True, metavar="FILE", help=".safetensors file of the eraser")
    add("--save-moments", metavar="FILE", help="also write the moments, to fit other erasers")
    add_shared(add, "--force")
    fit.set_defaults(run=run)


def _add_flag(add: Callable[..., object], option: Option) -> None:
    default = "" if option.default is None else f" (default: {option.default})"

    def value(text: str) -> object:
        try:
            return option.parse(text)
        except InputError as error:
            message = with_flags(str(error), [option.name])
            raise argparse.ArgumentTypeError(f"invalid value: {message}") from error

    number = {float: ["A"], int: ["N"], None: []}[option.number]
    metavar = "|".join([*number, *option.choices])
    add(option.flag, type=value, metavar=metavar, help=option.help + default)


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
    for option, path in outputs.items():
        if path is not None and Path(path).suffix in _OTHER_FORMATS:
            raise InputError(
                f"{option} {path!r}: the format of the file is safetensors; name a file that ends "
                "in .safetensors"
            )
    method = method_of(args.method, args.keep)
    options, moment_options = _options(args, method)
    passes = moment_options.pop("passes", 0)
    variables = list(dict.fromkeys([*args.erase, *(args.keep or [])]))
    if args.groups in variables:
        raise InputError(
            f"--groups names {args.groups!r}, which is erased or kept; name another variable"
        )
    columns = variables if args.groups is None else [*variables, args.groups]
    kinds = labels.parse_kinds(args.kind, columns)
    reader, name = rows.row_options(args, paths)
    source = reader.source(
        paths, name, columns, lambda: labels.read_label_files(args.labels, columns, kinds)
    )
    source.files += tuple(label_paths)
    parameters: dict[str, Any] = {"checkpoint": args.checkpoint, "kinds": kinds, **moment_options}
    data: Any
    if args.shrinkage == "cv":
        data = Moments.from_blocks(source, folds=2, groups=args.groups, **parameters)
        moments = data.total
    else:
        data = moments = Moments.from_blocks(source, **parameters)
    if args.save_moments is not None:
        moments.save(args.save_moments)
        print(f"moments: {args.save_moments}")
    refine = {"refine": source, "passes": passes} if passes else {}
    eraser = method.function(data, erase=args.erase, **options, **refine)
    eraser.save(args.output)
    if args.checkpoint is not None:
        Path(args.checkpoint).unlink(missing_ok=True)
    print_summary(eraser.report)
    print(f"eraser: {args.output} (its report: splince-fast inspect {args.output})")


def _options(args: argparse.Namespace, method: Method) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the method, and those of the moments, that the user passed."""
    from splince_fast.methods.table import METHODS

    names = ("keep", *OPTIONS, *MOMENT_OPTIONS)
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    for name in [name for name in options if name not in ("subsample", "covariance_type")]:
        parameter = "refine" if name == "passes" else name
        if parameter not in method.parameters:
            methods = ", ".join(key for key, m in METHODS.items() if parameter in m.parameters)
            raise InputError(
                f"--{name.replace('_', '-')} does not apply to {method.label}; it applies to "
                f"{methods}"
            )
    moment_options = {name: options.pop(name) for name in MOMENT_OPTIONS if name in options}
    defaults = {name: option.default for name, option in MOMENT_OPTIONS.items()}
    solver = args.solver or OPTIONS["solver"].default
    check_moment_options(
        **defaults | moment_options, shrinkage=args.shrinkage, solver=solver, groups=args.groups
    )
    return options, moment_options
