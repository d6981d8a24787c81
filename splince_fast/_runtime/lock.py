"""A readers-writer lock that raises instead of waiting, and that a fork leaves usable."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splince_fast._runtime.interrupts import Deferred
from splince_fast.exceptions import SplinceError


class ReadersWriterLock:
    """Readers-writer lock that raises instead of waiting; re-entrant.

    ``with Deferred(), lock:`` writes, ``with lock.reading(...):`` reads. Both hold Ctrl-C back
    until they end: no interrupt separates a count from its release. A forked child has only the
    thread that forked, so what other threads had taken is free there.
    """

    __slots__ = ("_changed", "_depth", "_message", "_mutex", "_pid", "_readers", "_writer")

    def __init__(self, message: str) -> None:
        self._message = message
        self._writer: int | None = None
        self._depth = 0
        self._readers: dict[int, int] = {}  # how often each thread reads
        self._belong_to_this_process()

    def _belong_to_this_process(self) -> None:
        me = threading.get_ident()
        self._readers = {thread: n for thread, n in self._readers.items() if thread == me}
        if self._writer != me:
            self._writer, self._depth = None, 0
        self._mutex = threading.Lock()  # of the parent it may have been copied locked
        self._changed = threading.Condition(self._mutex)
        self._pid = os.getpid()

    def __enter__(self) -> None:
        """Begin to write; the caller defers interrupts."""
        if self._pid != os.getpid():
            self._belong_to_this_process()
        me = threading.get_ident()
        with self._mutex:
            if self._writer != me and (self._writer is not None or self._readers):
                raise SplinceError(self._message)
            self._writer = me
            self._depth += 1

    def __exit__(self, *exception: object) -> None:
        # Nobody waits for a writer: whoever meets one gets an error.
        with self._mutex:
            self._depth -= 1
            if not self._depth:
                self._writer = None

    @contextmanager
    def reading(
        self, pending: Callable[[], bool] = lambda: False, settle: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Read; if something is `pending`, `settle` it first, while nobody else reads."""
        with Deferred():
            if self._pid != os.getpid():
                self._belong_to_this_process()
            me = threading.get_ident()
            with self._mutex:
                if self._writer not in (None, me):
                    raise SplinceError(self._message)
                while self._readers and pending():
                    self._changed.wait()
                if pending():
                    settle()
                self._readers[me] = self._readers.get(me, 0) + 1
            try:
                yield
            finally:
                with self._mutex:
                    self._readers[me] -= 1
                    if not self._readers[me]:
                        del self._readers[me]
                    self._changed.notify_all()
