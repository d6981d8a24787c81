from typing import Literal

from numpy import float64
from numpy.typing import NDArray

Float = NDArray[float64]

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
    inverse_scale: Float
    solver: Literal["none", "cholesky", "eigh", "diagonal", "refined"]
    rank: int
    n_null: int
    null_basis: Float
    def whiten(self, columns: Float) -> Float: ...
    def solve(self, columns: Float) -> Float: ...
    def unwhiten(self, columns: Float) -> Float: ...
    def remember(self, scatter: Float, per_weight: float) -> None: ...
    def gram(self, columns: Float) -> Float: ...
    def admit(self, spans: Float) -> Factor: ...

def identity(diagonal: Float, per_weight: float) -> Factor: ...
def diagonal(variances: Float, floor: Float) -> Factor: ...
def of_columns(columns: Float, variances: Float, floor: Float, *, smallest: float) -> Factor: ...
def dense(scatter: Float, floor: Float, **rest: float) -> Factor: ...
