"""The command line: the demonstration, and fit, apply and inspect for files.

Above 400 lines because files of labels are read here too: nobody but the command line does.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from splince_fast import methods, sources
from splince_fast._runtime import files
from splince_fast._runtime.extras import require
from splince_fast.evaluation.command import add_compare
from splince_fast.exceptions import (
    InputError,
    LabelError,
    SplinceError,
    SplinceWarning,
    UnknownVariableError,
)
from splince_fast.moments import Moments
from splince_fast.projection import Projection

# Which options each method takes, beside what it erases.
_METHODS: dict[str, tuple[Callable[..., Projection], tuple[str, ...]]] = {
    "splince": (methods.splince, ("keep", "max_amplification", "on_infeasible", "shrinkage")),
    "leace": (methods.leace, ("shrinkage",)),
    "sal": (methods.sal, ("keep", "max_amplification", "on_infeasible")),
    "mean": (methods.mean_projection, ()),
}
_DEFAULT_FIGURE = "splince-fast-demo.png"
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[nN][aA][nN]")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; the default is those of the process.

    Returns
    -------
    int
        0; 2 after a mistake in the arguments or the files, told on stderr; 130 after Ctrl-C.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return int(stop.code or 0)
    try:
        with _plain_warnings():
            args.run(args)
    except (SplinceError, OSError) as error:
        print(f"splince-fast: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("splince-fast: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(
        prog="splince-fast",
        description="Linear concept erasure: SPLINCE, LEACE, SAL and mean projection.",
        allow_abbrev=False,
    )
    version = files.library_version()
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_demo, _add_fit, _add_apply, _add_inspect, _add_doctor):
        add(commands)
    add_compare(commands, read_labels)
    return parser


# -- demo --------------------------------------------------------------------------------------


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="rerun the paper's profession experiment on activations of a language model",
        description="Erase occupational stereotypes from the states of a language model, keep "
        "factual gender, and see by which of them it still says he or she.",
    )
    demo.add_argument("--splits", type=int, default=20, help="random splits (default: 20)")
    demo.add_argument("--seed", type=int, default=0, help="of the splits (default: 0)")
    figure = demo.add_mutually_exclusive_group()
    figure.add_argument(
        "--figure", metavar="PATH", type=Path, help=f"where to draw it (default: {_DEFAULT_FIGURE})"
    )
    figure.add_argument("--no-figure", action="store_true", help="draw nothing")
    demo.add_argument("--json", metavar="PATH", type=Path, help="write all figures there, too")
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> None:
    if args.figure is not None:
        require("matplotlib.figure", "demo")
    for path in (args.figure, args.json):
        _check_folder(path)
    from splince_fast.demo import experiment, professions, table

    data = professions.load()
    runs: list[experiment.Results] = []
    for correlation in (None, experiment.PAPER_CORRELATION):
        results = experiment.run(
            data, n_splits=args.splits, seed=args.seed, train_correlation=correlation, progress=True
        )
        if not runs:
            print(table.heading(data, results))
        runs.append(results)
        print(f"\n{table.table(results)}\n{table.reading(results)}", flush=True)
    print(f"\n{table.notes(runs[-1])}")
    if args.json is not None:
        args.json.write_text(json.dumps(table.to_dict(data, runs), indent=1) + "\n")
        print(f"all figures: {args.json}")
    if args.no_figure:
        return
    if args.figure is None and find_spec("matplotlib") is None:
        print('figure: not drawn; matplotlib comes with pip install "splince_fast[demo]"')
        return
    from splince_fast.demo.figure import draw

    path = Path(_DEFAULT_FIGURE) if args.figure is None else args.figure
    draw(data, runs, path)
    print(f"figure: {path}")


# -- fit ---------------------------------------------------------------------------------------


def _add_fit(commands: Any) -> None:
    fit = commands.add_parser(
        "fit",
        allow_abbrev=False,
        help="fit an eraser to embeddings in .npy or parquet files",
        description="Read embeddings and labels once, and write an eraser.",
    )
    add = fit.add_argument
    add("embeddings", nargs="+", metavar="EMBEDDINGS", help=".npy files (shards in order), or "
        "parquet files or folders with --embedding")  # fmt: skip
    add("--labels", action="append", default=[], metavar="[NAME=]FILE",
        help=".npy (its variable is NAME, or the name of the file), .csv, .tsv or .parquet (a "
        "variable per column), one entry per row of all embeddings; may be repeated. With "
        "--embedding, labels are columns of the same files")  # fmt: skip
    add("--erase", action="append", required=True, metavar="NAME",
        help="variable to erase; repeat it to erase several jointly")  # fmt: skip
    add("--keep", action="append", metavar="NAME", help="variable to keep; may be repeated")
    add("--method", choices=sorted(_METHODS), default="splince", help="(default: splince)")
    add("--embedding", metavar="COLUMN", help="column of vectors in parquet files")
    add("--kind", action="append", default=[], metavar="NAME=KIND",
        help="read a variable as 'classes' or 'continuous' whatever its type")  # fmt: skip
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
    fit.set_defaults(run=_fit)


def _shrinkage(text: str) -> float | str:
    """A number or "oas", as an argument."""
    return text if text == "oas" else float(text)


def _fit(args: argparse.Namespace) -> None:
    for path in (args.output, args.save_moments):
        _check_new(path, args.force)
    _check_folder(args.checkpoint)
    function, options = _METHODS[args.method]
    chosen = {}
    for option in ("keep", "max_amplification", "on_infeasible", "shrinkage"):
        value = getattr(args, option)
        if value is not None and option not in options:
            able = ", ".join(name for name, (_, has) in _METHODS.items() if option in has)
            raise InputError(
                f"--{option.replace('_', '-')} means nothing to --method {args.method}; it is for "
                f"{able}"
            )
        if value is not None:
            chosen[option] = value
    if args.method == "splince" and not args.keep:
        raise InputError(
            "--method splince needs --keep NAME, the variable to keep; --method leace keeps none"
        )
    kinds = dict(_kind(text) for text in args.kind)
    wanted = list(dict.fromkeys([*args.erase, *(args.keep or [])]))
    for name in kinds:
        if name not in wanted:
            raise UnknownVariableError(f"--kind names {name!r}, which is neither erased nor kept")
    moments = Moments.from_blocks(
        _embeddings(args, wanted, kinds), progress=True, checkpoint=args.checkpoint, kinds=kinds
    )
    if args.save_moments is not None:
        moments.save(args.save_moments)
        print(f"moments: {args.save_moments}")
    eraser = function(moments, erase=args.erase, **chosen)
    eraser.save(args.output)
    print(f"eraser: {args.output}\n{eraser.report}")


def _kind(text: str) -> tuple[str, str]:
    """NAME=KIND in two parts."""
    name, separator, kind = text.rpartition("=")
    if not separator or kind not in ("classes", "continuous"):
        raise InputError(f"--kind {text!r} must be NAME=classes or NAME=continuous")
    return name, kind


def _embeddings(
    args: argparse.Namespace, wanted: list[str], kinds: Mapping[str, str]
) -> sources.Source:
    """The rows with the labels that are wanted."""
    if args.embedding is None:
        foreign = [path for path in args.embeddings if not path.endswith(".npy")]
        if foreign:
            raise InputError(
                f"{foreign[0]!r} is no .npy file; for parquet files name the column of vectors "
                "with --embedding COLUMN"
            )
        return sources.from_npy(args.embeddings, read_labels(args.labels, wanted, kinds))
    if args.labels:
        raise InputError(
            "--labels does not go with --embedding: labels are columns of the same parquet files"
        )
    return sources.from_parquet(args.embeddings, embedding=args.embedding, labels=wanted)


def read_labels(
    texts: Sequence[str], wanted: Sequence[str], kinds: Mapping[str, str]
) -> dict[str, Any]:
    """Read label columns from files.

    Parameters
    ----------
    texts : sequence of str
        ``FILE`` or ``NAME=FILE``.
    wanted : sequence of str
        Names of the columns to read.
    kinds : mapping
        What "classes" or "continuous" was said of some of them.

    Returns
    -------
    dict
        A column for every name.

    Raises
    ------
    UnknownVariableError
        A name is in no file.
    LabelError
        A name is in several, or a column cannot be read.
    InputError
        A file cannot be read.
    """
    columns: dict[str, Any] = {}
    known: list[str] = []
    for text in texts:
        name, path = _name_and_path(text)
        if path.suffix == ".npy":
            found: Mapping[str, Any] = {name or path.stem: _read_npy(path)}
            known += found
        elif name is not None:
            raise InputError(
                f"--labels {text!r}: NAME=FILE is for .npy files; the columns of other files have "
                "names of their own"
            )
        elif path.suffix in (".csv", ".tsv"):
            names, found = _read_csv(path, wanted, kinds)
            known += names
        elif path.suffix == ".parquet":
            names, found = _read_parquet(path, wanted)
            known += names
        else:
            raise InputError(f"labels come from .npy, .csv, .tsv or .parquet files, not {text!r}")
        columns |= found
    for name, times in Counter(known).items():
        if times > 1 and name in wanted:
            raise LabelError(f"the label files have {times} columns {name!r}; leave one of them")
    for name in wanted:
        if name not in columns:
            there = ", ".join(map(repr, known)) or "none: pass --labels FILE"
            raise UnknownVariableError(f"no label file has the variable {name!r}; there is {there}")
    return {name: columns[name] for name in wanted}


def _name_and_path(text: str) -> tuple[str | None, Path]:
    """NAME=FILE or FILE; a file whose own name has the sign is taken as it is."""
    name, separator, path = text.partition("=")
    return (name, Path(path)) if separator and not Path(text).exists() else (None, Path(text))


def _read_npy(path: Path) -> NDArray[Any]:
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read as labels: {error}. Save them as an array of strings, "
            "integers or floats, not of Python objects"
        ) from error


def _read_csv(
    path: Path, wanted: Sequence[str], kinds: Mapping[str, str]
) -> tuple[list[str], dict[str, Any]]:
    """Names of all columns, and those that are wanted."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            names = [name.strip() for name in next(rows, [])]
            places = {name: i for i, name in enumerate(names) if name in wanted}
            cells: dict[str, list[str]] = {name: [] for name in places}
            blank = 0  # the first empty line: only the end of the file may consist of such
            for row in rows:
                if not row:
                    blank = blank or rows.line_num
                elif blank or len(row) != len(names):
                    raise LabelError(
                        f"{str(path)!r} has {0 if blank else len(row)} fields in line "
                        f"{blank or rows.line_num}, and {len(names)} in its header; a label that "
                        'is missing is an empty field between delimiters, or ""'
                    )
                for name, place in places.items() if row else ():
                    cells[name].append(row[place].strip())
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read: {error}. Save it as a comma- or tab-separated file in "
            "UTF-8 with a header"
        ) from error
    return names, {n: _typed(texts, n, path, kinds.get(n)) for n, texts in cells.items()}


