"""The number of rows in a block, for sources and accumulators alike."""

from __future__ import annotations

import operator

from splince_fast.exceptions import InputError

BLOCK_ROWS = 4096
BLOCK_BYTES = 64 << 20
_MOST_ROWS = 1 << 31


def choose_block_rows(block_rows: int | None, n_features: int, itemsize: int) -> int:
    """Return `block_rows` after validation; by default 4096, fewer if a block exceeds 64 MiB.

    `itemsize` is the size of one of `n_features` numbers in bytes.
    """
    if block_rows is None:
        return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, n_features * itemsize)))
    return check_block_rows(block_rows)


def check_block_rows(block_rows: object) -> int:
    """Return `block_rows` as an int; InputError unless it lies between 1 and 2**31."""
    try:
        rows = operator.index(block_rows)  # type: ignore[arg-type]
    except TypeError:
        rows = 0
    if not 1 <= rows <= _MOST_ROWS or isinstance(block_rows, bool):
        raise InputError(
            f"block_rows is {block_rows!r}; it must be a positive integer, at most "
            f"{_MOST_ROWS:,} (a block lies in memory)"
        )
    return rows
