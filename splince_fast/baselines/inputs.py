"""The arguments of a fit, checked: numbers, rows, classes, weights and validation rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from splince_fast._runtime.names import ClassName
from splince_fast._runtime.rows import as_weights, check_values, column_names
from splince_fast._solve.options import is_integer, is_number
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import encode_one
from splince_fast.labels.containers import check_index
from splince_fast.labels.encoded import observed

Float = NDArray[np.float64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]
RandomState = int | np.random.Generator | np.random.RandomState | None
# A boolean mask over the rows passed to `fit`, or a tuple of arrays with separate validation rows.
Validation = ArrayLike | tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class ClassRows:
    """Rows of a fit, with a class code and a weight for each row, and perhaps a task code."""

    rows: Float  # (n, d)
    codes: Index
    weight: Float
    task: Index | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, index: Index | Mask) -> ClassRows:
        """Return the rows that `index` selects, with their codes and weights."""
        task = None if self.task is None else self.task[index]
        return ClassRows(self.rows[index], self.codes[index], self.weight[index], task)

    def fraction(self, mask: Mask) -> float:
        """Return the weighted fraction of the rows that `mask` marks."""
        return float(self.weight @ mask / self.weight.sum())

    def majority(self) -> float:
        """Return the weighted fraction of the rows in the most frequent class."""
        return float(np.bincount(self.codes, self.weight).max() / self.weight.sum())


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


def as_generator(random_state: RandomState) -> np.random.Generator:
    """Return a Generator; a RandomState draws its seed."""
    if isinstance(random_state, np.random.RandomState):
        random_state = int(random_state.randint(2**31 - 1))
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"random_state is {random_state!r}; it must be None, a non-negative integer, a "
            "Generator or a RandomState"
        ) from error


def float_rows(X: NDArray[np.generic]) -> Float:
    """Copy X into a C-contiguous float64 array; raise NonFiniteError for NaN or infinity."""
    check_values(X)
    return np.array(X, dtype=np.float64, order="C")


def observed_classes(
    values: object, n: int, name: str, role: str
) -> tuple[tuple[ClassName, ...], Index]:
    """Return the classes that occur in a column, and the class code of each row, -1 for none."""
    column = observed(encode_one(values, n, name=name, kind="classes"))
    if not column.classes:
        raise LabelError(f"every label of {role} is missing; pass at least two classes")
    if len(column.classes) == 1:
        raise LabelError(
            f"{role} has only one class, {column.classes[0]!r}; pass at least two classes"
        )
    return column.classes, column.codes


def normalised_weights(sample_weight: ArrayLike | None, n: int) -> Float:
    """Return the weights divided by the mean of the positive weights; n ones for None."""
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

    Of the n rows of a class that are `usable`, ``min(round(fraction * n), n - 1)`` are drawn. The
    mask is all False if fewer than two classes would have a validation row.
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
    return mask if n_classes > 1 else np.zeros_like(mask)


def append_validation(
    validation: tuple[Any, ...],
    columns: list[Any],
    sample_weight: ArrayLike | None,
    read_frame: Callable[[Any], NDArray[Any]],
) -> tuple[list[Any], ArrayLike | None, Mask]:
    """Append a tuple of validation rows to `columns`, which are X, the concept, and perhaps y.

    Return the extended columns, the extended weights, and the mask of the appended rows, which
    have weight 1. `read_frame` converts a frame to an array, and checks its feature names.
    """
    names = ", ".join(("X", "concept", "y")[: len(columns)])
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
