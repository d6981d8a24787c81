"""``python -m proofs_check``: run the checks and print the verdicts."""

from __future__ import annotations

import argparse
import sys

from proofs_check import _render, _run
from proofs_check._check import Check


def _bar(done: int, total: int, item: Check | None) -> None:
    """Redraw the progress bar on the terminal."""
    width, digits = 30, len(str(total))
    full = width * done // max(total, 1)
    text = f"[{'#' * full}{'.' * (width - full)}] {done:>{digits}}/{total}"
    text += f" {item.key} {item.statement}"[:60] if item else ""
    print(f"\r\x1b[2K{text}", end="" if item else "\r\x1b[2K", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and return the exit status: 0 iff every verdict was reproduced."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs_check",
        description="Check the theory of SPLINCE statement by statement.",
    )
    parser.add_argument("numbers", nargs="*", help="statements or sections, such as 4 or 1.2")
    parser.add_argument("--quick", action="store_true", help="fewer cases, under 20 seconds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random problems")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print JSON")
    style.add_argument("--markdown", action="store_true", help="print the findings document")
    options = parser.parse_args(arguments)
    try:
        selected = _run.checks(options.numbers)
    except ValueError as error:
        parser.error(str(error))

    def tick(done: int, item: Check | None) -> None:
        if sys.stderr.isatty():
            _bar(done, len(selected), item)

    outcomes = _run.run(selected, seed=options.seed, quick=options.quick, tick=tick)
    if options.json:
        print(_render.as_json(outcomes, seed=options.seed, quick=options.quick))
    elif options.markdown:
        print(_render.findings(outcomes, seed=options.seed, quick=options.quick), end="")
    else:
        print(_render.table(outcomes))
    return 0 if all(outcome.reproduced for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
