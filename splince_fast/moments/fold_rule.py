"""Whether a fit splits its rows into folds."""

from __future__ import annotations

import math

from splince_fast._runtime.memory import total_memory

# Fewer rows give held-out figures of little precision.
LEAST_ROWS = 200
# Up to this width factoring costs less than reading; for wider rows, least number of rows per
# feature.
_FEW_FEATURES, _ROWS_PER_FEATURE = 512, 4
# Memory of a fit in folds: number of d x d matrices (two states, and up to two per factor), and the
# largest fraction of the machine's memory for them.
_MATRICES, _SHARE = 6, 0.25


def use_folds(n_rows: int | None, n_features: int | None) -> bool:
    """Whether a fit splits its rows into two folds, for a report on held-out rows.

    At least 200 rows; at least 4 per feature where there are more than 512, since factoring two
    halves would cost more than reading the rows; and 6 d^2 doubles in a quarter of the memory of
    the machine. An unknown number counts as large enough.

    Parameters
    ----------
    n_rows, n_features : int or None
        Shape of the rows, where it is known.

    Returns
    -------
    bool
        The same for the same shape on the same machine: the eraser depends on it by rounding.

    Examples
    --------
    >>> from splince_fast.moments.fold_rule import use_folds
    >>> use_folds(10_000, 384), use_folds(100, 3), use_folds(3000, 1024)
    (True, False, False)
    """
    if n_rows is not None and n_rows < LEAST_ROWS:
        return False
    if n_features is None:
        return True
    rows = math.inf if n_rows is None else n_rows
    if n_features > _FEW_FEATURES and rows < _ROWS_PER_FEATURE * n_features:
        return False
    memory = total_memory()
    return memory is None or 8 * _MATRICES * n_features**2 <= _SHARE * memory
