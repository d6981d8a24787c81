"""The plan of a comparison: arguments checked and read once, before anything runs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import sources
from splince_fast._runtime.arrays import as_rows, check_values
from splince_fast.evaluation import _cells, _linear, _protocol
from splince_fast.evaluation._identity import source_of
from splince_fast.evaluation._pages import release, slices
from splince_fast.evaluation.probes import PROBES
from splince_fast.evaluation.splits import natural_split
from splince_fast.exceptions import InputError, LabelError
from splince_fast.labels import ClassCodes, Columns, Encoded, encode_one

ERASERS = ("none", "SAL", "LEACE", "SPLINCE", "mean", "random", "INLP", "RLACE")
HEADS = ("retrained", "frozen", "unregularised")
_WHOLE_HASH = 1 << 28
_SAMPLED_ROWS = 1 << 16
_JOB_BYTES = 1 << 29  # of the rows of a job, in float64, unless the caller names the sizes


@dataclass(frozen=True, slots=True)
class Named:
    """An eraser or head: its name, what it is, and a text that changes when it does."""

    name: str
    what: Any
    identity: str


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything a job needs to know, labels included; rows are found by `path` or `X`."""

    X: Any
    width: int  # features
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
    strengths: tuple[float, ...]
    select: str
    probes: tuple[str, ...]
    metrics: dict[str, Callable[[Any, Any], float]]
    test: NDArray[np.int8] | None  # part of each row: 0 training, 1 validation, 2 test, -1 none
    fingerprint: str
    notes: tuple[str, ...]

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Rows that have every label."""
        present = _present(self.task)
        for concept in self.concepts.values():
            present = present & _present(concept)
        return present

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
            split = natural_split(n, seed=seed, usable=self.usable, groups=self.groups)
            return self._bounded(split, seed)
        shortage = "raise" if self.groups is None else "shrink"
        return self.protocol.split(p, self.sizes, seed, shortage)

    def _own_split(self, seed: int) -> _protocol.Split:
        """The user's test rows; validation rows are drawn where none are marked."""
        part = np.where(self.usable, self.test, -1)  # type: ignore[arg-type]
        train, validation, test = (np.flatnonzero(part == k) for k in range(3))
        if not len(validation):
            order = np.random.default_rng(seed).permutation(train)
            validation, train = order[: len(order) // 10], order[len(order) // 10 :]
        missing = len(part) - int(self.usable.sum())
        return self._bounded(
            _protocol.Split(train, validation, test, None, None, missing, ()), seed
        )

    def _bounded(self, split: _protocol.Split, seed: int) -> _protocol.Split:
        """A random share of every part where the whole is more than a job may keep."""
        total, most = sum(split.sizes), _most_rows(self.width)
        if total <= most:
            return split
        rng = np.random.default_rng(seed)
        train, validation, test = (
            rng.permutation(part)[: len(part) * most // total]
            for part in (split.train, split.validation, split.test)
        )
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
    tied: Any,
    sizes: Any,
    n_seeds: int,
    random_state: int,
    strengths: Any,
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
    _check_classes("task", y)
    for name, encoded in concepts.items():
        _check_classes(f"concept {name!r}", encoded)
    levels, protocol = _levels(association, y, concepts, tied, groups)
    for name, value in (("n_seeds", n_seeds), ("random_state", random_state)):
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or value < (name == "n_seeds"):
            raise InputError(f"{name} is {value!r}; it must be an integer of at least 0 (1 seed)")
    parts = None if test is None else _parts(test, n)
    most, notes = _most_rows(rows.shape[1]), ()
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
            if sum(sizes) > most:
                notes += (_told(most, sum(sizes)),)
                sizes = tuple(size * most // sum(sizes) for size in sizes)
        sizes = _protocol.check_sizes(sizes)
        for p in protocol_sizes:  # a shortage is told before anything runs
            shortage = "raise" if groups is None else "shrink"
            protocol.split(p, sizes, int(random_state), shortage)
    elif sizes is not None:
        raise InputError("sizes= is for association=; the natural split takes all rows")
    elif n > most:
        notes += (_told(most, n),)
    _check_rows(rows)
    codes = None if groups is None else _cells.coded(groups, "groups", n).codes
    plan = Plan(
        X=rows, width=rows.shape[1], task=y, concepts=concepts, cells=cells, groups=codes,
        erasers=_named(erasers, ERASERS, "eraser"), heads=_named(chosen_heads, HEADS, "head"),
        levels=levels, seeds=tuple(int(random_state) + i for i in range(int(n_seeds))),
        protocol=protocol, sizes=sizes, strengths=_linear.check_strengths(strengths), select=select,
        probes=tuple(probes), metrics=_metrics(metrics), test=parts,
        fingerprint=_fingerprint(rows, [y, *concepts.values()], codes, parts), notes=notes,
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
    """What happens to the other rows, in words."""
    return (
        f"a job keeps at most {_JOB_BYTES / 2**20:,.0f} MiB of rows in float64: {most:,} of "
        f"{there:,} are used, drawn at random for each seed; with association=, sizes= takes more"
    )


def _check_rows(rows: NDArray[Any]) -> None:
    """Refuse NaN and infinity, block by block."""
    for _, block in slices(rows):
        try:
            check_values(block, "X")
        except InputError:
            check_values(rows, "X")  # names the rows of the whole
            raise


def read_rows(X: Any) -> NDArray[Any]:
    """Rows of shape (n, d) from an array, frame, tensor, or a .npy or .parquet file."""
    if isinstance(X, str | os.PathLike):
        path = Path(X)
        if path.suffix == ".npy":
            try:
                return as_rows(np.load(path, mmap_mode="r", allow_pickle=False))
            except (ValueError, EOFError) as error:
                raise InputError(
                    f"{str(path)!r} cannot be read as a .npy array: {error}. It may be truncated, "
                    "of another format, or hold Python objects"
                ) from error
        if path.suffix != ".parquet":
            raise InputError(f"{str(path)!r} is neither a .npy nor a .parquet file")
        X = sources.from_parquet(path, embedding="embedding")
    if isinstance(X, sources.Source):
        return np.concatenate([np.array(as_rows(block.X)) for block in X])
    return as_rows(X)


def _concepts(concept: Any) -> dict[str, Any]:
    """Concepts by name: a column, or a mapping or tuple of columns."""
    if isinstance(concept, Mapping):
        return {str(name): column for name, column in concept.items()}
    if isinstance(concept, tuple) and concept and not np.isscalar(concept[0]):
        return {f"concept[{i}]": column for i, column in enumerate(concept)}
    return {"concept": concept}


def _check_classes(name: str, encoded: Encoded) -> None:
    """Refuse a single class."""
    if isinstance(encoded, ClassCodes):
        seen = len(np.unique(encoded.codes[encoded.codes >= 0]))
        if seen < 2:
            raise LabelError(
                f"the {name} has {seen} class(es) among its rows; at least two are needed"
            )


def _levels(
    association: Any, y: Encoded, concepts: Mapping[str, Encoded], tied: Any, groups: Any
) -> tuple[tuple[float | None, ...], _protocol.Protocol | None]:
    """Levels of the sweep and its cells, or the natural split."""
    if association is None:
        if tied is not None:
            raise InputError("tied= is for association=; the natural split ties nothing")
        return (None,), None
    values = association if isinstance(association, Sequence | np.ndarray) else (association,)
    for p in values:
        _protocol.check_p(p)
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
    protocol = _protocol.Protocol.of(_cells.Coded(y.classes, y.codes), joint, tied, groups)
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


def _named(chosen: Any, known: tuple[str, ...], what: str) -> tuple[Named, ...]:
    """Erasers or heads with names and identities."""
    if isinstance(chosen, str) or not isinstance(chosen, Sequence | Mapping):
        chosen = (chosen,)
    pairs = list(chosen.items()) if isinstance(chosen, Mapping) else [(None, c) for c in chosen]
    found: dict[str, Named] = {}
    for given, thing in pairs:
        if isinstance(thing, str):
            if thing not in known:
                raise InputError(f"there is no {what} {thing!r}; choose from {', '.join(known)}")
            name, identity = thing, thing
        elif hasattr(thing, "get_params") and hasattr(thing, "fit"):
            name = type(thing).__name__
            identity = f"{type(thing).__module__}.{name}{sorted(thing.get_params().items())!r}"
        elif what == "eraser" and callable(thing):
            name = getattr(thing, "__name__", type(thing).__name__)
            identity = source_of(thing)
        else:
            raise InputError(
                f"{thing!r} is no {what}: pass one of {', '.join(known)}, an estimator"
                + (", or a function of moments that returns a Projection" * (what == "eraser"))
            )
        name = name if given is None else str(given)
        if name in found:
            raise InputError(f"two {what}s are named {name!r}; pass a dict to name them apart")
        found[name] = Named(name, thing, identity)
    if not found:
        raise InputError(f"no {what} is given; choose from {', '.join(known)}")
    return tuple(found.values())


def _metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """The caller's own metrics."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(callable(m) for m in metrics.values()):
        raise InputError("metrics must map names to functions of (y_true, y_pred)")
    return dict(metrics)


def _present(encoded: Encoded) -> NDArray[np.bool_]:
    if isinstance(encoded, ClassCodes):
        return np.asarray(encoded.codes >= 0)
    return np.ones(len(encoded.values), bool) if encoded.present is None else encoded.present


def _fingerprint(
    rows: NDArray[Any],
    labels: Sequence[Encoded],
    groups: NDArray[np.intp] | None,
    parts: NDArray[np.int8] | None,
) -> str:
    """Hash of the data: all labels, and all rows or, beyond 256 MiB, 65,536 evenly spaced ones."""
    digest = hashlib.sha256(repr((rows.shape, rows.dtype.str)).encode())
    step = 1 if rows.nbytes <= _WHOLE_HASH else max(1, len(rows) // _SAMPLED_ROWS)
    for start in range(0, len(rows), 8192 * step):
        digest.update(np.ascontiguousarray(rows[start : start + 8192 * step : step]).tobytes())
        release(rows)
    for encoded in labels:
        if isinstance(encoded, ClassCodes):
            digest.update(repr(encoded.classes).encode() + encoded.codes.tobytes())
        else:
            digest.update(encoded.values.tobytes() + _present(encoded).tobytes())
    for extra in (groups, parts):
        digest.update(b"-" if extra is None else extra.tobytes())
    return digest.hexdigest()[:16]
