"""Peak memory of a task in a process of its own, beyond what it held before.

The parent watches the child's anonymous memory (`RssAnon`), so that pages of mapped files, which
belong to the page cache, do not count. Where the system has no /proc, the child's own `ru_maxrss`
is taken, which counts them.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.001


class ChildError(Exception):
    """The task failed; the traceback of the child is the message."""


def extra_bytes(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    """Bytes that a task takes at its peak, beyond what its process held when it was ready.

    Parameters
    ----------
    prepare : callable
        A function of a module, called in the child. It prepares data, runs once on a few rows, so
        that libraries are loaded and compiled, and returns the task.
    *arguments
        Passed to `prepare`.

    Raises
    ------
    ChildError
        The child did not come to its end.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_run, args=(there, prepare, arguments))
    child.start()
    there.close()
    try:
        _received(here)
        before = peak = _anonymous(child.pid)
        here.send("go")
        while not here.poll(_POLL_SECONDS):
            peak = max(peak, _anonymous(child.pid))
        growth = _received(here)
    finally:
        here.close()
        child.join()
    return peak - before if before else growth


def _received(connection: Any) -> int:
    try:
        found = connection.recv()
    except EOFError:
        raise ChildError("the process ended") from None
    if isinstance(found, str):
        raise ChildError(found)
    return int(found)


def _run(connection: Any, prepare: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In the child: prepare, report, wait, work, report the growth of the largest size."""
    try:
        work = prepare(*arguments)
        gc.collect()
        before = _highest()
        connection.send(0)
        connection.recv()
        result = work()
        connection.send(_highest() - before)
        del result  # not before the peak was read
    except BaseException:
        connection.send(traceback.format_exc())


def _anonymous(pid: int | None) -> int:
    """Anonymous resident bytes of a process; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0


def _highest() -> int:
    """Largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
