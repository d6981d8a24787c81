"""``splince-fast doctor``: versions, processor and measured speed."""

from __future__ import annotations

import argparse


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its arguments to the parser."""
    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="print versions, BLAS, speed and advice",
        description="Print the versions of the package and its dependencies, the BLAS and the "
        "instruction set in use, two measured speeds, and advice for a faster setup. Add the "
        "output to a bug report.",
    )
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print versions, BLAS, instruction set, measured speeds and advice."""
    from splince_fast.config import show_config

    print(show_config())
