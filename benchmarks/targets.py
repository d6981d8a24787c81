"""The ratios that the project promises, measured, each beside its target.

Every ratio is taken within one run on one machine: contenders take turns, the number is the median
over rounds and its quartiles. SciPy's BLAS with its default settings is used throughout, but for
the rows marked "wide kernels". They run in a process of their own with the extra ``blas``, in the
situation that it is for: SciPy's BLAS runs narrower kernels than the processor has, because the
environment asks it to (``OPENBLAS_CORETYPE=Haswell``).

    python -m benchmarks.targets [--smoke] [--json PATH]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import _machine, _tables
from benchmarks._rows import Row
from benchmarks._sizes import smoke, use_smoke
from benchmarks._timing import Ratio

Group = Callable[[], Iterator[Row]]


def groups() -> dict[str, Group]:
    """The groups of rows, in the order of the table."""
    from benchmarks import _targets_accumulate, _targets_solve

    return {
        "accumulate": _targets_accumulate.rates,
        "wide": _wide_rows,
        "streams": _targets_accumulate.streams,
        "accuracy": _targets_accumulate.accuracy,
        "files": _targets_accumulate.files,
        "solve": _targets_solve.solving,
        "apply": _targets_solve.applying,
    }


def _wide_rows() -> Iterator[Row]:
    """The rows for the extra ``blas``, measured by a child process that may use it."""
    from benchmarks import _targets_accumulate

    if not importlib.util.find_spec("scipy_openblas32"):
        yield from _targets_accumulate.wide_rates("not installed: scipy-openblas32")
        return
    environment = {k: v for k, v in os.environ.items() if k != "SPLINCE_FAST_BLAS"}
    environment["OPENBLAS_CORETYPE"] = "Haswell"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        subprocess.run(
            [sys.executable, "-m", "benchmarks.targets", "--wide-rows", str(path)],
            check=True,
            env=environment,
        )
        for entry in json.loads(path.read_text(encoding="utf-8")):
            measured = entry.pop("measured")
            yield Row(**entry, measured=None if measured is None else Ratio(**measured))


def _write_wide_rows(path: str) -> None:
    """In the child: the rows as JSON."""
    from benchmarks import _targets_accumulate

    _machine.equal_threads()
    rows = [asdict(row) for row in _targets_accumulate.wide_rates()]
    Path(path).write_text(json.dumps(rows), encoding="utf-8")


def measure(chosen: list[str] | None = None) -> dict[str, Any]:
    """Run the groups, printing each row when it is known; returns machine and rows."""
    _machine.equal_threads()
    rows: list[Row] = []
    for name, group in groups().items():
        if chosen is None or name in chosen:
            for row in group():
                print(f"  {row.what}: {row.cells()[2]} {row.note}", file=sys.stderr, flush=True)
                rows.append(row)
    machine = _machine.describe()
    print("\n".join(_machine.lines(machine)), end="\n\n")
    print(_tables.markdown(["what", "target", "measured", "", "note"], (r.cells() for r in rows)))
    if smoke():
        print("\nSmoke sizes: everything ran, but the numbers mean nothing.")
    entries = [{**asdict(row), "met": row.met} for row in rows]
    return {"machine": machine, "smoke": smoke(), "rows": entries}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.targets", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="accumulate, wide, streams, ...")
    parser.add_argument("--wide-rows", metavar="PATH", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.smoke:
        use_smoke()
    if given.wide_rows:
        _write_wide_rows(given.wide_rows)
        return
    os.environ["SPLINCE_FAST_BLAS"] = "scipy"  # before the first product, which decides
    if given.only and not set(given.only) <= set(groups()):
        parser.error(f"groups are {', '.join(groups())}")
    results = measure(given.only)
    _tables.write_json(given.json, {"command": _machine.command(parser.prog, arguments), **results})


if __name__ == "__main__":
    main()
