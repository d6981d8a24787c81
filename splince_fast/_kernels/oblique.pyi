from typing import Any

from numpy import float64
from numpy.typing import NDArray

from splince_fast._kernels.factor import Factor

def oblique(
    factor: Factor,
    erased: NDArray[float64],
    kept: NDArray[float64],
    *,
    noise: float,
    relative: float,
    drop_below: float,
    may_drop: bool,
) -> tuple[Any, ...]: ...  # fields of Solution, up to `spread`
