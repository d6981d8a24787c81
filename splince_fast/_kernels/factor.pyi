from typing import Literal

from numpy import float64
from numpy.typing import NDArray

STATUS_OK: int
STATUS_INFEASIBLE: int
STATUS_NO_CONVERGENCE: int
STATUS_SINGULAR: int
STATUS_RANK_DEFICIENT: int

class Factor:
    width: int
    status: int
    constants: int
    n_noise: int
    admitted: int
    smallest: float
    tolerance: float
    variance: float
    rounding: float
    inverse_scale: NDArray[float64]
    @property
    def solver(self) -> Literal["none", "cholesky", "eigh", "diagonal", "refined"]: ...
    @property
    def rank(self) -> int: ...
    @property
    def n_null(self) -> int: ...
    @property
    def null_basis(self) -> NDArray[float64]: ...
    def whiten(self, columns: NDArray[float64]) -> NDArray[float64]: ...
    def solve(self, columns: NDArray[float64]) -> NDArray[float64]: ...
    def unwhiten(self, columns: NDArray[float64]) -> NDArray[float64]: ...
    def remember(self, scatter: NDArray[float64], per_weight: float) -> None: ...
    def gram(self, columns: NDArray[float64]) -> NDArray[float64]: ...
    def admit(self, spans: NDArray[float64]) -> Factor: ...

def identity(diagonal: NDArray[float64], per_weight: float) -> Factor: ...
def diagonal(variances: NDArray[float64], floor: NDArray[float64]) -> Factor: ...
def of_columns(
    columns: NDArray[float64],
    variances: NDArray[float64],
    floor: NDArray[float64],
    *,
    smallest: float,
) -> Factor: ...
def dense(
    scatter: NDArray[float64],
    floor: NDArray[float64],
    *,
    per_weight: float,
    ridge: float,
    max_rank: int,
    tolerance: float,
    force_eigh: bool,
    allow_eigh: bool,
) -> Factor: ...
