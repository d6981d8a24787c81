"""One update: prepare, reduce, commit. Nothing is registered before the commit.

The accumulator holds the state of x, the sums of every variable, and the rows that wait. It takes
valid input only; :class:`splince_fast.Moments` checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import threads
from splince_fast._runtime.arrays import Rows, eps_of
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
# Smaller arrays are allocated; larger ones borrow the work memory, which saves page faults.
_SMALL = 1 << 16


def check_column(variable: Variable, column: object, name: object) -> None:
    """Raise LabelError where an encoded column contradicts earlier blocks of a variable."""
    kind = KIND_OF_COLUMN[type(column)]
    if type(variable) is kind:
        variable.begin(column, name)
    elif kind.new(variable.width, column).begin(column, name)[0] is not None:
        raise contradiction(name, variable.kind, kind.kind)


def merged_variables(
    ours: Mapping[VariableName, Variable],
    theirs: Mapping[VariableName, Variable],
    shift: NDArray[np.float64],
    sign: int,
) -> dict[VariableName, Variable]:
    """Variables of both sides (sign 1) or of the first without the second (sign -1).

    `shift` is the reference point of their state minus that of ours. What only one side has is
    shared with it where it is ours, and copied where it is theirs.
    """
    result = dict(ours)
    for name, variable in theirs.items():
        ours_or_empty = result.get(name)
        if ours_or_empty is None:
            if sign < 0:
                raise IncompatibleMomentsError(
                    f"cannot remove a part that has the variable {name!r}, which the whole never "
                    "saw: it is not a part of it"
                )
            ours_or_empty = variable.empty_like()
        result[name] = ours_or_empty.merged(variable, shift, sign, name)
    return result


@dataclass(slots=True)
class Batch:
    """Rows of an update with labels encoded by the classes of the state, and new names."""

    block: LabelledRows
    variables: dict[VariableName, Variable]  # of its labels, new ones included
    new_names: dict[VariableName, Any]  # arguments of `learn`
    state: State  # of the accumulator; a new one before the first rows
    learned: bool = False


class Accumulator:
    """Sums of all rows.

    Attributes
    ----------
    parameters : Parameters
    state : State or None
        None before the first rows.
    variables : dict of VariableName to Variable
    buffer : Buffer or None
        Rows that wait for a block to fill up.
    feature_names : tuple of str or None
        Names of the features, where rows came as a data frame.
    """

    # Whether rows are always added in order, as by `update(in_order=True)`.
    ordered = False

    def __init__(self, parameters: Parameters, work: Workspace | None = None) -> None:
        self.parameters = parameters
        self.state: State | None = None
        self.variables: dict[VariableName, Variable] = {}
        self.buffer: Buffer | None = None
        self.feature_names: tuple[str, ...] | None = None
        self.pairs = LabelTable()  # of rows with several labels
        self._work = Workspace() if work is None else work

    @property
    def width(self) -> int | None:
        """Features d; None before the first rows."""
        return None if self.state is None else len(self.state.reference)

    @property
    def n_rows(self) -> int:
        """Rows seen, waiting ones included."""
        merged = 0 if self.state is None else self.state.n_rows
        return merged + (0 if self.buffer is None else self.buffer.filled)

    @property
    def waiting(self) -> bool:
        """Whether rows wait in the buffer."""
        return self.buffer is not None and self.buffer.filled > 0

    # Whether reading first merges rows, of the buffer or of other parts of the state.
    has_pending = waiting

    def merge_pending(self) -> None:
        """Merge all waiting rows."""
        self.flush()

    @property
    def nbytes(self) -> int:
        """Bytes of the state and of the work memory."""
        total = self._work.nbytes
        total += 0 if self.state is None else self.state.nbytes
        total += 0 if self.buffer is None else self.buffer.nbytes
        total += self.pairs.nbytes
        return total + sum(variable.nbytes for variable in self.variables.values())

    def seen(self) -> State:
        """The state of x.

        Raises
        ------
        NotEnoughDataError
            Nothing was merged yet.
        """
        if self.state is None or self.state.weight == 0:
            raise NotEnoughDataError("these moments are empty; call update(X, labels) first")
        return self.state

    def variable(self, name: VariableName) -> Variable:
        """The sums of one variable.

        Raises
        ------
        UnknownVariableError
            No such variable was seen.
        """
        return look_up(self.variables, name)

    def described(self) -> dict[VariableName, str]:
        """Kind and size of each variable in words, waiting rows included."""
        return {name: variable.described for name, variable in self.variables.items()}

    def workspace(self, size: int) -> AbstractContextManager[Float]:
        """Memory for `size` float64 numbers, for a solve."""
        return nullcontext(np.empty(size)) if size < _SMALL else self._work.borrowed(size)

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
        merge_all: bool = False,
    ) -> None:
        """Add rows with valid labels: full blocks in place, the others through the buffer.

        With `in_order` the rows of a block follow each other as they came, whatever the size of
        the updates that brought them: no rows overtake those that wait. With `checked` their
        values were looked at before. With `index` only the rows that it numbers are added, in its
        order; weights and labels are of those. With `merge_all` no rows wait afterwards.

        Raises
        ------
        NonFiniteError, InputError, LabelError
            Before anything changes.
        """
        in_order = in_order or self.ordered
        n, width = rows.array.shape
        if index is not None:
            n = len(index)
        capacity = self._work.capacities.get((width, rows.dtype))
        capacity = capacity or self._reserve(width, rows.dtype)
        # The reduction of a single whole block checks its values.
        if not (checked or (rows.direct and n == capacity and not (in_order and self.waiting))):
            rows.check()
        batch = self._prepare(LabelledRows(rows.array, weight, {}, index), encoded)
        start = 0
        while start < n:
            fills = merge_all or n - start >= capacity
            if rows.direct and fills and not (in_order and self.waiting):
                stop = min(n, start + capacity)
                block = batch.block if stop - start == n else batch.block.slice(start, stop)
                self._merge(batch, block)
                start = stop
                continue
            buffer = self._buffer_for(capacity, width, rows.dtype)
            stop = min(n, start + buffer.n_free)
            self._wait(batch, batch.block.slice(start, stop), buffer)
            if not buffer.n_free:
                try:
                    self.flush()
                except BaseException:
                    # Remove these rows from the buffer: they were not added.
                    buffer.filled -= stop - start
                    raise
            start = stop
        batch.state.row_eps = max(batch.state.row_eps, rows.eps)
        if merge_all:
            self.flush()

    def append_row(self, X: NDArray[np.generic], labels: object) -> bool:
        """Append a single row (1, d) to waiting rows of the same dtype and variables.

        Returns
        -------
        bool
            False, with nothing changed, for every input that `update` has to check or learn from.
        """
        columns = {} if labels is None else labels
        if self.buffer is None or type(columns) is not dict:
            return False
        codes = {}
        for name, column in columns.items():
            variable = self.variables.get(name)
            codes[name] = variable.code_of(column, name) if type(variable) is ClassSums else -1
            if codes[name] < 0:
                return False
        # Labels may call other code, which may update this object.
        parameters, buffer = self.parameters, self.buffer
        if buffer is None or parameters.joint or not parameters.kinds.keys() <= codes.keys():
            return False
        appended = buffer.append_row(X, codes)
        if appended and self.state is not None and X.dtype != buffer.rows.dtype:
            self.state.row_eps = max(self.state.row_eps, eps_of(X.dtype))
        return appended

    def n_missing(self, rows: Rows) -> int:
        """Number of further rows of this width and dtype that complete a block."""
        if self.buffer is not None and self.buffer.filled:
            return self.buffer.n_free
        return self.parameters.capacity(rows.width, rows.dtype.itemsize)

    def _prepare(self, block: LabelledRows, encoded: Mapping[VariableName, Encoded]) -> Batch:
        """Encode labels by the classes of the state; the batch holds new variables and classes."""
        width = block.rows.shape[1]
        state = self.state
        if state is None:
            state = self._empty_state(width)
        batch = Batch(block, {}, {}, state, learned=state is self.state)
        for name, column in encoded.items():
            kind, existing = KIND_OF_COLUMN[type(column)], self.variables.get(name)
            variable = existing if type(existing) is kind else kind.new(width, column)
            labels, new_names = variable.begin(column, name)
            if labels is None:
                continue
            if existing is not None and existing is not variable:
                raise contradiction(name, existing.kind, kind.kind)
            batch.block.labels[name] = labels
            batch.variables[name] = variable
            if new_names is not None or name not in self.variables:
                batch.new_names[name] = new_names
                batch.learned = False
        return batch

    def _empty_state(self, width: int) -> State:
        """The state of x before the first rows."""
        return State.empty(width, fourth=self.parameters.ledoit_wolf)

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Work memory for blocks of this width and dtype; returns the rows of a block."""
        capacity = self.parameters.capacity(width, dtype.itemsize)
        threads.thread_count()  # raises for an invalid setting
        self._work.reserve(capacity, width, dtype)
        return capacity

    def _buffer_for(self, capacity: int, width: int, dtype: np.dtype[np.generic]) -> Buffer:
        """A buffer with memory for a row of this dtype; waiting rows are widened or merged."""
        buffer = self.buffer
        if buffer is None:
            return Buffer(capacity, width, dtype)
        current = buffer.rows.dtype
        if current == dtype or (current.itemsize > dtype.itemsize and buffer.filled):
            return buffer
        if buffer.filled >= capacity:
            self.flush()
        if buffer.offers(capacity, dtype):
            return buffer
        self._reserve(width, dtype)
        return buffer.widened(capacity, dtype)

    # -- commit ----------------------------------------------------------------------------

    def _learn(self, batch: Batch) -> None:
        """Register the new variables and classes of the batch."""
        for name, new_names in batch.new_names.items():
            variable = batch.variables[name]
            if new_names is not None:
                variable.learn(new_names)
            self.variables[name] = variable
        self.state = batch.state
        batch.learned = True

    def _wait(self, batch: Batch, block: LabelledRows, buffer: Buffer) -> None:
        """Append rows to the buffer."""
        blanks = {name: variable.blank for name, variable in batch.variables.items()}
        filled = buffer.filled
        try:
            buffer.append(block, blanks)
        except BaseException:
            buffer.filled = filled
            buffer.forget(self.variables)
            raise
        if not batch.learned:
            self._learn(batch)
        self.buffer = buffer

    def flush(self) -> None:
        """Merge the rows that wait."""
        buffer = self.buffer
        if buffer is not None and buffer.filled and self.state is not None:
            block, dtype = buffer.contents(), buffer.rows.dtype
            if (self.state.width, dtype) not in self._work.capacities:
                self._reserve(self.state.width, dtype)
            variables = {name: self.variables[name] for name in block.labels}
            self._merge(Batch(block, variables, {}, self.state, learned=True), block)
            buffer.clear()

    def _merge(self, batch: Batch, block: LabelledRows) -> None:
        """Reduce a block and add it to the state and to its variables."""
        state, rows, index = batch.state, block.rows, block.index
        n = len(rows) if index is None else len(index)
        weight = None if block.weight is None else np.ascontiguousarray(block.weight)
        sample = sample_block(rows, weight, index)
        reference = state.reference_for(rows, weight, sample, index)
        moved = {}
        if reference is not state.reference:
            moved = self._moved(state, reference)
        asked: list[Request] = []
        for name, labels in block.labels.items():
            asked.append(moved.get(name, batch.variables[name]).ask(labels, weight))
        codes, n_sums, values = joined_requests(asked, n)
        reduced = reduce_block(
            rows, weight, sample, reference, codes, n_sums, values,
            self._work.for_block(n, rows.shape[1], rows.dtype), index,
        )  # fmt: skip
        # Allocate before mutating.
        fourth = None if state.fourth is None else state.fourth_about(reference)
        if fourth is not None:
            fourth.add_rows(rows, weight, reference, index)
        state.merge_block(reference, reduced, self._work.product)
        state.fourth = fourth
        self._commit(batch, block, moved, asked, reduced.class_sums, reduced.products)
        if len(block.labels) > 1:
            self.pairs.add(block.labels, batch.variables, weight, within=False)

    def _commit(
        self,
        batch: Batch,
        block: LabelledRows,
        moved: dict[VariableName, Variable],
        asked: list[Request],
        class_sums: Float,
        products: Float,
    ) -> None:
        """Replace variables by those in `moved`, then add the sums of a block to its variables."""
        if moved:
            self.variables.update(moved)
            batch.variables.update({name: moved[name] for name in block.labels if name in moved})
        if not batch.learned:
            self._learn(batch)
        first = row = 0
        for name, request in zip(block.labels, asked, strict=True):
            k = 0 if request.values is None else len(request.values)
            batch.variables[name].commit(
                request, class_sums[first : first + request.n_sums], products[row : row + k]
            )
            first, row = first + request.n_sums, row + k

    def _moved(self, state: State, reference: Float) -> dict[VariableName, Variable]:
        """Variables with sums about a new `reference`; empty if the reference point stays."""
        if not state.weight or reference is state.reference:
            return {}
        step = state.reference - reference
        return {name: variable.moved(step) for name, variable in self.variables.items()}

    # -- algebra ---------------------------------------------------------------------------

    def check_like(self, other: Accumulator) -> None:
        """Raise IncompatibleMomentsError where the two cannot be combined."""
        ours, theirs = self.width, other.width
        if ours is not None and theirs is not None and ours != theirs:
            raise IncompatibleMomentsError(
                f"moments of {ours} features and of {theirs} features cannot be combined; both "
                "must come from rows of the same embedding"
            )
        if other.state is not None and (
            self.parameters.ledoit_wolf != other.parameters.ledoit_wolf
        ):
            raise IncompatibleMomentsError(
                "one side was accumulated with ledoit_wolf=True and the other without; accumulate "
                "both alike"
            )

    def add(self, other: Accumulator) -> None:
        """Add the sums of another accumulator, in place; no rows wait on either side."""
        self.check_like(other)
        theirs = other.state
        if theirs is None:
            return
        if self.state is None:
            state = theirs.copy()
            self.variables = {name: v.copy() for name, v in other.variables.items()}
            self.state, self.pairs = state, other.pairs.copy()
            self.feature_names = self.feature_names or other.feature_names
            return
        state = self.state
        reference = state.reference_with(theirs)
        ours = {**self.variables, **self._moved(state, reference)}
        variables = merged_variables(ours, other.variables, theirs.reference - reference, 1)
        pairs = self.pairs.copy()
        pairs.merge(other.pairs, 1, variables, other.variables)
        state.add(theirs, reference)
        self.variables, self.pairs = variables, pairs
        self.feature_names = self.feature_names or other.feature_names

    def without(self, part: Accumulator) -> Accumulator:
        """The accumulator without a part; no rows wait on either side."""
        self.check_like(part)
        result = self.copy()
        theirs, state = part.state, result.state
        if theirs is None:
            return result
        if state is None:
            if theirs.n_rows:
                raise IncompatibleMomentsError(
                    "cannot remove a part from empty moments: it is not a part of them"
                )
            return result
        shift = theirs.reference - state.reference
        variables = merged_variables(result.variables, part.variables, shift, -1)
        constant, rounding = state.remove(theirs)
        for name, variable in variables.items():
            if variable.n_rows > state.n_rows:
                raise IncompatibleMomentsError(
                    f"cannot remove this part: more rows would carry the variable {name!r} than "
                    "are left, so it is not a part of the whole"
                )
            # Class sums have more digits than float32 products.
            constant = constant[~variable.varies(constant, state.mean_deviation, rounding)]
        if len(constant):
            state.second.clear(constant)
            for variable in variables.values():
                variable.clear(constant, state.mean_deviation)
        result.variables = variables
        result.pairs.merge(part.pairs, -1, variables, part.variables)
        return result

    def copy(self) -> Accumulator:
        """An independent copy, waiting rows included."""
        other = type(self)(self.parameters)
        other.state = None if self.state is None else self.state.copy()
        other.variables = {name: v.copy() for name, v in self.variables.items()}
        other.pairs = self.pairs.copy()
        other.feature_names = self.feature_names
        if self.buffer is not None and self.buffer.filled:
            other.buffer = self.buffer.widened(len(self.buffer.rows), self.buffer.rows.dtype)
        return other

    def scale(self, factor: float) -> None:
        """Multiply every weight by a factor; no rows wait."""
        if self.state is not None:
            self.state.scale(factor)
        self.pairs.gram *= factor
        for variable in self.variables.values():
            variable.scale(factor)

    def sort_classes(self, name: VariableName, order: list[ClassName]) -> None:
        """Reorder the classes of a variable to `order`, which may hold new ones; no rows wait."""
        if self.state is not None:
            old = cast(ClassSums, self.variables.get(name, ClassSums(self.state.width)))
            new = self.variables[name] = old.in_order(order)
            self.pairs.reorder(name, old, new)

    def restore(self, waiting: LabelledRows) -> None:
        """Buffer rows whose labels are already encoded by the classes of this state."""
        state = self.state
        if state is None:
            raise RuntimeError("rows wait for a state that does not exist")
        dtype = waiting.rows.dtype
        capacity = self.parameters.capacity(state.width, dtype.itemsize)
        blanks = {name: self.variables[name].blank for name in waiting.labels}
        # Files of earlier versions may have more waiting rows than a block of today.
        self.buffer = Buffer(max(capacity, len(waiting)), state.width, dtype)
        self.buffer.append(waiting, blanks)
        if not self.buffer.n_free or len(self.buffer.rows) > capacity:
            self.flush()
            self.buffer = None


def joined_requests(asked: list[Request], n: int) -> tuple[NDArray[np.intp], int, Float]:
    """The requests of all variables as one: codes (v, n), their number of sums, values (q, n)."""
    values: list[Float] = []
    codes = [request.codes for request in asked if request.codes is not None]
    stacked = np.empty((len(codes), n), np.intp)
    row = n_sums = 0
    for request in asked:
        if request.codes is not None:
            np.add(request.codes, n_sums, out=stacked[row])
            if n_sums and request.codes.min() < 0:
                stacked[row][request.codes < 0] = -1
            row, n_sums = row + 1, n_sums + request.n_sums
        if request.values is not None:
            values.append(request.values)
    values = values or [np.empty((0, n))]
    joined = values[0] if len(values) == 1 else np.concatenate(values)
    if len(joined) < MATRIX_PRODUCT_FROM:  # the kernel reads along rows
        joined = np.ascontiguousarray(joined)
    return stacked, n_sums, joined
