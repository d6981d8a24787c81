"""The thread pool of the kernels: number of threads, and division of work among threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from typing import TypeVar

from splince_fast.exceptions import InputError

_VARIABLE = "SPLINCE_FAST_NUM_THREADS"
_limit = threading.local()

T = TypeVar("T")


def thread_count() -> int:
    """Return the number of threads: ``SPLINCE_FAST_NUM_THREADS``, or the available processors."""
    # :func:`limited` can reduce the number of available processors.
    text = os.environ.get(_VARIABLE, "")
    if not text:
        affinity = hasattr(os, "sched_getaffinity")
        processors = len(os.sched_getaffinity(0)) if affinity else os.cpu_count()
        return min(max(1, processors or 1), getattr(_limit, "threads", sys.maxsize))
    if not (text.isascii() and text.isdecimal() and len(text) < 7) or int(text) < 1:
        raise InputError(f"{_VARIABLE} is {text[:20]!r}; set it to a positive integer or unset it")
    return int(text)


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Limit the number of threads for calls from this thread in a ``with`` block."""
    # ``SPLINCE_FAST_NUM_THREADS`` takes precedence over the limit.
    before = getattr(_limit, "threads", sys.maxsize)
    _limit.threads = threads
    try:
        yield
    finally:
        _limit.threads = before


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="splince_fast")


if hasattr(os, "register_at_fork"):  # the threads of the parent do not exist in a forked child
    os.register_at_fork(after_in_child=_executor.cache_clear)


def split(work: Callable[[int, int], T], size: int, *, grain: int, align: int = 1) -> list[T]:
    """Call ``work(start, stop)`` on ranges that cover 0 to `size`, in parallel if it is large."""
    # `grain` is the minimum number of items per thread. Ranges start at multiples of `align`, so
    # that no two threads write to one cache line.
    pieces = size // max(1, grain)
    if pieces > 1:
        pieces = min(pieces, thread_count())
    if pieces <= 1:
        return [work(0, size)]
    bounds = [align * round(i * size / (pieces * align)) for i in range(pieces)] + [size]
    ranges = [(a, b) for a, b in pairwise(bounds) if a < b]
    futures: list[Future[T]] = []
    with suppress(RuntimeError):  # no thread can start, or the interpreter exits
        for a, b in ranges[1:]:
            futures.append(_executor().submit(work, a, b))
    try:
        results = [work(a, b) for a, b in (ranges[0], *ranges[1 + len(futures) :])]
    finally:
        wait(futures)  # threads use arrays of the caller, also after an error
    return [results[0], *(future.result() for future in futures), *results[1:]]
