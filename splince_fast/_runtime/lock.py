"""Lock of the state of moments, deferral of KeyboardInterrupt, and forks."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """Return a re-entrant lock that is free in a forked child unless the forking thread has it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


class Deferred:
    """Defer KeyboardInterrupt to the end of a ``with`` block."""

    # Python raises KeyboardInterrupt in the main thread only. In other threads, and if the host
    # program handles SIGINT outside Python, the block runs without deferral.

    def __enter__(self) -> None:
        self._caught: tuple[int, FrameType | None] | None = None
        is_main = threading.current_thread() is threading.main_thread()
        # Store the handler first: an interrupt may come between these two statements.
        self._handler = signal.getsignal(signal.SIGINT) if is_main else None
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *exception: object) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)


# A lock that another thread holds during a fork stays locked in the child. A fork therefore waits
# until no other thread imports a module of this package or holds the lock of Numba's compiler, and
# the child reinitialises the locks of moments.

_compiler_locks: dict[int, Any] = {}  # lock of Numba by id of the forking thread


def _before_fork() -> None:
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.startswith("splince_fast.") and getattr(spec, "_initializing", False):
            with contextlib.suppress(ImportError):  # the importing thread raises this error
                importlib.import_module(name)
    if compiler := sys.modules.get("numba.core.compiler_lock"):
        lock = compiler.global_compiler_lock
        lock.acquire()
        _compiler_locks[threading.get_ident()] = lock


def _after_fork() -> None:
    if lock := _compiler_locks.pop(threading.get_ident(), None):
        lock.release()


def _after_fork_in_child() -> None:
    _after_fork()
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
