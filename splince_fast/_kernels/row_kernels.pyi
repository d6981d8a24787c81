from collections.abc import Callable
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
    total: Float
    squares: Float
    class_sums: Float
    products: Float
    def __init__(
        self,
        rows: NDArray[Any],
        index: Codes | None,
        weight: Float | None,
        shift: Float,
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
def reference_is_far(
    reference: Float,
    deviation: Float,
    weight: float,
    squares: Float,
    added_mean: Float,
    added_squares: Float,
    added_weight: float,
    max_distance: float,
    roundings: float,
) -> bool: ...
def count_classes(
    labels: Codes, weight: Float | None, n_classes: int
) -> tuple[Codes, Codes, Codes, Float, int]: ...

class Change: ...

class Addition(Change):
    def __init__(self, sums: Float, addend: Float, rows: Codes | None = None) -> None: ...

class ScatterAddition(Change):
    def __init__(
        self,
        scatter: Float,
        product: NDArray[Any] | None,
        sign: float,
        vectors: Float,
        coefficients: Float,
    ) -> None: ...

class Assignment(Change):
    owner: object
    def __init__(self, owner: object, attributes: dict[str, Any]) -> None: ...

class Call(Change):
    def __init__(self, function: Callable[..., object], *arguments: object) -> None: ...

def add(changes: list[Change]) -> None: ...

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
