"""``splince-fast fit``: embeddings and labels in files, an eraser out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from splince_fast.cli.paths import check_outputs
from splince_fast.exceptions import InputError, UnknownVariableError

if TYPE_CHECKING:
    from splince_fast.projection import Projection

# Which options each method takes, beside what it erases.
_METHODS: dict[str, tuple[str, ...]] = {
    "splince": ("keep", "max_amplification", "on_infeasible", "shrinkage"),
    "leace": ("shrinkage",),
    "sal": ("keep", "max_amplification", "on_infeasible"),
    "mean": (),
}
_OPTIONS = _METHODS["splince"]


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
    add("--method", choices=sorted(_METHODS), default="splince", help="(default: splince)")
    add("--embedding", metavar="COLUMN", help="column of vectors in tables")
    add("--key", metavar="NAME", help="array of rows in .npz, .safetensors or .pt files of several")
    add("--kind", action="append", default=[], metavar="NAME=KIND",
        help="read a variable as 'classes' or 'continuous' whatever its type; classes in text "
        "files keep their spelling, so that 01 and 1 are two")  # fmt: skip
    add("--max-amplification", type=float, metavar="A",
        help="give up kept directions that would lengthen corrections more than this")  # fmt: skip
    add("--on-infeasible", choices=("raise", "drop"),
        help="what to do where what is kept lies in what is erased (default: raise)")  # fmt: skip
    add("--shrinkage", type=_shrinkage, metavar="A|oas",
        help="share of an isotropic covariance, in [0, 1], or 'oas'")  # fmt: skip
    add("--checkpoint", metavar="FILE", help="save there while reading, and resume from it")
    add("--save-moments", metavar="FILE", help="keep the statistics, for other erasers")
    add("-o", "--output", required=True, metavar="FILE", help="the eraser, a .safetensors file")
    add("--force", action="store_true", help="overwrite files")
    fit.set_defaults(run=run)


def _shrinkage(text: str) -> float | str:
    """A number or "oas", as an argument."""
    return text if text == "oas" else float(text)


def run(args: argparse.Namespace) -> None:
    """Check everything, read, fit, write."""
    from splince_fast import methods
    from splince_fast.cli import label_files, rows
    from splince_fast.moments import Moments

    embeddings = rows.expand(args.embeddings)
    inputs = [*embeddings, *label_files.paths_of(args.labels)]
    outputs = {
        "--output": args.output,
        "--save-moments": args.save_moments,
        "--checkpoint": args.checkpoint,
    }
    check_outputs(outputs, inputs, force=args.force, resumed=("--checkpoint",))
    chosen = _options(args)
    kinds = dict(_kind(text) for text in args.kind)
    wanted = list(dict.fromkeys([*args.erase, *(args.keep or [])]))
    for name in kinds:
        if name not in wanted:
            raise UnknownVariableError(f"--kind names {name!r}, which is neither erased nor kept")
    if args.embedding is not None and args.labels:
        raise InputError(
            "--labels does not go with --embedding: labels are columns of the same files"
        )
    source = rows.source_of(
        embeddings,
        key=args.key,
        embedding=args.embedding,
        wanted=wanted,
        labels=lambda: label_files.read_labels(args.labels, wanted, kinds),
    )
    moments = Moments.from_blocks(source, progress=True, checkpoint=args.checkpoint, kinds=kinds)
    if args.save_moments is not None:
        moments.save(args.save_moments)
        print(f"moments: {args.save_moments}")
    functions: dict[str, Callable[..., Projection]] = {
        "splince": methods.splince, "leace": methods.leace, "sal": methods.sal,
        "mean": methods.mean_projection,
    }  # fmt: skip
    eraser = functions[args.method](moments, erase=args.erase, **chosen)
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


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the method that were given.

    Raises
    ------
    InputError
        One that the method does not take, or none to keep for SPLINCE.
    """
    chosen = {}
    for option in _OPTIONS:
        value = getattr(args, option)
        if value is None:
            continue
        if option not in _METHODS[args.method]:
            able = ", ".join(name for name, has in _METHODS.items() if option in has)
            raise InputError(
                f"--{option.replace('_', '-')} means nothing to --method {args.method}; it is for "
                f"{able}"
            )
        chosen[option] = value
    if args.method == "splince" and not args.keep:
        raise InputError(
            "--method splince needs --keep NAME, the variable to keep; --method leace keeps none"
        )
    a, s = args.max_amplification, args.shrinkage
    if a is not None and not a >= 1:
        raise InputError(f"--max-amplification is {a}; it must be a number of at least 1")
    if isinstance(s, float) and not 0 <= s <= 1:
        raise InputError(f"--shrinkage is {s}; it must be 'oas' or a number in [0, 1]")
    return chosen


def _kind(text: str) -> tuple[str, str]:
    """NAME=KIND in two parts."""
    name, separator, kind = text.rpartition("=")
    if not separator or kind not in ("classes", "continuous"):
        raise InputError(f"--kind {text!r} must be NAME=classes or NAME=continuous")
    return name, kind
