"""Count or print the package's function calls in two common journeys.

Run from a checkout: ``python tools/trace_calls.py [--tree]``. The first journey adds a full block
to non-empty moments, fits an eraser and applies it; the second fits the estimator. Nested functions
are counted; lambdas and comprehensions are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np

import splince_fast as sf

PACKAGE = Path(sf.__file__).parent


def trace(journey: Callable[[], object]) -> list[tuple[int, str, str]]:
    """Return depth, module and function name of each call within the package, in order."""
    calls: list[tuple[int, str, str]] = []
    depth = 0

    def record(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        code = frame.f_code
        path = Path(code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        if code.co_name.startswith("<"):
            return
        if event == "call":
            calls.append((depth, path.relative_to(PACKAGE).as_posix(), code.co_qualname))
        depth += 1 if event == "call" else -1

    sys.setprofile(record)
    try:
        journey()
    finally:
        sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="store_true", help="print each call, indented")
    tree = parser.parse_args().tree
    rng = np.random.default_rng(0)
    n, d = 4096, 64  # a full block
    z = rng.integers(0, 2, n)
    y = np.where(rng.random(n) < 0.8, z, 1 - z)
    X = rng.normal(size=(n, d)) + np.outer(z, rng.normal(size=d)) + np.outer(y, rng.normal(size=d))
    moments = sf.Moments().update(X, {"z": z, "y": y})

    def erase() -> None:
        moments.update(X, {"z": z, "y": y})
        sf.splince(moments, erase="z", keep="y")(X)

    def fit() -> None:
        sf.SPLINCE().fit(X, y, concept=z)

    for name, journey in (("update, splince, apply", erase), ("SPLINCE().fit", fit)):
        journey()  # warm up: fill caches
        calls = trace(journey)
        modules = {module for _, module, _ in calls}
        print(f"{name}: {len(calls)} calls in {len(modules)} modules")
        if tree:
            for depth, module, function in calls:
                print(f"{'  ' * (depth + 1)}{module}: {function}")


if __name__ == "__main__":
    main()
