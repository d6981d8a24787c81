"""Write the page on performance from the results of targets, peers, growth and profiles.

    python -m benchmarks.page --targets A.json --peers B.json --growth C.json --profiles D.json
                              [--figure docs/performance.svg] --out docs/performance.md

Whatever is missing in the results, and results of different machines or versions, are errors.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks import _page_runs, _page_text, peers


def main(arguments: list[str] | None = None) -> None:
    """Read, write, draw."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for program in _page_runs.PROGRAMS:
        parser.add_argument(f"--{program}", metavar="PATH", required=True, help="its results")
    parser.add_argument("--figure", metavar="PATH", help="draw the ratios of peers (PNG or SVG)")
    parser.add_argument("--out", metavar="PATH", required=True, help="the page")
    given = parser.parse_args(arguments)
    runs = _page_runs.read({name: getattr(given, name) for name in _page_runs.PROGRAMS})
    out, figure = Path(given.out), None
    if given.figure:
        figure = Path(os.path.relpath(given.figure, out.parent)).as_posix()
    text = _page_text.page(runs, figure)
    if given.figure:
        peers.draw({"times": runs.times}, given.figure)
    out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
