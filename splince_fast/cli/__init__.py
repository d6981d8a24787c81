"""The command line: demo, fit, apply, compare, inspect and doctor."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with the arguments of the process by default; return its exit status."""
    if hasattr(sys.stdout, "reconfigure"):
        # Class names may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:  # Ctrl-C during the import, too, prints no traceback
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
