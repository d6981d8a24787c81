"""A readers-writer lock that raises instead of waiting, and deferral of KeyboardInterrupt.

Both remain usable after a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from splince_fast.exceptions import SplinceError

T = TypeVar("T")

_set: Callable[[int, Any], Any] = signal.signal
_get: Callable[[int], Any] = signal.getsignal
with contextlib.suppress(ImportError, AttributeError):
    # The C functions create no enumeration members. This is measurable in updates of single rows.
    _raw: Any = importlib.import_module("_signal")
    _set, _get = _raw.signal, _raw.getsignal
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread().ident


class Deferred:
    """Defer KeyboardInterrupt inside a ``with`` block and raise it when the block ends.

    Python raises it in the main thread only. In other threads, and where the host program handles
    SIGINT outside Python, the block runs unchanged. A lock that is acquired and released inside
    the block is never left locked.
    """

    __slots__ = ("_caught", "_handler")

    def __enter__(self) -> None:
        self._caught: tuple[int, FrameType | None] | None = None
        self._handler: Callable[..., object] | None = None
        if threading.get_ident() == _main:
            handler = _get(_SIGINT)
            if callable(handler):
                # Stored before the replacement, because an interrupt may come between the two.
                self._handler = handler
                _set(_SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number, frame

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            _set(_SIGINT, self._handler)
            if self._caught is not None:
                self._handler(*self._caught)


class PendingRows(Protocol):
    """A state with buffered rows, which are merged before it is read."""

    @property
    def has_pending(self) -> bool:
        """Whether rows are buffered."""

    def merge_pending(self) -> None:
        """Merge the buffered rows."""


class ReadersWriterLock:
    """Readers-writer lock that raises instead of waiting; re-entrant.

    ``with Deferred(), lock:`` writes, ``with Reading(lock, ...):`` reads. Both defer
    KeyboardInterrupt until the block ends, so that no interrupt separates a count from its
    release. A forked child has only the thread that forked: locks of other threads are released
    there.
    """

    __slots__ = (
        "_changed", "_depth", "_message", "_mutex", "_process", "_readers", "_waiting", "_writer",
    )  # fmt: skip

    def __init__(self, message: str) -> None:
        self._message = message
        self._writer: int | None = None
        self._depth = 0
        self._readers: dict[int, int] = {}  # number of read locks by thread
        self._reset_for_process()

    def _reset_for_process(self) -> None:
        """Release the locks of threads that do not exist in this process."""
        me = threading.get_ident()
        self._readers = {thread: n for thread, n in self._readers.items() if thread == me}
        if self._writer != me:
            self._writer, self._depth = None, 0
        self._mutex = threading.Lock()  # the parent's may have been copied while locked
        self._changed = threading.Condition(self._mutex)
        self._waiting = 0
        self._process = _process

    def __enter__(self) -> None:
        """Acquire the write lock; the caller defers interrupts."""
        if self._process is not _process:
            self._reset_for_process()
        me = threading.get_ident()
        with self._mutex:
            if self._writer != me and (self._writer is not None or self._readers):
                raise SplinceError(self._message)
            self._writer = me
            self._depth += 1

    def __exit__(self, *exception: object) -> None:
        # No thread waits for a writer, and other threads read `_writer` alone: the assignment is
        # atomic and needs no mutex.
        self._depth -= 1
        if not self._depth:
            self._writer = None

    def acquire_read(self, source: PendingRows | None) -> None:
        """Acquire a read lock, and merge buffered rows first; the caller defers interrupts."""
        if self._process is not _process:
            self._reset_for_process()
        me = threading.get_ident()
        with self._mutex:
            if self._writer is not None and self._writer != me:
                raise SplinceError(self._message)
            if source is not None and source.has_pending:
                while self._readers and source.has_pending:
                    self._waiting += 1
                    self._changed.wait()
                    self._waiting -= 1
                if source.has_pending:
                    source.merge_pending()
            self._readers[me] = self._readers.get(me, 0) + 1


class Reading(Generic[T]):
    """Context of a read lock, which returns `source`, or ``view(source)``.

    Rows that are buffered in `source` are merged first. A class, because a generator takes longer
    to enter.
    """

    __slots__ = ("_deferred", "_lock", "_source", "_view")

    def __init__(
        self,
        lock: ReadersWriterLock,
        source: PendingRows | None = None,
        view: Callable[[Any], T] | None = None,
    ) -> None:
        self._lock, self._source, self._view = lock, source, view
        self._deferred = Deferred()

    def __enter__(self) -> T:
        source: Any = self._source
        self._deferred.__enter__()
        try:
            self._lock.acquire_read(source)
        except BaseException:
            self._deferred.__exit__()
            raise
        try:
            value: T = source if self._view is None else self._view(source)
        except BaseException:
            self.__exit__()
            raise
        return value

    def __exit__(self, *exception: object) -> None:
        lock, me = self._lock, threading.get_ident()
        try:
            with lock._mutex:
                lock._readers[me] -= 1
                if not lock._readers[me]:
                    del lock._readers[me]
                if lock._waiting:
                    lock._changed.notify_all()
        finally:
            self._deferred.__exit__()


# -- forks ---------------------------------------------------------------------------------
# A lock that another thread holds during a fork stays locked in the child. A fork therefore waits
# until no other thread imports a module of this package or holds the lock of Numba's compiler.

# Replaced in a forked child. Comparing objects needs no system call, unlike os.getpid.
_process = object()

# Numba's lock by the forking thread: a second thread may fork as soon as the first releases it.
_compiler_locks: dict[int, Any] = {}


def _before_fork() -> None:
    """Wait for imports of this package in other threads; acquire the lock of Numba's compiler."""
    for name, module in list(sys.modules.items()):
        if name.startswith("splince_fast.") and getattr(
            getattr(module, "__spec__", None), "_initializing", False
        ):
            with contextlib.suppress(ImportError):  # raised in the thread that imports it
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
    global _main, _process
    _main = threading.get_ident()  # the thread that forked
    _process = object()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
