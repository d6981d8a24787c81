from typing import Any

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Codes = NDArray[np.intp]

def levels() -> list[str]: ...
def level_name() -> str: ...
def use_level(name: str) -> None: ...
def register_width(itemsize: int) -> int: ...
def wide() -> bool: ...

class Block:
    rows: NDArray[Any]
    n: int
    cells: Codes
    sums: Float
    def __init__(
        self,
        rows: NDArray[Any],
        index: Codes | None,
        weight: Float | None,
        shift: Float,
        offset: Float | None,
        codes: Codes,
        n_codes: int,
        values: Float,
        part_rows: int,
    ) -> None: ...
    def check_sums(
        self,
        sample_squares: Float,
        weight_sum: float,
        min_weight: float,
        max_weight: float,
        excess: float,
    ) -> tuple[bool, bool, bool]: ...

def sample_columns(
    rows: NDArray[Any], index: Codes | None, weight: Float | None, stride: int
) -> Float: ...
def centre_columns(
    block: Block, rotations: Float, out: NDArray[Any], first: int, last: int
) -> None: ...
def reduce_chunks(
    block: Block,
    rotations: Float,
    chunk: int,
    stripe: int,
    panels: NDArray[Any],
    product: NDArray[Any],
    counters: NDArray[np.int64],
) -> None: ...
def sum_block(
    block: Block,
    task_columns: int,
    sums: Float,
    work: Float,
    counter: NDArray[np.int64],
) -> None: ...
def add_lower(
    scatter: Float,
    product: NDArray[Any],
    sign: float,
    vectors: Float,
    coefficients: Float,
    first: int,
    last: int,
) -> None: ...
def reference_is_far(
    reference: Float,
    deviation: Float,
    weight: float,
    squares: Float,
    sample_mean: Float,
    sample_squares: Float,
    sample_weight: float,
    block_weight: float,
    max_distance: float,
    roundings: float,
) -> bool: ...
def count_classes(
    labels: Codes, weight: Float | None, n_classes: int
) -> tuple[Codes, Codes, Codes, Float, int]: ...

class PackedFactors:
    def __init__(self, left: Float, right: Float, mean: Float, shift: Float) -> None: ...

def apply_rows(
    factors: PackedFactors,
    rows: NDArray[Any],
    out: NDArray[Any],
    start: int,
    stop: int,
    streamed: bool = False,
) -> int: ...
def squares_finite(rows: NDArray[Any], start: int, stop: int) -> bool: ...
