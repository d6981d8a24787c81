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
from splince_fast.evaluation import _cells, _checks, _linear, _protocol
from splince_fast.evaluation._context import PATH
from splince_fast.evaluation._data import check_rows, fingerprint, present, read_rows
from splince_fast.evaluation._identity import UnreadableError, identity_of
from splince_fast.evaluation.probes import PROBES
from splince_fast.evaluation.scoring import own_metrics
from splince_fast.evaluation.splits import natural_split
from splince_fast.exceptions import InputError, LabelError, NotEnoughDataError
from splince_fast.labels import ClassCodes, Columns, Encoded, encode_one
from splince_fast.methods.table import METHODS, key_of

Float = NDArray[np.float64]

ERASERS = (
    *(method.label for method in METHODS.values() if not method.needs_labels),
    "random", "INLP", "RLACE",
    "SAL+repair", "INLP+repair", "RLACE+repair",
)  # fmt: skip
HEADS = ("retrained", "frozen", "unregularised")
_JOB_BYTES = 1 << 29  # of the rows of a job, in float64, unless the caller names the sizes


@dataclass(frozen=True, slots=True)
class Named:
    """An eraser, head or metric: its name, what it is, and a text that changes when it does.

    `unread` says why that text is another one in every run; it is empty otherwise.
    """

    name: str
    what: Any
    identity: str
    unread: str = ""

    @property
    def role(self) -> str:
        """Which one of the library it is, or "" for one of the caller's own."""
        return self.what if isinstance(self.what, str) else ""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything a job needs to know, labels included; rows are found by `path` or `X`."""

    X: Any
    most: int | None  # rows that a job keeps, where the caller did not say
    task: Encoded
    concepts: dict[str, Encoded]
    cells: _cells.Coded | None  # of task and concepts; None where one is a quantity
    groups: NDArray[np.intp] | None
    erasers: tuple[Named, ...]
    heads: tuple[Named, ...]
    levels: tuple[float | None, ...]
    seeds: tuple[int, ...]
    protocol: _protocol.Protocol | None
    sizes: tuple[int, int, int] | None
    association_method: str
    unlabelled: bool
    alphas: tuple[float, ...]
    select: str
    probes: tuple[str, ...]
    metrics: tuple[Named, ...]
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

    def split(self, seed: int, p: float | None) -> _protocol.Split:
        """The split of a seed at a level."""
        if self.test is not None:
            return self._own_split(seed)
        if p is None or self.protocol is None or self.sizes is None:
            n = len(self.usable)
            split = natural_split(n, random_state=seed, usable=self.usable, groups=self.groups)
            return self._bounded(split, seed)
        shortage = "raise" if self.groups is None else "shrink"
        if self.association_method == "weights":
            split = self.protocol.weighted_split(p, self.sizes, seed, shortage)
            return self.protocol.weighted(self._bounded(split, seed))
        return self.protocol.split(p, self.sizes, seed, shortage)

    def moment_rows(self, split: _protocol.Split) -> tuple[NDArray[np.intp], Float | None]:
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

    def _own_split(self, seed: int) -> _protocol.Split:
        """The user's test rows; validation rows are drawn where none are marked."""
        part = np.where(self.usable, self.test, -1)  # type: ignore[arg-type]
        train, validation, test = (np.flatnonzero(part == k) for k in range(3))
        if not len(validation):
            train, validation = self._validation_of(train, np.random.default_rng(seed))
        missing = len(part) - int(self.usable.sum())
        return self._bounded(
            _protocol.Split(train, validation, test, None, None, missing, ()), seed
        )

    def _validation_of(
        self, train: NDArray[np.intp], rng: np.random.Generator
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Training and validation rows of the user's training rows: a tenth, whole groups."""
        if self.groups is None:
            order = rng.permutation(train)
            return order[len(order) // 10 :], order[: len(order) // 10]
        pool, _ = _protocol.pools_of(self.groups, train, rng, (0.0, 0.1))
        if not (pool[train] == 2).any():
            raise NotEnoughDataError(
                "the training rows are one group, and validation rows are to be another; mark "
                "them yourself in test=, with 'train', 'validation' and 'test'"
            )
        return train[pool[train] == 2], train[pool[train] == 1]

    def _bounded(self, split: _protocol.Split, seed: int) -> _protocol.Split:
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


def make_plan(
    X: Any,
    *,
    task: Any,
    concept: Any,
    groups: Any,
    erasers: Any,
    chosen_heads: Any,
    association: Any,
    aligned_class: Any,
    sizes: Any,
    association_method: str,
    unlabelled: bool,
    n_seeds: int,
    random_state: int,
    alphas: Any,
    select: str,
    probes: Sequence[str],
    metrics: Mapping[str, Any] | None,
    test: Any,
) -> Plan:
    """Check and read the arguments of :func:`splince_fast.evaluation.compare`."""
    rows = read_rows(X)
    n = len(rows)
    y = encode_one(task, n, name="task")
    concepts = {name: encode_one(v, n, name=name) for name, v in _concepts(concept).items()}
    for name, encoded in [("task", y), *((f"concept {name!r}", c) for name, c in concepts.items())]:
        if isinstance(encoded, ClassCodes):
            _cells.check_classes(name, _cells.Coded(encoded.classes, encoded.codes))
    levels, protocol = _levels(association, y, concepts, aligned_class, groups)
    for name, value in (("n_seeds", n_seeds), ("random_state", random_state)):
        if not is_integer(value) or value < (name == "n_seeds"):
            raise InputError(f"{name} is {value!r}; it must be an integer of at least 0 (1 seed)")
    parts = None if test is None else _parts(test, n)
    most = _most_rows(rows.shape[1])
    named = sizes is not None
    notes: tuple[str, ...] = ()
    _checks.check_method(association_method, "association_method")
    if association_method == "weights" and protocol is None:
        raise InputError(
            "association_method='weights' is for association=; the natural split weighs no cells"
        )
    if parts is not None and association is not None:
        raise InputError("test= names your own split; it does not go with association=")
    _linear.check_rule(select)
    for probe in probes:
        if probe not in PROBES:
            raise InputError(f"there is no probe {probe!r}; choose from {PROBES}")
    quantities = [isinstance(v, Columns) for v in (y, *concepts.values())]
    cells = None
    if not any(quantities):
        columns = [y, *concepts.values()]
        cells = _cells.joint(
            [_cells.Coded(c.classes, c.codes) for c in columns if isinstance(c, ClassCodes)]
        )
    if protocol is not None:
        protocol_sizes = [p for p in levels if p is not None]
        if sizes is None:
            sizes = protocol.largest_sizes(protocol_sizes)
            there = n if association_method == "weights" else sum(sizes)
            if there > most:
                notes += (_told(most, there),)
            if sum(sizes) > most:
                sizes = tuple(size * most // sum(sizes) for size in sizes)
        sizes = _checks.check_sizes(sizes)
        draw = protocol.weighted_split if association_method == "weights" else protocol.split
        for p in protocol_sizes:  # a shortage is told before anything runs
            draw(p, sizes, int(random_state), "raise" if groups is None else "shrink")
    elif sizes is not None:
        raise InputError("sizes= is for association=; the natural split takes all rows")
    elif n > most:
        notes += (_told(most, n),)
    check_rows(rows)
    members = None if groups is None else _cells.coded(groups, "groups", n)
    codes = None if members is None else members.codes
    if members is not None and parts is not None:
        _check_whole(members, parts)
    plan = Plan(
        X=rows, most=None if named else most, task=y, concepts=concepts, cells=cells, groups=codes,
        erasers=_named(erasers, ERASERS, "eraser"), heads=_named(chosen_heads, HEADS, "head"),
        levels=levels, seeds=tuple(int(random_state) + i for i in range(int(n_seeds))),
        protocol=protocol, sizes=sizes, association_method=association_method,
        unlabelled=bool(unlabelled), select=select,
        alphas=_linear.check_alphas(alphas), probes=tuple(probes),
        metrics=tuple(_read(n, m, m.score) for n, m in own_metrics(metrics).items()),
        test=parts, notes=notes,
        fingerprint=fingerprint(rows, [y, *concepts.values()], codes, parts),
    )  # fmt: skip
    if parts is not None and len(plan.seeds) > 1:
        raise InputError("test= is one split; pass n_seeds=1 with it")
    if int(plan.usable.sum()) < 4:
        raise LabelError("fewer than four rows have every label; check that they belong to X")
    return plan


def _most_rows(width: int) -> int:
    """Rows that a job keeps, at most."""
    return max(1, _JOB_BYTES // (8 * width))


def _told(most: int, there: int) -> str:
    """Use of the other rows, in words."""
    return (
        f"a job keeps at most {_JOB_BYTES / 2**20:,.0f} MiB of rows in float64: {most:,} of "
        f"{there:,} are used, drawn at random for each seed; with association=, sizes= takes more"
    )


def _concepts(concept: Any) -> dict[str, Any]:
    """Concepts by name: a column, or a mapping or tuple of columns."""
    if isinstance(concept, Mapping):
        return {str(name): column for name, column in concept.items()}
    if isinstance(concept, tuple) and concept and not np.isscalar(concept[0]):
        return {f"concept[{i}]": column for i, column in enumerate(concept)}
    return {"concept": concept}


def _levels(
    association: Any, y: Encoded, concepts: Mapping[str, Encoded], aligned_class: Any, groups: Any
) -> tuple[tuple[float | None, ...], _protocol.Protocol | None]:
    """Levels of the sweep and its cells, or the natural split."""
    if association is None:
        if aligned_class is not None:
            raise InputError("aligned_class= is for association=; the natural split aligns nothing")
        return (None,), None
    values = association if isinstance(association, Sequence | np.ndarray) else (association,)
    for p in values:
        _checks.check_p(p)
    if not len(values):
        raise InputError("association is empty; pass levels such as (.5, .7, .9), or None")
    if not isinstance(y, ClassCodes) or not all(
        isinstance(c, ClassCodes) for c in concepts.values()
    ):
        raise InputError(
            "the association protocol needs classes of task and concept, and one is a quantity; "
            "pass association=None, or thin the rows to the correlation you want"
        )
    joint = _cells.joint([_cells.Coded(c.classes, c.codes) for c in concepts.values()])  # type: ignore[union-attr]
    protocol = _protocol.Protocol.of(_cells.Coded(y.classes, y.codes), joint, aligned_class, groups)
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
    there = [np.bincount(groups.codes[inside & (parts == k)], minlength=size) > 0 for k in range(3)]
    cut = np.flatnonzero(np.sum(there, axis=0) > 1)
    if len(cut):
        raise InputError(
            f"test= cuts {len(cut):,} of {size:,} groups, such as {groups.names[cut[0]]!r}: their "
            "rows lie in more than one part. Keep each group in one part, or leave groups= out"
        )


def _named(chosen: Any, known: tuple[str, ...], what: str) -> tuple[Named, ...]:
    """Erasers or heads with names and identities."""
    if isinstance(chosen, str) or not isinstance(chosen, Sequence | Mapping):
        chosen = (chosen,)
    pairs = list(chosen.items()) if isinstance(chosen, Mapping) else [(None, c) for c in chosen]
    found: dict[str, Named] = {}
    for given, thing in pairs:
        if isinstance(thing, str):
            labels = {label.lower(): label for label in known}
            if what == "eraser" and (key := key_of(thing)) is not None:
                if METHODS[key].needs_labels:
                    raise InputError(
                        f"{key} is applied with the labels of the rows, and the test rows of a "
                        "comparison are erased without; evaluate it on rows of your own"
                    )
                thing = METHODS[key].label
            elif thing.lower() not in labels:
                raise InputError(f"there is no {what} {thing!r}; choose from {', '.join(known)}")
            else:
                thing = labels[thing.lower()]
            name = thing
        elif hasattr(thing, "get_params") and hasattr(thing, "fit"):
            name = type(thing).__name__
        elif what == "eraser" and callable(thing):
            name = getattr(thing, "__name__", type(thing).__name__)
        else:
            raise InputError(
                f"{thing!r} is no {what}: pass one of {', '.join(known)}, an estimator"
                + (", or a function of moments that returns a Projection" * (what == "eraser"))
            )
        name = name if given is None else str(given)
        if name in found:
            raise InputError(f"two {what}s are named {name!r}; pass a dict to name them apart")
        if name in ("", PATH):
            raise InputError(f"{name!r} is no name for a {what}; pass a dict with another one")
        found[name] = Named(name, thing, thing) if isinstance(thing, str) else _read(name, thing)
    if not found:
        raise InputError(f"no {what} is given; choose from {', '.join(known)}")
    return tuple(found.values())


def _read(name: str, what: Any, content: Any = None) -> Named:
    """A named eraser, head or metric with its identity: that of `content` where it is given."""
    try:
        return Named(name, what, identity_of(what if content is None else content))
    except UnreadableError as error:
        return Named(name, what, uuid.uuid4().hex, str(error))
