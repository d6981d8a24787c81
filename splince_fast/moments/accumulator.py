"""Accumulator of the moments of x and of the sums of every label variable over all rows.

An update encodes the labels, reduces the rows block by block to sums, and commits the sums of each
block. The first commit registers new variables and classes. Rows that do not fill a block are
buffered. :class:`splince_fast.Moments` validates the input beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import threads
from splince_fast._runtime.rows import Rows, eps_of
from splince_fast.exceptions import (
    IncompatibleMomentsError,
    NotEnoughDataError,
)
from splince_fast.labels import ClassCodes, ClassName, Columns, Encoded, VariableName
from splince_fast.moments.block import MATRIX_PRODUCT_FROM, Workspace, reduce_block, sample_block
from splince_fast.moments.buffer import Buffer, LabelledRows
from splince_fast.moments.class_sums import ClassSums
from splince_fast.moments.column_sums import ColumnSums
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.state import State
from splince_fast.moments.variable import Request, Variable, contradiction, look_up

Float = NDArray[np.float64]

KIND_OF_COLUMN: dict[type[Any], type[Variable]] = {ClassCodes: ClassSums, Columns: ColumnSums}
KINDS: dict[str, type[Variable]] = {kind.kind: kind for kind in KIND_OF_COLUMN.values()}


def check_column(variable: Variable, column: object, name: object) -> None:
    """Raise LabelError if a column differs from earlier blocks in kind, type or columns."""
    kind = KIND_OF_COLUMN[type(column)]
    if type(variable) is kind:
        variable.encode(column, name)
    elif kind.new(variable.width, column).encode(column, name)[0] is not None:
        raise contradiction(name, variable.kind, kind.kind)


def merged_variables(
    ours: Mapping[VariableName, Variable],
    theirs: Mapping[VariableName, Variable],
    offset: NDArray[np.float64],
    sign: int,
) -> dict[VariableName, Variable]:
    """Return the sum (sign 1) or difference (sign -1) of the variables of two accumulators."""
    # `offset` is the reference point of `theirs` minus that of `ours`. Variables that only `ours`
    # has are not copied.
    result = dict(ours)
    for name, variable in theirs.items():
        ours_or_empty = result.get(name)
        if ours_or_empty is None:
            if sign < 0:
                raise IncompatibleMomentsError(
                    f"cannot remove rows labelled with {name!r}: no labels of this variable were "
                    "added; subtract only moments that were added"
                )
            ours_or_empty = variable.empty_like()
        result[name] = ours_or_empty.merged(variable, offset, sign, name)
    return result


@dataclass(slots=True)
class Batch:
    """Rows of one update with encoded labels, and the variables to which the rows are added."""

    block: LabelledRows
    variables: dict[VariableName, Variable]  # registered and new variables
    new_names: dict[VariableName, Any]  # argument of `Variable.register`, if names are new
    state: State  # state of the accumulator, or an empty state before the first rows
    registered: bool = False  # whether the accumulator has registered `new_names`


class Accumulator:
    """Accumulator of the moments of x and of the sums of every label variable."""

    # Whether every update preserves the row order, as with `in_order=True`.
    always_in_order = False

    def __init__(self, parameters: Parameters, work: Workspace | None = None) -> None:
        self.parameters = parameters
        self.state: State | None = None  # moments of x; None before the first rows
        self.variables: dict[VariableName, Variable] = {}
        # rows that do not fill a block yet and are not part of any sum
        self.buffer: Buffer | None = None
        # names of the features, if rows came as a data frame
        self.feature_names: tuple[str, ...] | None = None
        self.label_products = LabelTable()  # sums of products of labels of two variables
        self._work = Workspace() if work is None else work

    @property
    def width(self) -> int | None:
        """Number of features d; None before the first rows."""
        return None if self.state is None else len(self.state.reference)

    @property
    def n_rows(self) -> int:
        """Number of rows, including buffered rows."""
        merged = 0 if self.state is None else self.state.n_rows
        return merged + (0 if self.buffer is None else self.buffer.filled)

    @property
    def has_buffered(self) -> bool:
        return self.buffer is not None and self.buffer.filled > 0

    # Whether `merge_pending` must be called before the sums are read.
    has_pending = has_buffered

    def merge_pending(self) -> None:
        """Merge all buffered rows into the sums."""
        self.flush()

    @property
    def nbytes(self) -> int:
        total = self._work.nbytes
        total += 0 if self.state is None else self.state.nbytes
        total += 0 if self.buffer is None else self.buffer.nbytes
        total += self.label_products.nbytes
        return total + sum(variable.nbytes for variable in self.variables.values())

    def nonempty_state(self) -> State:
        if self.state is None or self.state.weight == 0:
            raise NotEnoughDataError("these moments are empty; call update(X, labels) first")
        return self.state

    def variable(self, name: VariableName) -> Variable:
        return look_up(self.variables, name)

    def descriptions(self) -> dict[VariableName, str]:
        """Return the kind and size of each variable as text, including buffered rows."""
        return {name: variable.description for name, variable in self.variables.items()}

    # -- prepare ---------------------------------------------------------------------------

    def update(
        self,
        rows: Rows,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        *,
        in_order: bool = False,
        checked: bool = False,
        index: NDArray[np.intp] | None = None,
    ) -> None:
        """Add rows with valid labels: reduce full blocks directly, and buffer the other rows."""
        # The buffered rows come before the new rows if `in_order`; `checked` rows are not validated
        # again; `index` are the positions of the rows to add, (n,), with one entry of `weight` and
        # of `encoded` each. An error changes nothing.
        in_order = in_order or self.always_in_order
        n, width = rows.array.shape
        if index is not None:
            n = len(index)
        capacity = self._work.capacities.get((width, rows.dtype))
        capacity = capacity or self._reserve(width, rows.dtype)
        # All rows are validated before any change. The reduction of a block validates the block
        # before the state changes, so an update of exactly one block needs no check here.
        in_place = rows.direct and not (in_order and self.has_buffered)
        if not (checked or (in_place and n == capacity)):
            rows.check()
        batch = self._prepare(LabelledRows(rows.array, weight, {}, index), encoded)
        start = 0
        while start < n:
            full = n - start >= capacity
            if rows.direct and full and not (in_order and self.has_buffered):
                stop = start + capacity
                block = batch.block if stop - start == n else batch.block.slice(start, stop)
                self._merge(batch, block)
                start = stop
                continue
            buffer = self._buffer_for(capacity, width, rows.dtype)
            stop = min(n, start + buffer.n_free)
            self._append_to_buffer(batch, batch.block.slice(start, stop), buffer)
            if not buffer.n_free:
                try:
                    self.flush()
                except BaseException:
                    # The update fails: remove its rows from the buffer.
                    buffer.filled -= stop - start
                    raise
            start = stop
        batch.state.row_eps = max(batch.state.row_eps, rows.eps)

    def append_row(self, X: NDArray[np.generic], labels: object) -> bool:
        """Append a row X, (1, d), to a buffer that is not empty: the fast path of `update`."""
        # False changes nothing: the input needs validation, has new classes or other variables, or
        # completes a block.
        columns = {} if labels is None else labels
        if self.buffer is None or type(columns) is not dict:
            return False
        codes = {}
        for name, column in columns.items():
            variable = self.variables.get(name)
            codes[name] = variable.code_of(column, name) if type(variable) is ClassSums else -1
            if codes[name] < 0:
                return False
        # Read the buffer only now: user code that ran during the access to the labels may have
        # updated this accumulator.
        parameters, buffer = self.parameters, self.buffer
        if buffer is None or parameters.joint or not parameters.kinds.keys() <= codes.keys():
            return False
        appended = buffer.append_row(X, codes)
        if appended and self.state is not None and X.dtype != buffer.rows.dtype:
            self.state.row_eps = max(self.state.row_eps, eps_of(X.dtype))
        return appended

    def _prepare(self, block: LabelledRows, encoded: Mapping[VariableName, Encoded]) -> Batch:
        """Return a batch of rows with encoded labels, without a change of any sum."""
        # New classes are numbered after the registered classes.
        width = block.rows.shape[1]
        state = self.state
        if state is None:
            state = self._empty_state(width)
        batch = Batch(block, {}, {}, state, registered=state is self.state)
        for name, column in encoded.items():
            kind, existing = KIND_OF_COLUMN[type(column)], self.variables.get(name)
            variable = existing if type(existing) is kind else kind.new(width, column)
            labels, new_names = variable.encode(column, name)
            if labels is None:
                continue
            if existing is not None and existing is not variable:
                raise contradiction(name, existing.kind, kind.kind)
            batch.block.labels[name] = labels
            batch.variables[name] = variable
            if new_names is not None or name not in self.variables:
                batch.new_names[name] = new_names
                batch.registered = False
        return batch

    def _empty_state(self, width: int) -> State:
        return State.empty(width)

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Allocate work memory for blocks of this width and dtype; return the rows per block."""
        capacity = self.parameters.capacity(width, dtype.itemsize)
        threads.thread_count()  # raises InputError if SPLINCE_FAST_NUM_THREADS is invalid
        self._work.reserve(capacity, width, dtype)
        return capacity

    def _buffer_for(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> Buffer:
        """Return a buffer that accepts rows of this dtype."""
        # A buffer that holds rows of a wider dtype is returned unchanged. Buffered rows of a
        # narrower dtype are converted, or merged into the sums if they fill a block of `capacity`
        # rows.
        buffer = self.buffer
        if buffer is None:
            return Buffer(capacity, width, dtype)
        current = buffer.rows.dtype
        if current == dtype or (current.itemsize > dtype.itemsize and buffer.filled):
            return buffer
        if buffer.filled >= capacity:
            self.flush()
        if buffer.try_resize(capacity, dtype):
            return buffer
        self._reserve(width, dtype)
        return buffer.converted(capacity, dtype)

    # -- commit ----------------------------------------------------------------------------

    def _register(self, batch: Batch) -> None:
        for name, new_names in batch.new_names.items():
            variable = batch.variables[name]
            if new_names is not None:
                variable.register(new_names)
            self.variables[name] = variable
        self.state = batch.state
        batch.registered = True

    def _append_to_buffer(self, batch: Batch, block: LabelledRows, buffer: Buffer) -> None:
        """Append rows to the buffer, then register their new variables and classes."""
        missing_labels = {
            name: variable.missing_label for name, variable in batch.variables.items()
        }
        filled = buffer.filled
        try:
            buffer.append(block, missing_labels)
        except BaseException:
            buffer.filled = filled
            buffer.remove_unregistered(self.variables)
            raise
        if not batch.registered:
            self._register(batch)
        self.buffer = buffer

    def flush(self) -> None:
        """Merge the buffered rows into the sums."""
        buffer = self.buffer
        if buffer is not None and buffer.filled and self.state is not None:
            block, dtype = buffer.contents(), buffer.rows.dtype
            if (self.state.width, dtype) not in self._work.capacities:
                self._reserve(self.state.width, dtype)
            variables = {name: self.variables[name] for name in block.labels}
            self._merge(Batch(block, variables, {}, self.state, registered=True), block)
            buffer.clear()

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Reduce a block to sums, and add the sums to the state and to the variables."""
        state, rows, index = batch.state, block.rows, block.index
        n = len(rows) if index is None else len(index)
        weight = None if block.weight is None else np.ascontiguousarray(block.weight)
        sample = sample_block(rows, weight, index)
        reference = state.reference_for(rows, weight, sample, index)
        moved = {}
        if reference is not state.reference:
            moved = self._moved(state, reference)
        requests: list[Request] = []
        for name, labels in block.labels.items():
            requests.append(moved.get(name, batch.variables[name]).request(labels, weight))
        codes, n_sums, values = joined_requests(requests, n)
        reduced = reduce_block(
            rows, weight, sample, reference, codes, n_sums, values,
            self._work.for_block(n, rows.shape[1], rows.dtype), index,
        )  # fmt: skip
        state.merge_block(reference, reduced, self._work.product)
        self._commit(batch, block, moved, requests, reduced.class_sums, reduced.products)
        if len(block.labels) > 1:
            self.label_products.add(block.labels, batch.variables, weight)

    def _commit(
        self,
        batch: Batch,
        block: LabelledRows,
        moved: dict[VariableName, Variable],
        requests: list[Request],
        class_sums: Float,
        products: Float,
    ) -> None:
        """Add the sums of a block to its variables."""
        # `moved` holds copies of the variables about a new reference point, by name; it is empty if
        # the point is unchanged. The copies replace the variables before the sums are added.
        if moved:
            self.variables.update(moved)
            batch.variables.update({name: moved[name] for name in block.labels if name in moved})
        if not batch.registered:
            self._register(batch)
        class_start = product_start = 0
        for name, request in zip(block.labels, requests, strict=True):
            k = 0 if request.values is None else len(request.values)
            batch.variables[name].commit(
                request,
                class_sums[class_start : class_start + request.n_sums],
                products[product_start : product_start + k],
            )
            class_start, product_start = class_start + request.n_sums, product_start + k

    def _moved(self, state: State, reference: Float) -> dict[VariableName, Variable]:
        """Return copies of all variables about a new reference point."""
        # The dict is empty if the point is unchanged or the state has no rows.
        if not state.weight or reference is state.reference:
            return {}
        offset = state.reference - reference
        return {name: variable.moved(offset) for name, variable in self.variables.items()}

    # -- algebra ---------------------------------------------------------------------------

    def check_compatible(self, other: Accumulator) -> None:
        ours, theirs = self.width, other.width
        if ours is not None and theirs is not None and ours != theirs:
            raise IncompatibleMomentsError(
                f"moments of {ours} features and of {theirs} features cannot be combined; both "
                "must come from rows of the same embedding"
            )

    def add(self, other: Accumulator) -> None:
        """Add the sums of another accumulator, in place. Both buffers must be empty."""
        self.check_compatible(other)
        theirs = other.state
        if theirs is None:
            return
        if self.state is None:
            state = theirs.copy()
            self.variables = {name: v.copy() for name, v in other.variables.items()}
            self.state, self.label_products = state, other.label_products.copy()
            self.feature_names = self.feature_names or other.feature_names
            return
        state = self.state
        reference = state.reference_with(theirs)
        ours = {**self.variables, **self._moved(state, reference)}
        variables = merged_variables(ours, other.variables, theirs.reference - reference, 1)
        label_products = self.label_products.copy()
        label_products.merge(other.label_products, 1, variables, other.variables)
        state.add(theirs, reference)
        self.variables, self.label_products = variables, label_products
        self.feature_names = self.feature_names or other.feature_names

    def without(self, part: Accumulator) -> Accumulator:
        """Return a copy from which the rows of `part` are removed. Both buffers must be empty."""
        self.check_compatible(part)
        result = self.copy()
        theirs, state = part.state, result.state
        if theirs is None:
            return result
        if state is None:
            if theirs.n_rows:
                raise IncompatibleMomentsError(
                    "cannot remove rows from empty moments; subtract only moments that were added"
                )
            return result
        offset = theirs.reference - state.reference
        variables = merged_variables(result.variables, part.variables, offset, -1)
        constant, rounding = state.remove(theirs)
        for name, variable in variables.items():
            if variable.n_rows > state.n_rows:
                raise IncompatibleMomentsError(
                    f"cannot remove these moments: {state.n_rows} rows would remain, and "
                    f"{variable.n_rows} rows labelled with {name!r}; subtract only moments that "
                    "were added"
                )
            # In `constant` features the remaining scatter is within rounding error. A feature whose
            # mean differs between labels is not constant: sums per label are accurate to float64.
            constant = constant[
                ~variable.depends_on_label(constant, state.mean_deviation, rounding)
            ]
        if len(constant):
            state.second.make_constant(constant)
            for variable in variables.values():
                variable.make_constant(constant, state.mean_deviation)
        result.variables = variables
        result.label_products.merge(part.label_products, -1, variables, part.variables)
        return result

    def copy(self) -> Accumulator:
        other = type(self)(self.parameters)
        other.state = None if self.state is None else self.state.copy()
        other.variables = {name: v.copy() for name, v in self.variables.items()}
        other.label_products = self.label_products.copy()
        other.feature_names = self.feature_names
        if self.buffer is not None and self.buffer.filled:
            other.buffer = self.buffer.converted(len(self.buffer.rows), self.buffer.rows.dtype)
        return other

    def scale(self, factor: float) -> None:
        """Multiply every weight by a factor. The buffer must be empty."""
        if self.state is not None:
            self.state.scale(factor)
        self.label_products.gram *= factor
        for variable in self.variables.values():
            variable.scale(factor)

    def sort_classes(self, name: VariableName, order: list[ClassName]) -> None:
        """Reorder the classes of a variable as in `order`, which may include new classes."""
        if self.state is not None:
            old = cast(ClassSums, self.variables.get(name, ClassSums(self.state.width)))
            new = self.variables[name] = old.in_order(order)
            self.label_products.reorder(name, old, new)

    def restore(self, buffered: LabelledRows) -> None:
        """Replace the buffer by rows whose labels are encoded with the registered classes."""
        state = self.state
        if state is None:
            raise RuntimeError("buffered rows need a state")
        dtype = buffered.rows.dtype
        capacity = self.parameters.capacity(state.width, dtype.itemsize)
        missing_labels = {name: self.variables[name].missing_label for name in buffered.labels}
        self.buffer = Buffer(capacity, state.width, dtype)
        self.buffer.append(buffered, missing_labels)
        if not self.buffer.n_free:
            self.flush()
            self.buffer = None


def joined_requests(requests: list[Request], n: int) -> tuple[NDArray[np.intp], int, Float]:
    # codes, (v, n): index of the class sum of each row, for each of v requests with class sums,
    # numbered over all requests; -1 for a missing label. values, (q, n): weighted label columns of
    # the continuous variables.
    values: list[Float] = []
    codes = [request.codes for request in requests if request.codes is not None]
    stacked = np.empty((len(codes), n), np.intp)
    row = n_sums = 0
    for request in requests:
        if request.codes is not None:
            np.add(request.codes, n_sums, out=stacked[row])
            if n_sums and request.codes.min() < 0:
                stacked[row][request.codes < 0] = -1
            row, n_sums = row + 1, n_sums + request.n_sums
        if request.values is not None:
            values.append(request.values)
    values = values or [np.empty((0, n))]
    joined = values[0] if len(values) == 1 else np.concatenate(values)
    if len(joined) < MATRIX_PRODUCT_FROM:  # the kernel, unlike GEMM, needs C order
        joined = np.ascontiguousarray(joined)
    return stacked, n_sums, joined
