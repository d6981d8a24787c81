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

Prepare = Callable[[], Callable[[], object]]
_POLL_SECONDS = 0.001
_tasks: list[Callable[[], object]] = []  # of the child


def extra_bytes(prepare: Prepare) -> int:
    """Bytes that a task takes at its peak, beyond what its process held when it was ready.

    `prepare` is a function of a module, or a partial one, and is called in the child. It prepares
    data, runs once on a few rows, so that libraries are loaded and compiled, and returns the task.
    What the child raises is raised here; BrokenProcessPool, if it ends.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        pid = child.submit(_prepare, prepare).result()
        before = peak = _anonymous(pid)
        growth = child.submit(_work)
        while not wait([growth], _POLL_SECONDS).done:
            peak = max(peak, _anonymous(pid))
        seen = growth.result()
        return peak - before if before else seen


def _prepare(prepare: Prepare) -> int:
    _tasks.append(prepare())
    gc.collect()
    return os.getpid()


def _work() -> int:
    """By how many bytes the largest size of this process so far grows."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = _tasks[0]()
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    del result  # not before the peak was read
    return growth if sys.platform == "darwin" else 1024 * growth


def _anonymous(pid: int) -> int:
    """Anonymous resident bytes of a process; 0 where the system does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s*(\d+)", status)
    return 1024 * int(found[1]) if found else 0
