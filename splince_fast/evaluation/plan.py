"""The plan of a comparison: its arguments, validated and encoded before any job runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.arguments import as_values
from splince_fast._runtime.names import listed
from splince_fast._runtime.rows import check_values
from splince_fast._solve.options import is_integer
from splince_fast.evaluation import splits
from splince_fast.evaluation.data import (
    Matrix,
    Rows,
    class_codes,
    columns_of,
    fill_missing_groups,
    fingerprint,
    has_label,
    joint_classes,
    labels_of,
    occurring_classes,
    read_rows,
    take_rows,
    values_of,
)
from splince_fast.evaluation.erasers import (
    ERASERS,
    Component,
    ConceptLabels,
    SplitPart,
    named_components,
)
from splince_fast.evaluation.heads import check_alphas
from splince_fast.evaluation.metrics import Metric, check_metrics
from splince_fast.evaluation.probes import check_probes
from splince_fast.evaluation.records import PartLabels
from splince_fast.evaluation.splits import Protocol, Sizes, Split
from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, Columns, Encoded, encode_one
from splince_fast.labels.containers import check_index

HEADS = ("retrained", "frozen", "unregularised")
_PARTS = {"train": 0, "validation": 1, "test": 2, False: 0, True: 2}


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonPlan:
    """Rows, encoded labels and validated settings of a comparison."""

    X: Matrix  # (n, d)
    task: Encoded
    concepts: dict[str, Encoded]
    concept_codes: ClassCodes | None  # joint classes of the concepts; None if one is a quantity
    cells: ClassCodes | None  # joint classes of task and concepts; None if one is a quantity
    groups: Rows | None
    erasers: tuple[Component, ...]
    heads: tuple[Component, ...]
    levels: tuple[float | None, ...]
    seeds: tuple[int, ...]
    protocol: Protocol | None
    sizes: Sizes | None
    alphas: tuple[float, ...]
    probes: tuple[Component, ...]
    metrics: dict[str, Metric]  # custom metrics
    test: NDArray[np.int8] | None  # part of each row: 0 training, 1 validation, 2 test, -1 none
    fingerprint: str
    notes: tuple[str, ...]

    @property
    def task_name(self) -> str:
        """Name of the task in the moments."""
        name = "task"
        while name in self.concepts:
            name = f"kept {name}"
        return name

    @property
    def variables(self) -> dict[str, Encoded]:
        """Encoded task and concepts, by their names in the moments."""
        return {self.task_name: self.task, **self.concepts}

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Mask (n,) of the rows that have every label."""
        return np.asarray(np.all([has_label(c) for c in self.variables.values()], axis=0))

    def part(self, numbers: Rows) -> SplitPart:
        """Rows `numbers` of X, in float64, with their labels."""
        rows = take_rows(self.X, numbers)
        labels = {name: labels_of(column, numbers) for name, column in self.variables.items()}
        return SplitPart(rows, self.codes(numbers), self._concept_labels(numbers), labels)

    def _concept_labels(self, numbers: Rows) -> ConceptLabels:
        """Concept labels of the rows `numbers`, in the form that estimators receive."""
        if self.concept_codes is not None:
            return self.concept_codes.codes[numbers]
        columns = {name: values_of(c)[numbers] for name, c in self.concepts.items()}
        if all(isinstance(c, Columns) for c in self.concepts.values()):
            return np.concatenate(list(columns.values()), axis=1)
        return columns

    def codes(self, numbers: Rows) -> PartLabels:
        """Codes of the labels of the rows `numbers` of X."""
        return PartLabels(
            values_of(self.task)[numbers],
            None if self.concept_codes is None else self.concept_codes.codes[numbers],
            None if self.cells is None else self.cells.codes[numbers],
            None if self.groups is None else fill_missing_groups(self.groups[numbers]),
        )

    def split(self, seed: int, p: float | None) -> Split:
        """Split of a seed at an association level."""
        if self.test is not None:
            return self._fixed_split(seed)
        if p is None or self.protocol is None or self.sizes is None:
            return splits.natural_split(self.usable, random_state=seed, groups=self.groups)
        return self.protocol.split(p, self.sizes, seed)

    def _fixed_split(self, seed: int) -> Split:
        """Return the split that `test` fixes; draw validation rows if `test` marks none."""
        part = np.where(self.usable, self.test, -1)  # type: ignore[arg-type]
        train, validation, test = (np.flatnonzero(part == k) for k in range(3))
        if not len(validation):  # a tenth of the training rows, in whole groups
            _, validation, train = splits.random_parts(train, self.groups, seed, (0.0, 0.1))
            if self.groups is not None:
                train, validation = np.sort(train), np.sort(validation)
        return Split(train, validation, test, None, ())


