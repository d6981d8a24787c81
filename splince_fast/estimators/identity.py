"""Identity: an eraser that changes nothing, the baseline in a search over erasers."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from splince_fast._runtime.arrays import as_weights, check_values, is_sparse
from splince_fast._runtime.sparse import SparseRows
from splince_fast.estimators.base import ErasingTransformer
from splince_fast.exceptions import NotEnoughDataError
from splince_fast.projection import Projection
from splince_fast.report import Report

__all__ = ["Identity"]


class Identity(ErasingTransformer):
    """Return rows unchanged, with the interface of the erasers.

    Identity is the baseline in a search over erasers. scikit-learn's ``"passthrough"`` cannot
    replace it, because ``"passthrough"`` accepts no `concept`.

    Attributes
    ----------
    projection_ : Projection
        The identity, of rank 0.
    report_ : Report
        Report without erased variables and with distortion 0.
    n_samples_seen_, n_features_in_ : int
        Number of fitted rows with positive weight, and number of features.
    feature_names_in_ : ndarray of str, shape (n_features_in_,)
        Names of the features, if X was a frame.

    See Also
    --------
    LEACE : Erase a concept.
    SPLINCE : Erase a concept and keep a task.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import Identity
    >>> rng = np.random.default_rng(0)
    >>> z, X = rng.integers(0, 2, size=60), rng.normal(size=(60, 3))
    >>> eraser = Identity().fit(X, concept=z)
    >>> bool((eraser.transform(X) == X).all()), eraser.report_.distortion
    (True, 0.0)
    """

    concept_from = None
    n_samples_seen_: int
    _weight: float

    # The same as in the erasers: a search then passes `concept` to erasers and Identity alike.
    __metadata_request__fit: ClassVar = {"concept": True}
    __metadata_request__partial_fit: ClassVar = {"concept": True}

    @property
    def _accepts_sparse(self) -> bool:
        return True

    def fit(
        self,
        X: object,
        y: object = None,
        *,
        concept: object = None,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Record the features and the number of rows, and discard any earlier fit.

        Parameters
        ----------
        X : array-like, frame or sparse matrix of shape (n_samples, n_features)
            Rows; checked for NaN and infinity.
        y, concept : object, optional
            Ignored; accepted because the erasers take these arguments.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies.
        groups : object, optional
            Ignored.

        Returns
        -------
        object
            The estimator itself; unchanged after an error.

        Raises
        ------
        InputError, NonFiniteError
            The data are invalid.
        NotEnoughDataError
            All weights are zero.
        """
        with self._restored_on_error():
            self.__dict__.pop("_projection", None)
            self._add(X, sample_weight, min_rows=1)
            if not self.n_samples_seen_:
                raise NotEnoughDataError(
                    "every sample_weight is zero, so no row is left to fit to; give some rows a "
                    "positive weight"
                )
        return self

    def partial_fit(
        self, X: Any, y: Any = None, *, concept: Any = None, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Check a block of rows of any size, and add its number of rows to the count.

        Parameters
        ----------
        X : array-like, frame or sparse matrix of shape (n_samples, n_features)
            Rows, possibly none.
        y, concept : object, optional
            Ignored.
        sample_weight : array-like of shape (n_samples,), optional
            Non-negative frequencies.

        Returns
        -------
        object
            The estimator itself; unchanged after an error.

        Raises
        ------
        InputError, NonFiniteError
            The data are invalid, or have other features than earlier blocks.
        """
        with self._restored_on_error():
            self._add(X, sample_weight, min_rows=0)
        return self

    def merge(self, other: Self) -> Self:
        """Add the number of rows of another estimator to the count.

        Parameters
        ----------
        other : Identity
            Estimator to add; not modified.

        Returns
        -------
        object
            The estimator itself.

        Raises
        ------
        IncompatibleMomentsError
            The other estimator has another class or other features.
        NotFittedError
            One of the estimators is not fitted.
        """
        self._check_mergeable(other)
        self.n_samples_seen_ += other.n_samples_seen_
        self._weight += other._weight
        return self

    def _add(self, X: object, sample_weight: ArrayLike | None, *, min_rows: int) -> None:
        """Check a block of rows, and add the number and weights of its rows to the state."""
        first = not self.__sklearn_is_fitted__()
        rows = self._rows(X, reset=first, min_rows=min_rows)
        n, d = rows.shape
        if is_sparse(rows):
            SparseRows.of(rows).check()
        else:
            check_values(rows)
        weight = as_weights(sample_weight, n)
        if first:
            self.n_samples_seen_, self._weight = 0, 0.0
            empty = np.zeros((d, 0))
            self._projection = Projection(empty, empty, np.zeros(d), method="Identity")
        self.n_samples_seen_ += n if weight is None else int(np.count_nonzero(weight))
        self._weight += n if weight is None else float(weight.sum())

    @property
    def report_(self) -> Report:
        """Report without erased variables and with distortion 0."""
        d = self.projection_.n_features
        return Report(
            method="Identity",
            n_rows=self.n_samples_seen_,
            weight=self._weight,
            n_features=d,
            rank_covariance=None,
            rank=0,
            variables=(),
            dropped=0,
            cosines=(),
            amplification=1.0,
            rho=None,
            distortion=0.0,
            distortion_leace=None,
            solver="none",
            tolerance=0.0,
            shrinkage=0.0,
            warnings=(),
        )
