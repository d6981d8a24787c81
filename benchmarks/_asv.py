"""What the asv benchmarks share.

Only names that begin with ``time_``, ``peakmem_``, ``track_`` or ``timeraw_`` are measured. What is
tracked is a ratio or an error, so that it can be compared between machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from benchmarks import _machine


class Suite:
    """Settings of every benchmark: short, since ratios to bare BLAS are tracked beside times."""

    params: ClassVar[Sequence[Sequence[Any]]] = ()
    param_names: ClassVar[Sequence[str]] = ()
    timeout: ClassVar[float] = 120.0
    rounds: ClassVar[int] = 1
    repeat: ClassVar[tuple[int, int, float]] = (3, 9, 2.0)
    warmup_time: ClassVar[float] = 0.05

    def setup(self, *parameters: Any) -> None:
        """Prepare one combination of parameters."""
        _machine.equal_threads()


def paired(numerator: Callable[[], object], denominator: Callable[[], object]) -> float:
    """Median quotient of the times of two calls that take turns."""
    from benchmarks._timing import Contender, interleave, ratio

    timings = interleave({"a": Contender(numerator), "b": Contender(denominator)}, budget=1.5)
    return ratio(timings["a"], timings["b"]).median