def make_plan(
    X: object, *, task: object, concept: object, groups: object, erasers: object, heads: object,
    association: object, aligned_class: object, sizes: object, n_seeds: int,
    random_state: int, alphas: object, leakage: object, metrics: object,
    test: object,
) -> ComparisonPlan:  # fmt: skip
    """Validate and encode the arguments of :func:`splince_fast.evaluation.compare`."""
    for name, column in {"task": task, "concept": concept, "groups": groups, "test": test}.items():
        check_index(X, column, name)
    rows = read_rows(X)
    n = len(rows)
    y = _encode(task, n, "task", "task")
    columns = columns_of(concept, "concept")
    concepts = {str(k): _encode(c, n, str(k), f"concept {str(k)!r}") for k, c in columns.items()}
    if len(concepts) < len(columns):
        raise InputError(f"concept has the names {listed(columns)}; pass names that differ as text")
    concept_codes = joint_classes(list(concepts.values()))
    levels, protocol, sizes = _levels(association, aligned_class, sizes, groups, y, concept_codes)
    for name, value, least in (("n_seeds", n_seeds, 1), ("random_state", random_state, 0)):
        if not is_integer(value) or value < least:
            raise InputError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if test is not None and (association is not None or n_seeds != 1):
        raise InputError("test= is one fixed split; pass n_seeds=1 with it, and no association=")
    parts = None if test is None else _encode_parts(test, n)
    quantity = next((name for name, c in concepts.items() if isinstance(c, Columns)), "")
    probes = check_probes(leakage, "leakage", quantity)
    others = " or ".join(probe.name for probe in probes if probe.spec != "linear")
    note = f"a quantity, such as {quantity!r}, has only the linear probe, not {others}"
    check_values(rows, "X")
    codes = None if groups is None else class_codes(groups, "groups", n)
    if codes is not None and parts is not None:
        _check_groups_undivided(codes, parts)
    group_codes = None if codes is None else codes.codes
    plan = ComparisonPlan(
        X=rows, task=y, concepts=concepts, concept_codes=concept_codes,
        cells=joint_classes([y, *concepts.values()]), groups=group_codes,
        erasers=named_components(erasers, tuple(ERASERS), "eraser"),
        heads=named_components(heads, HEADS, "head"), levels=levels,
        seeds=tuple(int(random_state) + i for i in range(int(n_seeds))),
        protocol=protocol, sizes=sizes,
        alphas=check_alphas(alphas), probes=probes,
        metrics=check_metrics(metrics), test=parts,
        fingerprint=fingerprint(rows, {"": y, **concepts}, group_codes, parts),
        notes=(note,) if quantity and others else (),
    )  # fmt: skip
    if int(plan.usable.sum()) < 4:
        raise LabelError("fewer than four rows have every label; check that the labels belong to X")
    return plan


def _encode(column: object, n: int, name: str, role: str) -> Encoded:
    """Encode a column of n labels with two values or more, without classes that no row has."""
    encoded = encode_one(column, n, name=name, of="X")
    if isinstance(encoded, ClassCodes):
        return occurring_classes(role, encoded)
    values = encoded.values[has_label(encoded)]
    if len(values) and not np.ptp(values, axis=0).any():
        raise LabelError(f"the {role} has one value in all of its rows, {listed(values[0])}")
    return encoded


def _levels(
    association: object, aligned_class: object, sizes: object, groups: object, y: Encoded,
    concept: ClassCodes | None,
) -> tuple[tuple[float | None, ...], Protocol | None, Sizes | None]:  # fmt: skip
    """Return association levels, protocol and sizes; those of the natural split are None."""
    if association is None:
        for name, value in (("aligned_class", aligned_class), ("sizes", sizes)):
            if value is not None:
                raise InputError(f"{name}= needs association=; the natural split uses all rows")
        return (None,), None, None
    levels = as_values(association)
    for p in levels:
        splits.check_p(p)
    if not len(levels):
        raise InputError("association is empty; pass levels such as (.5, .7, .9), or None")
    if not isinstance(y, ClassCodes) or concept is None:
        raise InputError(
            "association= needs classes of task and concept, and one of them is a quantity; pass "
            "association=None, or divide the quantity into classes"
        )
    protocol = Protocol.of(y, concept, aligned_class, groups)
    levels = sorted({float(p) for p in levels})
    feasible = protocol.largest_sizes(levels) if sizes is None else splits.check_sizes(sizes)
    return tuple(levels), protocol, feasible


def _encode_parts(test: object, n: int) -> NDArray[np.int8]:
    """Part of each row (see `ComparisonPlan.test`), from a mask or a column of names."""
    column = class_codes(test, "test", n)
    unknown = [name for name in column.classes if name not in _PARTS]
    if unknown:
        raise LabelError(
            f"test= contains {unknown[0]!r}; pass a mask that is True for test rows, or the names "
            "'train', 'validation' and 'test'"
        )
    table = np.array([_PARTS[name] for name in column.classes] + [-1], dtype=np.int8)
    return np.asarray(table[column.codes])


def _check_groups_undivided(groups: ClassCodes, parts: NDArray[np.int8]) -> None:
    """Raise InputError if a group has rows in several parts."""
    used = (groups.codes >= 0) & (parts >= 0)
    pairs = np.unique(np.stack([groups.codes[used], parts[used]]), axis=1)
    codes, n_parts = np.unique(pairs[0], return_counts=True)
    if len(divided := codes[n_parts > 1]):
        raise InputError(
            f"test= divides {len(divided):,} of {len(groups.classes):,} groups between parts, such "
            f"as {groups.classes[divided[0]]!r}; keep each group in one part, or leave out groups="
        )
