"""Peak memory of one job in a process of its own, beyond what it held before.

The parent watches the child's anonymous memory (`RssAnon`), so that pages of mapped files, which
belong to the page cache, do not count. Where the system has no /proc, the child's own `ru_maxrss`
is taken, which counts them.

A job is named ``module:function``; the function prepares everything (data, imports, a warm-up) and
returns what is to be measured as a callable.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np

_ROOT = Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.001


class JobError(Exception):
    """The job failed; its standard error is the message."""


def extra_bytes(job: str, **arguments: Any) -> int:
    """Bytes that a job takes at its peak, beyond what its process held when it was ready.

    Raises
    ------
    JobError
        The child did not come to its end.
    """
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.memory", job, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        ready = child.stdout.readline() == "ready\n"
        before = peak = _anonymous(child.pid)
        answer = ""
        if ready:
            child.stdin.write("go\n")
            child.stdin.flush()
            while not select.select([child.stdout], [], [], _POLL_SECONDS)[0]:
                peak = max(peak, _anonymous(child.pid))
            answer = child.stdout.readline().strip()
        child.communicate("end\n" if answer else None)
        if child.returncode or not answer.isdecimal():
            errors.seek(0)
            raise JobError(f"{job} failed:\n{errors.read()}")
    return peak - before if before else int(answer)


def _anonymous(pid: int) -> int:
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


def _run(job: str, arguments: dict[str, Any]) -> None:
    """In the child: prepare, report, wait, work, report the growth of the largest size."""
    module, _, name = job.partition(":")
    work: Callable[[], object] = getattr(import_module(module), name)(**arguments)
    gc.collect()
    before = _highest()
    print("ready", flush=True)
    sys.stdin.readline()
    result = work()
    print(_highest() - before, flush=True)
    sys.stdin.readline()
    del result


# --- jobs of such children ------------------------------------------------------------------------
# Each prepares its data, runs once on a few rows so that libraries are loaded and compiled, and
# returns the job.


def accumulate_file(path: str) -> Callable[[], object]:
    """`Moments.from_blocks` over a .npy file of rows, with a binary concept."""
    import splince_fast as sf

    rows = np.load(path, mmap_mode="r")
    z = np.arange(len(rows), dtype=np.int64) % 2
    sf.Moments.from_blocks(sf.sources.from_arrays(rows[:9000], {"z": z[:9000]}))
    source = sf.sources.from_npy(path, {"z": z})
    return lambda: sf.Moments.from_blocks(source)


def apply_in_place(n: int, d: int, dtype: str) -> Callable[[], object]:
    """`eraser(X, out=X)`."""
    from benchmarks.jobs_erase import orthogonal

    eraser = orthogonal(d, 1)
    X = np.ones((n, d), dtype)
    eraser(X[:2000], out=X[:2000])
    return lambda: eraser(X, out=X)


def erase(name: str, n: int, d: int) -> Callable[[], object]:
    """Fit and apply by a contender of `jobs_erase`: float32 rows, a binary concept."""
    from benchmarks import jobs_erase
    from benchmarks.data import problem

    def way(rows: int) -> Any:
        data = problem(rows, d)
        return {**jobs_erase.splinces(data), **jobs_erase.erasers(data)}[name]

    way(4 * d).run()
    return cast(Callable[[], object], way(n).run)


if __name__ == "__main__":
    _run(sys.argv[1], json.loads(sys.argv[2]))
