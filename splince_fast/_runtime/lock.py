"""Lock of the state of moments, deferral of KeyboardInterrupt, and forks."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

_set: Callable[[int, Any], Any] = signal.signal
_get: Callable[[int], Any] = signal.getsignal
with contextlib.suppress(ImportError, AttributeError):
    # signal.signal creates enumeration members, and these C functions do not: updates with single
    # rows are measurably faster.
    _raw: Any = importlib.import_module("_signal")
    _set, _get = _raw.signal, _raw.getsignal
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread().ident
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

    __slots__ = ("_caught", "_handler")

    def __enter__(self) -> None:
        self._caught: tuple[int, FrameType | None] | None = None
        self._handler: Callable[..., object] | None = None
        if threading.get_ident() == _main:
            handler = _get(_SIGINT)
            if callable(handler):
                # Store the handler first: an interrupt may come between these two statements.
                self._handler = handler
                _set(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            _set(_SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)


# -- forks ---------------------------------------------------------------------------------
# A lock that another thread holds during a fork stays locked in the child. A fork therefore waits
# until no other thread imports a module of this package or holds the lock of Numba's compiler, and
# the child makes the locks of moments anew.

# Numba's compiler lock, for each thread that forks. One variable would not suffice, because another
# thread may fork as soon as the lock is released.
_compiler_locks: dict[int, Any] = {}


def _before_fork() -> None:
    """Wait until no other thread imports this package, then acquire Numba's compiler lock."""
    for name, module in list(sys.modules.items()):
        if name.startswith("splince_fast.") and getattr(
            getattr(module, "__spec__", None), "_initializing", False
        ):
            with contextlib.suppress(ImportError):  # the importing thread raises this error
                importlib.import_module(name)
    compiler = sys.modules.get("numba.core.compiler_lock")
    lock = getattr(compiler, "global_compiler_lock", None)
    if lock is not None:
        lock.acquire()
        _compiler_locks[threading.get_ident()] = lock


def _after_fork() -> None:
    lock = _compiler_locks.pop(threading.get_ident(), None)
    if lock is not None:
        lock.release()


def _after_fork_in_child() -> None:
    global _main
    _main = threading.get_ident()  # the forking thread is the main thread of the child
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
