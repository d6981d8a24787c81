"""Labels of the rows of a batch, in terms that all sites share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast.exceptions import LabelError
from splince_fast.labels import ClassCodes, ClassName, VariableName, class_key, encode

Float = NDArray[np.float64]


@dataclass
class LabelledRows:
    """What is known of a run of rows of one batch; shared by all sites.

    `codes` index the classes of the registry, -1 for a missing label; `values` (n, k) are NaN
    where missing.
    """

    n: int
    batch: int
    first: int  # number of its first row in the batch
    weight: Float | None
    codes: dict[VariableName, NDArray[np.intp]] = field(default_factory=dict)
    values: dict[VariableName, Float] = field(default_factory=dict)

    def slice(self, start: int, stop: int) -> LabelledRows:
        """The rows from `start` to `stop`."""
        return LabelledRows(
            stop - start,
            self.batch,
            self.first + start,
            None if self.weight is None else self.weight[start:stop],
            {name: codes[start:stop] for name, codes in self.codes.items()},
            {name: values[start:stop] for name, values in self.values.items()},
        )


class Registry:
    """Names of classes and columns of every variable, the same for all sites."""

    def __init__(self, kinds: dict[str, str], joint: tuple[tuple[str, ...], ...]) -> None:
        self.kinds, self.joint = kinds, joint
        self.classes: dict[VariableName, list[ClassName]] = {}
        self.columns: dict[VariableName, tuple[tuple[str, ...], Float]] = {}
        self._index: dict[VariableName, dict[Any, int]] = {}

    def read(
        self, labels: dict[str, Any], n: int, batch: int, weight: Float | None
    ) -> LabelledRows:
        """Labels of `n` rows in terms of this registry.

        Raises
        ------
        LabelError
            They cannot be read, or contradict what earlier batches said.
        """
        found = LabelledRows(n, batch, 0, weight)
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
                        names.append(one)
                lookup = [index[class_key(one)] for one in column.classes]
                found.codes[name] = np.array([*lookup, -1], np.intp)[column.codes]
            else:
                shown = column.values if column.present is None else column.values[column.present]
                if not len(shown):
                    continue
                self._check(name, self.classes, "classes", "continuous")
                known = self.columns.setdefault(name, (column.columns, shown.mean(axis=0)))
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

    def _check(self, name: VariableName, others: dict[Any, Any], old: str, new: str) -> None:
        if name in others:
            raise LabelError(
                f"the variable {name!r} was {old} in earlier batches and is {new} now; pass "
                f"kinds={{{name!r}: ...}} to collect"
            )
