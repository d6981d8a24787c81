"""Base classes of transformers that apply a projection: checks of rows, and labels by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import narwhals.stable.v2 as nw
import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from splince_fast._runtime.erase_rows import result_dtype
from splince_fast._runtime.rows import (
    as_numbers,
    as_weights,
    check_values,
    checked_names,
    column_names,
    holds_vectors,
    is_sparse,
    name_columns,
    refuse_lazy,
)
from splince_fast.exceptions import InputError, NonFiniteError, NotEnoughDataError
from splince_fast.labels.containers import check_index, variables_of
from splince_fast.projection import Projection


class _InputTypeError(InputError, TypeError):
    """Rows that scikit-learn rejects with a TypeError: sparse, or objects that are not numbers."""


class CheckedEstimator(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base of transformers that validate rows once and stay unchanged if a fit raises an error."""

    n_features_in_: int
    feature_names_in_: NDArray[Any]
    _column_names: tuple[str, ...] | None

    _sparse_advice: ClassVar[str] = ""

    @property
    def _accepts_sparse(self) -> bool:
        return False

    def _rows(self, X: object, *, reset: bool, min_rows: int, **columns: object) -> Any:
        """Return X as an array or CSR matrix, without a copy if possible."""
        refuse_lazy(X, "X")
        if hasattr(X, "index"):  # labels and weights belong to rows by position
            for role, column in columns.items():
                check_index(X, column, role)
        names = column_names(X)
        if isinstance(X, np.ndarray) or hasattr(X, "to_numpy"):
            X = _stack_vectors(X)
        try:
            # The values are checked for NaN and infinity later, in the pass that reads them.
            rows = validate_data(
                self, X=X, reset=reset, ensure_all_finite=False, ensure_min_samples=min_rows,
                accept_sparse="csr" if self._accepts_sparse else False,
            )  # fmt: skip
        except TypeError as error:
            advice = self._sparse_advice if is_sparse(X) else ""
            raise _InputTypeError(f"{error}{advice}") from error
        except ValueError as error:
            if names is not None:
                as_numbers(X)  # for columns of text, raises an error that names these columns
            raise InputError(str(error)) from error
        if names is not None and rows.dtype == object:
            as_numbers(X)
        first = reset or not hasattr(self, "_column_names")
        earlier = None if first else self._column_names
        names_now = checked_names(X, rows.shape[1], earlier, first=first)
        if reset:
            self._column_names = names_now
        return rows

    @contextmanager
    def _restored_on_error(self) -> Iterator[None]:
        """Restore all attributes after any exception; name the features of a NonFiniteError."""
        before = self.__dict__.copy()
        try:
            yield
        except BaseException as error:
            if isinstance(error, NonFiniteError):
                name_columns(error, getattr(self, "feature_names_in_", None))
            self.__dict__ = before
            raise

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = self._accepts_sparse
        tags.transformer_tags.preserves_dtype = ["float64", "float32", "float16"]
        return tags


