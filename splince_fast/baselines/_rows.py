"""Rows, classes and weights of one fit, and the rows that are set aside for validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arrays import as_weights, check_values
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassCodes, encode_one
from splince_fast.labels.names import ClassName

Float = NDArray[np.float64]
Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a fit: (n, d) float64, codes of their classes, positive weights."""

    rows: Float
    codes: Index
    weight: Float

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, index: Any) -> Part:
        """The rows that `index` selects."""
        return Part(self.rows[index], self.codes[index], self.weight[index])

    def share(self, hit: NDArray[np.bool_]) -> float:
        """Weighted share of the rows that are marked."""
        return float(self.weight @ hit / self.weight.sum())

    def majority(self) -> float:
        """Weighted share of the most frequent class."""
        return float(np.bincount(self.codes, self.weight).max() / self.weight.sum())


def class_codes(values: Any, n: int, name: str) -> ClassCodes:
    """A column read as classes, floats of whole values included.

    Raises
    ------
    LabelError
        It is no column of classes.
    """
    found = encode_one(values, n, name=name)
    if not isinstance(found, ClassCodes):
        found = encode_one(values, n, name=name, kind="classes")
    assert isinstance(found, ClassCodes)
    return found


def seen_classes(found: ClassCodes, role: str) -> tuple[tuple[ClassName, ...], Index]:
    """Classes that occur, and codes among them.

    Raises
    ------
    LabelError
        Fewer than two classes occur.
    """
    present = np.unique(found.codes[found.codes >= 0])
    if len(present) < 2:
        only = f": {found.classes[present[0]]!r}" if len(present) else ""
        raise LabelError(
            f"the {role} has only one class{only}" if len(present) else f"the {role} has no label"
        )
    codes = np.full(len(found.codes), -1, dtype=np.intp)
    labelled = found.codes >= 0
    codes[labelled] = np.searchsorted(present, found.codes[labelled])
    return tuple(found.classes[i] for i in present), codes


def float_rows(X: NDArray[Any]) -> Float:
    """X as C-contiguous float64 in memory of its own.

    Raises
    ------
    NonFiniteError
        NaN or infinity.
    """
    check_values(X)
    return np.array(X, dtype=np.float64, order="C")


def weights_of(sample_weight: Any, n: int) -> Float:
    """Weights of mean one over the rows that have any.

    Raises
    ------
    NotEnoughDataError
        All are zero.
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


def validation_rows(
    validation: Any, share: float, codes: Index, usable: NDArray[np.bool_], rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Mark the rows for validation: those given, or a share of each class at random.

    A class gives ``round(share * rows)`` of its rows, the last one never. No row is marked where
    that leaves fewer than two classes to validate on.

    Raises
    ------
    InputError
        `validation` is no boolean mask of the rows, or marks all or none of them.
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
                "validation marks all of the usable rows, or none; mark some, and leave the rest "
                "for training"
            )
        return mask
    mask = np.zeros(len(codes), dtype=np.bool_)
    touched = 0
    for code in np.unique(codes[usable]) if share else ():
        members = np.flatnonzero(usable & (codes == code))
        wanted = min(round(share * len(members)), len(members) - 1)
        mask[rng.permutation(members)[:wanted]] = True
        touched += wanted > 0
    return mask if touched > 1 else np.zeros(len(codes), dtype=np.bool_)


def appended(
    validation: Any, columns: list[Any], names: str, sample_weight: Any
) -> tuple[list[Any], Float | None, NDArray[np.bool_]] | None:
    """Columns and weights with a separate validation set behind them, and the mask of its rows.

    The rows of the set have weight one. None where `validation` is no tuple, but a mask or absent.

    Raises
    ------
    InputError
        The tuple has not one array for each column.
    """
    if not isinstance(validation, tuple):
        return None
    if len(validation) != len(columns):
        raise InputError(
            f"validation is a tuple of {len(validation)}; pass ({names}) of the validation rows, "
            "or one boolean per row of X"
        )
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(columns, validation, strict=True)]
    for ours, theirs in pairs:
        if ours.shape[1:] != theirs.shape[1:]:
            raise InputError(
                f"validation holds an array of shape {theirs.shape} beside one of {ours.shape}; "
                f"pass ({names}) of the same width"
            )
    sizes = [(len(a), len(b)) for a, b in pairs]
    if len(set(sizes)) != 1:
        raise InputError(f"validation holds arrays of {[b for _, b in sizes]} rows; one number")
    first, second = sizes[0]
    weight = sample_weight
    if weight is not None:
        weight = np.append(weights_of(weight, first), np.ones(second))
    return [np.concatenate(pair) for pair in pairs], weight, np.arange(first + second) >= first
