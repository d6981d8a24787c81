"""Validation of the inputs of a fit: parameters, rows, classes, weights and validation rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state

from splince_fast._runtime.arrays import as_weights, check_values, column_names
from splince_fast._runtime.keywords import as_values
from splince_fast._solve.options import is_integer, is_number
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import encode_one
from splince_fast.labels.encoded import observed
from splince_fast.labels.names import ClassName
from splince_fast.labels.positions import check_index

Float = NDArray[np.float64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]
RandomState = int | np.random.Generator | np.random.RandomState | None
# A boolean mask over the rows passed to `fit`, or a tuple of arrays with separate validation rows.
Validation = ArrayLike | tuple[Any, ...] | None


def check_number(value: Any, name: str, low: float, *, strict: bool = True) -> None:
    """Raise InputError unless `value` is a finite number > `low`, or >= `low` if not `strict`."""
    if not is_number(value) or not np.isfinite(value) or value < low or (strict and value == low):
        raise InputError(
            f"{name} is {value!r}; it must be a number {'above' if strict else 'of at least'} {low}"
        )


def check_count(value: Any, name: str) -> None:
    """Raise InputError unless `value` is a positive integer."""
    if not is_integer(value) or value < 1:
        raise InputError(f"{name} is {value!r}; it must be a positive integer")


def check_validation_share(value: object) -> None:
    """Raise InputError unless `value` is a number in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise InputError(f"validation_share is {value!r}; it must be a number in [0, 1)")


def candidate_values(parameter: float | Sequence[float], name: str) -> list[float]:
    """Return the candidate values of a parameter: a positive number, or a sequence of such numbers.

    Raises
    ------
    InputError
        The sequence is empty, or a value is not a positive number.
    """
    values = as_values(parameter)
    if not values or isinstance(parameter, str):
        raise InputError(
            f"{name} is {parameter!r}; it must be a number or a non-empty sequence of them"
        )
    for value in values:
        check_number(value, name, 0.0)
    return values


def as_generator(random_state: RandomState) -> np.random.Generator:
    """Return a Generator from a `random_state`.

    An integer seeds the Generator, a RandomState draws the seed, and a Generator is returned as is.
    """
    try:
        if random_state is None or isinstance(random_state, int | np.integer | np.random.Generator):
            return np.random.default_rng(random_state)
        legacy_state = check_random_state(random_state)
    except ValueError as error:
        raise InputError(
            f"random_state is {random_state!r}; it must be None, a non-negative integer, a "
            "Generator or a RandomState"
        ) from error
    return np.random.default_rng(legacy_state.randint(2**31 - 1))


@dataclass(frozen=True, slots=True)
class ClassRows:
    """Rows of a fit, float64 of shape (n, d), with a class code and a weight for each row."""

    rows: Float
    codes: Index
    weight: Float

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, index: Index | Mask) -> ClassRows:
        """Return the rows that `index` selects, with their class codes and weights."""
        return ClassRows(self.rows[index], self.codes[index], self.weight[index])

    def fraction(self, mask: Mask) -> float:
        """Return the weighted fraction of the rows that `mask` marks."""
        return float(self.weight @ mask / self.weight.sum())

    def majority(self) -> float:
        """Return the weighted fraction of the rows in the most frequent class."""
        return float(np.bincount(self.codes, self.weight).max() / self.weight.sum())


def observed_classes(
    values: object, n: int, name: str, role: str
) -> tuple[tuple[ClassName, ...], Index]:
    """Return the classes that occur in a column, and the class code of each row.

    The code of a row without a label is -1.

    Raises
    ------
    LabelError
        No row has a label, or all labels are equal.
    """
    column = observed(encode_one(values, n, name=name, kind="classes"))
    if not column.classes:
        raise LabelError(f"every label of {role} is missing; pass at least two classes")
    if len(column.classes) == 1:
        raise LabelError(
            f"{role} has only one class, {column.classes[0]!r}; pass at least two classes"
        )
    return column.classes, column.codes


def float_rows(X: NDArray[np.generic]) -> Float:
    """Copy X into a C-contiguous float64 array.

    Raises
    ------
    NonFiniteError
        X holds NaN or infinity.
    """
    check_values(X)
    return np.array(X, dtype=np.float64, order="C")


