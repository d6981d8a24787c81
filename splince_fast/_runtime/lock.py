"""A readers-writer lock that raises an error on conflicts; deferral of KeyboardInterrupt.

The lock and the deferral remain usable after a fork.
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
    # signal.signal creates enumeration members, and these C functions do not: updates with single
    # rows are measurably faster.
    _raw: Any = importlib.import_module("_signal")
    _set, _get = _raw.signal, _raw.getsignal
_SIGINT = int(signal.SIGINT)
_main = threading.main_thread().ident


class Deferred:
    """Defer KeyboardInterrupt to the end of a ``with`` block."""

    # Python raises KeyboardInterrupt in the main thread only. In other threads, and if the host
    # program handles SIGINT outside Python, the block runs without deferral. An interrupt cannot
    # prevent the release of a lock that is acquired inside the block.

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


class PendingRows(Protocol):
    """Protocol of a state that must be brought up to date before it is read."""

    # For example, the state buffers rows, or a total over classes is out of date.

    @property
    def has_pending(self) -> bool:
        """Whether `merge_pending` must be called before the state is read."""

    def merge_pending(self) -> None:
        """Merge the buffered rows, and update totals that are out of date."""


class ReadersWriterLock:
    """Re-entrant readers-writer lock that raises SplinceError if another thread has the lock."""

    # ``with Deferred(), lock:`` holds the write lock, ``with Reading(lock, ...):`` a read lock. In
    # both blocks KeyboardInterrupt is deferred, so that every acquired lock is released. There is
    # one wait: a reader that must merge buffered rows waits for the other readers. A forked child
    # releases the locks of other threads, because only the forking thread exists in the child.

    __slots__ = (
        "_changed", "_depth", "_message", "_mutex", "_process", "_readers", "_waiting", "_writer",
    )  # fmt: skip

    def __init__(self, message: str) -> None:
        self._message = message
        self._writer: int | None = None
        self._depth = 0
        self._readers: dict[int, int] = {}  # number of read locks per thread
        self._reset_for_process()

    def _reset_for_process(self) -> None:
        """Release the locks of threads that do not exist in this process."""
        me = threading.get_ident()
        self._readers = {thread: n for thread, n in self._readers.items() if thread == me}
        if self._writer != me:
            self._writer, self._depth = None, 0
        self._mutex = threading.Lock()  # a fork may copy the mutex while it is locked
        self._changed = threading.Condition(self._mutex)
        self._waiting = 0
        self._process = _process

    def __enter__(self) -> None:
        """Acquire the write lock; the caller must defer interrupts."""
        if self._process is not _process:
            self._reset_for_process()
        me = threading.get_ident()
        with self._mutex:
            if self._writer != me and (self._writer is not None or self._readers):
                raise SplinceError(self._message)
            self._writer = me
            self._depth += 1

    def __exit__(self, *exception: object) -> None:
        # The mutex is not needed: no thread waits for the writer, other threads read only
        # `_writer`, and the assignment of `_writer` is atomic.
        self._depth -= 1
        if not self._depth:
            self._writer = None

    def acquire_read(self, source: PendingRows | None) -> None:
        """Merge the buffered rows of `source`, then acquire a read lock."""
        # The caller must defer interrupts.
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
    """Context manager that holds a read lock and returns `source`, or ``view(source)``."""

    # The buffered rows of `source` are merged first. A class is used because it is faster to enter
    # than a generator with ``contextlib.contextmanager``.

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

# Identity of the process, replaced in a forked child. Unlike os.getpid, a comparison of objects
# needs no system call.
_process = object()

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
    global _main, _process
    _main = threading.get_ident()  # the forking thread is the main thread of the child
    _process = object()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
