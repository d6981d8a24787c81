"""Programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import splince_fast

ROOT = str(Path(splince_fast.__file__).parent.parent)


def run(
    text: str,
    *arguments: str,
    flags: tuple[str, ...] = (),
    begin: Callable[[], None] | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """The program `text`, with one thread of BLAS unless `environment` says otherwise."""
    own = {"PYTHONPATH": ROOT, "OPENBLAS_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *flags, "-c", text, *arguments],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **own}, preexec_fn=begin,
    )  # fmt: skip


def script(text: str, *arguments: str, **options: Any) -> str:
    """Standard output of a program, which must succeed."""
    done = run(text, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
