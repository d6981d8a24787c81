"""First and second moments that can be added (`Moments`), and moments of folds (`Folds`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple, Self, cast, overload

import numpy as np
from numpy.typing import NDArray

from splince_fast import sources
from splince_fast._kernels import blas
from splince_fast._kernels.row_kernels import Assignment, add
from splince_fast._runtime import files
from splince_fast._runtime.arguments import check_keywords
from splince_fast._runtime.lock import new_lock
from splince_fast._runtime.rows import (
    Rows,
    SparseRows,
    as_mask,
    as_numbers,
    as_weights,
    check_feature_names,
    checked_names,
    is_sparse,
    name_columns,
)
from splince_fast._solve.options import Options, is_number
from splince_fast.exceptions import (
    IncompatibleMomentsError,
    InputError,
    NonFiniteError,
    SplinceError,
)
from splince_fast.labels import ClassName, Encoded, VariableName, encode
from splince_fast.labels.containers import check_index, map_labels, take_entries, take_positions
from splince_fast.moments.accumulator import Accumulator
from splince_fast.moments.format import FORMAT, from_tensors, to_tensors
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.scatters import Sampled, with_subsample
from splince_fast.moments.split import Part, Split, accumulator_of
from splince_fast.moments.state import State
from splince_fast.moments.statistics import Factored, Statistics
from splince_fast.moments.stream import accumulate
from splince_fast.moments.variables import denominator

Float = NDArray[np.float64]


class Update(NamedTuple):
    """Validated arguments of one update."""

    rows: Rows
    weight: Float | None
    encoded: Mapping[VariableName, Encoded]
    row_index: NDArray[np.intp] | None  # indices of the rows with nonzero weight; None: all
    n_input_rows: int  # number of rows, including those of weight zero
    n: int  # number of rows with nonzero weight
    feature_names: tuple[str, ...] | None  # columns of a data frame


def read_update(
    X: object, labels: object, sample_weight: object, mask: object, accumulator: Part
) -> Update:
    """Return the validated arguments of `Moments.update`."""
    width, parameters = accumulator.width, accumulator.parameters
    if mask is not None or len(getattr(X, "shape", ())) > 2:
        X, labels, sample_weight = _flattened(X, labels, sample_weight, mask)
    sparse = parameters.covariance_type == "diag" and is_sparse(X)
    rows = (SparseRows if sparse else Rows).of(X, width=width)
    n, index, names = rows.array.shape[0], None, None
    if hasattr(X, "columns"):
        names = checked_names(
            X, rows.array.shape[1], accumulator.feature_names, first=not accumulator.n_rows
        )
    if hasattr(X, "index"):
        check_index(X, labels)
        check_index(X, sample_weight, "sample_weight")
    weight = None if sample_weight is None else as_weights(sample_weight, n)
    if weight is not None and not weight.all():
        index = np.flatnonzero(weight)
        labels = None if labels is None else _select_labels(labels, index, n)
        rows, weight = rows.select(index), weight[index]
    n_kept = n if index is None else len(index)
    encoded = encode(labels, n_kept, kinds=parameters.kinds or None, joint=parameters.joint)
    return Update(rows, weight, encoded, index, n, n_kept, names)


def _flattened(X: Any, labels: Any, sample_weight: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Return the rows of X, (n, d), and their labels and weights, without leading dimensions."""
    # `mask`, (...), is False for the rows to leave out; None keeps all rows.
    array = as_numbers(X)
    if array.ndim < 2:
        raise InputError(f"X has shape {array.shape}; it must be (n, d), or (batch, token, d)")
    leading = array.shape[:-1]
    rows = array.reshape(int(np.prod(leading)), array.shape[-1])
    selected = np.arange(len(rows)) if mask is None else np.flatnonzero(as_mask(mask, leading))

    def take(column: Any, name: str) -> Any:
        return take_positions(column, leading, selected, name)

    if sample_weight is not None:
        sample_weight = take(sample_weight, "sample_weight")
    return rows if mask is None else rows[selected], map_labels(labels, take), sample_weight


