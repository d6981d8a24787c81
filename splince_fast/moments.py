"""Moments: everything that erasers need to know of the data, in one mergeable state."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast import _files, _interrupts
from splince_fast._stage import LabelledRows, Stage
from splince_fast._state import EPS32, EPS64, State, buffer_rows, reduce_block
from splince_fast._validation import as_rows, as_weights, check_values, working_dtype
from splince_fast._variables import ClassSums, ColumnSums, Variable, check_tensors
from splince_fast.exceptions import (
    FileFormatError,
    IncompatibleMomentsError,
    InputError,
    LabelError,
    NotEnoughDataError,
    SplinceError,
    UnknownVariableError,
)
from splince_fast.labels import (
    ClassCodes,
    ClassName,
    Columns,
    Encoded,
    VariableName,
    class_key,
    encode,
)

Float = NDArray[np.float64]

_FORMAT = 1
_KIND = "moments"
_KINDS: dict[str, type[ClassSums] | type[ColumnSums]] = {
    "classes": ClassSums,
    "continuous": ColumnSums,
}
_BLOCK_BYTES = 1 << 26


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

    Notes
    -----
    Every block is centred by its own mean and merged by the pairwise formula of Chan, Golub and
    LeVeque (1983), so the result does not depend on offset, drift or order beyond rounding.
    Products are taken in float32 for data of at most 32 bits and added up in float64.

    A row whose label for some variable is missing counts for x and for the other variables.

    One thread at a time may use an object: a second one gets an error, not a wrong number. Different
    objects can be filled from different threads and then merged.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> X, z = rng.normal(size=(100, 3)), rng.integers(0, 2, size=100)
    >>> halves = sf.Moments().update(X[:50], {"z": z[:50]}), sf.Moments().update(X[50:], {"z": z[50:]})
    >>> moments = halves[0] + halves[1]
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
    ) -> None:
        if block_rows is not None and (not isinstance(block_rows, int) or block_rows < 1):
            raise InputError(f"block_rows is {block_rows!r}; it must be a positive integer")
        self._block_rows = block_rows
        self._kinds = dict(kinds or {})
        self._joint = tuple(tuple(names) for names in joint)
        self._width: int | None = None
        self._state: State | None = None
        self._variables: dict[VariableName, Variable] = {}
        self._stage: Stage | None = None
        self._centred: NDArray[Any] | None = None  # work: a centred block
        self._product: NDArray[np.float32] | None = None  # work: its product, if float32
        self._lock = threading.Lock()

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
        with self._exclusive():
            rows = as_rows(X, width=self._width)
            weight = as_weights(sample_weight, len(rows))
            encoded = encode(labels, len(rows), kinds=self._kinds or None, joint=self._joint)
            self._check_kinds(encoded)
            if weight is not None and (weight == 0).any():
                chosen = weight > 0
                rows, weight = rows[chosen], weight[chosen]
                encoded = {name: _choose(column, chosen) for name, column in encoded.items()}
            if len(rows) == 0:
                return self
            check_values(rows)
            self._feed(rows, weight, encoded)
        return self

    @classmethod
    def from_blocks(
        cls,
        blocks: Any,
        *,
        progress: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = 60.0,
        block_rows: int | None = None,
        kinds: Mapping[str, str] | None = None,
        joint: Sequence[tuple[str, ...]] = (),
    ) -> Moments:
        """Accumulate a whole source, reading the next block while one is accumulated.

        Parameters
        ----------
        blocks : Source or iterable of (X, labels) or (X, labels, sample_weight)
            See :mod:`splince_fast.sources`.
        progress : bool
            Show rows/s, bytes/s and the time left on stderr.
        checkpoint : path, optional
            The state is written there atomically every `checkpoint_seconds`, and at the end. If
            the file exists, accumulation resumes behind the last block that it holds; the result
            is the same to the last bit as without the interruption.
        block_rows, kinds, joint
            As for the class.

        Raises
        ------
        FileFormatError
            The checkpoint belongs to another source or other parameters.
        """
        from splince_fast import sources

        source = sources.as_source(blocks)
        moments = cls(block_rows=block_rows, kinds=kinds, joint=joint)
        identity = {"name": source.name, "n_rows": source.n_rows, "n_features": source.n_features}
        position = 0
        if checkpoint is not None and os.path.exists(checkpoint):
            found, stream = cls._read(checkpoint)
            same = found._block_rows == block_rows and found._kinds == moments._kinds
            if (
                stream is None
                or stream["source"] != identity
                or not same
                or found._joint != moments._joint
            ):
                raise FileFormatError(
                    f"the checkpoint {os.fspath(checkpoint)} is of another source or of other "
                    f"parameters (it holds {stream}); delete it or name another file"
                )
            moments, position = found, stream["position"]
        written = time.monotonic()
        with (
            sources.Progress(source.n_rows, source.nbytes, enabled=progress) as bar,
            sources.prefetched(source, position) as reader,
        ):
            bar.skip(moments.n_rows)
            for block in reader:
                moments.update(block.X, block.labels, sample_weight=block.sample_weight)
                position += 1
                bar.advance(len(block.X), getattr(block.X, "nbytes", 0))
                if checkpoint is not None and time.monotonic() - written >= checkpoint_seconds:
                    moments._write(checkpoint, {"source": identity, "position": position})
                    written = time.monotonic()
        if checkpoint is not None:
            moments._write(checkpoint, {"source": identity, "position": position})
        return moments

    def _check_kinds(self, encoded: Mapping[VariableName, Encoded]) -> None:
        """A variable stays what its first block said it is."""
        for name, column in encoded.items():
            known = self._variables.get(name)
            if known is None or (isinstance(column, ClassCodes) and not column.classes):
                continue
            found = "classes" if isinstance(column, ClassCodes) else "continuous"
            if known.kind != found:
                raise LabelError(
                    f"the variable {name!r} was {known.kind} in earlier blocks and is {found} in "
                    f"this one; give it one dtype, or fix it with Moments(kinds={{{name!r}: "
                    f"{known.kind!r}}})"
                )
            if isinstance(known, ColumnSums) and isinstance(column, Columns):
                names, default = list(column.columns), [str(i) for i in range(known.n_columns)]
                if len(names) != known.n_columns or (
                    names != known.names and default not in (names, known.names)
                ):
                    raise LabelError(
                        f"the variable {name!r} had the columns {known.names} in earlier blocks "
                        f"and has {names} in this one; pass the same columns in the same order"
                    )

    def _feed(
        self, rows: NDArray[Any], weight: Float | None, encoded: Mapping[VariableName, Encoded]
    ) -> None:
        """Add valid rows: whole blocks directly where their layout allows, others by the stage."""
        dtype, width = working_dtype(rows.dtype), rows.shape[1]
        capacity = self._capacity(width)
        stage = self._stage
        if stage is None or stage.dtype != dtype:
            self._flush()
            stage = Stage(capacity, width, dtype)
            self._centred = np.empty((buffer_rows(capacity, width, dtype), width), dtype)
            if dtype == np.float32 and self._product is None:
                self._product = np.empty((width, width), np.float32, order="F")
        if self._state is None:
            head = rows[: min(len(rows), 256)].astype(np.float64)
            self._state = State.empty(head.mean(axis=0))
        with _interrupts.deferred():
            self._stage, self._width = stage, width
            block = self._labelled(rows, weight, encoded)
            direct = rows.dtype == dtype and rows.flags.c_contiguous and rows.flags.aligned
            start, n = 0, len(rows)
            while start < n:
                if direct and not stage.filled and n - start >= capacity:
                    stop = start + capacity
                    self._merge_rows(block.slice(start, stop))
                else:
                    stop = min(n, start + stage.room)
                    stage.append(block.slice(start, stop))
                    if not stage.room:
                        self._flush()
                start = stop

    def _capacity(self, width: int) -> int:
        """Rows of a block."""
        if self._block_rows is not None:
            return self._block_rows
        return max(1, min(4096, _BLOCK_BYTES // (8 * width)))

    def _labelled(
        self, rows: NDArray[Any], weight: Float | None, encoded: Mapping[VariableName, Encoded]
    ) -> LabelledRows:
        """Rows with labels in terms of the state: new variables and classes get their place."""
        block = LabelledRows(rows, weight)
        width = rows.shape[1]
        for name, column in encoded.items():
            known = self._variables.get(name)
            if isinstance(column, ClassCodes):
                if not column.classes:
                    continue
                if known is None:
                    known = self._variables[name] = ClassSums.empty(width)
                if isinstance(known, ClassSums):
                    known.grow(list(column.classes))
                    lookup = [known.index[class_key(c)] for c in column.classes]
                    # -1, a missing label, picks the last entry.
                    block.codes[name] = np.array([*lookup, -1], np.intp)[column.codes]
            else:
                present = column.present
                if present is not None and not present.any():
                    continue
                if known is None:
                    shown = column.values if present is None else column.values[present]
                    reference = shown.mean(axis=0)
                    self._variables[name] = ColumnSums.empty(width, column.columns, reference)
                values = column.values
                block.values[name] = (
                    values if present is None else np.where(present[:, None], values, np.nan)
                )
        return block

    def _flush(self) -> None:
        """Merge the staged rows."""
        if self._stage is not None and self._stage.filled:
            with _interrupts.deferred():
                self._merge_rows(self._stage.contents())
                self._stage.clear()

    def _merge_rows(self, block: LabelledRows) -> None:
        """Reduce a block of rows and add it to the state and to the variables."""
        if self._state is None or self._centred is None:
            raise RuntimeError("rows were merged before the state was made")
        n = len(block)
        weight = np.empty(0) if block.weight is None else np.ascontiguousarray(block.weight)
        # Sums are kept only for the classes that occur: `where` lists them, per variable.
        codes = np.full((len(block.codes), n), -1, np.intp)
        where: list[NDArray[np.intp]] = []
        n_codes = 0
        for row, (name, column) in zip(codes, block.codes.items(), strict=True):
            known = self._variables[name]
            place = np.full(known.n_columns + 1, -1, np.intp)
            present = np.flatnonzero(np.bincount(column + 1, minlength=known.n_columns + 1)[1:])
            place[present] = n_codes + np.arange(len(present))
            row[:] = place[column]
            where.append(present)
            n_codes += len(present)
        values, pieces = self._weighted_values(block, weight)
        reduced = reduce_block(
            block.rows, weight, self._state.reference, codes, n_codes, values, self._centred
        )
        if reduced.centred.dtype == np.float32:
            self._state.merge_block(reduced, self._product)
        else:
            self._state.merge_block(reduced, None)
        start = 0
        for row, name, present in zip(codes, block.codes, where, strict=True):
            known = self._variables[name]
            if isinstance(known, ClassSums):
                known.allocate()
                stop = start + len(present)
                shown = row >= 0
                slots = row[shown] - start
                counts = np.bincount(slots, minlength=len(present)).astype(np.int64)
                weights = counts.astype(np.float64)
                if weight.size:
                    weights = np.asarray(np.bincount(slots, weight[shown], len(present)), float)
                known.add(present, counts, weights, reduced.class_sums[start:stop])
                start = stop
        start = 0
        for name, (n_present, total, z_sum, squares) in pieces.items():
            known = self._variables[name]
            if isinstance(known, ColumnSums):
                stop = start + known.n_columns
                known.add(n_present, total, reduced.products[stop], z_sum,
                          reduced.products[start:stop], squares)  # fmt: skip
                start = stop + 1

    def _weighted_values(
        self, block: LabelledRows, weight: Float
    ) -> tuple[Float, dict[VariableName, tuple[int, float, Float, Float]]]:
        """Rows w (z - t) of every continuous variable, each followed by w itself, 0 if missing."""
        stacked: list[Float] = []
        pieces = {}
        w = weight if weight.size else np.ones(len(block))
        for name, values in block.values.items():
            known = self._variables[name]
            if not isinstance(known, ColumnSums):
                continue
            missing = np.asarray(np.isnan(values).any(axis=1))
            shown = np.where(missing, 0.0, w)
            deviations = np.where(missing[:, None], 0.0, values - known.reference).T
            weighted = deviations * shown
            stacked += [weighted, shown[None, :]]
            pieces[name] = (
                int(len(block) - np.count_nonzero(missing)),
                float(shown.sum()),
                weighted.sum(axis=1),
                weighted @ deviations.T,
            )
        return np.concatenate(stacked) if stacked else np.empty((0, len(block))), pieces

    # -- algebra ---------------------------------------------------------------------------

    def __add__(self, other: Moments) -> Moments:
        """Moments of both data sets together."""
        return self._combined(other, 1)

    def __iadd__(self, other: Moments) -> Moments:
        """Merge the other moments into this object."""
        result = self._combined(other, 1)
        with self._exclusive(), _interrupts.deferred():
            self._adopt(result)
        return self

    def __sub__(self, part: Moments) -> Moments:
        """Moments of the rows that are not in `part`, which must have been added before."""
        return self._combined(part, -1)

    def __radd__(self, other: object) -> Moments:
        """So that ``sum(parts)`` works, which begins with 0."""
        if isinstance(other, int) and other == 0:
            return self.copy()
        return NotImplemented

    def _combined(self, other: Moments, sign: int) -> Moments:
        if not isinstance(other, Moments):
            return NotImplemented
        left, right = self.copy(), other.copy()
        if left._width is not None and right._width is not None and left._width != right._width:
            raise IncompatibleMomentsError(
                f"moments of {left._width} features and of {right._width} features cannot be "
                "combined; both must come from rows of the same embedding"
            )
        left._flush()
        right._flush()
        if right._state is None:
            return left
        if left._state is None:
            if sign < 0 and right._state.n_rows:
                raise IncompatibleMomentsError(
                    "cannot remove a part from empty moments: it is not a part of them"
                )
            left._adopt(right)
            return left
        shift = right._state.reference - left._state.reference
        variables = dict(left._variables)
        for name, variable in right._variables.items():
            known = variables.get(name)
            if known is None:
                if sign < 0:
                    raise IncompatibleMomentsError(
                        f"cannot remove a part that has the variable {name!r}, which the whole "
                        "never saw: it is not a part of it"
                    )
                known = (
                    ClassSums.empty(variable.width)
                    if isinstance(variable, ClassSums)
                    else ColumnSums.empty(variable.width, tuple(variable.names), variable.reference)
                )
            if isinstance(known, ClassSums) and isinstance(variable, ClassSums):
                variables[name] = known.merged(variable, shift, sign, name)
            elif isinstance(known, ColumnSums) and isinstance(variable, ColumnSums):
                variables[name] = known.merged(variable, shift, sign, name)
            else:
                raise IncompatibleMomentsError(
                    f"the variable {name!r} is {known.kind} on one side and {variable.kind} on the "
                    "other; accumulate both with the same kinds="
                )
        left._state = left._state.merged(right._state, sign)
        left._variables = variables
        return left

    def _adopt(self, other: Moments) -> None:
        """Take over what another object, about to be discarded, has accumulated."""
        self._width, self._state = other._width, other._state
        self._variables, self._stage = other._variables, other._stage
        self._centred, self._product = other._centred, other._product

    def copy(self) -> Moments:
        """An independent copy, staged rows included."""
        with self._exclusive():
            other = type(self)(block_rows=self._block_rows, kinds=self._kinds, joint=self._joint)
            other._width = self._width
            other._state = None if self._state is None else self._state.copy()
            other._variables = {name: v.copy() for name, v in self._variables.items()}
            staged = None if self._stage is None else self._stage.contents()
            if staged is not None and len(staged):
                other._restage(staged)
        return other

    def _restage(self, block: LabelledRows) -> None:
        """Stage rows whose labels are already in terms of this state."""
        width = block.rows.shape[1]
        capacity = self._capacity(width)
        self._stage = Stage(capacity, width, block.rows.dtype)
        self._centred = np.empty(
            (buffer_rows(capacity, width, block.rows.dtype), width), block.rows.dtype
        )
        if block.rows.dtype == np.float32:
            self._product = np.empty((width, width), np.float32, order="F")
        self._stage.append(block)

    # -- reading ---------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """Rows seen, those of weight 0 not counted."""
        staged = 0 if self._stage is None else self._stage.filled
        return staged + (0 if self._state is None else self._state.n_rows)

    @property
    def n_features(self) -> int | None:
        """Width d of the rows; None before the first of them."""
        return self._width

    @property
    def weight(self) -> float:
        """Total weight of the rows seen."""
        with self._exclusive():
            self._flush()
            return 0.0 if self._state is None else self._state.weight

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

        Raises
        ------
        NotEnoughDataError
            The total weight is not above `ddof`.
        """
        from splince_fast._kernels import blas

        state = self.flushed()
        if state.weight - ddof <= 0:
            raise NotEnoughDataError(
                f"a covariance with ddof = {ddof:g} needs a total weight above it, and the rows "
                f"seen weigh {state.weight:g}; add rows or pass ddof=0"
            )
        full = state.scatter / (state.weight - ddof)
        blas.mirror_lower(full)
        return full

    def cross_covariance(self, name: VariableName, *, ddof: float = 1) -> Float:
        """(d, k) float64: covariance of x with a variable, over the rows that carry its label.

        One column per class, of its 0/1 indicator and in the order of :meth:`classes`, or per
        continuous column.

        Raises
        ------
        UnknownVariableError
            No such variable was seen.
        NotEnoughDataError
            The weight of the labelled rows is not above `ddof`.
        """
        return self.variable(name).cross_covariance(ddof, name)

    def classes(self, name: VariableName) -> tuple[ClassName, ...]:
        """Names of the classes of a class-coded variable, in the order of its columns.

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
        """Rows of each class of a class-coded variable (as :meth:`classes` for errors)."""
        names = self.classes(name)
        known = self.variable(name)
        if not isinstance(known, ClassSums):
            raise LabelError(f"the variable {name!r} is continuous; it has no classes")
        return dict(zip(names, map(int, known.rows), strict=True))

    @property
    def variables(self) -> dict[VariableName, str]:
        """Variables seen, each with its kind: "classes" or "continuous"."""
        return {name: variable.kind for name, variable in self._variables.items()}

    @property
    def nbytes(self) -> int:
        """Bytes held: the state and the work buffers."""
        total = 0
        if self._state is not None:
            total += self._state.scatter.nbytes + 2 * self._state.reference.nbytes
        for variable in self._variables.values():
            total += sum(tensor.nbytes for tensor in variable.tensors().values())
        for buffer in (self._stage, self._centred, self._product):
            total += 0 if buffer is None else buffer.nbytes
        return total

    def flushed(self) -> State:
        """The state of x with every row merged; what the methods compute from."""
        with self._exclusive():
            self._flush()
            if self._state is None or self._state.weight == 0:
                raise NotEnoughDataError("these moments are empty; call update(X, labels) first")
            return self._state

    def variable(self, name: VariableName) -> Variable:
        """The sums of one variable with every row merged; what the methods compute from."""
        with self._exclusive():
            self._flush()
        if name not in self._variables:
            known = ", ".join(repr(v) for v in self._variables) or "none"
            hint = (
                f"; joint cells are accumulated with Moments(joint=[{name!r}])"
                if isinstance(name, tuple)
                else ""
            )
            raise UnknownVariableError(
                f"no variable {name!r} was accumulated; the variables are: {known}{hint}"
            )
        return self._variables[name]

    def __repr__(self) -> str:
        if self._width is None:
            return "Moments(empty)"
        variables = ", ".join(
            f"{name!r}: {v.n_columns} {'classes' if v.kind == 'classes' else 'columns'}"
            for name, v in self._variables.items()
        )
        return (
            f"Moments({self.n_rows:,} rows, {self._width} features, {{{variables}}}, "
            f"{self.nbytes / 2**20:.1f} MiB)"
        )

    # -- persistence -----------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, staged rows included, to a safetensors file, atomically."""
        self._write(path, None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Moments:
        """Read a state back; it continues exactly where the saved one stood.

        Raises
        ------
        FileFormatError
            Truncated, foreign, inconsistent, or written by a newer version.
        FileNotFoundError
            There is no such file.
        """
        return cls._read(path)[0]

    def _write(self, path: str | os.PathLike[str], stream: dict[str, Any] | None) -> None:
        with self._exclusive():
            tensors, metadata = self._serialised()
            _files.write(path, _KIND, _FORMAT, tensors, {**metadata, "stream": stream})

    def _serialised(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Named tensors and JSON metadata that hold the whole state."""
        from splince_fast._kernels import blas

        metadata: dict[str, Any] = {
            "block_rows": self._block_rows,
            "kinds": self._kinds,
            "joint": [list(names) for names in self._joint],
            "width": self._width,
            "variables": [],
        }
        tensors: dict[str, NDArray[Any]] = {}
        state = self._state
        if state is not None:
            blas.mirror_lower(state.scatter)
            metadata |= {"n_rows": state.n_rows, "float32_products": state.unit_roundoff > EPS64}
            tensors |= {
                "reference": state.reference,
                "weight": np.array([state.weight]),
                "deviation": state.deviation,
                "scatter": state.scatter.T,
            }
        for i, (name, variable) in enumerate(self._variables.items()):
            if isinstance(variable, ClassSums):
                variable.allocate()
            entry = {"name": list(name) if isinstance(name, tuple) else name}
            metadata["variables"].append(entry | variable.metadata())
            tensors |= {f"variable.{i}.{key}": t for key, t in variable.tensors().items()}
        if self._stage is not None:
            tensors |= self._stage.tensors(list(self._variables))
        return tensors, metadata

    @classmethod
    def _read(cls, path: str | os.PathLike[str]) -> tuple[Moments, dict[str, Any] | None]:
        tensors, metadata = _files.read(path, _KIND, _FORMAT)
        try:
            return cls._deserialised(tensors, metadata), metadata["stream"]
        except FileFormatError as error:
            raise FileFormatError(f"{os.fspath(path)} is inconsistent: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FileFormatError(
                f"{os.fspath(path)} is inconsistent ({type(error).__name__}: {error}); it was "
                "edited or damaged: accumulate again"
            ) from error

    @classmethod
    def _deserialised(
        cls, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]
    ) -> Moments:
        joint = tuple(tuple(names) for names in metadata["joint"])
        moments = cls(block_rows=metadata["block_rows"], kinds=metadata["kinds"], joint=joint)
        width = moments._width = metadata["width"]
        if width is None:
            return moments
        if not isinstance(width, int) or width < 1:
            raise FileFormatError(f"the width {width!r} is not a positive integer")
        real = np.float64
        check_tensors(
            tensors, {"reference": (real, (width,)), "weight": (real, (1,)),
                      "deviation": (real, (width,)), "scatter": (real, (width, width))}
        )  # fmt: skip
        n_rows = metadata["n_rows"]
        if not isinstance(n_rows, int) or n_rows < 0 or tensors["weight"][0] < 0:
            raise FileFormatError("the number of rows or the weight is negative or no number")
        moments._state = State(
            tensors["reference"], n_rows, float(tensors["weight"][0]), tensors["deviation"],
            np.asfortranarray(tensors["scatter"].T),
            EPS32 if metadata["float32_products"] else EPS64,
        )  # fmt: skip
        if (np.einsum("ii->i", moments._state.scatter) < 0).any():
            raise FileFormatError("the scatter has a negative variance")
        for i, entry in enumerate(metadata["variables"]):
            prefix = f"variable.{i}."
            own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            name = tuple(entry["name"]) if isinstance(entry["name"], list) else entry["name"]
            reader: type[ClassSums] | type[ColumnSums] = _KINDS[entry["kind"]]
            moments._variables[name] = reader.read(width, entry, own)
        sizes = {name: v.n_columns for name, v in moments._variables.items()}
        coded = frozenset(n for n, v in moments._variables.items() if isinstance(v, ClassSums))
        staged = Stage.read(tensors, width, sizes, coded)
        if staged is not None:
            if len(staged) > moments._capacity(width):
                raise FileFormatError("more rows are staged than a block holds")
            moments._restage(staged)
        return moments

    def __getstate__(self) -> dict[str, Any]:
        with self._exclusive():
            tensors, metadata = self._serialised()
            return {"tensors": {k: t.copy() for k, t in tensors.items()}, "metadata": metadata}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(self._deserialised(state["tensors"], state["metadata"]).__dict__)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time; a second one is told so rather than made to wait or to corrupt."""
        if not self._lock.acquire(blocking=False):
            raise SplinceError(
                "these moments are in use by another thread; give each thread its own Moments and "
                "add them up afterwards"
            )
        try:
            yield
        finally:
            self._lock.release()


def _choose(column: Encoded, chosen: NDArray[np.bool_]) -> Encoded:
    """The rows of a column where `chosen`."""
    if isinstance(column, ClassCodes):
        return ClassCodes(column.classes, column.codes[chosen])
    present = None if column.present is None else column.present[chosen]
    return Columns(column.columns, column.values[chosen], present)
