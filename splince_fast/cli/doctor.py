"""``splince-fast doctor``: what the library runs on."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Declare the command."""
    doctor = commands.add_parser(
        "doctor", allow_abbrev=False, help="show versions, BLAS, measured rates, and advice"
    )
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    from splince_fast.config import show_config

    print(show_config())
