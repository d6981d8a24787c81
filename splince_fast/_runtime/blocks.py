"""The number of rows in a block, the unit in which sources read and moments accumulate rows."""

from __future__ import annotations

import operator

from splince_fast.exceptions import InputError

BLOCK_ROWS = 4096
BLOCK_BYTES = 64 << 20
_MOST_ROWS = 1 << 31


def choose_block_rows(block_rows: int | None, n_features: int, itemsize: int) -> int:
    """Return the validated `block_rows`; for None, return 4096, or fewer to stay within 64 MiB.

    A row has `n_features` numbers of `itemsize` bytes.
    """
    if block_rows is None:
        return max(1, min(BLOCK_ROWS, BLOCK_BYTES // max(1, n_features * itemsize)))
    return check_block_rows(block_rows)


def check_block_rows(block_rows: object) -> int:
    """Return `block_rows` as an int; raise InputError unless it lies between 1 and 2**31."""
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
