"""The plan of a comparison: its arguments, validated and encoded before any job runs."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime.keywords import as_values
from splince_fast._solve.options import is_integer
from splince_fast.evaluation import splits
from splince_fast.evaluation._digest import UnreadableError, digest_of
from splince_fast.evaluation.data import (
    check_classes,
    check_finite,
    class_codes,
    columns_of,
    fill_missing_groups,
    fingerprint,
    has_label,
    joint_classes,
    labels_of,
    read_rows,
)
from splince_fast.evaluation.erasers import ERASERS, ConceptLabels, SplitPart, parse_partial
from splince_fast.evaluation.heads import ALPHAS, check_alphas, check_rule
from splince_fast.evaluation.metrics import check_metrics
from splince_fast.evaluation.probes import check_probes
from splince_fast.evaluation.records import PATH, TestLabels
from splince_fast.evaluation.splits import Protocol, Sizes, Split
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassCodes, Columns, Encoded, encode_one
from splince_fast.labels.encoded import observed
from splince_fast.labels.names import listed
from splince_fast.labels.positions import check_index
from splince_fast.methods.table import METHODS, key_of

Float = NDArray[np.float64]
Rows = NDArray[np.intp]
Mask = NDArray[np.bool_]

HEADS = ("retrained", "frozen", "unregularised")
_JOB_BYTES = 1 << 29  # maximum bytes of the float64 rows of a job; ignored if `sizes` is passed
_PARTS = {
    "train": 0, "training": 0, "validation": 1, "valid": 1, "val": 1, "dev": 1, "test": 2,
    False: 0, True: 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Component:
    """Name, specification and digest of an eraser, head or metric.

    `digest` covers the source code and the parameters. If the code cannot be read,
    `unreadable` says why, and the digest is random; otherwise `unreadable` is empty.
    """

    name: str
    spec: Any
    digest: str
    unreadable: str = ""

    @property
    def role(self) -> str:
        """Name of an eraser or head of the library; "" for an estimator, function or metric."""
        return self.spec if isinstance(self.spec, str) else ""


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonPlan:
    """Rows, encoded labels and validated settings of a comparison."""

    X: Any  # (n, d); None in worker processes, which memory-map a file
    max_rows: int | None  # largest number of rows of a job; None if `sizes` was passed
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
    association_method: str
    unlabelled: bool
    alphas: tuple[float, ...]
    select: str
    probes: tuple[str, ...]
    metrics: tuple[Component, ...]
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
    def same_column_text(self) -> str:
        """Sentence that names a concept whose labels are those of the task; "" without one."""
        task, *concepts = (
            column.codes if isinstance(column, ClassCodes) else column.values
            for column in self.variables.values()
        )
        for name, concept in zip(self.concepts, concepts, strict=True):
            if np.array_equal(task, concept):
                return f"The task and the concept {name!r} are the same column. "
        return ""

    @property
    def usable(self) -> Mask:
        """Mask (n,) of the rows that have every label."""
        return np.asarray(has_label(self.task) & self._has_concept_labels)

    @property
    def _has_concept_labels(self) -> Mask:
        return np.asarray(np.all([has_label(c) for c in self.concepts.values()], axis=0))

    def part(self, numbers: Rows, rows: Float, weights: Float | None) -> SplitPart:
        """Combine scaled `rows` and `weights` with the labels of the rows `numbers` of X."""
        task = self.task
        return SplitPart(
            rows,
            task.codes[numbers] if isinstance(task, ClassCodes) else task.values[numbers],
            self._concept_labels(numbers),
            None if self.cells is None else self.cells.codes[numbers],
            None if self.groups is None else fill_missing_groups(self.groups[numbers]),
            weights,
            {name: labels_of(column, numbers) for name, column in self.variables.items()},
        )

    def _concept_labels(self, numbers: Rows) -> ConceptLabels:
        """Concept labels of the rows `numbers`, in the form that estimators receive."""
        if self.concept_codes is not None:
            return self.concept_codes.codes[numbers]
        columns = {
            name: c.values[numbers] if isinstance(c, Columns) else c.codes[numbers]
            for name, c in self.concepts.items()
        }
        if all(isinstance(c, Columns) for c in self.concepts.values()):
            return np.concatenate(list(columns.values()), axis=1)
        return columns

    def test_labels(self, numbers: Rows) -> TestLabels:
        """Labels of the test rows `numbers`, for a task of classes."""
        assert isinstance(self.task, ClassCodes)
        return TestLabels(
            self.task.codes[numbers],
            None if self.concept_codes is None else self.concept_codes.codes[numbers],
            None if self.cells is None else self.cells.codes[numbers],
            None if self.groups is None else fill_missing_groups(self.groups[numbers]),
        )

    def split(self, seed: int, p: float | None) -> Split:
        """Split of a seed at an association level.

        Raises
        ------
        NotEnoughDataError
            The split has no training or no test rows.
        """
        split = self._split(seed, p)
        if not len(split.train) or not len(split.test):
            raise NotEnoughDataError(
                f"the split has {len(split.train)} training and {len(split.test)} test rows, of "
                f"{int(self.usable.sum())} rows with every label, and needs both; check test= and "
                "groups= (all rows of a group, and all rows without a group, are in one part)"
            )
        return split

    def _split(self, seed: int, p: float | None) -> Split:
        if self.test is not None:
            return self._fixed_split(seed)
        if p is None or self.protocol is None or self.sizes is None:
            split = splits.natural_split(self.usable, random_state=seed, groups=self.groups)
            return self._limit_rows(split, seed)
        split = self.protocol.split(
            p, self.sizes, seed, method=self.association_method,
            on_shortage="raise" if self.groups is None else "shrink",
        )  # fmt: skip
        if self.association_method == "weights":
            return self.protocol.weighted(self._limit_rows(split, seed))
        return split

    def moment_rows(self, split: Split) -> tuple[Rows, Float | None]:
        """Return the row numbers and weights from which the moments of a split are computed.

        The rows are the training rows. With `unlabelled`, rows that lack only the task label are
        added with weight 1. Rows whose group has validation or test rows are not added; nor are
        rows that a fixed split (`test`) does not mark as training rows.
        """
        if not self.unlabelled:
            return split.train, split.weights
        added = self._has_concept_labels & ~has_label(self.task)
        if self.test is not None:
            added &= self.test == 0
        if self.groups is not None:
            held_out = np.unique(self.groups[np.concatenate([split.validation, split.test])])
            added &= ~np.isin(self.groups, held_out[held_out >= 0])
        unlabelled = np.flatnonzero(added)
        weights = None
        if split.weights is not None:
            weights = np.concatenate([split.weights, np.ones(len(unlabelled))])
        return np.concatenate([split.train, unlabelled]), weights

    def _fixed_split(self, seed: int) -> Split:
        """Return the split that `test` fixes; draw validation rows if `test` marks none."""
        part = np.where(self.usable, self.test, -1)  # type: ignore[arg-type]
        train, validation, test = (np.flatnonzero(part == k) for k in range(3))
        if not len(validation):
            train, validation = self._draw_validation(train, np.random.default_rng(seed))
        missing = len(part) - int(self.usable.sum())
        return self._limit_rows(Split(train, validation, test, None, None, missing, ()), seed)

    def _draw_validation(self, train: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
        """Move a tenth of the training rows (whole groups) to a validation part; return both."""
        if self.groups is None:
            order = rng.permutation(train)
            return order[len(order) // 10 :], order[: len(order) // 10]
        part, _ = splits.parts_of_groups(self.groups, train, rng, (0.0, 0.1))
        if not (part[train] == 2).any():
            raise NotEnoughDataError(
                "the training rows are one group, so validation rows cannot be drawn; mark "
                "validation rows in test=, with the names 'train', 'validation' and 'test'"
            )
        return train[part[train] == 2], train[part[train] == 1]

    def _limit_rows(self, split: Split, seed: int) -> Split:
        """Subsample the parts of a split to at most `max_rows` rows in total.

        All parts are reduced by the same factor. With association levels, all test rows are kept.
        """
        if self.max_rows is None or sum(split.sizes) <= self.max_rows:
            return split
        rng = np.random.default_rng(seed)
        n_fixed = len(split.test) if split.p is not None else 0
        total, limit = sum(split.sizes) - n_fixed, self.max_rows - n_fixed
        train, validation, test = (
            rng.permutation(part)[: len(part) * limit // total]
            for part in (split.train, split.validation, split.test)
        )
        test = split.test if n_fixed else test
        return dataclasses.replace(split, train=train, validation=validation, test=test)


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """Arguments of :func:`splince_fast.evaluation.compare` on which the results depend."""

    task: object
    concept: object
    groups: object = None
    erasers: object = ("none", "SAL", "LEACE", "SPLINCE")
    heads: object = ("retrained", "frozen")
    association: object = None
    aligned_class: object = None
    sizes: object = None
    association_method: str = "subsample"
    unlabelled: bool = False
    n_seeds: int = 5
    random_state: int = 0
    alphas: object = ALPHAS
    select: str = "worst_group"
    leakage: Sequence[str] = ("linear",)
    metrics: Mapping[str, object] | None = None
    test: object = None

    @property
    def weighted(self) -> bool:
        """Whether rows are weighted, instead of subsampled, to reach an association level."""
        return self.association_method == "weights"


def make_plan(X: object, settings: Settings) -> ComparisonPlan:
    """Validate and encode the arguments of a comparison."""
    for name in ("task", "concept", "groups", "test"):
        check_index(X, getattr(settings, name), name)
    rows = read_rows(X)
    n = len(rows)
    y = _drop_empty_classes(encode_one(settings.task, n, name="task", of="X"))
    columns = _concept_columns(settings.concept)
    concepts = {
        name: _drop_empty_classes(encode_one(column, n, name=name, of="X"))
        for name, column in columns.items()
    }
    for name, encoded in [("task", y), *((f"concept {name!r}", c) for name, c in concepts.items())]:
        if isinstance(encoded, ClassCodes):
            check_classes(name, encoded)
            continue
        values = encoded.values[has_label(encoded)]
        if len(values) and not np.ptp(values, axis=0).any():
            raise LabelError(
                f"the {name} has one value in all of its rows, {listed(values[0].tolist())}"
            )
    concept_codes = _joint_classes(list(concepts.values()))
    levels, protocol = _levels(settings, y, concept_codes)
    for name in ("n_seeds", "random_state"):
        value = getattr(settings, name)
        minimum = int(name == "n_seeds")
        if not is_integer(value) or value < minimum:
            raise InputError(f"{name} is {value!r}; it must be an integer of at least {minimum}")
    parts = None if settings.test is None else _encode_parts(settings.test, n)
    splits.check_method(settings.association_method, "association_method")
    if settings.weighted and protocol is None:
        raise InputError(
            "association_method='weights' needs association=; the natural split has no weights"
        )
    if parts is not None and settings.association is not None:
        raise InputError("test= is a fixed split and excludes association=; pass one of them")
    check_rule(settings.select)
    probes = check_probes(settings.leakage, "leakage")
    quantities = [name for name, column in concepts.items() if isinstance(column, Columns)]
    notes = _probe_notes(probes, quantities)
    max_rows = max(1, _JOB_BYTES // (8 * rows.shape[1]))
    sizes, note = _sizes(settings, protocol, [p for p in levels if p is not None], n, max_rows)
    check_finite(rows)
    groups = None if settings.groups is None else class_codes(settings.groups, "groups", n)
    if groups is not None and parts is not None:
        _check_groups_undivided(groups, parts)
    codes = None if groups is None else groups.codes
    plan = ComparisonPlan(
        X=rows, max_rows=max_rows if settings.sizes is None else None, task=y, concepts=concepts,
        concept_codes=concept_codes, cells=_joint_classes([y, *concepts.values()]), groups=codes,
        erasers=_components(settings.erasers, ERASERS, "eraser"),
        heads=_components(settings.heads, HEADS, "head"), levels=levels,
        seeds=tuple(int(settings.random_state) + i for i in range(int(settings.n_seeds))),
        protocol=protocol, sizes=sizes, association_method=settings.association_method,
        unlabelled=bool(settings.unlabelled), select=settings.select,
        alphas=check_alphas(settings.alphas), probes=probes,
        metrics=tuple(
            _component(k, m, m.score) for k, m in check_metrics(settings.metrics).items()
        ),
        test=parts, notes=(note, *notes) if note else notes,
        fingerprint=fingerprint(rows, {"": y, **concepts}, codes, parts),
    )  # fmt: skip
    if parts is not None and len(plan.seeds) > 1:
        raise InputError("test= is one split; pass n_seeds=1 with it")
    if int(plan.usable.sum()) < 4:
        raise LabelError("fewer than four rows have every label; check that the labels belong to X")
    return plan


def _probe_notes(probes: tuple[str, ...], quantities: list[str]) -> tuple[str, ...]:
    """Return a note if some probes are not computed for the concepts `quantities`, else ().

    Raises
    ------
    InputError
        There are quantities, but the linear probe, the only one for quantities, is not requested.
    """
    others = [probe for probe in probes if probe != "linear"]
    if not others or not quantities:
        return ()
    text = f"a quantity, such as the concept {quantities[0]!r}, has only the linear probe"
    if len(others) == len(probes):
        raise InputError(
            f"{text}; pass leakage=('linear',), with other probes for concepts of classes, or "
            "divide the quantity into classes, such as its quartiles"
        )
    return (f"{text}, not {' or '.join(others)}",)


def _drop_empty_classes(column: Encoded) -> Encoded:
    """Return the column without the classes that no row has."""
    return observed(column) if isinstance(column, ClassCodes) else column


def _joint_classes(columns: Sequence[Encoded]) -> ClassCodes | None:
    """Joint classes of several columns; None if one of them is a quantity."""
    classes = [column for column in columns if isinstance(column, ClassCodes)]
    return joint_classes(classes) if len(classes) == len(columns) else None


def _sizes(
    settings: Settings, protocol: Protocol | None, levels: list[float], n: int, max_rows: int
) -> tuple[Sizes | None, str]:
    """Return the sizes of the protocol's splits, and a note if a job uses a sample of the rows.

    The sizes are None for the natural split. The note is empty if a job uses all rows.
    """

    def note(n_used: int) -> str:
        if n_used <= max_rows:
            return ""
        return (
            f"a job keeps at most {_JOB_BYTES / 2**20:,.0f} MiB of rows in float64: {max_rows:,} "
            f"of {n_used:,} are used, drawn at random for each seed; to use more rows, pass "
            "association= and sizes="
        )

    if protocol is None:
        if settings.sizes is not None:
            raise InputError("sizes= needs association=; the natural split uses all rows")
        return None, note(n)
    if settings.sizes is not None:
        return splits.check_sizes(settings.sizes), ""
    sizes = protocol.largest_sizes(levels)
    total = sum(sizes)
    if total > max_rows:
        sizes = splits.check_sizes([size * max_rows // total for size in sizes])
    return sizes, note(n if settings.weighted else total)


def _concept_columns(concept: object) -> dict[str, Any]:
    """Concepts by name, from a column, or a mapping, frame or tuple of columns.

    Raises
    ------
    InputError
        There are no columns, or two names are equal as text.
    """
    by_name = columns_of(concept, "concept")
    columns = {str(name): column for name, column in by_name.items()}
    if len(columns) < len(by_name):
        raise InputError(f"concept has the names {listed(by_name)}; pass names that differ as text")
    return columns


def _levels(
    settings: Settings, y: Encoded, concept: ClassCodes | None
) -> tuple[tuple[float | None, ...], Protocol | None]:
    """Return the association levels and the protocol; ((None,), None) for the natural split."""
    association = settings.association
    if association is None:
        if settings.aligned_class is not None:
            raise InputError("aligned_class= needs association=; pass both, or neither")
        return (None,), None
    values = as_values(association)
    for p in values:
        splits.check_p(p)
    if not len(values):
        raise InputError("association is empty; pass levels such as (.5, .7, .9), or None")
    if not isinstance(y, ClassCodes) or concept is None:
        raise InputError(
            "association= needs classes of task and concept, and one of them is a quantity; pass "
            "association=None, or divide the quantity into classes"
        )
    protocol = Protocol.of(y, concept, settings.aligned_class, settings.groups)
    return tuple(sorted({float(p) for p in values})), protocol


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
    parts = table[column.codes]
    for k, name in ((0, "training"), (2, "test")):
        if not (parts == k).any():
            raise InputError(f"test= leaves no {name} rows")
    return np.asarray(parts)


def _check_groups_undivided(groups: ClassCodes, parts: NDArray[np.int8]) -> None:
    """Raise InputError if a group has rows in several parts."""
    grouped = groups.codes >= 0
    size = len(groups.classes)
    in_part = [
        np.bincount(groups.codes[grouped & (parts == k)], minlength=size) > 0 for k in range(3)
    ]
    divided = np.flatnonzero(np.sum(in_part, axis=0) > 1)
    if len(divided):
        raise InputError(
            f"test= divides {len(divided):,} of {size:,} groups between parts, such as "
            f"{groups.classes[divided[0]]!r}; keep each group in one part, or leave out groups="
        )


def _components(specs: object, choices: tuple[str, ...], kind: str) -> tuple[Component, ...]:
    """Return the components of erasers or heads.

    Raises
    ------
    InputError
        A specification is invalid, or a name occurs twice.
    """
    if isinstance(specs, str) or not isinstance(specs, Sequence | Mapping):
        specs = (specs,)
    pairs = list(specs.items()) if isinstance(specs, Mapping) else [(None, spec) for spec in specs]
    components: dict[str, Component] = {}
    for key, spec in pairs:
        if isinstance(spec, str):
            spec = default_name = _label(spec, choices, kind)
        elif hasattr(spec, "get_params") and hasattr(spec, "fit"):
            default_name = type(spec).__name__
        elif kind == "eraser" and callable(spec):
            default_name = getattr(spec, "__name__", type(spec).__name__)
        else:
            raise InputError(
                f"{spec!r} is not a valid {kind}: pass one of {', '.join(choices)}, an estimator"
                + (", or a function of moments that returns a Projection" * (kind == "eraser"))
            )
        name = default_name if key is None else str(key)
        if name in components:
            raise InputError(f"two {kind}s are named {name!r}; pass a dict with different names")
        if name in ("", PATH):
            raise InputError(f"the {kind} name {name!r} is reserved; pass a dict with another name")
        components[name] = (
            Component(name, spec, spec) if isinstance(spec, str) else _component(name, spec, spec)
        )
    if not components:
        raise InputError(f"{kind}s= is empty; choose from {', '.join(choices)}")
    return tuple(components.values())


def _label(text: str, choices: tuple[str, ...], kind: str) -> str:
    """Canonical label of an eraser or head of the library, such as "LEACE" or "LEACE*0.9"."""
    labels = {label.lower(): label for label in choices}
    base, intensity = text, ""
    if kind == "eraser":
        if (partial := parse_partial(text)) is not None:
            base, intensity = partial[0], f"*{partial[1]:g}"
        if (key := key_of(base)) is not None:
            return METHODS[key].label + intensity
    if base.lower() not in labels:
        raise InputError(f"there is no {kind} {text!r}; choose from {', '.join(choices)}")
    return labels[base.lower()] + intensity


def _component(name: str, spec: object, content: object) -> Component:
    """Return a component with the digest of `content`, or a random one for unreadable code."""
    try:
        return Component(name, spec, digest_of(content))
    except UnreadableError as error:
        return Component(name, spec, uuid.uuid4().hex, str(error))
