"""Base class of DFR and GroupDRO: validation of inputs, cells (class, group), predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from splince_fast._runtime.arrays import eps_of
from splince_fast._solve.tolerances import EPS
from splince_fast.baselines._inputs import (
    ClassRows,
    Float,
    Index,
    Mask,
    RandomState,
    Validation,
    append_validation,
    as_generator,
    check_validation_share,
    float_rows,
    normalised_weights,
    observed_classes,
    validation_mask,
)
from splince_fast.estimators.base import CheckedEstimator, columns_by_name
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassName, encode_one
from splince_fast.labels.names import listed
from splince_fast.labels.positions import check_index


@dataclass(frozen=True, slots=True)
class CellRows(ClassRows):
    """Rows of a fit, with a class code, a cell code and a weight for each row."""

    cells: Index

    def take(self, index: Index | Mask) -> CellRows:
        """Return copies of the rows that `index` selects, with their codes and weights."""
        part = ClassRows.take(self, index)
        return CellRows(part.rows, part.codes, part.weight, self.cells[index])


@dataclass(frozen=True, slots=True)
class CellData:
    """Validated inputs of one fit."""

    train: CellRows
    selection: CellRows  # the validation rows, or the training rows without validation rows
    names: list[tuple[ClassName, ...]]  # the cells (class, group), in the order of the cell codes
    eps: float  # machine epsilon of the rows that were passed; of float64 for integers
    rng: np.random.Generator


class BalancedClassifier(ClassifierMixin, CheckedEstimator):  # type: ignore[misc]
    """Base class of linear classifiers that balance cells (class, group)."""

    groups_from: str | None
    validation_share: float
    random_state: RandomState
    classes_: NDArray[Any]
    coef_: Float
    intercept_: Float
    cells_: list[tuple[ClassName, ...]]

    __metadata_request__fit: ClassVar = {"groups": True, "validation": True}

    def _fit_cells(self, data: CellData) -> None:
        """Fit the classifier to validated inputs, and set `coef_` and `intercept_`."""
        raise NotImplementedError

    def _needs_validation_rows(self) -> bool:
        """Return whether the fit selects a parameter or an epoch on validation rows."""
        raise NotImplementedError

    def _uses_softmax(self) -> bool:
        """Return whether more than two classes are fitted by softmax, not one-vs-rest."""
        return True

    def _check_parameters(self) -> None:
        """Raise InputError for an invalid parameter; called before any row is read."""
        raise NotImplementedError

    def _check_common(self) -> None:
        if self.groups_from not in (None, "y"):
            raise InputError(f"groups_from is {self.groups_from!r}; it must be None or 'y'")
        check_validation_share(self.validation_share)

    def _fit(
        self, X: Any, y: Any, groups: Any, sample_weight: ArrayLike | None, validation: Validation
    ) -> Self:
        """Validate the inputs, and fit the classifier; an error leaves the estimator unchanged."""
        with self._restored_on_error():
            self._check_parameters()
            self._fit_cells(self._read(X, y, groups, sample_weight, validation))
        return self

    def _read(
        self, X: Any, y: Any, groups: Any, sample_weight: ArrayLike | None, validation: Validation
    ) -> CellData:
        """Validate the inputs, encode the cells and split off the validation rows."""
        if y is None:
            self._refuse_missing_y("y is the task")
        name = type(self).__name__
        if groups is None and self.groups_from is None:
            raise InputError(
                f"{name} was given no groups. Pass fit(X, y, groups=z), or in a pipeline "
                f"pipe.fit(X, y, {name.lower()}__groups=z); {name}(groups_from='y') balances the "
                "classes of y alone"
            )
        if groups is not None and self.groups_from == "y":
            raise InputError(
                f"{name} has groups_from='y' and was given groups, too; leave out groups= or "
                "groups_from='y'"
            )
        mask = None if isinstance(validation, tuple) else validation
        for column, role in (
            (y, "y"), (groups, "groups"), (sample_weight, "sample_weight"), (mask, "validation")
        ):  # fmt: skip
            check_index(X, column, role)
        rows = self._rows(X, reset=True, min_rows=2)
        eps = eps_of(rows.dtype) or EPS
        labels = fit_labels = _check_y(y)
        if isinstance(validation, tuple):
            inputs, input_names = [rows, labels], "X, y"
            if groups is not None:
                inputs, input_names = [*inputs, _group_array(groups)], "X, y, groups"
                validation_groups = (_group_array(_align_groups(groups, g)) for g in validation[2:])
                validation = (*validation[:2], *validation_groups)
            inputs, sample_weight, validation = append_validation(
                validation, inputs, input_names, sample_weight,
                lambda X: self._rows(X, reset=False, min_rows=1),
            )  # fmt: skip
            rows, labels, *columns = inputs
            if columns:
                groups = tuple(columns[0].T) if columns[0].ndim == 2 else columns[0]
        n = len(rows)
        classes, codes = observed_classes(labels, n, "y", "y")
        if (codes < 0).any():
            n_missing = (codes < 0).sum()
            raise LabelError(f"y has no label in {n_missing} of {n} rows; leave these rows out")
        weight = normalised_weights(sample_weight, n)
        cells, names = _encode_cells(classes, codes, groups, n)
        rng = as_generator(self.random_state)
        usable = weight > 0
        fraction = self.validation_share if self._needs_validation_rows() else 0.0
        mask = validation_mask(validation, fraction, cells, usable, rng)
        all_rows = CellRows(float_rows(rows), codes, weight, cells)
        train = all_rows.take(usable & ~mask)
        empty = sorted(set(range(len(names))) - set(train.cells))
        if empty:
            raise NotEnoughDataError(
                f"the cell {names[empty[0]]} (class, group) has no training row of positive "
                "weight; mark other rows for validation, or leave the cell out"
            )
        # As in scikit-learn, `classes_` has the dtype of y.
        self.classes_ = np.unique(fit_labels)
        self.cells_ = names
        selection = all_rows.take(usable & mask) if mask.any() else train
        return CellData(train, selection, names, eps, rng)

    def _accuracies(self, part: CellRows, coef: Float, intercept: Float) -> tuple[float, float]:
        """Return the lowest accuracy over the non-empty cells, and the accuracy over all rows."""
        scores = part.rows @ coef.T + intercept
        y_pred = (scores[:, 0] > 0).astype(np.intp) if len(coef) == 1 else scores.argmax(axis=1)
        correct_weight = part.weight * (y_pred == part.codes)
        cell_weight = np.bincount(part.cells, part.weight)
        cell_correct_weight = np.bincount(part.cells, correct_weight)
        accuracies = cell_correct_weight[cell_weight > 0] / cell_weight[cell_weight > 0]
        return float(accuracies.min()), float(correct_weight.sum() / cell_weight.sum())

    def decision_function(self, X: object) -> Float:
        """Return the decision scores of rows.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Rows with the features of the fit.

        Returns
        -------
        ndarray of float64, shape (n_samples,) or (n_samples, n_classes)
            Scores of the classes. For two classes, the score of the second class, which is
            predicted if this score is positive.

        Raises
        ------
        NotFittedError, InputError, NonFiniteError
            The estimator is not fitted; X has other features than in the fit, or holds NaN or
            infinity.
        """
        check_is_fitted(self)
        rows = float_rows(self._rows(X, reset=False, min_rows=1))
        scores = rows @ self.coef_.T + self.intercept_
        return np.asarray(scores[:, 0] if scores.shape[1] == 1 else scores)

    def predict(self, X: object) -> NDArray[Any]:
        """Return the most likely class of each row; raises as :meth:`decision_function`.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Rows with the features of the fit.

        Returns
        -------
        ndarray of shape (n_samples,)
            Predicted classes, in the dtype of the fitted y.
        """
        scores = self.decision_function(X)
        codes = (scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[codes])

    def predict_proba(self, X: object) -> Float:
        """Return the class probabilities of each row; raises as :meth:`decision_function`.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Rows with the features of the fit.

        Returns
        -------
        ndarray of float64, shape (n_samples, n_classes)
            Probabilities, one column per class in the order of ``classes_``.
        """
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], axis=1)
        if self._uses_softmax():
            return np.asarray(softmax(scores, axis=1))
        proba = expit(scores)
        return np.asarray(proba / proba.sum(axis=1, keepdims=True))


def _check_y(y: object) -> NDArray[np.generic]:
    """Return y as an (n,) array of classes; raise LabelError with the text of scikit-learn."""
    try:
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        check_classification_targets(labels)
    except (TypeError, ValueError) as error:  # scikit-learn raises TypeError for bytes
        raise LabelError(str(error)) from error
    return np.asarray(labels)


def _group_array(groups: Any) -> NDArray[Any]:
    """Return groups as an array of shape (n,), or (n, k) if they are k > 1 columns.

    Raises
    ------
    InputError
        The columns differ in length.
    """
    is_tuple = isinstance(groups, tuple)
    columns = groups if is_tuple else columns_by_name(groups, "groups").values()
    arrays = [np.asarray(column) for column in columns]
    if len(arrays) == 1:
        return arrays[0]
    if len({len(array) for array in arrays}) > 1:
        raise InputError(
            f"the columns of groups have the lengths {listed(map(len, arrays))}; pass columns of "
            "the same length"
        )
    return np.stack([array.astype(object) for array in arrays], axis=1)


def _align_groups(training_groups: Any, validation_groups: Any) -> Any:
    """Return the groups of the validation rows, with columns in the order of the training groups.

    Columns of mappings and frames are matched by name. If one argument is a tuple,
    `validation_groups` is returned unchanged.

    Raises
    ------
    InputError
        The arguments have several columns with different names.
    """
    if isinstance(training_groups, tuple) or isinstance(validation_groups, tuple):
        return validation_groups
    training_columns, validation_columns = (
        columns_by_name(columns, "groups") for columns in (training_groups, validation_groups)
    )
    if len(training_columns) != len(validation_columns) or len(training_columns) == 1:
        return validation_groups
    if set(training_columns) != set(validation_columns):
        raise InputError(
            f"validation has the groups {listed(validation_columns)} and the fit "
            f"{listed(training_columns)}; pass columns of the same names"
        )
    return {name: validation_columns[name] for name in training_columns}


def _encode_cells(
    classes: Sequence[ClassName], codes: Index, groups: object, n: int
) -> tuple[Index, list[tuple[ClassName, ...]]]:
    """Return the cell code of each row, and the cells (class, group, ...) ordered by code."""
    code_columns: list[Index] = [codes]
    class_names: list[Sequence[ClassName]] = [classes]
    if isinstance(groups, tuple):
        columns = {f"groups[{i}]": column for i, column in enumerate(groups)}
    else:
        columns = {} if groups is None else columns_by_name(groups, "groups")
    for name, values in columns.items():
        column = encode_one(values, n, name=name, kind="classes")
        if (column.codes < 0).any():
            n_missing = (column.codes < 0).sum()
            raise LabelError(
                f"{name} has no group in {n_missing} of {n} rows; leave out rows without a group, "
                "or give them a group of their own"
            )
        code_columns.append(column.codes)
        class_names.append(column.classes)
    unique, cells = np.unique(np.stack(code_columns, axis=1), axis=0, return_inverse=True)
    return cells.reshape(-1), [
        tuple(values[code] for values, code in zip(class_names, row, strict=True)) for row in unique
    ]
