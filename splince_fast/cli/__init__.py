"""The command line: demo, fit, apply, compare, inspect and doctor.

Each command has a module: ``add(commands)`` declares the arguments of the command, ``run(args)``
executes it. :func:`main` imports the modules, so that Ctrl-C is handled during imports, too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        Exit status: 0 after success; 2 after an error in the arguments or the files, printed on
        stderr; 130 after Ctrl-C; 141 if the reader of the output has closed the pipe.

    Examples
    --------
    >>> from splince_fast.cli import main
    >>> main(["inspect", "/nowhere/eraser"])
    2
    """
    if hasattr(sys.stdout, "reconfigure"):
        # Class names may hold characters that the terminal cannot show.
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
        # Without this, Python flushes stdout at exit and reports the broken pipe again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