def _typed(texts: list[str], name: str, path: Path, kind: str | None) -> Any:
    """A column of text as integers, floats or strings; an empty text is missing."""
    filled = [text for text in texts if text]
    if all(map(_INTEGER.fullmatch, filled)):
        return [int(text) if text else None for text in texts]
    numbers = [bool(_NUMBER.fullmatch(text)) for text in filled]
    if all(numbers) and kind != "classes":
        return np.array([float(text) if text else np.nan for text in texts])
    if any(numbers) and kind is None:
        raise LabelError(
            f"column {name!r} of {str(path)!r} holds numbers and text such as "
            f"{filled[numbers.index(False)]!r}; leave missing labels empty, or say "
            f"--kind {name}=classes if all of them are names"
        )
    return [text or None for text in texts]


def _read_parquet(path: Path, wanted: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Names of all columns, and those that are wanted."""
    pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
    try:
        names = list(parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=[name for name in names if name in wanted])
    except pa.ArrowException as error:
        raise InputError(f"{str(path)!r} cannot be read as Parquet: {error}") from error
    return names, {name: table.column(name) for name in table.column_names}


# -- apply -------------------------------------------------------------------------------------


def _add_apply(commands: Any) -> None:
    apply = commands.add_parser(
        "apply",
        allow_abbrev=False,
        help="apply an eraser to a .npy file of any size",
        description="Rows are read and written through memory maps, in pieces.",
    )
    apply.add_argument("eraser", metavar="ERASER", help="a file that fit has written")
    apply.add_argument("rows", metavar="X", help=".npy file of shape (n, d)")
    where = apply.add_mutually_exclusive_group(required=True)
    where.add_argument("-o", "--output", metavar="FILE", help="new .npy file, complete or absent")
    where.add_argument(
        "--in-place",
        action="store_true",
        help="overwrite X; after an interruption run it again: erasing twice changes nothing",
    )
    apply.add_argument("--force", action="store_true", help="overwrite FILE")
    apply.set_defaults(run=_apply)


def _apply(args: argparse.Namespace) -> None:
    eraser = Projection.load(args.eraser)
    _check_new(args.output, args.force)
    try:
        X = np.lib.format.open_memmap(args.rows, mode="r+" if args.in_place else "r")
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{args.rows!r} cannot be read as a .npy array: {error}. It may be truncated, of "
            "another format, or hold Python objects"
        ) from error
    dtype = eraser(X[:0]).dtype  # refuses a wrong shape before anything is written
    if not args.in_place:
        with _new_array(Path(args.output), dtype, X.shape) as out:
            eraser(X, out=out, progress=True)
    elif dtype != X.dtype:
        raise InputError(f"{args.rows!r} holds {X.dtype}, and the result is {dtype}; use -o FILE")
    else:
        eraser(X, out=X, progress=True)
        X.flush()
    print(f"{len(X):,} rows: {args.rows if args.in_place else args.output}")


@contextmanager
def _new_array(
    target: Path, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Iterator[NDArray[Any]]:
    """A memory-mapped .npy file that gets its name when it is complete."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
        with open(partial, "rb+") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is an error here, a crash in the map
                os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
            yield array
            array.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


# -- inspect -----------------------------------------------------------------------------------


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect", allow_abbrev=False, help="show what an eraser or a file of moments holds"
    )
    inspect.add_argument("file", metavar="FILE")
    inspect.set_defaults(run=_inspect)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor", allow_abbrev=False, help="show versions, BLAS, measured rates, and advice"
    )
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    from splince_fast.config import show_config

    print(show_config())


