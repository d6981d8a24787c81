"""DFR: a linear head fitted to balanced subsets of the training rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Self

import numpy as np
from sklearn.linear_model import LogisticRegression

from splince_fast._runtime.progress import Progress
from splince_fast.baselines._inputs import (
    Float,
    Index,
    RandomState,
    Validation,
    candidate_values,
    check_count,
)
from splince_fast.baselines._linear import BalancedClassifier, CellData, CellRows
from splince_fast.exceptions import InputError

# From scikit-learn 1.8 on, `l1_ratio=1` replaces `penalty="l1"`.
_HAS_PENALTY = inspect.signature(LogisticRegression).parameters["penalty"].default == "l2"
# A feature counts as constant if its range is at most _ROUNDINGS * eps times its largest absolute
# value, eps being the machine epsilon of the rows. A rounding has a relative error of at most
# eps / 2, so this allows for 128 of them.
_ROUNDINGS = 64
_L1: dict[str, str | float] = {"penalty": "l1"} if _HAS_PENALTY else {"l1_ratio": 1.0}


class DFR(BalancedClassifier):
    """Deep feature reweighting on training rows: a sparse head, averaged over balanced subsets.

    The features are standardised by the mean and standard deviation of the training rows. A
    balanced subset has the same number of rows from each cell (class, group): as many as the
    smallest cell has, drawn without replacement. One head is fitted to each subset, and ``coef_``
    and ``intercept_`` are the means over the heads. If C is a sequence, each value is fitted to the
    first subset, and the value with the highest worst-cell accuracy on the validation rows is
    selected (ties: by accuracy, then the smaller C). More than two classes are fitted one-vs-rest
    with ``penalty="l1"``, and by softmax with ``penalty="l2"``.

    ``penalty="l2", n_subsets=1`` is subsampling of groups (SUBG).

    Parameters
    ----------
    C : float or sequence of float
        Inverse regularisation strength, as in scikit-learn; one value of a sequence is selected.
        The default is the grid of Kirichenko et al.
    penalty : {"l1", "l2"}
        Norm of the coefficients in the penalty.
    n_subsets : int
        Number of balanced subsets.
    validation_share : float in [0, 1)
        Fraction of each cell held out for validation if ``fit`` is given no validation rows and
        C is a sequence; with 0, C is selected on the training rows.
    groups_from : {None, "y"}
        With "y", `fit` takes no groups, and the cells are the classes of y.
    random_state : int, Generator, RandomState or None
        Draws the subsets and the validation rows.
    progress : bool, optional
        Show a progress bar on stderr; by default only in a terminal or notebook, after two
        seconds.

    Attributes
    ----------
    coef_, intercept_ : ndarray of shape (1 or n_classes, n_features) and (1 or n_classes,)
        Coefficients and intercepts for unscaled X.
    classes_ : ndarray
    cells_ : list of tuple
        Cells (class, group).
    C_ : float
        Selected C.
    n_features_in_, feature_names_in_
        Number and names of the features of X.

    Notes
    -----
    ``fit`` takes no ``sample_weight``: subsets are balanced by numbers of rows.

    References
    ----------
    P. Kirichenko, P. Izmailov, A. G. Wilson, "Last layer re-training is sufficient for robustness
    to spurious correlations", ICLR 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast.baselines import DFR
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(0, 2, size=600)
    >>> z = np.where(rng.random(600) < 0.9, y, 1 - y)
    >>> X = rng.normal(size=(600, 3)) + np.outer(z, [2, 0, 0]) + np.outer(y, [0, 1, 0])
    >>> head = DFR(random_state=0).fit(X, y, groups=z)
    >>> bool(abs(head.coef_[0, 0]) < abs(head.coef_[0, 1]))
    True
    """

    C_: float

    def __init__(
        self,
        *,
        C: float | Sequence[float] = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01),
        penalty: str = "l1",
        n_subsets: int = 10,
        validation_share: float = 0.2,
        groups_from: str | None = None,
        random_state: RandomState = None,
        progress: bool | None = None,
    ) -> None:
        self.C = C
        self.penalty = penalty
        self.n_subsets = n_subsets
        self.validation_share = validation_share
        self.groups_from = groups_from
        self.random_state = random_state
        self.progress = progress

    def fit(
        self, X: object, y: object = None, *, groups: object = None, validation: Validation = None
    ) -> Self:
        """Fit the classifier, and discard any earlier fit.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Copied to float64.
        y : array-like of shape (n_samples,)
            Labels of the task, two or more classes.
        groups : array-like of shape (n_samples,), tuple of these, mapping or frame
            Groups, which form the cells together with y. With several columns, a group is a
            combination of values, one from each column.
        validation : array-like of bool, shape (n_samples,), or tuple (X, y, groups), optional
            Mask of the validation rows, or separate validation rows. All rows have weight 1. C is
            selected on these rows; no head is fitted to them.

        Returns
        -------
        object
            The estimator itself; unchanged after an error or KeyboardInterrupt.

        Raises
        ------
        InputError, NonFiniteError, LabelError, NotEnoughDataError
            The rows, labels or parameters are invalid, or a cell has no training row.
        """
        return self._fit(X, y, groups, None, validation)

    def _check_parameters(self) -> None:
        self._check_common()
        if self.penalty not in ("l1", "l2"):
            raise InputError(f"penalty is {self.penalty!r}; it must be 'l1' or 'l2'")
        check_count(self.n_subsets, "n_subsets")
        candidate_values(self.C, "C")

    def _needs_validation_rows(self) -> bool:
        return len(candidate_values(self.C, "C")) > 1

    def _uses_softmax(self) -> bool:
        return self.penalty == "l2"

    def _fit_cells(self, data: CellData) -> None:
        train = data.train
        mean = train.rows.mean(axis=0)
        scale = train.rows.std(axis=0)
        # Constant features are detected by their range. The computed standard deviation of a
        # constant feature may be positive, because the mean is rounded.
        rounding = _ROUNDINGS * data.eps * np.abs(train.rows).max(axis=0)
        scale[np.ptp(train.rows, axis=0) <= rounding] = 1.0
        counts = np.bincount(train.cells)
        members = [np.flatnonzero(train.cells == cell) for cell in range(len(counts))]
        subsets = [
            np.concatenate([data.rng.permutation(rows)[: counts.min()] for rows in members])
            for _ in range(self.n_subsets)
        ]
        C_values = candidate_values(self.C, "C")
        n_fits = self.n_subsets + len(C_values) - (len(C_values) == 1)
        with Progress(n_fits * len(subsets[0]), label="DFR", show=self.progress) as bar:

            def fit_subset(index: Index, C: float) -> tuple[Float, Float]:
                part = train.take(index)
                part.rows[...] -= mean
                part.rows[...] /= scale
                coef, intercept = self._fit_head(part, C)
                bar.advance(len(index), part.rows.nbytes)
                coef = coef / scale
                return coef, intercept - coef @ mean

            self.C_ = float(C_values[0])
            if len(C_values) > 1:
                scores = {
                    (*self._accuracies(data.selection, *fit_subset(subsets[0], C)), -C)
                    for C in C_values
                }
                self.C_ = float(-max(scores)[2])
            heads = [fit_subset(index, self.C_) for index in subsets]
        self.coef_ = np.mean([coef for coef, _ in heads], axis=0)
        self.intercept_ = np.mean([intercept for _, intercept in heads], axis=0)

    def _fit_head(self, part: CellRows, C: float) -> tuple[Float, Float]:
        """Fit one head to standardised rows; return its coefficients and intercepts."""
        if self.penalty == "l2":
            model = LogisticRegression(C=C, max_iter=1000).fit(part.rows, part.codes)
            return model.coef_, model.intercept_
        k = len(self.classes_)
        targets = [part.codes == c for c in range(k)] if k > 2 else [part.codes]
        models = [
            LogisticRegression(C=C, solver="liblinear", random_state=0, max_iter=200, **_L1).fit(
                part.rows, target.astype(np.intp)
            )
            for target in targets
        ]
        return (
            np.concatenate([model.coef_ for model in models]),
            np.concatenate([model.intercept_ for model in models]),
        )
