"""``splince-fast fit``: embeddings and labels in files, an eraser out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from splince_fast._solve.options import OPTIONS, READING, Option, check_reading
from splince_fast.cli.paths import check_outputs
from splince_fast.exceptions import InputError, UnknownVariableError

if TYPE_CHECKING:
    from splince_fast.methods.table import Method


def add(commands: Any) -> None:
    """Declare the command."""
    fit = commands.add_parser(
        "fit",
        allow_abbrev=False,
        help="fit an eraser to embeddings in files",
        description="Read embeddings and labels once, and write an eraser.",
    )
    add = fit.add_argument
    add("embeddings", nargs="+", metavar="EMBEDDINGS",
        help=".npy, .npz, .safetensors or .pt files (shards in order), .parquet files or a saved "
        "Hugging Face data set with --embedding, or folders of such files")  # fmt: skip
    add("--labels", action="append", default=[], metavar="[NAME=]FILE",
        help=".npy (its variable is NAME, or the name of the file), .csv, .tsv or .parquet (a "
        "variable per column), one entry per row of all embeddings; may be repeated. In text an "
        "empty field is a missing label; NA, None and the like are names. With --embedding, labels "
        "are columns of the same files")  # fmt: skip
    add("--erase", action="append", required=True, metavar="NAME",
        help="variable to erase; repeat it to erase several jointly")  # fmt: skip
    add("--keep", action="append", metavar="NAME", help="variable to keep; may be repeated")
    add(
        "--method", metavar="NAME",
        help="splince, leace, sal, mean_projection or oracle, which needs labels to be applied "
        "(default: splince with --keep, else leace)",
    )  # fmt: skip
    add("--embedding", metavar="COLUMN", help="column of vectors in tables")
    add("--key", metavar="NAME", help="array of rows in .npz, .safetensors or .pt files of several")
    add("--kind", action="append", default=[], metavar="NAME=KIND",
        help="read a variable as 'classes' or 'continuous' whatever its type; classes in text "
        "files keep their spelling, so that 01 and 1 are two")  # fmt: skip
    for option in (OPTIONS | READING).values():
        _add_flag(add, option)
    add("--groups", metavar="NAME",
        help="variable whose classes are not parted where the rows are dealt to two folds, from "
        "which the report says what happens to rows not seen; without it the hash of its position "
        "decides for each row. With --subsample and --sketch-size there are no such folds, but for "
        "--shrinkage cv")  # fmt: skip
    add("--checkpoint", metavar="FILE", help="save there while reading, and resume from it")
    add("--save-moments", metavar="FILE", help="keep the statistics, for other erasers")
    add("-o", "--output", required=True, metavar="FILE", help="the eraser, a .safetensors file")
    add("--force", action="store_true", help="overwrite files")
    fit.set_defaults(run=run)


def _add_flag(add: Any, option: Option) -> None:
    """Declare the flag of an option as its declaration has it."""
    default = "" if option.default is None else f" (default: {option.default})"

    def value(text: str) -> Any:
        try:
            return option.parse(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(f"invalid value: {error}") from error

    number = {float: ["A"], int: ["N"], None: []}[option.number]
    words = [*number, *option.choices]
    add(option.flag, type=value, metavar="|".join(words), help=option.help + default)


def run(args: argparse.Namespace) -> None:
    """Check everything, read, fit, write."""
    from splince_fast.cli import label_files, rows
    from splince_fast.methods.table import method_of
    from splince_fast.methods.unseen import few_rows
    from splince_fast.moments import Moments
    from splince_fast.moments.fold_rule import LEAST_ROWS

    embeddings = rows.expand(args.embeddings)
    inputs = [*embeddings, *label_files.paths_of(args.labels)]
    outputs = {
        "--output": args.output,
        "--save-moments": args.save_moments,
        "--checkpoint": args.checkpoint,
    }
    check_outputs(outputs, inputs, force=args.force, resumed=("--checkpoint",))
    method = method_of(args.method, args.keep)
    chosen = _options(args, method)
    reading, passes = _reading(args, chosen)
    kinds = dict(_kind(text) for text in args.kind)
    wanted = list(dict.fromkeys([*args.erase, *(args.keep or [])]))
    read = wanted if args.groups is None else list(dict.fromkeys([*wanted, args.groups]))
    for name in kinds:
        if name not in read:
            raise UnknownVariableError(f"--kind names {name!r}, which is neither erased nor kept")
    if args.groups in wanted:
        raise InputError(f"--groups names {args.groups!r}, which is erased or kept, too")
    if args.embedding is not None and args.labels:
        raise InputError(
            "--labels does not go with --embedding: labels are columns of the same files"
        )
    source = rows.source_of(
        embeddings,
        key=args.key,
        embedding=args.embedding,
        wanted=read,
        labels=lambda: label_files.read_labels(args.labels, read, kinds),
    )
    parameters = {"kinds": kinds, "ledoit_wolf": args.shrinkage == "ledoit-wolf", **reading}
    stream = {"checkpoint": args.checkpoint}
    folds = None
    plain = reading.get("subsample", 1) == 1 and "sketch_size" not in reading
    if args.shrinkage == "cv" or (plain and _folded(args, source.n_rows, source.n_features)):
        folds = Moments.from_blocks(source, folds=2, groups=args.groups, **stream, **parameters)
        moments = folds.total
    else:
        moments = Moments.from_blocks(source, **stream, **parameters)
    if args.save_moments is not None:
        moments.save(args.save_moments)
        print(f"moments: {args.save_moments}")
    again = {"refine": source, "passes": passes} if passes else {}
    data = moments if folds is None else folds
    eraser = method.function(data, erase=args.erase, **chosen, **again)
    if folds is None and plain and moments.n_rows >= LEAST_ROWS and not method.needs_labels:
        eraser = few_rows(eraser)
    eraser.save(args.output)
    print(f"eraser: {args.output}")
    for name in wanted:
        print(f"  {name!r} was read as {_how_read(moments, name)}")
    print(eraser.report)


def _how_read(moments: Any, name: str) -> str:
    """Say of a variable what it was taken for."""
    if moments.variables[name] == "continuous":
        return f"numbers ({moments.cross_covariance(name).shape[1]} column(s))"
    return f"classes ({len(moments.classes(name))})"


def _folded(args: argparse.Namespace, n_rows: int | None, n_features: int | None) -> bool:
    """Whether the rows are dealt to folds; a checkpoint goes on as it has begun."""
    from splince_fast._runtime.files import kind_of
    from splince_fast.moments.fold_rule import use_folds

    begun = None if args.checkpoint is None else kind_of(args.checkpoint)
    return use_folds(n_rows, n_features) if begun is None else begun == "folds"


def _options(args: argparse.Namespace, method: Method) -> dict[str, Any]:
    """Options of the method.

    Raises
    ------
    InputError
        An option that the method does not take.
    """
    from splince_fast.methods.table import METHODS

    taken = {"keep", *OPTIONS, *READING}
    chosen = {name: value for name in taken if (value := getattr(args, name)) is not None}
    for name in chosen.keys() - {"subsample", "sketch_size"}:
        needed = "refine" if name == "passes" else name
        if needed not in method.parameters:
            able = ", ".join(key for key, own in METHODS.items() if needed in own.parameters)
            raise InputError(
                f"--{name.replace('_', '-')} does not apply to {method.label}; it is for {able}"
            )
    return chosen


def _reading(args: argparse.Namespace, chosen: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Take out of what was chosen what moments are told, and how often rows are read again.

    Raises
    ------
    InputError
        Options that do not go together.
    """
    given = {name: chosen.pop(name) for name in READING if name in chosen}
    table = {name: given.get(name, option.default) for name, option in READING.items()}
    check_reading(
        **table,
        shrinkage=args.shrinkage,
        solver=args.solver or OPTIONS["solver"].default,
        groups=args.groups,
    )
    passes = given.pop("passes", 0)
    return given, passes


def _kind(text: str) -> tuple[str, str]:
    """NAME=KIND in two parts."""
    name, separator, kind = text.rpartition("=")
    if not separator or kind not in ("classes", "continuous"):
        raise InputError(f"--kind {text!r} must be NAME=classes or NAME=continuous")
    return name, kind
