from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

MOST_VARIABLES: int

class Joining:
    def __init__(
        self,
        rows: NDArray[Any],
        variables: Sequence[tuple[object, object, NDArray[Any]]],
    ) -> None: ...
    def takes(self, accumulator: object, lock: object, X: object, labels: object) -> bool: ...
