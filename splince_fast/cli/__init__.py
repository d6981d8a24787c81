"""The command line: fit, apply and inspect for files, the demonstration, and the doctor.

One module per command, each with ``add(commands)``, which declares its arguments, and ``run``.
Nothing is imported here that takes time: Ctrl-C is answered from the first moment on.
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
        Arguments; the default is those of the process.

    Returns
    -------
    int
        0; 2 after a mistake in the arguments or the files, told on stderr; 130 after Ctrl-C; 141
        where the reader of the output has gone.

    Examples
    --------
    >>> from splince_fast.cli import main
    >>> main(["inspect", "/nowhere/eraser"])
    2
    """
    if hasattr(sys.stdout, "reconfigure"):  # names of classes may hold what a terminal cannot show
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
        # The rest of the buffer would fail again when the interpreter exits.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
