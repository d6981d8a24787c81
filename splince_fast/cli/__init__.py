"""The command line: demo, fit, apply, compare, inspect and doctor.

The module of a command has two functions: ``add(commands)`` declares its arguments, and
``run(args)`` executes it. :func:`main` imports it inside ``try``, so that Ctrl-C during the imports
prints no traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with the arguments of the process by default; return its exit status.

    It is 0 after success, 2 after an error in the arguments or the files, 130 after Ctrl-C, and 141
    if the program that reads the output has closed the pipe.
    """
    if hasattr(sys.stdout, "reconfigure"):
        # Class names may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from splince_fast.cli.commands import run

        code = run(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("splince-fast: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Redirect stdout to the null device: Python flushes stdout at exit, and would report the
        # broken pipe again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
