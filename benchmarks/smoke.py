"""Run every benchmark once at its smallest size, in this process; fail if any of them does.

    python -m benchmarks.smoke [TEXT ...]      only those whose name contains one of the texts

The asv benchmarks come first, then targets, peers, growth and profiles with ``--smoke``, and the
page that is made of their results.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import _sizes


def jobs(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls of all that there is to run."""
    from benchmarks import _discovery, growth, peers, profiles, targets

    for benchmark in _discovery.find():
        yield benchmark.name, benchmark.run
    yield "discovery by asv", _same_as_asv
    programs = {"targets": targets, "peers": peers, "growth": growth, "profiles": profiles}
    for name, program in programs.items():
        yield name, partial(program.main, ["--smoke", "--json", str(folder / f"{name}.json")])
    yield "page", lambda: _page(folder, programs)


def _page(folder: Path, programs: Mapping[str, Any]) -> None:
    """The page and its figure, from the results in the folder; those that lack are made."""
    from benchmarks import page

    arguments = ["--out", str(folder / "performance.md")]
    if find_spec("matplotlib"):
        arguments += ["--figure", str(folder / "performance.svg")]
    for name, program in programs.items():
        path = folder / f"{name}.json"
        if not path.exists():
            program.main(["--smoke", "--json", str(path)])
        arguments += [f"--{name}", str(path)]
    page.main(arguments)


def _same_as_asv() -> None:
    from benchmarks import _discovery

    expected = {benchmark.family for benchmark in _discovery.find()}
    found = _discovery.families_by_asv()
    if found is not None and found != expected:
        raise LookupError(f"asv and this smoke run differ about {sorted(found ^ expected)}")


def run(wanted: list[str]) -> int:
    """Run what is wanted, report failures on stderr; returns their number."""
    _sizes.use_smoke()
    failed, count, began = [], 0, perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, work in jobs(Path(folder)):
            if wanted and not any(text in name for text in wanted):
                continue
            count += 1
            said = io.StringIO()
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    work()
            except (Exception, SystemExit):
                failed.append(name)
                print(f"{name} failed\n{said.getvalue()}", file=sys.stderr)
                traceback.print_exc()
    for name in failed:
        print(f"FAILED {name}", file=sys.stderr)
    print(f"{count} benchmarks ran in {perf_counter() - began:.0f} s, {len(failed)} failed")
    if not count:
        print(f"no benchmark has a name with {' or '.join(wanted)}", file=sys.stderr)
    return len(failed) if count else 1


def main(arguments: list[str] | None = None) -> None:
    """Run and exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.smoke", description=__doc__)
    parser.add_argument("text", nargs="*", help="part of the names to run; everything without")
    sys.exit(1 if run(parser.parse_args(arguments).text) else 0)


if __name__ == "__main__":
    main()
