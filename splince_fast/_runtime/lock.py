"""A readers-writer lock that raises instead of waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splince_fast.exceptions import SplinceError


class ReadersWriterLock:
    """Readers-writer lock that raises instead of waiting; re-entrant."""

    __slots__ = ("_condition", "_depth", "_message", "_readers", "_writer")

    def __init__(self, message: str) -> None:
        self._condition = threading.Condition()
        self._message = message
        self._writer: int | None = None
        self._depth = 0
        self._readers = 0

    def __enter__(self) -> None:
        """Begin to write."""
        me = threading.get_ident()
        with self._condition:
            if self._writer != me and (self._writer is not None or self._readers):
                raise SplinceError(self._message)
            self._writer = me
            self._depth += 1

    def __exit__(self, *exception: object) -> None:
        # Nobody waits for a writer: whoever meets one gets an error.
        with self._condition:
            self._depth -= 1
            if not self._depth:
                self._writer = None

    def begin_reading(
        self, pending: Callable[[], bool] = lambda: False, settle: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to read; if something is `pending`, `settle` it first, while nobody else reads."""
        with self._condition:
            if self._writer not in (None, threading.get_ident()):
                raise SplinceError(self._message)
            while self._readers and pending():
                self._condition.wait()
            if pending():
                settle()
            self._readers += 1

    def end_reading(self) -> None:
        with self._condition:
            self._readers -= 1
            self._condition.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read, whatever is pending."""
        self.begin_reading()
        try:
            yield
        finally:
            self.end_reading()
