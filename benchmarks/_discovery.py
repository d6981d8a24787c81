"""The asv benchmarks of this package, found as asv finds them."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import benchmarks

PREFIXES = ("time_", "timeraw_", "peakmem_", "track_")
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A method with one combination of its parameters."""

    suite: type[Any]
    method: str
    parameters: tuple[Any, ...]

    @property
    def family(self) -> str:
        """Its name as asv writes it."""
        module = self.suite.__module__.split(".", 1)[1]
        return f"{module}.{self.suite.__name__}.{self.method}"

    @property
    def name(self) -> str:
        arguments = ", ".join(map(repr, self.parameters))
        return f"{self.family}({arguments})"

    def run(self) -> None:
        """Set up, run once, tear down.

        Raises
        ------
        Exception
            Whatever the benchmark raises; ValueError where what it tracks is not a finite number.
        """
        instance = self.suite()
        instance.setup(*self.parameters)
        try:
            result = getattr(instance, self.method)(*self.parameters)
            if self.method.startswith("timeraw_"):
                _run_alone(result)
            if self.method.startswith("track_") and not math.isfinite(result):
                raise ValueError(f"it tracks {result!r}, which is not a finite number")
        finally:
            if hasattr(instance, "teardown"):
                instance.teardown(*self.parameters)


def find() -> Iterator[Benchmark]:
    """Every benchmark with every combination of its parameters."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name.startswith("_"):
            continue
        name = f"benchmarks.{module.name}"
        for _, suite in inspect.getmembers(import_module(name), inspect.isclass):
            if suite.__module__ != name or suite.__name__.startswith("_"):
                continue
            for method, _ in inspect.getmembers(suite, inspect.isfunction):
                if method.startswith(PREFIXES):
                    for parameters in itertools.product(*getattr(suite, "params", ())):
                        yield Benchmark(suite, method, parameters)


def families_by_asv() -> set[str] | None:
    """Names of what asv itself discovers; None where it is not installed."""
    if not find_spec("asv_runner"):
        return None
    from asv_runner.discovery import disc_benchmarks

    return {benchmark.name for benchmark in disc_benchmarks(str(_HERE))}


def _run_alone(code: str) -> None:
    """Run a statement in an interpreter of its own."""
    path = os.pathsep.join(filter(None, [str(_HERE.parent), os.environ.get("PYTHONPATH")]))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
