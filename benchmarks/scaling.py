"""How cost grows: exponents in rows, features, classes and rank, beside what the algorithm has.

    python -m benchmarks.scaling [--smoke]

Every size of an axis is timed alternately with its floor; an exponent is the slope of log time over
log size, by least squares over the upper half of the sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import machine
from benchmarks.data import problem
from benchmarks.jobs import FLOOR, OURS, Ways
from benchmarks.jobs_accumulate import accumulate, block_rows, syrk
from benchmarks.jobs_erase import apply_into, lapack, orthogonal, splince_of
from benchmarks.timing import Contender, interleave, pick, ratio, use_smoke


@dataclass(frozen=True, slots=True)
class Growth:
    """Times along one axis.

    Attributes
    ----------
    what, axis : str
    expected : float
        The exponent that the algorithm has once the size is large.
    sizes, seconds : tuple
        Median times of whole calls.
    share : tuple of float
        Time of the floor over that of splince_fast; empty without a floor.
    """

    what: str
    axis: str
    expected: float
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    share: tuple[float, ...]

    @property
    def exponent(self) -> float:
        upper = slice(len(self.sizes) // 2 - 1 if len(self.sizes) > 3 else 0, None)
        return float(np.polyfit(np.log(self.sizes[upper]), np.log(self.seconds[upper]), 1)[0])

    def line(self) -> str:
        times = ", ".join(f"{1e3 * s:.3g}" for s in self.seconds)
        share = f"; {self.share[-1]:.2f} of the floor's rate" if self.share else ""
        return (
            f"{self.what}: {self.axis} = {', '.join(map(str, self.sizes))}: {times} ms; "
            f"exponent {self.exponent:.2f} ({self.expected:g}){share}"
        )


def run() -> Iterator[Growth]:
    """Times along every axis."""
    for what, axis, expected, sizes, build in _axes():
        found = _along(what, axis, expected, {size: build(size) for size in sizes})
        print(f"  {found.line()}", file=sys.stderr, flush=True)
        yield found


def _axes() -> Iterator[tuple[str, str, float, list[int], Callable[[int], Ways]]]:
    block, d, wide = block_rows(), pick(1024, 16), pick(768, 16)
    widths = pick([256, 512, 1024, 2048, 4096], [8, 16])

    def rows(n: int, width: int = d, classes: int = 2) -> Ways:
        data = problem(n, width, classes=classes)
        return {OURS: accumulate(data, block), FLOOR: syrk(data, block)}

    def solve(width: int, classes: int = 2) -> Ways:
        moments = problem(max(4096, 2 * width), width, "float64", classes=classes).moments()
        return {OURS: splince_of(moments), FLOOR: lapack(moments, "z", "y")}

    def apply(n: int, width: int, rank: int) -> Ways:
        return apply_into(np.ones((n, width), np.float32), orthogonal(width, rank))

    n = pick(25_000, 100)
    yield "accumulate", "rows", 1, [block * k for k in pick([1, 2, 4, 8], [1, 2])], rows
    yield "accumulate", "features", 2, widths, lambda d: rows(block, d)
    yield "accumulate", "classes", 0, pick([2, 20, 200, 2000], [2, 4]), lambda k: rows(block, d, k)
    yield "solve", "features", 3, widths[:-1], solve
    yield "solve", "classes", 1, pick([2, 8, 32, 128], [2, 4]), lambda k: solve(d, k)
    yield "apply", "rows", 1, [n * k for k in (1, 2, 4)], lambda n: apply(n, wide, 1)
    yield "apply", "features", 1, widths, lambda d: apply(n, d, 1)
    yield "apply", "rank", 1, pick([1, 4, 16, 64], [1, 2]), lambda r: apply(n, wide, r)


def _along(what: str, axis: str, expected: float, ways: Mapping[int, Ways]) -> Growth:
    """Time all sizes alternately, each with its floor; seconds of whole calls."""
    every = {
        f"{name} {size}": replace(way, units=1.0)
        for size, found in ways.items()
        for name, way in found.items()
        if name in (OURS, FLOOR) and isinstance(way, Contender)
    }
    timings = interleave(every)
    ours = {size: timings[f"{OURS} {size}"] for size in ways}
    share = (ratio(timings[f"{FLOOR} {size}"], ours[size]).median for size in ways)
    seconds = (t.spread().median for t in ours.values())
    return Growth(what, axis, expected, tuple(ways), tuple(seconds), tuple(share))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.scaling", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    if parser.parse_args(arguments).smoke:
        use_smoke()
    os.environ.setdefault("SPLINCE_FAST_BLAS", "scipy")
    machine.equal_threads()
    for found in run():
        print(found.line())


if __name__ == "__main__":
    main()
