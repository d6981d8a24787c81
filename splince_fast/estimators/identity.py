"""Identity: an eraser that changes nothing, the baseline in a search over erasers."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from numpy.typing import ArrayLike
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from splince_fast._runtime.rows import as_weights, check_values, is_sparse
from splince_fast._runtime.sparse import SparseRows
from splince_fast.estimators.base import CheckedEstimator
from splince_fast.exceptions import NotEnoughDataError

__all__ = ["Identity"]


class Identity(OneToOneFeatureMixin, TransformerMixin, CheckedEstimator):  # type: ignore[misc]
    """Return rows unchanged: the baseline in a search over erasers.

    scikit-learn's ``"passthrough"`` cannot replace it, because it accepts no `concept`.

    Attributes
    ----------
    n_features_in_ : int
        Number of features.
    feature_names_in_ : ndarray of str, shape (n_features_in_,)
        Names of the features, if X was a frame.

    Examples
    --------
    >>> import numpy as np
    >>> from splince_fast import Identity
    >>> rng = np.random.default_rng(0)
    >>> z, X = rng.integers(0, 2, size=60), rng.normal(size=(60, 3))
    >>> bool((Identity().fit(X, concept=z).transform(X) == X).all())
    True
    """

    # As in the erasers: a search then passes `concept` to erasers and Identity alike.
    __metadata_request__fit: ClassVar = {"concept": True}

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
        groups: object = None,
    ) -> Self:
        """Check the rows and weights, and store the features.

        Parameters
        ----------
        X : array-like, frame or sparse matrix of shape (n_samples, n_features)
            Rows.
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
        """
        with self._restored_on_error():
            rows = self._checked(X, reset=True, min_rows=1)
            weight = as_weights(sample_weight, rows.shape[0])
            if weight is not None and not weight.any():
                raise NotEnoughDataError(
                    "every sample_weight is zero, so no row is left to fit to; give some rows a "
                    "positive weight"
                )
        return self

    def transform(self, X: object) -> Any:
        """Return a copy of the rows.

        Parameters
        ----------
        X : array-like, frame or sparse matrix of shape (n_samples, n_features)
            Rows with the features of the fit.

        Returns
        -------
        ndarray or sparse matrix of shape (n_samples, n_features)
            The same rows.
        """
        check_is_fitted(self, "n_features_in_")
        with self._restored_on_error():
            return self._checked(X, reset=False, min_rows=0).copy()

    def _checked(self, X: object, *, reset: bool, min_rows: int) -> Any:
        rows = self._rows(X, reset=reset, min_rows=min_rows)
        if is_sparse(rows):
            SparseRows.of(rows).check()
        else:
            check_values(rows)
        return rows

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32", "float16"]
        return tags
