"""Run every job once at its smallest size in this process; stop at the first error.

    python -m benchmarks.smoke [TEXT ...]      only jobs whose name contains one of the texts

The page of the results is written to a temporary folder. Without TEXT, every benchmark that asv
finds then runs with its first job, if asv is installed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks import compare, machine, page


def run(texts: list[str]) -> None:
    """Run the jobs whose names contain one of the texts, all jobs if `texts` is empty.

    Jobs use one thread by default: at tiny sizes, more threads only add synchronisation.
    """
    os.environ["SPLINCE_FAST_BENCH"] = "smoke"  # child processes inherit the variable
    os.environ.setdefault("SPLINCE_FAST_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare.run(compare.select_jobs(texts), folder / "smoke.json")
        page.write(folder, folder)
    if not texts and find_spec("asv_runner"):
        from asv_runner.discovery import disc_benchmarks

        benchmarks = list(disc_benchmarks(str(machine.ROOT / "benchmarks")))
        if not benchmarks:
            sys.exit("asv finds no benchmark")
        for benchmark in benchmarks:
            print(benchmark.name, flush=True)
            benchmark.set_param_idx(0)
            benchmark.do_run()


if __name__ == "__main__":
    run(sys.argv[1:])