def _inspect(args: argparse.Namespace) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(args.file, framework="numpy") as file:
            header = file.metadata() or {}
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        header, shapes = {}, {}  # loading says what is wrong
    held = (
        Moments.load(args.file) if header.get("kind") == "moments" else Projection.load(args.file)
    )
    print(
        f"{held!r}\n  format {header['format_version']}, written by {header['library']} "
        f"{header['library_version']}"
    )
    for name, shape in shapes.items():
        print(f"  tensor {name}: {shape}")
    if isinstance(held, Projection):
        print("no report: it was not made by a method" if held.report is None else held.report)
        return
    print(f"  weight {held.weight:,.10g}")
    for variable, kind in held.variables.items():
        if kind == "classes":
            counts = held.class_counts(variable)
            shown = ", ".join(f"{name!r}: {rows:,}" for name, rows in list(counts.items())[:10])
            kind += f" {{{shown}{', ...' if len(counts) > 10 else ''}}}"
        print(f"  variable {variable!r}: {kind}")


# -- shared ------------------------------------------------------------------------------------


def _check_new(path: str | None, force: bool) -> None:
    """Refuse, before any work, a file that exists or that cannot be made."""
    _check_folder(path)
    if path is not None and os.path.exists(path) and not force:
        raise InputError(f"{path!r} exists; name another file, or overwrite it with --force")


def _check_folder(path: str | Path | None) -> None:
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise InputError(f"there is no folder for {str(path)!r}; make it first")


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings of this package as one line each, without the source line that raised them."""
    told: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in told:
            told.add(str(message))
            print(f"splince-fast: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", SplinceWarning)
        warnings.showwarning = show
        yield
