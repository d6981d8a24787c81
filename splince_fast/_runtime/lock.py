"""A readers-writer lock that raises instead of waiting, and that a fork leaves usable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from splince_fast._runtime import forks
from splince_fast._runtime.interrupts import Deferred
from splince_fast.exceptions import SplinceError

T = TypeVar("T")


class Settling(Protocol):
    """A source of readings, whose waiting rows are merged first, while no other thread reads."""

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has anything to do."""

    def settle(self) -> None:
        """Make it ready to be read."""


class ReadersWriterLock:
    """Readers-writer lock that raises instead of waiting; re-entrant.

    ``with Deferred(), lock:`` writes, ``with lock.reading(...):`` reads. Both hold Ctrl-C back
    until they end: no interrupt separates a count from its release. A forked child has only the
    thread that forked, so what other threads had taken is free there.
    """

    # `writer` and `readers` are read elsewhere, too: where both are empty, the lock is free.
    __slots__ = (
        "_changed",
        "_depth",
        "_message",
        "_mutex",
        "_process",
        "_waiting",
        "readers",
        "writer",
    )

    def __init__(self, message: str) -> None:
        self._message = message
        self.writer: int | None = None
        self._depth = 0
        self.readers: dict[int, int] = {}  # how often each thread reads
        self._belong_to_this_process()

    def _belong_to_this_process(self) -> None:
        me = threading.get_ident()
        self.readers = {thread: n for thread, n in self.readers.items() if thread == me}
        if self.writer != me:
            self.writer, self._depth = None, 0
        self._mutex = threading.Lock()  # the parent's may have been copied while locked
        self._changed = threading.Condition(self._mutex)
        self._waiting = 0
        self._process = forks.process

    def __enter__(self) -> None:
        """Begin to write; the caller defers interrupts."""
        if self._process is not forks.process:
            self._belong_to_this_process()
        me = threading.get_ident()
        with self._mutex:
            if self.writer != me and (self.writer is not None or self.readers):
                raise SplinceError(self._message)
            self.writer = me
            self._depth += 1

    def __exit__(self, *exception: object) -> None:
        # Nobody waits for a writer: whoever meets one gets an error. Others read `writer` alone,
        # so that the last step, a single one, needs no mutex.
        self._depth -= 1
        if not self._depth:
            self.writer = None

    def reading(
        self, source: Settling | None = None, view: Callable[[Any], T] | None = None
    ) -> Reading[T]:
        """Read `source`, settled, or what `view` makes of it under the lock."""
        return Reading(self, source, view)

    def begin_to_read(self, source: Settling | None) -> None:
        """Count this thread among the readers; the caller defers interrupts."""
        if self._process is not forks.process:
            self._belong_to_this_process()
        me = threading.get_ident()
        with self._mutex:
            if self.writer is not None and self.writer != me:
                raise SplinceError(self._message)
            if source is not None and source.unsettled:
                while self.readers and source.unsettled:
                    self._waiting += 1
                    self._changed.wait()
                    self._waiting -= 1
                if source.unsettled:
                    source.settle()
            self.readers[me] = self.readers.get(me, 0) + 1

    def end_reading(self) -> None:
        """The opposite of `begin_to_read`."""
        me = threading.get_ident()
        with self._mutex:
            self.readers[me] -= 1
            if not self.readers[me]:
                del self.readers[me]
            if self._waiting:
                self._changed.notify_all()


class Reading(Generic[T]):
    """One ``with`` block that reads: no generator, as every solve passes here."""

    __slots__ = ("_deferred", "_lock", "_source", "_view")

    def __init__(
        self, lock: ReadersWriterLock, source: Settling | None, view: Callable[[Any], T] | None
    ) -> None:
        self._lock, self._source, self._view = lock, source, view
        self._deferred = Deferred()

    def __enter__(self) -> T:
        source: Any = self._source
        self._deferred.__enter__()
        try:
            self._lock.begin_to_read(source)
            try:
                read: T = source if self._view is None else self._view(source)
            except BaseException:
                self._lock.end_reading()
                raise
            return read
        except BaseException as error:
            self._deferred.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self._lock.end_reading()
        finally:
            self._deferred.__exit__(*exception)
