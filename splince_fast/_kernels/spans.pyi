from numpy import float64
from numpy.typing import NDArray

CONSTANT_ROUNDINGS: float

def class_span(sums: NDArray[float64], weights: NDArray[float64]) -> NDArray[float64]: ...
def largest_correlation(span: NDArray[float64], variances: NDArray[float64]) -> float: ...
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
