"""Parsing and running of a command; each error or warning is printed on one line."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from splince_fast._runtime.arguments import library_version
from splince_fast.cli import apply, compare, demo, fit, inspect
from splince_fast.cli.options import with_flags
from splince_fast.exceptions import SplinceError, SplinceWarning


def run(argv: Sequence[str] | None) -> int:
    """Parse the arguments, run the command, and return the exit status."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has already printed the error or the help
        return int(stop.code or 0)
    printed: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = _with_flags(str(message), args)
        if text not in printed:
            printed.add(text)
            print(f"splince-fast: warning: {text}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", SplinceWarning)
            warnings.showwarning = show
            args.run(args)
    except BrokenPipeError:
        raise
    except (SplinceError, OSError) as error:
        missing_path = error.filename if isinstance(error, FileNotFoundError) else None
        text = str(error) if missing_path is None else f"there is no file {str(missing_path)!r}"
        print(f"splince-fast: error: {_with_flags(text, args)}", file=sys.stderr)
        return 2
    return 0


def _with_flags(text: str, args: argparse.Namespace) -> str:
    # `run` is the function of the command, and `folder` the value of --run.
    names = ["run" if name == "folder" else name for name in vars(args).keys() - {"run"}]
    return with_flags(text, names, getattr(args, "variables", {}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="splince-fast",
        description="Remove a concept, such as gender, from embeddings so that no linear "
        "predictor finds it, and keep a task.",
        epilog="'splince-fast COMMAND --help' shows the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {library_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, fit, apply, compare, inspect):
        command.add(commands)
    return parser
