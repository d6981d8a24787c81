"""Forks: what another thread has locked stays locked in the child, so that a fork waits for it."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

# Another object in a forked child: to look at it costs no system call, as os.getpid does.
process = object()

_held: list[Any] = []


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
        _held.append(lock)


def _after() -> None:
    while _held:
        _held.pop().release()


def _in_child() -> None:
    global process
    process = object()
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
