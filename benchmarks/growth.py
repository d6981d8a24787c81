"""How cost grows, how far it is from what the machine can do, and what a large job will take.

Three tables from one run:

* the machine: rates of the bare symmetric product (SYRK), the bare Cholesky factorisation (POTRF)
  and a memory copy;
* exponents of the time in rows, features, classes and rank, beside what the algorithm promises,
  and the share of the machine's rate that is reached;
* a model without fitted constants that predicts times from those rates alone (see
  `benchmarks._model`), checked against measurements, and what it says of a large job: n = 10^9 rows
  of d = 8192 by default.

SciPy's BLAS is used unless SPLINCE_FAST_BLAS=auto.

    python -m benchmarks.growth [--smoke] [--json PATH] [--n N] [--d D]
                                [--syrk GFLOPS] [--potrf GFLOPS] [--copy GBS] [--disk GBS]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks import _machine, _peers, _tables
from benchmarks._data import problem
from benchmarks._model import (
    BLOCK,
    Check,
    Rates,
    apply_and_copy,
    bare_potrf,
    checks,
    measured_rates,
    splince_of,
)
from benchmarks._sizes import pick, smoke, use_smoke
from benchmarks._timing import Contender, interleave, ratio


@dataclass(frozen=True, slots=True)
class Growth:
    """Times along one axis.

    Attributes
    ----------
    what, axis : str
    promised : float
        The exponent that the algorithm has once the size is large.
    sizes, seconds, share : tuple
        Median times, and the share of the machine's rate reached (nan without a floor).
    """

    what: str
    axis: str
    promised: float
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    share: tuple[float, ...]

    @property
    def exponent(self) -> float:
        """Slope of log time over log size, by least squares over the upper half of the sizes."""
        upper = slice(len(self.sizes) // 2 - 1 if len(self.sizes) > 3 else 0, None)
        return float(np.polyfit(np.log(self.sizes[upper]), np.log(self.seconds[upper]), 1)[0])

    def cells(self) -> list[str]:
        share = f"{self.share[-1]:.2f}" if self.share else ""
        times = ", ".join(map(_tables.seconds, self.seconds))
        return [self.what, f"{self.axis} = {', '.join(map(str, self.sizes))}", times,
                f"{self.exponent:.2f}", f"{self.promised:g}", share]  # fmt: skip


def growths() -> list[Growth]:
    """Times along every axis."""
    found = []
    for measure in (_rows, _features, _classes, _solve_features, _solve_classes,
                    _apply_rows, _apply_features, _apply_rank):  # fmt: skip
        found.append(measure())
        print("  " + ", ".join(found[-1].cells()), file=sys.stderr, flush=True)
    return found


def _along(
    what: str,
    axis: str,
    promised: float,
    contenders: Mapping[int, Contender],
    floors: Mapping[int, Contender] | None = None,
) -> Growth:
    """Time all sizes of an axis in turn, each beside its floor; seconds of whole calls."""
    every = {f"{size}": c for size, c in contenders.items()}
    every |= {f"floor {size}": c for size, c in (floors or {}).items()}
    timings = interleave({name: replace(c, units=1.0) for name, c in every.items()})
    share = [ratio(timings[f"floor {size}"], timings[f"{size}"]).median for size in floors or {}]
    seconds = [timings[f"{size}"].median for size in contenders]
    return Growth(what, axis, promised, tuple(contenders), tuple(seconds), tuple(share))


def _rows() -> Growth:
    sizes = pick([1, 2, 4, 8], [1, 2])
    block, d = pick(BLOCK, 64), pick(1024, 16)
    data = {k * block: problem(k * block, d) for k in sizes}
    return _along(
        f"accumulate, d = {d}", "n", 1,
        {n: _peers.accumulate_ours(p, block) for n, p in data.items()},
        {n: _peers.accumulate_syrk(p, block) for n, p in data.items()},
    )  # fmt: skip


def _features() -> Growth:
    block = pick(BLOCK, 64)
    data = {d: problem(block, d) for d in pick([256, 512, 1024, 2048, 4096], [8, 16])}
    return _along(
        f"accumulate, n = {block}", "d", 2,
        {d: _peers.accumulate_ours(p, block) for d, p in data.items()},
        {d: _peers.accumulate_syrk(p, block) for d, p in data.items()},
    )  # fmt: skip


def _classes() -> Growth:
    block, d = pick(BLOCK, 64), pick(1024, 16)
    return _along(
        f"accumulate, n = {block}, d = {d}", "classes", 0,
        {
            k: _peers.accumulate_ours(problem(block, d, classes=k), block)
            for k in pick([2, 20, 200, 2000], [2, 4])
        },
    )  # fmt: skip


def _solve_features() -> Growth:
    sizes = pick([256, 512, 1024, 2048], [8, 16])
    moments = {d: problem(2 * d, d, "float64").moments() for d in sizes}
    return _along(
        "solve, 2 classes", "d", 3,
        {d: splince_of(m) for d, m in moments.items()},
        {d: bare_potrf(np.asfortranarray(m.covariance())) for d, m in moments.items()},
    )  # fmt: skip


def _solve_classes() -> Growth:
    d = pick(1024, 16)
    sizes = pick([2, 8, 32, 128], [2, 4])
    moments = {k: problem(4096, d, "float64", classes=k).moments() for k in sizes}
    return _along(f"solve, d = {d}", "classes", 1, {k: splince_of(m) for k, m in moments.items()})


def _apply_rows() -> Growth:
    d = pick(768, 16)
    sizes = pick([25_000, 50_000, 100_000, 200_000], [100, 200])
    return _apply_along(f"apply, d = {d}, rank 1", "n", 1, {n: (n, d, 1) for n in sizes})


def _apply_features() -> Growth:
    n = pick(25_000, 100)
    sizes = pick([256, 512, 1024, 2048, 4096], [8, 16])
    return _apply_along(f"apply, n = {n}, rank 1", "d", 1, {d: (n, d, 1) for d in sizes})


def _apply_rank() -> Growth:
    n, d = pick((50_000, 768), (100, 16))
    ranks = pick([1, 2, 4, 8, 16, 32, 64], [1, 2])
    return _apply_along(f"apply, n = {n}, d = {d}", "rank", 1, {r: (n, d, r) for r in ranks})


def _apply_along(
    what: str, axis: str, promised: float, sizes: Mapping[int, tuple[int, int, int]]
) -> Growth:
    """Apply to n rows of d features at a rank, beside a copy of them."""
    pairs = {size: apply_and_copy(*shape) for size, shape in sizes.items()}
    ours, floors = ({size: pair[i] for size, pair in pairs.items()} for i in (0, 1))
    return _along(what, axis, promised, ours, floors)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print the tables; returns machine, rates, growth, checks and prediction."""
    _machine.equal_threads()
    here = measured_rates()
    grown = growths()
    checked = checks(here)
    there = Rates(
        given.syrk * 1e9 if given.syrk else here.syrk,
        given.potrf * 1e9 if given.potrf else here.potrf,
        given.copy * 1e9 if given.copy else here.copy,
        given.disk * 1e9 if given.disk else float("inf"),
    )
    n, d = given.n, given.d
    prediction = {
        "accumulate": there.accumulate(n, d),
        "solve": there.solve(d),
        "apply": there.apply(n, d),
    }
    machine = _machine.describe()
    print("\n".join(_machine.lines(machine)))
    print(
        f"\nBare SYRK in float32 {here.syrk / 1e9:.0f} GFLOP/s, bare POTRF in float64 "
        f"{here.potrf / 1e9:.0f} GFLOP/s, copy {here.copy / 1e9:.1f} GB/s of what is read.\n"
    )
    print(growth_table(grown))
    print("\nThe model against measurements:\n")
    print(check_table(checked))
    print(
        f"\nPredicted for n = {n:.3g}, d = {d:g} at {there.syrk / 1e9:.0f} and "
        f"{there.potrf / 1e9:.0f} GFLOP/s, {there.copy / 1e9:.1f} GB/s, "
        f"{4 * n * d / 1e12:.1f} TB of rows:"
    )
    for job, predicted in prediction.items():
        print(f"  {job:<11} {_tables.duration(predicted)}")
    if smoke():
        print("\nSmoke sizes: everything ran, but the numbers mean nothing.")
    return {
        "machine": machine,
        "smoke": smoke(),
        "rates": _finite(here),
        "growth": [{**asdict(growth), "exponent": growth.exponent} for growth in grown],
        "checks": [asdict(check) for check in checked],
        "prediction": {"n": n, "d": d, "seconds": prediction, "rates": _finite(there)},
    }


