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

# --- moments ---

SUSPECT: int
FAR: int
NEEDS_FLOAT64: int

def sort_by_cell(codes: Codes, n_codes: int, part_rows: int, order: Codes, cell: Codes) -> None: ...
def sample_columns(
    rows: NDArray[Any], index: Codes, weight: Float, stride: int, shift: Float, spread: Float
) -> None: ...
def centre_columns(
    rows: NDArray[Any],
    index: Codes,
    weight: Float,
    shift: Float,
    offset: Float,
    codes: Codes,
    order: Codes,
    cell: Codes,
    values: Float,
    rotations: Float,
    part_rows: int,
    peak: Float,
    total: Float,
    class_sums: Float,
    products: Float,
    out: NDArray[Any],
    first: int,
    last: int,
) -> None: ...
def reduce_chunks(
    rows: NDArray[Any],
    index: Codes,
    weight: Float,
    shift: Float,
    offset: Float,
    codes: Codes,
    order: Codes,
    cell: Codes,
    values: Float,
    rotations: Float,
    part_rows: int,
    peak: Float,
    total: Float,
    class_sums: Float,
    products: Float,
    chunk: int,
    stripe: int,
    panels: NDArray[Any],
    product: NDArray[Any],
    counters: NDArray[np.int64],
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
def judge_sweep(
    shift: Float,
    spread: Float,
    peak: Float,
    total: Float,
    whole: float,
    lightest: float,
    heaviest: float,
    n: int,
    excess: float,
) -> int: ...
def reference_is_far(
    reference: Float,
    deviation: Float,
    weight: float,
    squares: Float,
    shift: Float,
    spread: Float,
    sampled: float,
    whole: float,
    far: float,
    roundings: float,
) -> bool: ...
def count_classes(
    labels: Codes,
    weight: Float,
    known: int,
    codes: Codes,
    present: Codes,
    rows: Codes,
    weights: Float,
) -> tuple[int, int]: ...
def add_classes(
    rows: NDArray[np.int64],
    weights: Float,
    sums: Float,
    where: Codes,
    more_rows: Codes,
    more_weights: Float,
    added: Float,
) -> None: ...

# --- erase ---

class PackedFactors:
    def __init__(
        self,
        left: NDArray[np.float64],
        right: NDArray[np.float64],
        mean: NDArray[np.float64],
        shift: NDArray[np.float64],
    ) -> None: ...

def apply_rows(
    factors: PackedFactors,
    rows: NDArray[Any],
    out: NDArray[Any],
    start: int,
    stop: int,
    streamed: bool = False,
) -> int: ...
def squares_finite(rows: NDArray[Any], start: int, stop: int) -> bool: ...

# --- sweep ---

def sweep_block(
    rows: NDArray[Any],
    index: NDArray[Any],
    weight: NDArray[Any],
    shift: NDArray[Any],
    inverse: NDArray[Any],
    codes: NDArray[Any],
    order: NDArray[Any],
    cell: NDArray[Any],
    values: NDArray[Any],
    segment: int,
    width: int,
    stripe: int,
    sums: NDArray[Any],
    near: NDArray[Any],
    leverage: NDArray[Any],
    counter: NDArray[Any],
) -> None: ...
