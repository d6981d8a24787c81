"""The one switch of size: ``SPLINCE_FAST_BENCH=smoke`` or ``full``."""

from __future__ import annotations

import os
from typing import TypeVar

VARIABLE = "SPLINCE_FAST_BENCH"

T = TypeVar("T")


def smoke() -> bool:
    """Whether sizes are tiny, so that everything runs and no number means anything."""
    chosen = os.environ.get(VARIABLE, "full")
    if chosen not in ("smoke", "full"):
        raise SystemExit(f"{VARIABLE} is {chosen!r}; it must be 'smoke' or 'full'")
    return chosen == "smoke"


def use_smoke() -> None:
    """Tiny sizes and single threads from here on, in child processes as well.

    At tiny sizes several threads would only wait for each other, for long on a busy machine.
    """
    os.environ[VARIABLE] = "smoke"
    os.environ.setdefault("SPLINCE_FAST_NUM_THREADS", "1")


def pick(full: T, tiny: T) -> T:
    """One of two sizes, by the switch."""
    return tiny if smoke() else full
