"""Peak memory of a task in a process of its own, beyond what it held before.

The parent watches the child's anonymous memory (`RssAnon`), so that pages of mapped files, which
belong to the page cache, do not count. Where the system has no /proc, the child's own `ru_maxrss`
is taken, which counts them.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.001
_tasks: list[Callable[[], object]] = []  # of the child


def extra_bytes(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    """Bytes that a task takes at its peak, beyond what its process held when it was ready.

    `prepare` is a function of a module, called in the child with the arguments. It prepares data,
    runs once on a few rows, so that libraries are loaded and compiled, and returns the task. What
    the child raises is raised here; BrokenProcessPool, if it ends.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        pid = child.submit(_prepare, prepare, arguments).result()
        before = peak = _anonymous(pid)
        growth = child.submit(_work)
        while not wait([growth], _POLL_SECONDS).done:
            peak = max(peak, _anonymous(pid))
        seen = growth.result()
        return peak - before if before else seen


def _prepare(prepare: Callable[..., Callable[[], object]], arguments: tuple[Any, ...]) -> int:
    _tasks.append(prepare(*arguments))
    gc.collect()
    return os.getpid()


def _work() -> int:
    """By how much the largest size of this process so far grows."""
    before = _highest()
    result = _tasks[0]()
    growth = _highest() - before
    del result  # not before the peak was read
    return growth


def _anonymous(pid: int) -> int:
    """Anonymous resident bytes of a process; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s*(\d+)", status)
    return 1024 * int(found[1]) if found else 0


def _highest() -> int:
    """Largest resident size of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