def growth_table(grown: list[Growth]) -> str:
    """Times and exponents along every axis."""
    header = ["what", "sizes", "times", "exponent", "promised", "share of the floor's rate"]
    return _tables.markdown(header, (growth.cells() for growth in grown))


def check_table(checked: list[Check]) -> str:
    """The model beside measurements."""
    header = ["what", "predicted", "measured", "measured over predicted"]
    return _tables.markdown(header, (check.cells() for check in checked))


def _finite(rates: Rates) -> dict[str, float]:
    """The rates that limit anything."""
    return {name: rate for name, rate in asdict(rates).items() if rate != float("inf")}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    parser.add_argument("--n", type=float, default=1e9, help="rows of the large job")
    parser.add_argument("--d", type=float, default=8192, help="features of the large job")
    parser.add_argument("--syrk", type=float, help="GFLOP/s of that machine, float32")
    parser.add_argument("--potrf", type=float, help="GFLOP/s of that machine, float64")
    parser.add_argument("--copy", type=float, help="GB/s that it copies")
    parser.add_argument("--disk", type=float, help="GB/s that it reads rows with")
    given = parser.parse_args(arguments)
    if given.smoke:
        use_smoke()
    os.environ.setdefault("SPLINCE_FAST_BLAS", "scipy")  # before the first product, which decides
    results = measure(given)
    _tables.write_json(given.json, {"command": _machine.command(parser.prog, arguments), **results})


if __name__ == "__main__":
    main()
