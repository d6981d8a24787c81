"""Run every benchmark once at its smallest size, in this process; fail if any of them does.

    python -m benchmarks.smoke [TEXT ...]      only those whose name contains one of the texts

The asv benchmarks come first, then targets, peers and growth with ``--smoke``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from benchmarks import _sizes


def jobs(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls of all that there is to run."""
    from benchmarks import _discovery, growth, peers, targets

    for benchmark in _discovery.find():
        yield benchmark.name, benchmark.run
    yield "discovery by asv", _same_as_asv
    yield "targets", lambda: targets.main(["--smoke", "--json", str(folder / "targets.json")])
    figure = ["--figure", str(folder / "peers.png")] if find_spec("matplotlib") else []
    yield (
        "peers",
        lambda: peers.main(["--smoke", "--json", str(folder / "peers.json"), *figure]),
    )
    yield "growth", lambda: growth.main(["--smoke", "--json", str(folder / "growth.json")])


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
