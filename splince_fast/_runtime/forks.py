"""Forks: what another thread has locked stays locked in the child, so that a fork waits for it."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from typing import Any

# Another object in a forked child: to look at it costs no system call, as os.getpid does.
process = object()

# Numba's lock, by the thread that forks: another one may fork as soon as it is released.
_held: dict[int, Any] = {}


def _before() -> None:
    """Wait for modules of ours that another thread imports, and for what Numba compiles."""
    for name, module in list(sys.modules.items()):
        if name.startswith("splince_fast.") and getattr(
            getattr(module, "__spec__", None), "_initializing", False
        ):
            with contextlib.suppress(ImportError):  # told to the thread that imports it
                importlib.import_module(name)
    compiler = sys.modules.get("numba.core.compiler_lock")
    lock = getattr(compiler, "global_compiler_lock", None)
    if lock is not None:
        lock.acquire()
        _held[threading.get_ident()] = lock


def _after() -> None:
    lock = _held.pop(threading.get_ident(), None)
    if lock is not None:
        lock.release()


def _in_child() -> None:
    global process
    process = object()
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
