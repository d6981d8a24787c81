"""Rule that determines whether a fit splits its rows into folds."""

from __future__ import annotations

import math

from splince_fast._runtime.memory import total_memory

# Least number of rows of a fit with folds: with fewer rows, results on held-out rows have large
# standard errors.
LEAST_ROWS = 200
# A fit of more than _FEW_FEATURES features uses folds only if it has _ROWS_PER_FEATURE rows or more
# per feature: with fewer rows, the factorisations take longer than reading the rows.
_FEW_FEATURES, _ROWS_PER_FEATURE = 512, 4
# Largest number of d x d matrices in a fit with two folds (the scatters of two states, and two
# matrices for each of two factors), and the largest fraction of the machine's memory for them.
_MATRICES, _MEMORY_FRACTION = 6, 0.25


def use_folds(n_rows: int | None, n_features: int | None) -> bool:
    """Return whether a fit splits its rows into two folds, for a report on held-out rows."""
    # There must be at least 200 rows, and at least 4 rows per feature if there are more than 512
    # features: with fewer rows the factorisations would take longer than reading the rows. 6 d^2
    # float64 numbers take at most a quarter of the machine's memory. A condition on an unknown
    # number counts as satisfied. The answer depends on the shape and the machine alone, so that
    # refits are reproducible.
    if n_rows is not None and n_rows < LEAST_ROWS:
        return False
    if n_features is None:
        return True
    rows = math.inf if n_rows is None else n_rows
    if n_features > _FEW_FEATURES and rows < _ROWS_PER_FEATURE * n_features:
        return False
    memory = total_memory()
    return memory is None or 8 * _MATRICES * n_features**2 <= _MEMORY_FRACTION * memory