class ErasingTransformer(CheckedEstimator):
    """Base of transformers that fit a :class:`Projection` to rows and a concept."""

    concept_from: str | None
    _projection: Projection | None  # None until it is computed from accumulated moments

    _keeps_task: ClassVar[bool] = False  # whether the covariance of X with y is kept

    def _concept_columns(self, y: object, concept: object) -> dict[str, Any]:
        """Return the variables to erase, by name: `concept`, or y with ``concept_from="y"``."""
        name = type(self).__name__
        if self.concept_from == "y":
            if concept is not None:
                raise InputError(
                    f"{name} has concept_from='y' and was given a concept, too; leave one out"
                )
            if y is None:
                self._refuse_missing_y("with concept_from='y', y is the concept")
            return columns_by_name(y, "concept")
        if concept is None:
            task, use = ("y, ", "keeps") if self._keeps_task else ("", "does not keep")
            raise InputError(
                f"{name} was given no concept to erase. Pass fit(X, {task}concept=z), or in a "
                f"pipeline pipe.fit(X, y, {name.lower()}__concept=z). y is the task, which {name} "
                f"{use}, and never silently becomes the concept; with {name}(concept_from='y'), "
                "y is the concept"
            )
        return columns_by_name(concept, "concept")

    def _refuse_missing_y(self, reason: str) -> NoReturn:
        # scikit-learn's `check_estimator` expects this text.
        raise InputError(
            f"This {type(self).__name__} estimator requires y to be passed, but the target y is "
            f"None: {reason}"
        )

    def _check_concept_from(self) -> None:
        if self.concept_from not in (None, "y"):
            raise InputError(f"concept_from is {self.concept_from!r}; it must be None or 'y'")

    def _solve(self) -> Projection:
        raise NotImplementedError

    @property
    def projection_(self) -> Projection:
        """Fitted map; computed on first use after ``partial_fit``.

        Raises
        ------
        NotFittedError
            The estimator is not fitted.
        SplinceError
            No eraser exists for the data passed so far; the errors are those of :meth:`fit`.
        """
        check_is_fitted(self)
        if self._projection is None:
            self._projection = self._solve()
        return self._projection

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_projection")

    def transform(self, X: object) -> Any:
        """Erase the concept from rows; no labels are needed.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features); sparse for "diag"
            Rows, possibly none; a dask array is erased lazily.

        Returns
        -------
        ndarray of shape (n_samples, n_features)
            Erased rows in the dtype of X if X is floating, otherwise in float64; a frame after
            ``set_output(transform="pandas")`` or ``"polars"``. Sparse rows give a dense array: pass
            few at a time, or use ``projection_.fold_into(weight, bias)`` for a layer that follows.

        Raises
        ------
        NotFittedError, InputError, NonFiniteError
            The estimator is not fitted; or X has other features than the fitted rows, or contains
            NaN or infinity.
        """
        check_is_fitted(self)
        if hasattr(X, "map_blocks"):  # X is a dask array
            return self.projection_(X)
        rows = self._rows(X, reset=False, min_rows=0)
        projection = self.projection_
        if is_sparse(rows):
            rows = rows.astype(result_dtype(rows.dtype), copy=False).toarray()
            clean = projection(rows, out=rows)
        else:
            clean = projection(rows)
        # A NaN or infinity in any feature makes all columns of the erased row non-finite, so that
        # the first column reveals it. A map of rank 0 returns the row unchanged.
        if not projection.rank or not np.isfinite(clean[:, 0]).all():
            with self._restored_on_error():
                check_values(rows)
        return clean

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = self._keeps_task or self.concept_from == "y"
        return tags


def _stack_vectors(X: Any) -> Any:
    """Return one column whose entries are vectors as a matrix; return other input unchanged."""
    shape = getattr(X, "shape", ())
    if len(shape) != 1 and shape[1:] != (1,):
        return X
    values = X if isinstance(X, np.ndarray) else X.to_numpy()
    return as_numbers(values) if holds_vectors(values) else X


def columns_by_name(labels: object, role: str) -> dict[str, Any]:
    """Return the columns of a mapping or frame, by name; a single column gets the name `role`."""
    if not isinstance(labels, Mapping) and not hasattr(type(labels), "columns"):
        return {role: labels}
    columns = variables_of(labels, role)
    if not columns:
        raise InputError(f"the {role} holds no variable; pass at least one column")
    return {name: nw.to_native(column, pass_through=True) for name, column in columns.items()}


def read_weights(sample_weight: object, n_rows: int) -> NDArray[np.float64] | None:
    """Return the weights as float64, None for None; raise NotEnoughDataError if all are zero."""
    weight = as_weights(sample_weight, n_rows)
    if weight is not None and not weight.any():
        raise NotEnoughDataError(
            "every sample_weight is zero, so that no row is left; give some rows a positive weight"
        )
    return weight
