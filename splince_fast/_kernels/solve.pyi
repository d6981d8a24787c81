from typing import Any

from numpy import float64
from numpy.typing import NDArray

OK: int
INFEASIBLE: int
NO_CONVERGENCE: int
SINGULAR: int
RANK_DEFICIENT: int

def class_span(sums: NDArray[float64], weights: NDArray[float64]) -> NDArray[float64]: ...
def column_deviations(
    z_sum: NDArray[float64], squares: NDArray[float64], reference: NDArray[float64], weight: float
) -> NDArray[float64]: ...
def column_span(
    products: NDArray[float64],
    z_sum: NDArray[float64],
    x_sum: NDArray[float64],
    squares: NDArray[float64],
    reference: NDArray[float64],
    weight: float,
) -> NDArray[float64]: ...
def oblique_factors(
    scatter: NDArray[float64],
    mean: NDArray[float64],
    span_z: NDArray[float64],
    span_y: NDArray[float64],
    workspace: NDArray[float64],
    *,
    whitened: bool,
    force_eigh: bool,
    allow_eigh: bool,
    per_weight: float,
    ridge: float,
    max_rank: int,
    eigen_tolerance: float,
    rank_tolerance: float,
    drop_below: float,
    may_drop: bool,
) -> dict[str, Any]: ...