def _select_labels(labels: Any, index: NDArray[np.intp], n: int) -> Any:
    """Return the labels of the rows `index`."""
    # A column whose length is not n is returned unchanged: `encode` raises an error for it later.

    def select(column: Any, description: str) -> Any:
        shape = getattr(column, "shape", None)
        try:
            length = shape[0] if shape else len(column)
        except TypeError:
            return column
        return take_entries(column, index) if length == n else column

    return map_labels(labels, select)


class _Accumulation:
    """An accumulator or a split behind one lock, and its files: the base of moments and folds."""

    _KIND: ClassVar[str]
    _sums: Part
    _lock: Any

    @classmethod
    def _wrap(cls, accumulator: Part, lock: Any = None) -> Self:
        """Return a new object that owns an accumulator, without a copy."""
        new = cls.__new__(cls)
        new._own(accumulator, lock or new_lock())
        return new

    def _own(self, accumulator: Part, lock: Any) -> None:
        self._sums, self._lock = accumulator, lock

    @property
    def _accumulator(self) -> Part:
        """The accumulator or split; raise SplinceError if an update failed half-way."""
        if self._sums.broken:
            raise SplinceError(
                "an update of these moments failed half-way, and their sums are incomplete; "
                "accumulate again, or load the checkpoint"
            )
        return self._sums

    @property
    def parameters(self) -> Parameters:
        """Validated arguments with which the moments were created."""
        return self._sums.parameters

    def _arguments(self) -> dict[str, Any]:
        return asdict(self.parameters)

    @property
    def n_rows(self) -> int:
        """Number of rows, without rows of weight 0."""
        with self._lock:
            return self._accumulator.n_rows

    @property
    def n_features(self) -> int | None:
        """Number of features d; None before the first rows."""
        return self._accumulator.width

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Column names of the first data frame among the rows; None if all rows were arrays."""
        return self._accumulator.feature_names

    @property
    def variables(self) -> dict[VariableName, str]:
        """Kind of each variable: "classes" or "continuous"."""
        with self._lock:
            return {name: v.kind for name, v in self._accumulator.variables.items()}

    def update(
        self, X: Any, labels: Any = None, *, sample_weight: Any = None, mask: Any = None
    ) -> Self:
        """Add rows.

        Parameters
        ----------
        X : array-like of shape (n, d), or (batch, token, d)
            Rows of float16, bfloat16, float32, float64, integers or bools, of NumPy, torch, pandas
            or polars; n may be 0. With ``covariance_type="diag"``, also a matrix or array of
            scipy.sparse, which is never made dense.
        labels : mapping of str to column(s), frame, or a single column, optional
            Labels of the rows, see :mod:`splince_fast.labels`; a single column is the variable
            "concept". With leading dimensions, a column has one entry per sequence, (batch,), or
            per position, (batch, token).
        sample_weight : array-like of shape (n,), optional
            Non-negative frequencies; rows of weight 0 are ignored. With leading dimensions, the
            shape is that of a label column.
        mask : array-like of bool with the shape of X without the last dimension, optional
            True or 1 for rows to add; other rows, such as padding, are ignored.

        Returns
        -------
        Moments or Folds
            The object itself.

        Raises
        ------
        InputError, NonFiniteError, LabelError
            The input is invalid; the state is unchanged.

        Examples
        --------
        >>> import numpy as np
        >>> import splince_fast as sf
        >>> states = np.random.default_rng(0).normal(size=(2, 5, 3))
        >>> mask = np.arange(5) < np.array([[5], [2]])
        >>> moments = sf.Moments().update(states, {"z": ["a", "b"]}, mask=mask)
        >>> moments.class_counts("z")
        {'a': 5, 'b': 2}
        """
        with self._lock:
            sums, options = self._accumulator, dict[str, Any]()
            plain = sample_weight is None and mask is None and type(X) is np.ndarray
            is_row = plain and X.shape[:1] == (1,)
            if is_row and isinstance(sums, Accumulator) and sums.append_row(X, labels):
                return self
            given = read_update(X, labels, sample_weight, mask, sums)
            owners: list[Part] = [sums]
            if isinstance(sums, Split) and sums.n_folds is not None:
                index = np.arange(given.n) if given.row_index is None else given.row_index
                options["numbers"] = index.astype(np.uint64) + np.uint64(sums.position)
                position = sums.position + given.n_input_rows
                owners += sums.parts.values()
            try:
                changes = sums.prepare(given.rows, given.weight, given.encoded, **options)
            except NonFiniteError as error:
                name_columns(error, given.feature_names)
                raise
            if given.n and given.feature_names is not None and sums.feature_names is None:
                names = tuple(map(str, given.feature_names))
                changes += [Assignment(owner, {"feature_names": names}) for owner in owners]
            if options:
                changes.append(Assignment(sums, {"position": position}))
            add(changes)
        return self

    def _write_checkpoint(
        self, path: str | os.PathLike[str], stream: dict[str, object] | None
    ) -> None:
        """Write the state and the JSON object `stream`, which has the position in the source."""
        with self._lock:
            tensors, metadata = to_tensors(self._accumulator)
            files.write(path, self._KIND, FORMAT, tensors, {**metadata, "stream": stream})

    @classmethod
    def _read_checkpoint(cls, path: str | os.PathLike[str]) -> tuple[Self, object]:
        """Return the state and the JSON object `stream` of a file."""
        tensors, metadata = files.read(path, cls._KIND, FORMAT)
        with files.consistent(path, "accumulate again"):
            sums = from_tensors(tensors, metadata, folds=cls._KIND == "folds")
            return cls._wrap(sums), metadata["stream"]

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            tensors, metadata = to_tensors(self._accumulator, packed=True)
            # Arrays are copied under the lock, since later updates change them. The packed scatter
            # is a copy already.
            copies = {k: t if k.endswith("scatter.lower") else t.copy() for k, t in tensors.items()}
            return {"tensors": copies, "metadata": metadata}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._own(from_tensors(**state, folds=self._KIND == "folds"), new_lock())


class Moments(_Accumulation):
    """Streaming, mergeable first and second moments of x and of labelled variables.

    One pass over the data in blocks of any size gives the mean and covariance of x, and the
    cross-covariance of x with every variable. Any number of erasers can be computed from these. The
    state is float64 and takes O(d^2) memory for any number of rows. Up to rounding errors, ``a +
    b`` equals the moments of both data sets, and ``(a + b) - b`` equals ``a``.

    Parameters
    ----------
    block_rows : int, optional
        Rows per block; smaller updates are buffered until a block is full. The default is 4096, or
        fewer if a block would exceed 64 MiB.
    kinds : mapping of str to {"classes", "continuous"}, optional
        Kind of each variable for which the dtype gives the wrong kind: by default, strings, bools
        and integers are classes, and floats are continuous.
    joint : sequence of tuples of str, optional
        Class-coded variables whose combinations are accumulated as classes of one more variable,
        with the tuple as its name: ``joint=[("gender", "race")]``.
    subsample : float in (0, 1]
        Fraction of the rows that are sampled to estimate the covariance of x. Sums per class, means
        and variances are those of all rows.
    covariance_type : {"full", "diag"}
        With "diag", the variances alone replace the d x d scatter: O(d k) numbers for k label
        columns. Rows may then be sparse.
    random_state : int
        Seed of the sampled rows.
    by : str, optional
        Class-coded variable; the scatter of each of its k classes, at most 64, is accumulated
        separately, in :attr:`by_class`: O(k d^2) numbers.

    Notes
    -----
    Constraints are exact with "diag" and ``subsample``, too; the distortion may exceed the minimum:
    see the page "Fit data larger than memory". Products are computed in float32 for data of at most
    32 bits, and added in float64. A row without a label for one variable counts for x and for other
    variables. One thread at a time uses an object; a second thread waits.

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

    _KIND = "moments"

    def __init__(
        self,
        *,
        block_rows: int | None = None,
        kinds: Mapping[str, str] | None = None,
        joint: Sequence[tuple[str, ...]] = (),
        subsample: float = 1.0,
        covariance_type: str = "full",
        random_state: int = 0,
        by: str | None = None,
    ) -> None:
        parameters = Parameters.of(
            block_rows, kinds, joint, subsample, random_state, covariance_type, by
        )
        self._own(accumulator_of(parameters), new_lock())

    @overload
    @classmethod
    def from_blocks(cls, blocks: object, *, folds: None = None, **options: Any) -> Moments: ...

    @overload
    @classmethod
    def from_blocks(cls, blocks: object, *, folds: int, **options: Any) -> Folds: ...

    @classmethod
    def from_blocks(
        cls,
        blocks: Any,
        *,
        folds: int | None = None,
        groups: str | None = None,
        client: Any = None,
        progress: bool | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = 60.0,
        **parameters: Any,
    ) -> Moments | Folds:
        """Accumulate a source, and read the next block while a block is accumulated.

        Parameters
        ----------
        blocks : Source or iterable of (X, labels) or (X, labels, sample_weight)
            See :mod:`splince_fast.sources`.
        folds : int, optional
            Number of folds into which rows are split, at least 2.
        groups : str, optional
            With `folds`, name of a variable of the labels: rows of one class stay in one fold.
            The variable is not accumulated.
        client : dask.distributed.Client, optional
            Cluster whose workers read the blocks, from files that every worker can read, or from
            a dask array. The result has the same bits for any number of workers.
        progress : bool, optional
            Show a progress bar; by default in a terminal or notebook, after two seconds.
        checkpoint : path, optional
            File to which the state is written atomically: at intervals, after an error of the
            source or Ctrl-C, and at the end. If the file exists, accumulation resumes after its
            last block, with the same result to the bit. It is refused for other parameters, and for
            files of another path, size or modification time; of data without files, only the kind
            and shape are compared. Not with `client`.
        checkpoint_seconds : float
            Seconds between two writes of the checkpoint; 0 writes after every block.
        **parameters
            Arguments of the class. ``subsample="auto"`` takes the smallest power of 1/2 that
            leaves 22 sampled rows per feature.

        Returns
        -------
        Moments or Folds
            Folds, with the classes of every variable in sorted order, if `folds` is given.

        Raises
        ------
        FileFormatError
            The checkpoint belongs to another source, other data or other parameters.
        InputError
            A parameter is out of range; `subsample` is "auto" for a source of unknown length; or
            `subsample` leaves fewer than 4 rows per feature.
        """
        if folds is None and groups is not None:
            raise InputError("groups= needs folds=: it keeps groups in one fold; pass folds=2, too")
        if folds is not None and client is not None:
            raise InputError(
                "folds= needs one process, and client= is a cluster; pass folds or client, or "
                "accumulate one source per fold on the cluster and pass the list of moments to "
                "cross_report"
            )
        source = sources.as_source(blocks)
        check_keywords(parameters, cls, where="Moments")
        parameters = with_subsample(parameters, source, folds or 1)
        empty: Any = cls(**parameters)
        if client is not None:
            if checkpoint is not None:
                raise InputError("a run on a cluster has no checkpoint; omit checkpoint or client")
            from splince_fast.moments import cluster

            return cast(Moments, cluster.accumulate(source, empty, client, progress=progress))
        if folds is not None:
            empty = Folds(folds, groups=groups, **parameters)
        total: Moments | Folds = accumulate(
            source, empty, progress=progress, checkpoint=checkpoint,
            checkpoint_seconds=checkpoint_seconds,
        )  # fmt: skip
        return total._sort_classes() if isinstance(total, Folds) else total

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both data sets together."""
        self._check_compatible(other)
        result = self._merged_copy()
        result += other
        return result

    def __iadd__(self, other: Moments) -> Moments:
        """Add the other moments to this object, in place."""
        self._check_compatible(other)
        part = other.copy() if other is self else other
        with self._merged(part) as (ours, theirs):
            add(ours.merged(theirs))
        return self

    def __sub__(self, part: Moments) -> Moments:
        """Return the moments without the rows of `part`, all of which must have been added."""
        self._check_compatible(part)
        with self._merged(part) as (ours, theirs):
            return self._wrap(ours.without(theirs))

    @contextmanager
    def _merged(self, other: Moments) -> Iterator[tuple[Any, Any]]:
        """Hold both locks, and yield both accumulators without buffered rows."""
        first, second = sorted((self._lock, other._lock), key=id)  # avoids a deadlock
        with first, second:
            accumulators = self._accumulator, other._accumulator
            for accumulator in accumulators:
                accumulator.merge_pending()
            yield accumulators

    def __radd__(self, other: object) -> Moments:
        """Return a copy for ``0 + moments``, with which ``sum(parts)`` begins."""
        if isinstance(other, int) and other == 0:
            return self.copy()
        return self + cast(Moments, other)  # raises InputError

    def _check_compatible(self, other: object) -> None:
        if not isinstance(other, Moments):
            raise InputError(
                f"moments can be combined with moments only, not with {type(other).__name__}"
            )
        ours, theirs = self._accumulator, other._accumulator
        ours.parameters.check_compatible(theirs.parameters)
        if None not in (ours.width, theirs.width) and ours.width != theirs.width:
            raise IncompatibleMomentsError(
                f"moments of {ours.width} features and of {theirs.width} features cannot be "
                "combined; both must come from rows of the same embedding"
            )
        try:
            check_feature_names(theirs.feature_names, ours.feature_names, "the other moments")
        except InputError as error:
            raise IncompatibleMomentsError(str(error)) from None

    @classmethod
    def _sum_of(cls, parts: Sequence[Moments]) -> Moments:
        """Return the sum of one or more moments, as a new object."""
        total = cls._wrap(accumulator_of(parts[0].parameters))
        for part in parts:
            total += part
        return total

    def _merged_copy(self) -> Moments:
        """Return a copy with all buffered rows merged into the sums."""
        with self._lock:
            self._accumulator.merge_pending()
            return self.copy()

    def scaled(self, factor: float) -> Moments:
        """Return the moments of the same rows with every weight multiplied by a factor.

        Parts that were accumulated separately can be added in any proportions. Let m_g be the
        moments of cell g: in the sum of ``m_g.scaled(p_g / m_g.weight)``, cell g has weight p_g.

        Parameters
        ----------
        factor : float
            Factor of the weights, positive and finite.

        Returns
        -------
        Moments
            A new object: ``weight`` is multiplied; ``n_rows``, ``mean`` and
            ``covariance(ddof=0)`` are unchanged.

        Raises
        ------
        InputError
            `factor` is not a positive finite number.
        """
        if not is_number(factor) or not 0 < factor < np.inf:
            raise InputError(f"the factor is {factor!r}; it must be a positive finite number")
        result = self._merged_copy()
        result._accumulator.scale(float(factor))
        return result

    def copy(self) -> Moments:
        """Return an independent copy, including buffered rows."""
        with self._lock:
            return self._wrap(self._accumulator.copy())

    @property
    def weight(self) -> float:
        """Weight sum of the rows."""
        with self._lock:
            accumulator = self._flushed()
            return 0.0 if accumulator.state is None else accumulator.state.weight

    @property
    def mean(self) -> Float:
        """(d,) float64: weighted mean of x.

        Raises
        ------
        NotEnoughDataError
            No rows were added yet.
        """
        return self._state().mean

    def covariance(self, *, ddof: float = 1) -> Float:
        """(d, d) float64: sum w (x - mean)(x - mean)^T / (weight - ddof), in units of x squared.

        With ``subsample`` below 1, it is that of the sampled rows.

        Parameters
        ----------
        ddof : float
            Delta degrees of freedom.

        Raises
        ------
        NotEnoughDataError
            The weight sum is not above `ddof`.
        InputError
            The moments were made with ``covariance_type="diag"``.
        """
        if self.parameters.is_diagonal:
            raise InputError(
                "moments made with covariance_type='diag' do not store the d x d covariance; "
                "accumulate with 'full', if the covariance fits in memory. The variances are in "
                "moments.factored().variances"
            )
        with self._lock:
            state = self._flushed().nonempty_state()
            if isinstance(state.second, Sampled):
                state = state.second.sample.nonempty_state()
            full = state.second.matrix / denominator(state.weight, ddof, "covariance")
        blas.mirror_lower(full)
        return full

    def cross_covariance(self, name: VariableName, *, ddof: float = 1) -> Float:
        """(d, k) float64: covariance of x with a variable, over the rows with a label.

        There is one column per class, for its 0/1 indicator, in the order of :meth:`classes`; or
        one column per column of a continuous variable.

        Parameters
        ----------
        name : str or tuple of str
            Name of the variable.
        ddof : float
            Delta degrees of freedom.

        Raises
        ------
        UnknownVariableError
            There is no such variable.
        NotEnoughDataError
            The weight sum of the labelled rows is not above `ddof`.
        """
        with self._lock:
            return self._flushed().variable(name).cross_covariance(ddof, name)

    def classes(self, name: VariableName) -> tuple[ClassName, ...]:
        """Return the class names of a class-coded variable, in the order of its columns.

        Parameters
        ----------
        name : str or tuple of str
            Name of the variable.

        Raises
        ------
        UnknownVariableError, LabelError
            There is no such variable, or it is continuous.
        """
        with self._lock:
            return self._flushed().variable(name).class_names(name)

    def class_counts(self, name: VariableName) -> dict[ClassName, int]:
        """Return the number of rows of each class of a class-coded variable.

        Parameters
        ----------
        name : str or tuple of str
            Name of the variable.

        Raises
        ------
        UnknownVariableError, LabelError
            There is no such variable, or it is continuous.
        """
        with self._lock:
            variable = self._flushed().variable(name)
            names = variable.class_names(name)
            return dict(zip(names, map(int, variable.tensors()["rows"]), strict=True))

    @property
    def by_class(self) -> dict[ClassName | None, Moments]:
        """Moments of each class of the variable `by`; the key None has the rows without a label.

        Raises
        ------
        InputError
            The moments were made without `by`.
        """
        split = self._accumulator
        if not isinstance(split, Split):
            raise InputError(
                "these moments have no scatter per class; accumulate them with "
                "Moments(by=NAME) for the name of the variable"
            )
        with self._lock:
            split.merge_pending()
            parts = {key: part.copy() for key, part in split.parts.items() if part.n_rows}
        for part in parts.values():
            part.feature_names = split.feature_names
        return {key: self._wrap(part) for key, part in parts.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the work memory."""
        with self._lock:
            return self._accumulator.nbytes

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + self.nbytes  # read by dask

    def _flushed(self) -> Accumulator:
        """Return the sums of all rows; the caller has the lock."""
        sums = self._accumulator
        sums.merge_pending()
        return cast(Accumulator, sums.total()) if isinstance(sums, Split) else sums

    def _state(self) -> State:
        """Return the state of x, after buffered rows are merged into the sums."""
        with self._lock:
            return self._flushed().nonempty_state()

    def factored(self, shrinkage: float | str | None = None, *, solver: str = "auto") -> Factored:
        """Return an immutable snapshot with Cov(x) factored, for several erasers.

        Every method and :func:`splince_fast.concept_strength` accept it in place of moments. An
        eraser then takes O(d^2) per column of its variables, without a factorisation, O(d^3).

        Parameters
        ----------
        shrinkage, solver
            As for :func:`splince_fast.splince`.

        Returns
        -------
        Factored
            Snapshot of d^2 float64 numbers, or 2 d^2 if Cov(x) is rank deficient.

        Raises
        ------
        NotEnoughDataError
            No rows were added yet.
        InputError
            A parameter is out of range.
        """
        options = Options(shrinkage=shrinkage, solver=solver).checked()
        with self._statistics() as statistics:
            return Factored(statistics, options)

    @contextmanager
    def _statistics(self) -> Iterator[Statistics]:
        """Hold the lock, and yield the statistics for erasers."""
        with self._lock:
            yield Statistics(self._flushed())

    def __repr__(self) -> str:
        if self.n_features is None:
            return "Moments(empty)"
        with self._lock:
            texts = self._accumulator.descriptions()
        variables = ", ".join(f"{name!r}: {text}" for name, text in texts.items())
        return (
            f"Moments({self.n_rows:,} rows, {self.n_features} features, {{{variables}}}, "
            f"{self.nbytes / 2**20:.1f} MiB)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, including buffered rows, to a safetensors file.

        Parameters
        ----------
        path : path
            Path of the file, which is replaced atomically.
        """
        self._write_checkpoint(path, None)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Moments:
        """Read moments from a file; further updates continue as if they had not been saved.

        Parameters
        ----------
        path : path
            A file of :meth:`save`, or a checkpoint; the folds of a checkpoint are added.

        Raises
        ------
        FileFormatError
            The file is truncated, inconsistent, of another kind, or of a newer version.
        FileNotFoundError
            There is no such file.
        """
        if files.kind_of(path) == Folds._KIND:
            return Folds._read_checkpoint(path)[0].total
        return cls._read_checkpoint(path)[0]


class Folds(_Accumulation, Sequence[Moments]):
    """A sequence of moments, into which the rows of a stream are split.

    Row number i of the stream is in fold ``splitmix64(i) mod n``; with `groups`, the fold of a row
    depends on a digest of its class name instead. Folds are bit for bit the same for every block
    size.

    Parameters
    ----------
    n_folds : int
        Number of folds, at least 2.
    groups : str, optional
        Name of a variable of the labels: rows of one class stay in one fold, and a row without a
        label is assigned by its number. The variable is not accumulated.
    **parameters
        As for :class:`Moments`.

    Raises
    ------
    InputError
        `n_folds` or `groups` is invalid.

    Notes
    -----
    Every method accepts folds in place of moments: the eraser is fitted to all rows, the report
    includes the effect on held-out rows (:func:`splince_fast.cross_report`), and
    ``shrinkage="cv"`` is available.

    Examples
    --------
    >>> import numpy as np
    >>> import splince_fast as sf
    >>> rng = np.random.default_rng(0)
    >>> X, z = rng.normal(size=(1000, 3)), rng.integers(0, 2, size=1000)
    >>> folds = sf.Moments.from_blocks([(X, {"z": z})], folds=2)
    >>> len(folds), folds.total.n_rows
    (2, 1000)
    >>> eraser = sf.leace(folds[0], erase="z")  # folds[1] is held out
    """

    _KIND = "folds"
    _accumulator: Split

    def __init__(self, n_folds: int, *, groups: str | None = None, **parameters: Any) -> None:
        check_keywords(parameters, Moments, where="Moments")
        self._own(Split(Parameters.of(**parameters), n_folds, groups), new_lock())

    def _own(self, accumulator: Part, lock: Any) -> None:
        super()._own(accumulator, lock)
        parts = self._accumulator.parts.values()
        self._folds = tuple(Moments._wrap(part, lock) for part in parts)

    def _arguments(self) -> dict[str, Any]:
        return {"folds": len(self), "groups": self._accumulator.groups, **super()._arguments()}

    def __len__(self) -> int:
        return len(self._folds)

    @overload
    def __getitem__(self, index: int) -> Moments: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Moments, ...]: ...

    def __getitem__(self, index: int | slice) -> Moments | tuple[Moments, ...]:
        return self._folds[index]

    def __repr__(self) -> str:
        return f"Folds({len(self)} of {self.n_rows:,} rows: {self._folds[0]!r}, ...)"

    @property
    def total(self) -> Moments:
        """Moments of all rows, as a new object."""
        with self._lock:
            return Moments._wrap(self._accumulator.total())

    @classmethod
    def from_blocks(cls, blocks: object, *, folds: int = 2, **options: Any) -> Folds:
        """Accumulate a source, with rows split into folds.

        Parameters
        ----------
        blocks, folds, **options
            As for :meth:`Moments.from_blocks`.

        Returns
        -------
        Folds
            The folds.
        """
        return Moments.from_blocks(blocks, folds=folds, **options)

    def _sort_classes(self) -> Folds:
        """Give all folds the same classes in sorted order, whatever the sizes of the blocks."""
        with self._lock:
            self._accumulator.sort_all_classes()
        return self


def name_features(moments: Moments | Folds, names: Iterable[str] | None) -> None:
    """Set the feature names of moments or folds that have no names; None changes nothing."""
    parts = (moments, *moments) if isinstance(moments, Folds) else (moments,)
    for part in parts:
        if names is not None and part.feature_names is None:
            part._accumulator.feature_names = tuple(map(str, names))


def from_accumulator(accumulator: Accumulator, parameters: Parameters) -> Moments:
    """Return moments with the sums of an accumulator and with other parameters."""
    # No rows may be buffered. The arrays are shared, not copied.
    result = Accumulator(parameters)
    result.state, result.variables = accumulator.state, accumulator.variables
    result.label_products = accumulator.label_products
    return Moments._wrap(result)


def to_record(moments: Moments) -> files.Record:
    """Return named tensors and JSON metadata of moments, consistent under concurrent updates."""
    state = moments.__getstate__()
    return state["tensors"], state["metadata"]


def from_record(tensors: files.Tensors, metadata: Mapping[str, Any]) -> Moments:
    """Return the moments that `to_record` stored; errors as for `from_tensors`."""
    return Moments._wrap(from_tensors(tensors, metadata))