def normalised_weights(sample_weight: ArrayLike | None, n: int) -> Float:
    """Return the weights divided by the mean of the positive weights; n ones for None.

    Raises
    ------
    NotEnoughDataError
        All weights are zero.
    """
    weight = as_weights(sample_weight, n)
    if weight is None:
        return np.ones(n)
    if not weight.any():
        raise NotEnoughDataError(
            "every sample_weight is zero, so no row is left to fit to; give some rows a positive "
            "weight"
        )
    return np.asarray(weight / weight[weight > 0].mean())


def validation_mask(
    validation: ArrayLike | None,
    fraction: float,
    codes: Index,
    usable: Mask,
    rng: np.random.Generator,
) -> Mask:
    """Return the mask of the validation rows: `validation`, or a random fraction of each class.

    `codes` are class or cell codes, and `usable` is the mask of the rows that may take part in the
    fit. Of the n usable rows of a class, ``min(round(fraction * n), n - 1)`` are drawn. The mask is
    all False if fewer than two classes would have a validation row.

    Raises
    ------
    InputError
        `validation` is not a boolean mask of the rows, or it marks all usable rows or none.
    """
    if validation is not None:
        mask = np.asarray(validation)
        if mask.dtype != np.bool_ or mask.shape != codes.shape:
            raise InputError(
                f"validation is {mask.dtype} of shape {mask.shape}; pass one boolean per row, True "
                "where the row is for validation"
            )
        if not (mask & usable).any() or not (~mask & usable).any():
            raise InputError(
                "validation marks all of the usable rows (labelled, of positive weight), or none; "
                "mark some of them, and leave others for training"
            )
        return mask
    mask = np.zeros(len(codes), dtype=np.bool_)
    n_classes = 0
    for code in np.unique(codes[usable]) if fraction else ():
        members = np.flatnonzero(usable & (codes == code))
        n_drawn = min(round(fraction * len(members)), len(members) - 1)
        mask[rng.permutation(members)[:n_drawn]] = True
        n_classes += n_drawn > 0
    return mask if n_classes > 1 else np.zeros(len(codes), dtype=np.bool_)


def append_validation(
    validation: Validation,
    columns: list[Any],
    names: str,
    sample_weight: ArrayLike | None,
    read_frame: Callable[[Any], NDArray[Any]],
) -> tuple[list[Any], ArrayLike | None, ArrayLike | None]:
    """Append a tuple of validation rows to the training rows.

    Return the extended `columns`, the extended weights, and the mask of the appended rows. Appended
    rows have weight 1. If X of the tuple is a frame, `read_frame` converts X to an array and checks
    the feature names. If `validation` is a mask or None, `columns`, `sample_weight` and
    `validation` are returned unchanged.

    Raises
    ------
    InputError
        The tuple does not hold one array for each of `columns`, array shapes differ, or text would
        be appended to numbers.
    LabelError
        A label column of the tuple has the pandas index of X of the tuple in another order.
    """
    if not isinstance(validation, tuple):
        return columns, sample_weight, validation
    if len(validation) != len(columns):
        raise InputError(
            f"validation is a tuple of {len(validation)}; pass ({names}) of the validation rows, "
            "or one boolean per row of X"
        )
    for column in validation[1:]:
        check_index(validation[0], column, "a column of validation")
    if column_names(validation[0]) is not None:
        validation = (read_frame(validation[0]), *validation[1:])
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(columns, validation, strict=True)]
    for column, extra in pairs:
        if column.shape[1:] != extra.shape[1:]:
            raise InputError(
                f"validation holds an array of shape {extra.shape}, and the fit one of shape "
                f"{column.shape}; pass ({names}) of the same width"
            )
        dtype_kinds = {column.dtype.kind, extra.dtype.kind}
        if dtype_kinds & set("UST") and dtype_kinds - set("USTO"):
            raise InputError(
                f"validation holds an array of {extra.dtype}, and the fit one of {column.dtype}: "
                "text never equals a number; convert one of the arrays"
            )
    sizes = [(len(column), len(extra)) for column, extra in pairs]
    if len(set(sizes)) != 1:
        raise InputError(
            f"({names}) of the fit have {[a for a, _ in sizes]} rows, and those of validation "
            f"{[b for _, b in sizes]}; all arrays must have the same number of rows as their X"
        )
    n, n_validation = sizes[0]
    if sample_weight is not None:
        sample_weight = np.append(normalised_weights(sample_weight, n), np.ones(n_validation))
    mask = np.arange(n + n_validation) >= n
    return [np.concatenate(pair) for pair in pairs], sample_weight, mask
