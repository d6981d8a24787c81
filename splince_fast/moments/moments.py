"""Moments: everything that erasers need to know of the data, in one mergeable state.

Above 400 lines because it is the whole public face of the state, with its documentation; the work
is done in the modules beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import files
from splince_fast._runtime.arrays import as_rows, as_weights
from splince_fast._runtime.lock import ReadersWriterLock
from splince_fast.exceptions import (
    FileFormatError,
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NotEnoughDataError,
)
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, VariableName, encode
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.format import from_tensors, to_tensors
from splince_fast.moments.state import State
from splince_fast.moments.variable import ClassSums, Variable, check_consistent, check_ddof

Float = NDArray[np.float64]

_FORMAT = 1
_KIND = "moments"
_MOST_BLOCK_ROWS = 1 << 31


class Moments:
    """Streaming, mergeable first and second moments of x and of labelled variables.

    One pass over the data in blocks of any size gives the mean and covariance of x and its
    cross-covariance with every variable; from them any number of erasers follow. The state is
    float64 and takes O(d^2) memory whatever the number of rows.

    Contracts, to rounding: updating with a block equals merging the moments of that block;
    ``a + b`` equals the moments of both data sets, in any order or grouping; ``(a + b) - b``
    equals ``a``; a weight of 2 equals the row twice, a weight of 0 its absence.

    Parameters
    ----------
    block_rows : int, optional
        Rows that are reduced at a time; smaller updates wait until so many have come. The
        default is 4096, fewer where a block would exceed 64 MiB.
    kinds : mapping of str to {"classes", "continuous"}, optional
        Decides how a variable is read where its dtype does not: strings, bools and integers are
        classes, floats continuous.
    joint : sequence of tuples of str, optional
        Class-coded variables whose joint cells are accumulated, too, under the tuple as name:
        ``joint=[("gender", "race")]``.
    ledoit_wolf : bool
        Accumulate, too, what ``shrinkage="ledoit-wolf"`` needs of the fourth moments: O(d) more
        state and another pass over each block.

    Notes
    -----
    Every block is centred close to its own mean and merged by the pairwise formula of Chan, Golub
    and LeVeque (1983), so the result does not depend on offset, drift or order beyond rounding.
    Products are taken in float32 for data of at most 32 bits and added up in float64: entries of
    the covariance are then exact to about 1e-7 of the standard deviations, to 1e-6 for columns
    that take few distinct values, and to 4e-6 where a few rows of a block hold most of a column's
    sum of squares.

    A row whose label for some variable is missing counts for x and for the other variables.

    One thread at a time may use an object: a second one gets an error, not a wrong number.
    Different objects can be filled from different threads and then merged.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> X, z = rng.normal(size=(100, 3)), rng.integers(0, 2, size=100)
    >>> first = sf.Moments().update(X[:50], {"z": z[:50]})
    >>> second = sf.Moments().update(X[50:], {"z": z[50:]})
    >>> moments = first + second
    >>> moments.n_rows, moments.cross_covariance("z").shape
    (100, (3, 2))
    >>> bool(np.allclose(moments.covariance(), np.cov(X.T)))
    True
    """

    def __init__(
        self,
        *,
        block_rows: int | None = None,
        kinds: Mapping[str, str] | None = None,
        joint: Sequence[tuple[str, ...]] = (),
        ledoit_wolf: bool = False,
    ) -> None:
        if block_rows is not None:
            whole = isinstance(block_rows, int | np.integer) and not isinstance(block_rows, bool)
            if not whole or not 1 <= block_rows <= _MOST_BLOCK_ROWS:
                raise InputError(
                    f"block_rows is {block_rows!r}; it must be a positive integer, at most "
                    f"{_MOST_BLOCK_ROWS:,} (a block is held in memory)"
                )
            block_rows = int(block_rows)
        self._block_rows = block_rows
        if kinds is not None and not isinstance(kinds, Mapping):
            raise InputError(
                f"kinds is {kinds!r}; it must map names of variables to 'classes' or 'continuous'"
            )
        if not isinstance(joint, list | tuple) or not all(
            isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
            for names in joint
        ):
            raise InputError(
                f"joint is {joint!r}; it must be a list of tuples of names, such as "
                "[('gender', 'race')]"
            )
        self._kinds = dict(kinds or {})
        self._joint = tuple(tuple(names) for names in joint)
        self._ledoit_wolf = bool(ledoit_wolf)
        self._accumulator = Accumulator(block_rows, ledoit_wolf=self._ledoit_wolf)
        self._lock = ReadersWriterLock(
            "these moments are in use by another thread; give each thread its own Moments and add "
            "them up afterwards"
        )

    # -- filling ---------------------------------------------------------------------------

    def update(self, X: Any, labels: Any = None, *, sample_weight: Any = None) -> Moments:
        """Add rows.

        Parameters
        ----------
        X : array-like of shape (n, d)
            float16, bfloat16, float32, float64, integers or bools; any memory layout; NumPy,
            torch, pandas or polars. n may be 0.
        labels : mapping of str to column(s), frame, or a single column, optional
            See :mod:`splince_fast.labels`; a bare column is the variable "concept".
        sample_weight : array-like of shape (n,), optional
            Non-negative frequencies; rows of weight 0 are left out.

        Returns
        -------
        Moments
            The object itself.

        Raises
        ------
        InputError, NonFiniteError, LabelError
            Before anything changes: after a failed update the state is what it was.
        """
        with self._lock:
            rows = as_rows(X, width=self._accumulator.width)
            weight = as_weights(sample_weight, len(rows))
            encoded = encode(labels, len(rows), kinds=self._kinds or None, joint=self._joint)
            check_consistent(self._accumulator.variables, encoded)
            if weight is not None and (weight == 0).any():
                chosen = weight > 0
                rows, weight = rows[chosen], weight[chosen]
                encoded = {name: _choose(column, chosen) for name, column in encoded.items()}
            if len(rows) == 0:
                return self
            self._accumulator.feed(rows, weight, encoded)
        return self

    @classmethod
    def from_blocks(
        cls,
        blocks: Any,
        *,
        progress: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = 60.0,
        **parameters: Any,
    ) -> Moments:
        """Accumulate a whole source, reading the next block while one is accumulated.

        Parameters
        ----------
        blocks : Source or iterable of (X, labels) or (X, labels, sample_weight)
            See :mod:`splince_fast.sources`.
        progress : bool
            Show rows/s, bytes/s and the time left on stderr.
        checkpoint : path, optional
            The state is written there atomically now and then, and at the end. If the file
            exists, accumulation resumes behind the last block that it holds; the result is the
            same to the last bit as without the interruption.
        checkpoint_seconds : float
            How often; 0 is after every block.
        **parameters
            block_rows, kinds, joint and ledoit_wolf, as for the class.

        Raises
        ------
        FileFormatError
            The checkpoint belongs to another source or other parameters.
        """
        from splince_fast import sources

        if not isinstance(checkpoint_seconds, int | float) or not checkpoint_seconds >= 0:
            raise InputError(
                f"checkpoint_seconds is {checkpoint_seconds!r}; it must be a number of at least 0"
            )
        source = sources.as_source(blocks)
        moments = cls(**parameters)
        identity = {"name": source.name, "n_rows": source.n_rows, "n_features": source.n_features}
        position = 0
        if checkpoint is not None and os.path.exists(os.fspath(checkpoint)):
            found, stream = cls._read(checkpoint)
            same = found._parameters() == moments._parameters()
            if stream is None or stream["source"] != identity or not same:
                raise FileFormatError(
                    f"the checkpoint {os.fspath(checkpoint)} is of another source or of other "
                    f"parameters (it holds {stream}); delete it or name another file"
                )
            moments, position = found, stream["position"]
        resumed = position > 0
        written = time.monotonic()
        with (
            sources.Progress(source.n_rows, source.nbytes, enabled=progress) as bar,
            sources.prefetched(source, position) as reader,
        ):
            bar.skip(moments.n_rows)
            for block in reader:
                if resumed:
                    moments._check_continuation(block, checkpoint)
                    resumed = False
                moments.update(block.X, block.labels, sample_weight=block.sample_weight)
                position += 1
                bar.advance(len(block.X), getattr(block.X, "nbytes", 0))
                if checkpoint is not None and time.monotonic() - written >= checkpoint_seconds:
                    moments._write(checkpoint, {"source": identity, "position": position})
                    written = time.monotonic()
        if checkpoint is not None:
            moments._write(checkpoint, {"source": identity, "position": position})
        return moments

    def _check_continuation(self, block: Any, checkpoint: object) -> None:
        """Raise FileFormatError if the block behind a checkpoint brings other variables."""
        fresh = encode(block.labels, len(block.X), kinds=self._kinds or None, joint=self._joint)
        foreign = [name for name in fresh if name not in self._accumulator.variables]
        if foreign:
            raise FileFormatError(
                f"the checkpoint {checkpoint} was written with the variables "
                f"{list(self._accumulator.variables)}, and the data now bring {foreign}; pass the "
                "same labels, delete the checkpoint, or name another file"
            )

    # -- algebra ---------------------------------------------------------------------------

    def __add__(self, other: Moments) -> Moments:
        """Moments of both data sets together."""
        return self._combined(other, 1)

    def __iadd__(self, other: Moments) -> Moments:
        """Merge the other moments into this object."""
        with self._lock:
            self._accumulator = self._combined(other, 1)._accumulator
        return self

    def __sub__(self, part: Moments) -> Moments:
        """Moments of the rows that are not in `part`, which must have been added before."""
        return self._combined(part, -1)

    def __radd__(self, other: object) -> Moments:
        """So that ``sum(parts)`` works, which begins with 0."""
        if isinstance(other, int) and other == 0:
            return self.copy()
        return self._combined(other, 1)

    def _combined(self, other: object, sign: int) -> Moments:
        if not isinstance(other, Moments):
            raise InputError(f"moments combine with moments, not with {type(other).__name__}")
        if other is self:
            other = self.copy()
        clash = {k for k in self._kinds.keys() & other._kinds if self._kinds[k] != other._kinds[k]}
        if clash:
            raise IncompatibleMomentsError(
                f"the two sides read {sorted(clash)} by different kinds=; accumulate both alike"
            )
        with self.held() as ours, other.held() as theirs:
            return self._sibling(ours.merged(theirs, sign))

    def _sibling(self, accumulator: Accumulator) -> Moments:
        """New moments with the same parameters around an accumulator."""
        new = type(self)(**self._parameters())
        new._accumulator = accumulator
        return new

    def _parameters(self) -> dict[str, Any]:
        """The arguments that would make an empty object like this one."""
        return {
            "block_rows": self._block_rows,
            "kinds": self._kinds,
            "joint": self._joint,
            "ledoit_wolf": self._ledoit_wolf,
        }

    def copy(self) -> Moments:
        """An independent copy, rows that wait for a full block included."""
        with self._lock.reading():
            return self._sibling(self._accumulator.copy())

    # -- reading ---------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """Rows seen, those of weight 0 not counted."""
        return self._accumulator.n_rows

    @property
    def n_features(self) -> int | None:
        """Width d of the rows; None before the first of them."""
        return self._accumulator.width

    @property
    def weight(self) -> float:
        """Total weight of the rows seen."""
        with self.held() as held:
            return 0.0 if held.state is None else held.state.weight

    @property
    def mean(self) -> Float:
        """(d,) float64: weighted mean of x.

        Raises
        ------
        NotEnoughDataError
            Nothing was seen yet.
        """
        return self.flushed().mean

    def covariance(self, *, ddof: float = 1) -> Float:
        """(d, d) float64: sum w (x - mean)(x - mean)^T / (weight - ddof), in units of x squared.

        Parameters
        ----------
        ddof : float
            Delta degrees of freedom.

        Returns
        -------
        ndarray of shape (d, d)
            A new array.

        Raises
        ------
        NotEnoughDataError
            The total weight is not above `ddof`.
        """
        from splince_fast._kernels import blas

        check_ddof(ddof)
        with self.held() as held:
            state = held.seen()
            if state.weight - ddof <= 0:
                raise NotEnoughDataError(
                    f"a covariance with ddof = {ddof:g} needs a total weight above it, and the "
                    f"rows seen weigh {state.weight:g}; add rows or pass ddof=0"
                )
            full = state.scatter / (state.weight - ddof)
        blas.mirror_lower(full)
        return full

    def cross_covariance(self, name: VariableName, *, ddof: float = 1) -> Float:
        """(d, k) float64: covariance of x with a variable, over the rows that carry its label.

        One column per class, of its 0/1 indicator and in the order of :meth:`classes`, or per
        continuous column.

        Parameters
        ----------
        name : str or tuple of str
            The variable.
        ddof : float
            Delta degrees of freedom.

        Returns
        -------
        ndarray of shape (d, k)
            A new array.

        Raises
        ------
        UnknownVariableError
            No such variable was seen.
        NotEnoughDataError
            The weight of the labelled rows is not above `ddof`.
        """
        with self.held() as held:
            return held.variable(name).cross_covariance(ddof, name)

    def classes(self, name: VariableName) -> tuple[ClassName, ...]:
        """Names of the classes of a class-coded variable, in the order of its columns.

        Parameters
        ----------
        name : str or tuple of str
            The variable.

        Raises
        ------
        UnknownVariableError, LabelError
            No such variable, or a continuous one.
        """
        known = self.variable(name)
        if not isinstance(known, ClassSums):
            raise LabelError(f"the variable {name!r} is continuous; it has no classes")
        return tuple(known.names)

    def class_counts(self, name: VariableName) -> dict[ClassName, int]:
        """Rows of each class of a class-coded variable; errors as for :meth:`classes`.

        Parameters
        ----------
        name : str or tuple of str
            The variable.

        Returns
        -------
        dict
            Number of rows by class.
        """
        names = self.classes(name)
        known = self.variable(name)
        if not isinstance(known, ClassSums):
            raise LabelError(f"the variable {name!r} is continuous; it has no classes")
        return dict(zip(names, map(int, known.rows), strict=True))

    @property
    def variables(self) -> dict[VariableName, str]:
        """Variables seen, each with its kind: "classes" or "continuous"."""
        return {name: variable.kind for name, variable in self._accumulator.variables.items()}

    @property
    def nbytes(self) -> int:
        """Bytes held: the state and the work buffers."""
        return self._accumulator.nbytes

    @contextmanager
    def held(self) -> Iterator[Accumulator]:
        """What the methods compute from: every row merged, and no other thread can change it.

        Any number of threads may be in it at a time: they solve in parallel.
        """
        accumulator = self._accumulator
        self._lock.begin_reading(lambda: accumulator.waiting, accumulator.flush)
        try:
            yield accumulator
        finally:
            self._lock.end_reading()

    def flushed(self) -> State:
        """The state of x with every row merged."""
        with self.held() as held:
            return held.seen()

    def variable(self, name: VariableName) -> Variable:
        """The sums of one variable with every row merged.

        Parameters
        ----------
        name : str or tuple of str
            The variable.

        Raises
        ------
        UnknownVariableError
            No such variable was seen.
        """
        with self.held() as held:
            return held.variable(name)

    def __repr__(self) -> str:
        if self.n_features is None:
            return "Moments(empty)"
        variables = ", ".join(
            f"{name!r}: {v.n_columns} {'classes' if v.kind == 'classes' else 'columns'}"
            for name, v in self._accumulator.variables.items()
        )
        return (
            f"Moments({self.n_rows:,} rows, {self.n_features} features, {{{variables}}}, "
            f"{self.nbytes / 2**20:.1f} MiB)"
        )

    # -- persistence -----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, rows that wait for a full block included, to a safetensors file.

        Parameters
        ----------
        path : path
            The file; whatever happens, it holds either what it held before or the whole state.
        """
        self._write(path, None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Moments:
        """Read a state back; it continues exactly where the saved one stood.

        Parameters
        ----------
        path : path
            A file written by :meth:`save`, or a checkpoint.

        Raises
        ------
        FileFormatError
            Truncated, foreign, inconsistent, or written by a newer version.
        FileNotFoundError
            There is no such file.
        """
        return cls._read(path)[0]

    def _write(self, path: str | os.PathLike[str], stream: dict[str, Any] | None) -> None:
        with self._lock.reading():
            tensors, metadata = self._serialised()
            files.write(path, _KIND, _FORMAT, tensors, {**metadata, "stream": stream})

    def _serialised(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Tensors and metadata from which `_deserialised` makes an equal object."""
        tensors, metadata = to_tensors(self._accumulator)
        joint = [list(names) for names in self._joint]
        return tensors, {**metadata, "kinds": self._kinds, "joint": joint}

    @classmethod
    def _deserialised(
        cls, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]
    ) -> Moments:
        joint = [tuple(names) for names in metadata["joint"]]
        new = cls(
            block_rows=metadata["block_rows"],
            kinds=metadata["kinds"],
            joint=joint,
            ledoit_wolf=metadata["ledoit_wolf"],
        )
        new._accumulator = from_tensors(tensors, metadata)
        return new

    @classmethod
    def _read(cls, path: str | os.PathLike[str]) -> tuple[Moments, dict[str, Any] | None]:
        tensors, metadata = files.read(path, _KIND, _FORMAT)
        try:
            return cls._deserialised(tensors, metadata), metadata["stream"]
        except FileFormatError as error:
            raise FileFormatError(f"{os.fspath(path)} is inconsistent: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FileFormatError(
                f"{os.fspath(path)} is inconsistent ({type(error).__name__}: {error}); it was "
                "edited or damaged: accumulate again"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        with self._lock.reading():
            tensors, metadata = self._serialised()
            return {"tensors": {k: t.copy() for k, t in tensors.items()}, "metadata": metadata}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(self._deserialised(state["tensors"], state["metadata"]).__dict__)


def _choose(column: Encoded, chosen: NDArray[np.bool_]) -> Encoded:
    """The rows of a column where `chosen`."""
    if isinstance(column, ClassCodes):
        codes = column.codes[chosen]
        seen = np.unique(codes[codes >= 0])
        place = np.full(len(column.classes) + 1, -1, np.intp)
        place[seen] = np.arange(len(seen))
        return ClassCodes(tuple(column.classes[i] for i in seen), place[codes])
    present = None if column.present is None else column.present[chosen]
    return Columns(column.columns, column.values[chosen], present)
