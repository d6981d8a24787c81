"""The plan of a comparison: arguments checked and read once, before anything runs."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._solve.options import is_integer
from splince_fast.evaluation import _cells, splits
from splince_fast.evaluation._data import check_rows, fingerprint, present, read_rows
from splince_fast.evaluation._erasers import ERASERS
from splince_fast.evaluation._identity import UnreadableError, identity_of
from splince_fast.evaluation._records import PATH, TestLabels
from splince_fast.evaluation.heads import ALPHAS, check_alphas, check_rule
from splince_fast.evaluation.probes import PROBES
from splince_fast.evaluation.scoring import own_metrics
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassCodes, Columns, Encoded, encode_one
from splince_fast.methods.table import METHODS, key_of

Float = NDArray[np.float64]

HEADS = ("retrained", "frozen", "unregularised")
_JOB_BYTES = 1 << 29  # of the rows of a job, in float64, unless the caller names the sizes


@dataclass(frozen=True, slots=True)
class Component:
    """An eraser, head or metric: its name, its specification, and a digest that changes with it.

    `unread` says why the digest is another one in every run; it is empty otherwise.
    """

    name: str
    spec: Any
    identity: str
    unread: str = ""

    @property
    def role(self) -> str:
        """Which one of the library it is, or "" for one of the caller's own."""
        return self.spec if isinstance(self.spec, str) else ""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything a job needs to know, labels included; rows are found by `path` or `X`."""

    X: Any
    most: int | None  # rows that a job keeps, where the caller did not say
    task: Encoded
    concepts: dict[str, Encoded]
    cells: _cells.Coded | None  # of task and concepts; None where one is a quantity
    groups: NDArray[np.intp] | None
    erasers: tuple[Component, ...]
    heads: tuple[Component, ...]
    levels: tuple[float | None, ...]
    seeds: tuple[int, ...]
    protocol: splits.Protocol | None
    sizes: tuple[int, int, int] | None
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
        """The variable of the task in the moments."""
        name = "task"
        while name in self.concepts:
            name = f"kept {name}"
        return name

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Rows that have every label."""
        return np.asarray(present(self.task) & self._with_concepts)

    @property
    def _with_concepts(self) -> NDArray[np.bool_]:
        """Rows that have every concept."""
        return np.asarray(np.all([present(c) for c in self.concepts.values()], axis=0))

    @property
    def concept_codes(self) -> _cells.Coded | None:
        """Joint cells of the concepts; None for a quantity."""
        read = [_cells.Coded(c.classes, c.codes) for c in self.concepts.values()
                if isinstance(c, ClassCodes)]  # fmt: skip
        return _cells.joint(read) if len(read) == len(self.concepts) else None

    def test_labels(self, rows: NDArray[np.intp]) -> TestLabels:
        """Labels of test rows of a task of classes."""
        assert isinstance(self.task, ClassCodes)
        joint = self.concept_codes
        return TestLabels(
            self.task.codes[rows],
            None if joint is None else joint.codes[rows],
            None if self.cells is None else self.cells.codes[rows],
            None if self.groups is None else self.groups[rows],
        )

    def split(self, seed: int, p: float | None) -> splits.Split:
        """The split of a seed at a level."""
        if self.test is not None:
            return self._own_split(seed)
        if p is None or self.protocol is None or self.sizes is None:
            n = len(self.usable)
            split = splits.natural_split(
                n, random_state=seed, usable=self.usable, groups=self.groups
            )
            return self._bounded(split, seed)
        shortage = "raise" if self.groups is None else "shrink"
        if self.association_method == "weights":
            split = self.protocol.weighted_split(p, self.sizes, seed, shortage)
            return self.protocol.weighted(self._bounded(split, seed))
        return self.protocol.split(p, self.sizes, seed, shortage)

    def moment_rows(self, split: splits.Split) -> tuple[NDArray[np.intp], Float | None]:
        """Rows that the moments of a split rest on, and their weights: the training rows, and
        where it was asked for those that lack the task alone, each of weight 1.

        A row of a group with validation or test rows, or of another part, is none of them.
        """
        if not self.unlabelled:
            return split.train, split.weights
        free = self._with_concepts & ~present(self.task)
        if self.test is not None:
            free &= self.test == 0
        if self.groups is not None:
            held = np.unique(self.groups[np.concatenate([split.validation, split.test])])
            free &= ~np.isin(self.groups, held[held >= 0])
        more = np.flatnonzero(free)
        weights = None
        if split.weights is not None:
            weights = np.concatenate([split.weights, np.ones(len(more))])
        return np.concatenate([split.train, more]), weights

    def _own_split(self, seed: int) -> splits.Split:
        """The user's test rows; validation rows are drawn where none are marked."""
        part = np.where(self.usable, self.test, -1)  # type: ignore[arg-type]
        train, validation, test = (np.flatnonzero(part == k) for k in range(3))
        if not len(validation):
            train, validation = self._validation_of(train, np.random.default_rng(seed))
        missing = len(part) - int(self.usable.sum())
        return self._bounded(splits.Split(train, validation, test, None, None, missing, ()), seed)

    def _validation_of(
        self, train: NDArray[np.intp], rng: np.random.Generator
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Training and validation rows of the user's training rows: a tenth, whole groups."""
        if self.groups is None:
            order = rng.permutation(train)
            return order[len(order) // 10 :], order[: len(order) // 10]
        pool, _ = splits.parts_of_groups(self.groups, train, rng, (0.0, 0.1))
        if not (pool[train] == 2).any():
            raise NotEnoughDataError(
                "the training rows are one group, and validation rows are to be another; mark "
                "them yourself in test=, with 'train', 'validation' and 'test'"
            )
        return train[pool[train] == 2], train[pool[train] == 1]

    def _bounded(self, split: splits.Split, seed: int) -> splits.Split:
        """A random share of every part where the whole is more than a job may keep."""
        if self.most is None or sum(split.sizes) <= self.most:
            return split
        rng = np.random.default_rng(seed)
        kept = len(split.test) if split.p is not None else 0  # test rows of the protocol stay
        total, most = sum(split.sizes) - kept, self.most - kept
        train, validation, test = (
            rng.permutation(part)[: len(part) * most // total]
            for part in (split.train, split.validation, split.test)
        )
        test = split.test if kept else test
        return dataclasses.replace(split, train=train, validation=validation, test=test)


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """Arguments of :func:`splince_fast.evaluation.compare` that the results depend on."""

    task: Any
    concept: Any
    groups: Any = None
    erasers: Any = ("none", "SAL", "LEACE", "SPLINCE")
    heads: Any = ("retrained", "frozen")
    association: Any = None
    aligned_class: Any = None
    sizes: Any = None
    association_method: str = "subsample"
    unlabelled: bool = False
    n_seeds: int = 5
    random_state: int = 0
    alphas: Any = ALPHAS
    select: str = "worst_group"
    leakage: Sequence[str] = ("linear",)
    metrics: Mapping[str, Any] | None = None
    test: Any = None


def make_plan(X: Any, given: Settings) -> Plan:
    """Check and read the arguments of a comparison."""
    rows = read_rows(X)
    n = len(rows)
    y = encode_one(given.task, n, name="task")
    concepts = {name: encode_one(v, n, name=name) for name, v in _concepts(given.concept).items()}
    for name, encoded in [("task", y), *((f"concept {name!r}", c) for name, c in concepts.items())]:
        if isinstance(encoded, ClassCodes):
            _cells.check_classes(name, _cells.Coded(encoded.classes, encoded.codes))
    levels, protocol = _levels(given, y, concepts)
    for name in ("n_seeds", "random_state"):
        value = getattr(given, name)
        if not is_integer(value) or value < (name == "n_seeds"):
            raise InputError(f"{name} is {value!r}; it must be an integer of at least 0 (1 seed)")
    parts = None if given.test is None else _parts(given.test, n)
    most = _most_rows(rows.shape[1])
    splits.check_method(given.association_method, "association_method")
    if given.association_method == "weights" and protocol is None:
        raise InputError(
            "association_method='weights' is for association=; the natural split weighs no cells"
        )
    if parts is not None and given.association is not None:
        raise InputError("test= names your own split; it does not go with association=")
    check_rule(given.select)
    for probe in given.leakage:
        if probe not in PROBES:
            raise InputError(f"there is no probe {probe!r}; choose from {PROBES}")
    quantities = [isinstance(v, Columns) for v in (y, *concepts.values())]
    cells = None
    if not any(quantities):
        columns = [y, *concepts.values()]
        cells = _cells.joint(
            [_cells.Coded(c.classes, c.codes) for c in columns if isinstance(c, ClassCodes)]
        )
    sizes, note = _sizes(given, protocol, [p for p in levels if p is not None], n, most)
    check_rows(rows)
    members = None if given.groups is None else _cells.coded(given.groups, "groups", n)
    codes = None if members is None else members.codes
    if members is not None and parts is not None:
        _check_whole(members, parts)
    plan = Plan(
        X=rows, most=most if given.sizes is None else None, task=y, concepts=concepts, cells=cells,
        groups=codes, erasers=_components(given.erasers, ERASERS, "eraser"),
        heads=_components(given.heads, HEADS, "head"), levels=levels,
        seeds=tuple(int(given.random_state) + i for i in range(int(given.n_seeds))),
        protocol=protocol, sizes=sizes, association_method=given.association_method,
        unlabelled=bool(given.unlabelled), select=given.select,
        alphas=check_alphas(given.alphas), probes=tuple(given.leakage),
        metrics=tuple(_component(k, m, m.score) for k, m in own_metrics(given.metrics).items()),
        test=parts, notes=(note,) if note else (),
        fingerprint=fingerprint(rows, [y, *concepts.values()], codes, parts),
    )  # fmt: skip
    if parts is not None and len(plan.seeds) > 1:
        raise InputError("test= is one split; pass n_seeds=1 with it")
    if int(plan.usable.sum()) < 4:
        raise LabelError("fewer than four rows have every label; check that they belong to X")
    return plan


def _sizes(
    given: Settings, protocol: splits.Protocol | None, levels: list[float], n: int, most: int
) -> tuple[tuple[int, int, int] | None, str]:
    """Sizes of the splits of the protocol, and a note where a job cannot keep all rows."""
    if protocol is None:
        if given.sizes is not None:
            raise InputError("sizes= is for association=; the natural split takes all rows")
        return None, _limit_note(most, n) if n > most else ""
    sizes, weighted, note = given.sizes, given.association_method == "weights", ""
    if sizes is None:
        sizes = protocol.largest_sizes(levels)
        n_used = n if weighted else sum(sizes)
        note = _limit_note(most, n_used) if n_used > most else ""
        if sum(sizes) > most:
            sizes = tuple(size * most // sum(sizes) for size in sizes)
    sizes = splits.check_sizes(sizes)
    draw = protocol.weighted_split if weighted else protocol.split
    for p in levels:  # a shortage is an error before anything runs
        draw(p, sizes, int(given.random_state), "raise" if given.groups is None else "shrink")
    return sizes, note


def _most_rows(width: int) -> int:
    """Rows that a job keeps, at most."""
    return max(1, _JOB_BYTES // (8 * width))


def _limit_note(most: int, n: int) -> str:
    """Use of the other rows, in words."""
    return (
        f"a job keeps at most {_JOB_BYTES / 2**20:,.0f} MiB of rows in float64: {most:,} of "
        f"{n:,} are used, drawn at random for each seed; with association=, sizes= takes more"
    )


def _concepts(concept: Any) -> dict[str, Any]:
    """Concepts by name: a column, or a mapping or tuple of columns."""
    if isinstance(concept, Mapping):
        return {str(name): column for name, column in concept.items()}
    if isinstance(concept, tuple) and concept and not np.isscalar(concept[0]):
        return {f"concept[{i}]": column for i, column in enumerate(concept)}
    return {"concept": concept}


def _levels(
    given: Settings, y: Encoded, concepts: Mapping[str, Encoded]
) -> tuple[tuple[float | None, ...], splits.Protocol | None]:
    """Levels of the sweep and its cells, or the natural split."""
    association = given.association
    if association is None:
        if given.aligned_class is not None:
            raise InputError("aligned_class= is for association=; the natural split aligns nothing")
        return (None,), None
    values = association if isinstance(association, Sequence | np.ndarray) else (association,)
    for p in values:
        splits.check_p(p)
    if not len(values):
        raise InputError("association is empty; pass levels such as (.5, .7, .9), or None")
    classes = [c for c in concepts.values() if isinstance(c, ClassCodes)]
    if not isinstance(y, ClassCodes) or len(classes) < len(concepts):
        raise InputError(
            "the association protocol needs classes of task and concept, and one is a quantity; "
            "pass association=None, or thin the rows to the correlation you want"
        )
    joint = _cells.joint([_cells.Coded(c.classes, c.codes) for c in classes])
    protocol = splits.Protocol.of(
        _cells.Coded(y.classes, y.codes), joint, given.aligned_class, given.groups
    )
    return tuple(sorted({float(p) for p in values})), protocol


def _parts(test: Any, n: int) -> NDArray[np.int8]:
    """Parts from a mask of test rows or a column of names."""
    column = _cells.coded(test, "test", n)
    place = {
        "train": 0, "training": 0, "validation": 1, "valid": 1, "val": 1, "dev": 1, "test": 2,
        False: 0, True: 2,
    }  # fmt: skip
    unknown = [name for name in column.names if name not in place]
    if unknown:
        raise LabelError(
            f"test= holds {unknown[0]!r}; pass a mask that is True for test rows, or the names "
            "'train', 'validation' and 'test'"
        )
    table = np.array([place[name] for name in column.names] + [-1], dtype=np.int8)
    parts = table[column.codes]
    for k, name in ((0, "training"), (2, "test")):
        if not (parts == k).any():
            raise InputError(f"test= leaves no {name} rows")
    return np.asarray(parts)


def _check_whole(groups: _cells.Coded, parts: NDArray[np.int8]) -> None:
    """Refuse parts that cut a group: its rows would be on both sides.

    Raises
    ------
    InputError
        With the number of such groups and one of them.
    """
    inside = groups.codes >= 0
    size = len(groups.names)
    in_part = [
        np.bincount(groups.codes[inside & (parts == k)], minlength=size) > 0 for k in range(3)
    ]
    cut = np.flatnonzero(np.sum(in_part, axis=0) > 1)
    if len(cut):
        raise InputError(
            f"test= cuts {len(cut):,} of {size:,} groups, such as {groups.names[cut[0]]!r}: their "
            "rows lie in more than one part. Keep each group in one part, or leave groups= out"
        )


def _components(chosen: Any, choices: tuple[str, ...], role: str) -> tuple[Component, ...]:
    """Erasers or heads with names and identities."""
    if isinstance(chosen, str) or not isinstance(chosen, Sequence | Mapping):
        chosen = (chosen,)
    pairs = list(chosen.items()) if isinstance(chosen, Mapping) else [(None, c) for c in chosen]
    labels = {label.lower(): label for label in choices}
    found: dict[str, Component] = {}
    for given, spec in pairs:
        if isinstance(spec, str):
            if role == "eraser" and (key := key_of(spec)) is not None:
                spec = METHODS[key].label
            elif spec.lower() not in labels:
                raise InputError(f"there is no {role} {spec!r}; choose from {', '.join(choices)}")
            else:
                spec = labels[spec.lower()]
            name = spec
        elif hasattr(spec, "get_params") and hasattr(spec, "fit"):
            name = type(spec).__name__
        elif role == "eraser" and callable(spec):
            name = getattr(spec, "__name__", type(spec).__name__)
        else:
            raise InputError(
                f"{spec!r} is no {role}: pass one of {', '.join(choices)}, an estimator"
                + (", or a function of moments that returns a Projection" * (role == "eraser"))
            )
        name = name if given is None else str(given)
        if name in found:
            raise InputError(f"two {role}s are named {name!r}; pass a dict to name them apart")
        if name in ("", PATH):
            raise InputError(f"{name!r} is no name for a {role}; pass a dict with another one")
        found[name] = (
            Component(name, spec, spec) if isinstance(spec, str) else _component(name, spec)
        )
    if not found:
        raise InputError(f"no {role} is given; choose from {', '.join(choices)}")
    return tuple(found.values())


def _component(name: str, spec: Any, content: Any = None) -> Component:
    """An eraser, head or metric with its identity: that of `content` where it is given."""
    try:
        return Component(name, spec, identity_of(spec if content is None else content))
    except UnreadableError as error:
        return Component(name, spec, uuid.uuid4().hex, str(error))
