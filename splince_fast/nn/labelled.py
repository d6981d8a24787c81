"""Labels of the rows of a batch, in terms that all sites share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from splince_fast.exceptions import LabelError
from splince_fast.labels import ClassCodes, ClassName, VariableName, class_key, encode
from splince_fast.nn.memory import on_device

Tensor = Any
Float = NDArray[np.float64]
# A run of rows: those from the second number to the third.
Part = tuple["LabelledRows", int, int]


@dataclass
class LabelledRows:
    """What is known of a run of rows of one batch; shared by all sites.

    `codes` index the classes of the registry, -1 for a missing label; `values` (n, k) are NaN
    where missing.
    """

    n: int
    batch: int
    weight: Float | None
    codes: dict[VariableName, NDArray[np.intp]] = field(default_factory=dict)
    values: dict[VariableName, Float] = field(default_factory=dict)


@dataclass(frozen=True)
class Design:
    """What the labels of a block multiply its rows by; made once for all sites.

    Attributes
    ----------
    rows : Tensor of shape (m, n)
        Coefficients in float64; the first row has the weights.
    slots : Tensor of shape (m,)
        Where a site keeps each of the m sums.
    sums : Tensor of shape (m,)
        Of the coefficients.
    roots : Tensor of shape (n, 1), or None
        Roots of the weights, unless all are 1.
    whole : float
        Sum of the weights.
    classes : dict of name to (rows, weights)
        Of each class: how many rows, and their weight.
    columns : dict of name to (rows, weight, sum, products)
        Of the values that are there, about the registry's reference: how many, and sums.
    """

    rows: Tensor
    slots: Tensor
    sums: Tensor
    roots: Tensor | None
    whole: float
    classes: dict[VariableName, tuple[NDArray[np.int64], Float]]
    columns: dict[VariableName, tuple[int, float, Float, Float]]


class Registry:
    """Names of classes and columns of every variable, the same for all sites."""

    def __init__(self, kinds: dict[str, str], joint: tuple[tuple[str, ...], ...]) -> None:
        self.kinds, self.joint = kinds, joint
        self.classes: dict[VariableName, list[ClassName]] = {}
        self.columns: dict[VariableName, tuple[tuple[str, ...], Float]] = {}
        self._index: dict[VariableName, dict[Any, int]] = {}
        self._slots: dict[tuple[VariableName, int], int] = {}

    @property
    def n_slots(self) -> int:
        """How many sums of rows a site keeps; the first is that of all rows."""
        return 1 + len(self._slots)

    def slots(self, name: VariableName, numbers: Iterable[int]) -> list[int]:
        """Where the sums of classes are, or of products with columns; -1: of rows with values."""
        return [self._slots[name, int(j)] for j in numbers]

    def _take_slot(self, name: VariableName, number: int) -> None:
        self._slots[name, number] = self.n_slots

    def read(
        self, labels: dict[str, Any], n: int, batch: int, weight: Float | None
    ) -> LabelledRows:
        """Labels of `n` rows in terms of this registry.

        Raises
        ------
        LabelError
            They cannot be read, or contradict what earlier batches said.
        """
        found = LabelledRows(n, batch, weight)
        encoded = encode(labels, n, kinds=self.kinds or None, joint=self.joint)
        for name, column in encoded.items():
            if isinstance(column, ClassCodes):
                if not column.classes:
                    continue
                self._check(name, self.columns, "continuous", "classes")
                names = self.classes.setdefault(name, [])
                index = self._index.setdefault(name, {})
                for one in column.classes:
                    if class_key(one) not in index:
                        index[class_key(one)] = len(names)
                        self._take_slot(name, len(names))
                        names.append(one)
                lookup = [index[class_key(one)] for one in column.classes]
                found.codes[name] = np.array([*lookup, -1], np.intp)[column.codes]
            else:
                shown = column.values if column.present is None else column.values[column.present]
                if not len(shown):
                    continue
                self._check(name, self.classes, "classes", "continuous")
                if name not in self.columns:
                    self.columns[name] = column.columns, shown.mean(axis=0)
                    for j in range(-1, len(column.columns)):
                        self._take_slot(name, j)
                known = self.columns[name]
                if len(known[0]) != column.values.shape[1]:
                    raise LabelError(
                        f"the variable {name!r} had {len(known[0])} columns before and has "
                        f"{column.values.shape[1]} in batch {batch}"
                    )
                values = column.values
                if column.present is not None:
                    values = np.where(column.present[:, None], values, np.nan)
                found.values[name] = values
        return found

    def design(self, parts: list[Part], device: Any) -> Design:
        """The coefficients of a block that is made of these runs."""
        weight = _joined(
            [np.ones(b - a) if p.weight is None else p.weight[a:b] for p, a, b in parts]
        )
        rows, slots = [weight[None]], [0]
        classes: dict[VariableName, tuple[NDArray[np.int64], Float]] = {}
        columns: dict[VariableName, tuple[int, float, Float, Float]] = {}
        names: dict[VariableName, None] = {}
        for part, _, _ in parts:
            names |= dict.fromkeys(part.codes) | dict.fromkeys(part.values)
        for name in names:
            if name in self.classes:
                gap = np.array([-1], np.intp)
                codes = _joined(
                    [p.codes[name][a:b] if name in p.codes else gap.repeat(b - a)
                     for p, a, b in parts]
                )  # fmt: skip
                k, shown = len(self.classes[name]), codes >= 0
                counts = np.bincount(codes[shown], minlength=k)
                own = np.bincount(codes[shown], weight[shown], k).astype(np.float64)
                classes[name] = counts, own
                # One row of coefficients per class that occurs: a product, the same every time.
                present = np.flatnonzero(counts)
                rows.append(np.where(np.equal(codes, present[:, None]), weight, 0.0))
                slots += self.slots(name, present)
            else:
                labels, reference = self.columns[name]
                values = _joined(
                    [p.values[name][a:b] if name in p.values
                     else np.full((b - a, len(labels)), np.nan) for p, a, b in parts]
                )  # fmt: skip
                missing = np.isnan(values).any(axis=1)
                own = np.where(missing, 0.0, weight)
                deviations = np.where(missing[:, None], 0.0, values - reference)
                weighted = own[:, None] * deviations
                columns[name] = (
                    len(values) - int(np.count_nonzero(missing)), float(own.sum()),
                    weighted.sum(axis=0), weighted.T @ deviations,
                )  # fmt: skip
                rows += [own[None], weighted.T]
                slots += self.slots(name, range(-1, len(labels)))
        made = on_device(torch.from_numpy(np.concatenate(rows)), device)
        equal = all(part.weight is None for part, _, _ in parts)
        roots = None if equal else made[0].sqrt().unsqueeze(1)
        return Design(
            made, on_device(torch.tensor(slots), device), made.sum(1), roots, float(weight.sum()),
            classes, columns,
        )  # fmt: skip

    def _check(self, name: VariableName, others: dict[Any, Any], old: str, new: str) -> None:
        if name in others:
            raise LabelError(
                f"the variable {name!r} was {old} in earlier batches and is {new} now; pass "
                f"kinds={{{name!r}: ...}} to collect"
            )


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
