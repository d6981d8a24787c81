"""What DFR and GroupDRO share: cells of class and group, linear predictions, reading a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from splince_fast.baselines._erasing import generator
from splince_fast.baselines._rows import (
    Float,
    Index,
    appended,
    check_share,
    class_codes,
    float_rows,
    seen_classes,
    validation_rows,
    weights_of,
)
from splince_fast.estimators.base import CheckedEstimator, variables_of
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError


@dataclass(slots=True)
class Cells:
    """Rows with the codes of their class and their cell, ready to fit."""

    rows: Float
    codes: Index
    cells: Index
    weight: Float

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(slots=True)
class Task:
    """One fit, read: rows of training and of selection (the same where none is set aside)."""

    train: Cells
    selection: Cells
    names: list[tuple[Any, ...]]
    rng: np.random.Generator

    @property
    def n_validation(self) -> int:
        """Rows set aside."""
        return 0 if self.selection is self.train else len(self.selection)


class BalancedClassifier(ClassifierMixin, CheckedEstimator):  # type: ignore[misc]
    """A linear classifier whose fit looks at cells (class, group)."""

    groups_from: str | None
    validation_share: float
    random_state: Any
    classes_: NDArray[Any]
    coef_: Float
    intercept_: Float
    cells_: list[tuple[Any, ...]]

    __metadata_request__fit: ClassVar = {"groups": True, "validation": True}

    def _fit_cells(self, task: Task) -> None:
        """Set coef_ and intercept_."""
        raise NotImplementedError

    def _selects(self) -> bool:
        """Whether the fit chooses anything on validation rows; if not, none are set aside."""
        raise NotImplementedError

    def _uses_softmax(self) -> bool:
        """Whether several classes are one softmax, not one against the rest."""
        return True

    def _check_parameters(self) -> None:
        """Refuse parameters before any row is read."""
        raise NotImplementedError

    def _check_common(self) -> None:
        """Refuse parameters that both classifiers have."""
        if self.groups_from not in (None, "y"):
            raise InputError(f"groups_from is {self.groups_from!r}; it must be None or 'y'")
        check_share(self.validation_share)

    def _fit(self, X: Any, y: Any, groups: Any, sample_weight: Any, validation: Any) -> Self:
        """Read everything, then fit; as before if that raises."""
        with self._restored_on_error():
            self._check_parameters()
            self._fit_cells(self._read(X, y, groups, sample_weight, validation))
        return self

    def _read(self, X: Any, y: Any, groups: Any, sample_weight: Any, validation: Any) -> Task:
        """Check everything, code the cells, split off the validation rows."""
        if y is None:
            self._refuse_missing_y("it is the task")
        name = type(self).__name__
        if groups is None and self.groups_from is None:
            raise InputError(
                f"{name} was given no groups. Pass fit(X, y, groups=z), or in a pipeline "
                f"pipe.fit(X, y, {name.lower()}__groups=z); {name}(groups_from='y') balances the "
                "classes of y alone"
            )
        if groups is not None and self.groups_from == "y":
            raise InputError(f"{name} has groups_from='y' and was given groups, too; leave out one")
        rows = self._rows(X, reset=True, least=2)
        labels = _labels(y)
        given = [rows, labels] if groups is None else [rows, labels, groups]
        if isinstance(groups, tuple):
            given = [rows, labels, np.stack([np.asarray(g) for g in groups], axis=1)]
        parts_of = "X, y" if groups is None else "X, y, groups"
        if (more := appended(validation, given, parts_of)) is not None:
            (rows, labels, *rest), validation = more
            groups = rest[0] if rest else None
            if groups is not None and groups.ndim == 2:
                groups = tuple(groups.T)
            if sample_weight is not None:
                sample_weight = np.append(
                    weights_of(sample_weight, len(rows) - validation.sum()), validation[validation]
                )
        n = len(rows)
        classes, codes = seen_classes(class_codes(labels, n, "y"), "y")
        if (codes < 0).any():
            raise LabelError(f"y misses {(codes < 0).sum()} labels; leave those rows out")
        weight = weights_of(sample_weight, n)
        cells, names = _cells(classes, codes, groups, n)
        rng = generator(self.random_state)
        usable = weight > 0
        share = self.validation_share if self._selects() else 0.0
        mask = validation_rows(validation, share, cells, usable, rng)
        wide = float_rows(rows)
        parts = [
            Cells(wide[chosen], codes[chosen], cells[chosen], weight[chosen])
            for chosen in (usable & ~mask, usable & mask)
        ]
        train = parts[0]
        lost = sorted(set(range(len(names))) - set(train.cells))
        if lost:
            raise NotEnoughDataError(
                f"the cell {names[lost[0]]} (class, group) has no training row of positive weight; "
                "mark other rows for validation, or leave the cell out"
            )
        # Classes in the dtype of y, as scikit-learn keeps them.
        self.classes_ = np.unique(labels)
        self.cells_ = names
        return Task(train, parts[1] if mask.any() else train, names, rng)

    def _worst_and_mean(self, part: Cells, coef: Float, intercept: Float) -> tuple[float, float]:
        """Worst accuracy over the cells present, and accuracy."""
        scores = part.rows @ coef.T + intercept
        chosen = (scores[:, 0] > 0).astype(np.intp) if len(coef) == 1 else scores.argmax(axis=1)
        hit = part.weight * (chosen == part.codes)
        totals = np.bincount(part.cells, part.weight)
        hits = np.bincount(part.cells, hit)
        return float((hits[totals > 0] / totals[totals > 0]).min()), float(hit.sum() / totals.sum())

    def decision_function(self, X: Any) -> Float:
        """Scores of rows.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Rows with the features that it was fitted on.

        Returns
        -------
        ndarray of float64, shape (n_samples,) or (n_samples, n_classes)
            For two classes that of the second: above 0 it is predicted.

        Raises
        ------
        NotFittedError, InputError, NonFiniteError
            Not fitted; X has other features, or holds NaN or infinity.
        """
        check_is_fitted(self)
        rows = float_rows(self._rows(X, reset=False, least=1))
        scores = rows @ self.coef_.T + self.intercept_
        return np.asarray(scores[:, 0] if scores.shape[1] == 1 else scores)

    def predict(self, X: Any) -> NDArray[Any]:
        """Most likely class of rows; parameters and errors as in :meth:`decision_function`.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Rows with the features that it was fitted on.

        Returns
        -------
        ndarray of shape (n_samples,)
            In the dtype of the y that was fitted.
        """
        scores = self.decision_function(X)
        chosen = (scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[chosen])

    def predict_proba(self, X: Any) -> Float:
        """Probability of each class; parameters and errors as in :meth:`decision_function`.

        Parameters
        ----------
        X : array-like or frame of shape (n_samples, n_features)
            Rows with the features that it was fitted on.

        Returns
        -------
        ndarray of float64, shape (n_samples, n_classes)
            Columns as in ``classes_``.
        """
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], axis=1)
        if self._uses_softmax():
            return np.asarray(softmax(scores, axis=1))
        chances = expit(scores)
        return np.asarray(chances / chances.sum(axis=1, keepdims=True))


def _labels(y: Any) -> NDArray[Any]:
    """y as one column; targets of a regression are refused in scikit-learn's words."""
    try:
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        check_classification_targets(labels)
    except ValueError as error:
        raise LabelError(str(error)) from error
    return np.asarray(labels)


def _cells(
    classes: Sequence[Any], codes: Index, groups: Any, n: int
) -> tuple[Index, list[tuple[Any, ...]]]:
    """Code of each row's cell (class, group, ...), in lexicographic order, and their names."""
    keys: list[Index] = [codes]
    names: list[Sequence[Any]] = [classes]
    if isinstance(groups, tuple):
        columns = {f"groups[{i}]": column for i, column in enumerate(groups)}
    else:
        columns = {} if groups is None else variables_of(groups, "groups")
    for name, values in columns.items():
        found = class_codes(values, n, name)
        if (found.codes < 0).any():
            raise LabelError(
                f"{name} misses the group of {(found.codes < 0).sum()} rows; leave those rows out, "
                "or give them a group of their own"
            )
        keys.append(found.codes)
        names.append(found.classes)
    unique, cells = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)
    return cells.reshape(-1), [
        tuple(values[code] for values, code in zip(names, row, strict=True)) for row in unique
    ]
