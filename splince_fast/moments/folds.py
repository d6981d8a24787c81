"""Moments of several parts of one stream, so that what is fitted on some is judged on others."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import files
from splince_fast._runtime.arrays import column_names, name_columns
from splince_fast._runtime.hashing import splitmix64
from splince_fast._runtime.interrupts import Deferred
from splince_fast._runtime.keywords import check_keywords
from splince_fast._runtime.memory import total_memory
from splince_fast._solve.options import is_integer
from splince_fast.exceptions import FileFormatError, InputError, LabelError, NonFiniteError
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, VariableName, class_key
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.entry import Given, read_update
from splince_fast.moments.format import NEWEST, format_of, from_tensors, part_of, to_tensors
from splince_fast.moments.moments import Moments, consistent
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.variables import check_column

_KIND = "folds"
_MOST = 1024

# With fewer rows a half says little of rows not seen.
LEAST_ROWS = 200
# Up to so many features factoring takes no time; beyond, there must be rows for it.
_FEW_FEATURES, _ROWS_PER_FEATURE = 512, 4
# Two states and their factors, which take 2 d^2 numbers each where x is rank deficient, may take
# this share of the memory of the machine.
_MATRICES, _SHARE = 6, 0.25


def worthwhile(n_rows: int | None, n_features: int | None) -> bool:
    """Whether a fit deals its rows to two folds, so that its report speaks of rows not seen.

    At least 200 rows; at least 4 per feature where there are more than 512, since factoring two
    halves would cost more than reading the rows; and 6 d^2 doubles in a quarter of the memory of
    the machine. What is not known beforehand does not stand against it.

    Parameters
    ----------
    n_rows, n_features : int or None
        Shape of the rows, where it is known.

    Returns
    -------
    bool
        The same for the same shape on the same machine: the eraser depends on it by rounding.

    Examples
    --------
    >>> from splince_fast.moments.folds import worthwhile
    >>> worthwhile(10_000, 384), worthwhile(100, 3), worthwhile(3000, 1024)
    (True, False, False)
    """
    if n_rows is not None and n_rows < LEAST_ROWS:
        return False
    if n_features is None:
        return True
    rows = math.inf if n_rows is None else n_rows
    if n_features > _FEW_FEATURES and rows < _ROWS_PER_FEATURE * n_features:
        return False
    memory = total_memory()
    return memory is None or 8 * _MATRICES * n_features**2 <= _SHARE * memory


class Folds(Sequence[Moments]):
    """A sequence of moments, to which the rows of a stream are dealt.

    Row number i of the stream goes to fold ``splitmix64(i) mod n``; with `groups`, every row of a
    class of that variable goes where the digest of the class says. The choice depends on nothing
    else, so that the same stream gives the same bits whatever the size of its blocks.

    Parameters
    ----------
    n_folds : int
        At least 2.
    groups : str, optional
        A variable of the labels. It serves the grouping alone and is not accumulated; a row
        without its label is dealt by its number.
    **parameters
        As for :class:`Moments`.

    Attributes
    ----------
    feature_names : tuple of str or None
        Names of the columns of X, where the first rows came as a frame; for messages.

    Raises
    ------
    InputError
        `n_folds` or `groups` out of range.

    Notes
    -----
    Every method takes them in place of moments: the eraser is that of all rows, its report says
    what it does to rows not seen (:func:`splince_fast.cross_report`), and ``shrinkage="cv"`` can
    be chosen.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> X, z = rng.normal(size=(1000, 3)), rng.integers(0, 2, size=1000)
    >>> folds = sf.Moments.from_blocks([(X, {"z": z})], folds=2)
    >>> len(folds), folds.total.n_rows
    (2, 1000)
    >>> eraser = sf.leace(folds[0], erase="z")  # to be judged on folds[1]
    """

    def __init__(self, n_folds: int, *, groups: str | None = None, **parameters: Any) -> None:
        if not is_integer(n_folds) or not 2 <= n_folds <= _MOST:
            raise InputError(f"folds is {n_folds!r}; it must be an integer from 2 to {_MOST}")
        if groups is not None and not isinstance(groups, str):
            raise InputError(f"groups is {groups!r}; it must be the name of a variable")
        check_keywords(parameters, Moments, where="Moments")
        self._folds = tuple(Moments(**parameters) for _ in range(int(n_folds)))
        self._groups = groups
        self._position = 0
        self.feature_names: tuple[str, ...] | None = None

    # -- a sequence ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._folds)

    @overload
    def __getitem__(self, index: int) -> Moments: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Moments, ...]: ...

    def __getitem__(self, index: int | slice) -> Moments | tuple[Moments, ...]:
        return self._folds[index]

    def __iter__(self) -> Iterator[Moments]:
        return iter(self._folds)

    def __repr__(self) -> str:
        return f"Folds({len(self)} of {self.n_rows:,} rows: {self._folds[0]!r}, ...)"

    @property
    def total(self) -> Moments:
        """(new) moments of all rows: the folds merged."""
        result = self._folds[0].copy()
        for fold in self._folds[1:]:
            result += fold
        return result

    @property
    def n_rows(self) -> int:
        """Rows of all folds."""
        return sum(fold.n_rows for fold in self._folds)

    @property
    def n_features(self) -> int | None:
        """Width d of the rows; None before the first of them."""
        return next((fold.n_features for fold in self._folds if fold.n_features), None)

    @property
    def parameters(self) -> Parameters:
        """The arguments that each of the moments was made with."""
        return self._folds[0].parameters

    @property
    def variables(self) -> dict[VariableName, str]:
        """Variables seen in any fold, each with its kind."""
        return {name: kind for fold in self._folds for name, kind in fold.variables.items()}

    # -- filling ---------------------------------------------------------------------------

    @classmethod
    def from_blocks(
        cls,
        blocks: Any,
        *,
        folds: int = 2,
        groups: str | None = None,
        progress: bool | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = 60.0,
        **parameters: Any,
    ) -> Folds:
        """Accumulate a whole source, its rows split into folds.

        Parameters
        ----------
        blocks : Source or iterable of (X, labels) or (X, labels, sample_weight)
            See :mod:`splince_fast.sources`.
        folds : int
            Number of folds, at least 2.
        groups : str, optional
            Name of a class-coded variable of the labels whose classes stay together.
        progress, checkpoint, checkpoint_seconds
            As for :meth:`Moments.from_blocks`.
        **parameters
            The arguments of :class:`Moments`.

        Returns
        -------
        Folds
            With the classes of every variable in sorted order.

        Raises
        ------
        FileFormatError, InputError
            As :meth:`Moments.from_blocks`.

        Examples
        --------
        >>> import numpy as np
        >>> import splince_fast as sf
        >>> rng = np.random.default_rng(0)
        >>> X, z = rng.normal(size=(1000, 3)), rng.integers(0, 2, size=1000)
        >>> folds = sf.Folds.from_blocks([(X, {"z": z})], folds=2)
        >>> sf.cross_report(folds, erase="z", method="leace").method
        'leace'
        """
        from splince_fast import sources
        from splince_fast.moments.sampled import with_rate
        from splince_fast.moments.stream import accumulate

        source = sources.as_source(blocks)
        check_keywords(parameters, Moments, where="Moments")
        empty = cls(folds, groups=groups, **with_rate(parameters, source, folds))
        return accumulate(
            source, empty, progress=progress, checkpoint=checkpoint,
            checkpoint_seconds=checkpoint_seconds,
        )._sort_classes()  # fmt: skip

    def update(self, X: Any, labels: Any = None, *, sample_weight: Any = None) -> Folds:
        """Split rows into the folds.

        Parameters
        ----------
        X, labels, sample_weight
            As for :meth:`Moments.update`.

        Raises
        ------
        InputError, NonFiniteError, LabelError
            Before anything changes.
        """
        # Read once, and checked as a whole before it is added to any fold.
        given = read_update(X, labels, sample_weight, None, self._wide()._accumulator)
        if not self._position and hasattr(X, "columns"):
            self.feature_names = tuple(map(str, X.columns))
        n = given.n
        try:
            given.rows.check()
        except NonFiniteError as error:
            name_columns(error, column_names(X))
            raise
        fold_of = self._deal(given, n)
        encoded = {name: v for name, v in given.encoded.items() if name != self._groups}
        for fold in self._folds:
            known = fold._accumulator.variables
            for name in encoded.keys() & known.keys():
                check_column(known[name], encoded[name], name)
        with Deferred(), ExitStack() as locks:
            for fold in self._folds:
                locks.enter_context(fold._lock)
            chosen = [np.flatnonzero(fold_of == i) for i in range(len(self))]
            # A block of each fold in turn: rows that one of them has read are near for the others.
            begun = [0] * len(self)
            while any(first < len(index) for first, index in zip(begun, chosen, strict=True)):
                for i, fold in enumerate(self._folds):
                    room = fold._accumulator.room(given.rows)
                    index = chosen[i][begun[i] : begun[i] + room]
                    if len(index):
                        fold._accumulator.update(
                            given.rows,
                            None if given.weight is None else given.weight[index],
                            {name: _rows_of(column, index) for name, column in encoded.items()},
                            in_order=True,
                            checked=True,
                            index=index,
                        )
                    begun[i] += len(index)
            self._position += given.n_given
        return self

    def _wide(self) -> Moments:
        """A fold that knows the width, if any does."""
        return next((fold for fold in self._folds if fold.n_features), self._folds[0])

    def _deal(self, given: Given, n: int) -> NDArray[np.intp]:
        """The fold of each row."""
        index = np.arange(n) if given.kept is None else given.kept
        hashed = splitmix64(index.astype(np.uint64) + np.uint64(self._position))
        if self._groups is not None:
            column = given.encoded.get(self._groups)
            if not isinstance(column, ClassCodes):
                raise LabelError(
                    f"groups names {self._groups!r}, which is not a class-coded variable of the "
                    "labels; pass the ids of the groups as strings or integers"
                )
            of_class = np.array([*map(_digest, column.classes), 0], np.uint64)
            hashed = np.where(column.codes >= 0, of_class[column.codes], hashed)
        return (hashed % np.uint64(len(self))).astype(np.intp)

    def _sort_classes(self) -> Folds:
        """Give every fold the same classes in sorted order, whatever the size of the blocks."""
        for name, kind in self.variables.items():
            if kind != "classes":
                continue
            known = [fold._accumulator.variables.get(name) for fold in self._folds]
            names = {class_key(c): c for v in known if v for c in v.class_names(name)}
            order = [names[key] for key in sorted(names, key=repr)]
            for fold in self._folds:
                with fold._locked() as held, Deferred():
                    if held.state is not None:
                        width = held.state.width
                        sums = held.variables.get(name, ClassSums.without_rows(width))
                        held.variables[name] = cast(ClassSums, sums).in_order(order)
        return self

    # -- storing ---------------------------------------------------------------------------

    def _arguments(self) -> dict[str, Any]:
        """The arguments of empty folds of the same parameters, as JSON."""
        return {"folds": len(self), "groups": self._groups, **self.parameters.as_arguments()}

    def _write_checkpoint(self, path: str | os.PathLike[str], stream: dict[str, Any]) -> None:
        """Write the folds and the position in their source."""
        tensors: dict[str, NDArray[Any]] = {}
        metadata: list[dict[str, Any]] = []
        for i, fold in enumerate(self._folds):
            with fold._lock.reading():
                own, described = to_tensors(fold._accumulator)
                tensors |= {f"fold.{i}.{key}": tensor.copy() for key, tensor in own.items()}
                metadata.append(described)
        described = {"groups": self._groups, "position": self._position, "stream": stream}
        version = format_of(self.parameters)
        files.write(path, _KIND, version, tensors, {"folds": metadata, **described})

    def _read_checkpoint(self, path: str | os.PathLike[str]) -> tuple[Folds, Any]:
        """The folds and the position in their source that a checkpoint holds."""
        tensors, metadata = files.read(path, _KIND, NEWEST)
        with consistent(path):
            described, groups, position = (
                metadata["folds"], metadata["groups"], metadata["position"]
            )  # fmt: skip
            found = Folds(len(described), groups=groups)
            if not isinstance(position, int) or not 0 <= position < 1 << 63:
                raise FileFormatError("the number of rows seen is negative or no number")
            found._position = position
            found._folds = tuple(
                Moments._around(from_tensors(part_of(tensors, f"fold.{i}."), own))
                for i, own in enumerate(described)
            )
            return found, metadata["stream"]


def _digest(name: ClassName) -> int:
    """64 bits that depend on the name of a class alone."""
    digest = hashlib.blake2b(repr(class_key(name)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _rows_of(column: Encoded, chosen: NDArray[np.intp]) -> Encoded:
    """Some rows of an encoded column, with all its classes."""
    if isinstance(column, ClassCodes):
        return ClassCodes(column.classes, column.codes[chosen])
    present = None if column.present is None else column.present[chosen]
    return Columns(column.columns, column.values[chosen], present)
