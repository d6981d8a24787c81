"""Splits: the association protocol, whose rule is public to the row, and the natural split."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.evaluation._cells import coded
from splince_fast.evaluation._checks import check_method, check_p, check_sizes
from splince_fast.evaluation._protocol import Protocol, Split, pools_of


def spurious_split(
    task: Any,
    concept: Any,
    *,
    p: float,
    sizes: tuple[int, int, int] | None = None,
    random_state: int = 0,
    aligned_class: Any = None,
    groups: Any = None,
    on_shortage: str = "raise",
    method: str = "subsample",
) -> Split:
    """Draw training and validation rows with a given association, and decorrelated test rows.

    With two classes of the task and a the aligned class, p = P(z = a | y = 1) = P(z != a | y = 0)
    and the task balanced: the cells (1, a), (0, a) have fractions p / 2 and (1 - p) / 2, the other
    K - 1 classes divide (1 - p) / 2 of y = 1 and p / 2 of y = 0 equally. With a mapping a of C
    classes of the task to classes of the concept, (y, a[y]) has the fraction p / C and the others
    divide (1 - p) / C equally.

    *The rule, by which figures are reproducible to the row*: ``rng = default_rng(random_state)``;
    for the cells in lexicographic order (y, z), ``m = rng.permutation(rows of the cell)``; the
    first ``n_test // n_cells`` of m are test rows, the next ``round(n_validation * share)``
    validation rows, the next ``round(n_train * share)`` training rows. The test rows are the same
    at every p.

    *With* ``method="weights"`` *no training row is thrown away*: the test rows are those of the
    rule; of the r rows that are left in a cell, the first ``round(r n_validation / (n_validation +
    n_train))`` are validation rows and all others training rows, and in either part the n_g rows
    of cell g weigh w_g = N share_g / n_g each, with N = 1 / sum_g share_g^2 / n_g. So the weights
    have the shares of the cells, and add up to N = (sum w)^2 / sum w^2, the number of rows of
    equal weight that say as much (Kish). A cell without a share at p, as at p = 1, has test rows
    alone.

    Parameters
    ----------
    task, concept : column of shape (n,)
        Classes; rows that lack one of them are left out.
    p : float
        In [0, 1].
    sizes : tuple of three int, optional
        Rows for training, validation and test; the default is the largest that the cells allow
        at 70, 10 and 20 %.
    random_state : int
        Of the permutations.
    aligned_class : class, or mapping of task class to concept class, optional
        The default is the class of the concept that is most frequent, relative to the other
        class of the task, among rows of the second one.
    groups : column of shape (n,), optional
        Rows of one group (a person, a document) stay in one part: ``rng`` permutes the groups
        first, and they are dealt to test, validation and training by the shares of the sizes.
    on_shortage : {"raise", "shrink"}
        Where a cell has too few rows: an error, or all cells alike are made smaller.
    method : {"subsample", "weights"}
        How training and validation rows reach p: cells lose rows, or all rows stay and cells are
        weighted. Of `sizes`, "weights" takes the test rows and the ratio of the others.

    Returns
    -------
    Split
        Row numbers, and what was adjusted; with ``method="weights"`` the weights of training and
        validation rows.

    Raises
    ------
    InputError
        A parameter out of range.
    LabelError
        A task or concept with one class, or with quantities; a class that is not there.
    NotEnoughDataError
        A cell has too few rows; the text names the largest feasible size.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.evaluation import spurious_split
    >>> rng = np.random.default_rng(0)
    >>> y, z = rng.integers(0, 2, 1000), rng.integers(0, 2, 1000)
    >>> split = spurious_split(y, z, p=0.9, sizes=(200, 40, 100), random_state=0, aligned_class=1)
    >>> split.sizes
    (200, 40, 100)
    >>> float(np.mean(z[split.train][y[split.train] == 1] == 1))
    0.9
    >>> whole = spurious_split(y, z, p=0.9, sizes=(200, 40, 100), aligned_class=1, method="weights")
    >>> whole.sizes, round(whole.weights.sum())
    ((750, 150, 100), 437)
    >>> same = whole.weights * (z[whole.train] == y[whole.train])
    >>> round(float(same.sum() / whole.weights.sum()), 6)
    0.9
    """
    check_p(p)
    check_method(method)
    y = coded(task, "task")
    protocol = Protocol.of(y, coded(concept, "concept", len(y.codes)), aligned_class, groups)
    if sizes is None:
        sizes = protocol.largest_sizes([p])
    draw = protocol.weighted_split if method == "weights" else protocol.split
    return draw(p, check_sizes(sizes), random_state, on_shortage)


def natural_split(
    n: int, *, random_state: int, usable: NDArray[np.bool_] | None = None, groups: Any = None
) -> Split:
    """The split without a protocol: the first quarter of a permutation tests, a tenth validates.

    ``r = default_rng(random_state).permutation(usable rows)``; test = the first n // 4, validation
    the next n // 10, training the rest. With groups the permutation is over groups.

    Parameters
    ----------
    n : int
        Number of rows.
    random_state : int
        Of the permutation.
    usable : (n,) bool, optional
        Rows that take part.
    groups : column of shape (n,), optional
        Rows of one group stay in one part.

    Returns
    -------
    Split
        Row numbers in the order of the permutation.
    """
    rows = np.arange(n) if usable is None else np.flatnonzero(usable)
    rng = np.random.default_rng(random_state)
    if groups is None:
        order = rng.permutation(rows)
        test, rest = order[: len(rows) // 4], order[len(rows) // 4 :]
        validation, train = rest[: len(rows) // 10], rest[len(rows) // 10 :]
    else:
        pool, rank = pools_of(coded(groups, "groups", n).codes, rows, rng, (0.25, 0.1))
        order = rows[np.lexsort((rows, rank[rows]))]
        test, validation, train = (order[pool[order] == k] for k in range(3))
    return Split(train, validation, test, None, None, n - len(rows), ())
