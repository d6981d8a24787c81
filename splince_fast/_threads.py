"""The one owner of threads: how many, and how work is split over them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

from splince_fast.exceptions import InputError, SplinceError

_VARIABLE = "SPLINCE_FAST_NUM_THREADS"
_pool: ThreadPoolExecutor | None = None

T = TypeVar("T")


def _available() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def thread_count() -> int:
    """Threads of our own kernels: ``SPLINCE_FAST_NUM_THREADS``, or the available processors.

    Raises
    ------
    InputError
        The variable is set to something else than a positive integer.
    """
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return _available()
    if not (text.isascii() and text.isdecimal() and len(text) < 7) or int(text) < 1:
        raise InputError(f"{_VARIABLE} is {text[:20]!r}; set it to a positive integer or unset it")
    return int(text)


def _executor() -> ThreadPoolExecutor:
    """The process-wide pool, made on first use."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="splince_fast")
    return _pool


def _forget_pool() -> None:
    """A forked child has none of its parent's threads: let it make its own pool."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def split(work: Callable[[int, int], T], size: int, *, grain: int, align: int = 1) -> list[T]:
    """Call work(first, last) on ranges that cover 0..size, in parallel where that pays.

    Parameters
    ----------
    work : callable that releases the GIL for most of its time
    grain : int
        Smallest range worth a thread of its own.
    align : int
        Ranges begin at multiples of this (so that two threads never write one cache line).

    Returns
    -------
    list
        What the calls returned, in order of their ranges.
    """
    pieces = min(thread_count(), size // max(1, grain))
    if pieces <= 1:
        return [work(0, size)]
    bounds = [align * round(i * size / (pieces * align)) for i in range(pieces)] + [size]
    ranges = [(a, b) for a, b in pairwise(bounds) if a < b]
    futures: list[Future[T]] = []
    results: list[T] = []
    try:
        for a, b in ranges[1:]:
            futures.append(_executor().submit(work, a, b))
    except RuntimeError:
        pass  # no thread can be started, or the interpreter exits: this one does the rest
    try:
        results.append(work(*ranges[0]))
        rest = [work(a, b) for a, b in ranges[1 + len(futures) :]]
    finally:
        # Buffers stay in use until every thread has finished, also when this one failed.
        for future in futures:
            future.exception()
    return results + [future.result() for future in futures] + rest


class Turns:
    """Many readers, or one writer: a thread that finds others in its way is told so at once.

    A thread may nest its own turns.
    """

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
