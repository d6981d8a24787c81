from numpy import float32
from numpy.typing import NDArray

MOST_DIRECTIONS: int

class FewRows:
    def __init__(
        self, neg_bias: NDArray[float32], right: NDArray[float32], left: NDArray[float32]
    ) -> None: ...
    def erase(self, source: int, target: int, n: int, chosen: int) -> None: ...
