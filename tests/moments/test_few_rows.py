"""The kernel that erases few rows: its numbers, its bounds, and factors that it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from splince_fast._kernels.rows import MOST_DIRECTIONS, FewRows


@pytest.mark.parametrize("rank", [0, 1, 3, MOST_DIRECTIONS])
@pytest.mark.parametrize("d", [1, 15, 16, 35])
def test_rows_are_erased_and_nothing_else_is_written(rank: int, d: int) -> None:
    rng = np.random.default_rng(0)
    shapes = ((rank,), (rank, d), (rank, d))
    neg_bias, right, left = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    kernel = FewRows(neg_bias.copy(), right.copy(), left.copy())  # which need not outlive the call
    x = rng.normal(size=(7, d)).astype(np.float32)
    chosen = np.array([1, 0, 1, 1, 0, 1, 1], np.uint8)
    factors = (np.float64(f) for f in (right, left, neg_bias))
    right, left, neg_bias = factors
    wanted = x - (x @ right.T + neg_bias) @ left
    # Dot products of d numbers and sums of `rank` terms, in any order.
    terms = np.abs(x) @ np.abs(right.T) + np.abs(neg_bias)
    wrong = (d + rank + 2) * 2.0**-24 * (np.abs(x) + terms @ np.abs(left))
    for mask in (None, chosen):
        room = np.full((9, d), np.float32(7.0))
        bits = 0 if mask is None else mask.ctypes.data
        kernel.erase(x.ctypes.data, room[1:].ctypes.data, 7, bits)
        assert (room[[0, 8]] == 7.0).all()
        rows = chosen == 1 if mask is not None else slice(None)
        assert (np.abs(room[1:8] - wanted) <= wrong)[rows].all()
        assert rank == 0 or not (np.abs(x - wanted) <= wrong)[rows].all()
        assert mask is None or (room[1:8] == x)[chosen == 0].all()
    room = x.copy()
    kernel.erase(room.ctypes.data, room.ctypes.data, 7, 0)  # in place
    assert (np.abs(room - wanted) <= wrong).all()


def test_factors_of_other_shapes_are_refused() -> None:
    one, a = np.ones(1, np.float32), np.ones((2, 5), np.float32)
    with pytest.raises(ValueError, match="shapes"):
        FewRows(one, a, a)
    with pytest.raises(ValueError, match="shapes"):
        FewRows(a[:, 0].copy(), a, np.ones((2, 4), np.float32))
    many = np.ones((MOST_DIRECTIONS + 1, 5), np.float32)
    with pytest.raises(ValueError, match="too many"):
        FewRows(many[:, 0].copy(), many, many)
