"""Accumulator of the moments of x and of the sums of every label variable over all rows.

An update has two steps. `prepare` encodes the labels, reduces the rows block by block to sums, and
returns the changes of the state; it may fail, and changes nothing. `add` applies the changes in one
compiled call. Rows that do not fill a block are buffered. :class:`splince_fast.Moments` validates
the input beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Addition, Assignment, Change, add
from splince_fast._runtime import threads
from splince_fast._runtime.rows import Rows, eps_of
from splince_fast.exceptions import (
    IncompatibleMomentsError,
    InputError,
    NotEnoughDataError,
)
from splince_fast.labels import ClassName, Encoded, VariableName
from splince_fast.moments.block import (
    MATRIX_PRODUCT_FROM,
    Block,
    BlockSums,
    Buffer,
    Labels,
    LabelSums,
    Workspace,
    reduce_block,
)
from splince_fast.moments.label_table import LabelTable
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.state import State
from splince_fast.moments.variables import (
    KIND_OF_COLUMN,
    ClassSums,
    Variable,
    contradiction,
    look_up,
)

Float = NDArray[np.float64]


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
        self.broken = False  # whether a change of the state failed half-way
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
        tensors = (t for variable in self.variables.values() for t in variable.tensors().values())
        return total + sum(tensor.nbytes for tensor in tensors)

    def nonempty_state(self) -> State:
        if self.state is None or self.state.weight == 0:
            raise NotEnoughDataError("these moments are empty; call update(X, labels) first")
        return self.state

    def variable(self, name: VariableName) -> Variable:
        return look_up(self.variables, name)

    def descriptions(self) -> dict[VariableName, str]:
        """Return the kind and size of each variable as text, including buffered rows."""
        return {name: variable.description for name, variable in self.variables.items()}

    # -- adding rows -----------------------------------------------------------------------

    def prepare(
        self,
        rows: Rows,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        *,
        in_order: bool = False,
        checked: bool = False,
        index: NDArray[np.intp] | None = None,
        copy: bool = False,
    ) -> list[Change]:
        """Return the changes that add rows with valid labels; the state is unchanged."""
        # Full blocks are reduced directly, and the other rows are buffered. The buffered rows come
        # before the new rows if `in_order`; `checked` rows are not validated again; `index` are the
        # positions of the rows to add, (n,), with one entry of `weight` and of `encoded` each.
        # The changes of one block refer to sums in the work memory, which no other block may use
        # before the changes are added. With `copy`, or if there are several blocks, the rows are
        # added to a copy of the state, and the only change is that the copy replaces the state.
        n = int(rows.array.shape[0]) if index is None else len(index)
        if not n:
            return []
        in_order = in_order or self.always_in_order
        n_merges = self.n_merges(rows, n)
        changes: list[Change] = []
        try:
            if not checked:
                self._check(rows, n, in_order)
            if n_merges == 0 or (n_merges == 1 and not copy):
                self._add_rows(rows, n, weight, encoded, in_order, index, changes.extend)
                return changes
            draft = self.copy()
            draft._work = self._work
            draft._widen_buffer(rows)
            draft._add_rows(rows, n, weight, encoded, in_order, index, add)
        except InputError:
            if not checked:
                rows.check()  # its message has the row numbers of the whole update
            raise
        return [Assignment(self, vars(draft))]

    def n_merges(self, rows: Rows, n: int) -> int:
        """Return the number of blocks that an update of n rows reduces, or a larger number."""
        width, dtype = rows.array.shape[1], rows.dtype
        capacity = self._capacity(width, dtype)
        buffer = self.buffer
        if buffer is None:
            return n // capacity
        if buffer.filled and buffer.rows.dtype.itemsize < dtype.itemsize:
            return 2  # the buffered rows may fill a block of the wider dtype
        return (buffer.filled + n) // min(capacity, len(buffer.rows))

    def _check(self, rows: Rows, n: int, in_order: bool) -> None:
        """Raise an error for invalid rows, except in full blocks, which the reduction checks."""
        first = 0
        if rows.direct and not (in_order and self.has_buffered):
            first = n - n % self._capacity(rows.array.shape[1], rows.dtype)
        if not first:
            rows.check()
        elif first < n:
            Rows.from_array(rows.array[first:]).check()

    def _add_rows(
        self,
        rows: Rows,
        n: int,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        in_order: bool,
        index: NDArray[np.intp] | None,
        sink: Callable[[list[Change]], None],
    ) -> None:
        """Pass the changes that add rows to `sink`, step by step."""
        # A step reduces one block at most. If there are several, `sink` adds the changes of a step.
        block, state, variables = self._encoded(rows, n, weight, encoded, index)
        capacity = self._capacity(rows.array.shape[1], rows.dtype)
        buffer, start = None, 0
        filled = 0 if self.buffer is None else self.buffer.filled
        while start < n:
            if rows.direct and n - start >= capacity and not (in_order and filled):
                stop = start + capacity
                part = block if n == capacity else block.slice(start, stop)
                changes, variables = self._merge(part, state, variables)
            else:
                if buffer is None:
                    buffer = self._buffer_for(capacity, rows)
                    filled = buffer.filled
                stop = min(n, start + len(buffer.rows) - filled)
                part, filled = block.slice(start, stop), filled + stop - start
                if filled < len(buffer.rows):
                    changes = buffer.appended(part, filled - part.n)
                else:
                    whole, emptied = buffer.completed(part)
                    changes, variables = self._merge(whole, state, variables)
                    changes, filled = [*changes, emptied], 0
            sink(changes)
            start = stop
        sums = {"state": state, "variables": variables, "buffer": buffer or self.buffer}
        row_eps = max(state.row_eps, rows.eps)
        sink([Assignment(state, {"row_eps": row_eps}), Assignment(self, sums)])

    def _encoded(
        self,
        rows: Rows,
        n: int,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        index: NDArray[np.intp] | None,
    ) -> tuple[Block, State, dict[VariableName, Variable]]:
        """Return the block of an update, and the state and the variables with its new names."""
        width = rows.array.shape[1]
        labels: dict[VariableName, Labels] = {}
        variables = self.variables
        for name, column in encoded.items():
            kind, existing = KIND_OF_COLUMN[type(column)], variables.get(name)
            variable: Any = existing if type(existing) is kind else kind.new(width, column)
            codes, named = variable.encode(column, name)
            if codes is None:
                continue
            if existing is not None and existing is not variable:
                raise contradiction(name, existing.kind, kind.kind)
            labels[name] = codes
            if named is not existing:
                variables = {**variables, name: named}
        weight = None if weight is None else np.ascontiguousarray(weight)
        state = self.state or self._empty_state(width)
        return Block(n, rows.array, weight, labels, index), state, variables

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
        parameters, buffer, state = self.parameters, self.buffer, self.state
        if buffer is None or parameters.joint or not parameters.kinds.keys() <= codes.keys():
            return False
        changes: list[Change] = []
        if state is not None and X.dtype != buffer.rows.dtype:
            changes = [Assignment(state, {"row_eps": max(state.row_eps, eps_of(X.dtype))})]
        return buffer.append_row(X, codes, changes)

    def _empty_state(self, width: int) -> State:
        return State.empty(width)

    def _capacity(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Return the rows per block, for which work memory is allocated."""
        return self._work.capacities.get((width, dtype)) or self._reserve(width, dtype)

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Allocate work memory for blocks of this width and dtype; return the rows per block."""
        capacity = self.parameters.capacity(width, dtype.itemsize)
        threads.thread_count()  # raises InputError if SPLINCE_FAST_NUM_THREADS is invalid
        self._work.reserve(capacity, width, dtype)
        return capacity

    def _buffer_for(self, capacity: int, rows: Rows) -> Buffer:
        """Return a buffer that accepts rows of this dtype; buffered rows have none narrower."""
        buffer = self.buffer
        if buffer is not None and (
            buffer.filled
            or buffer.rows.dtype == rows.dtype
            or buffer.try_resize(capacity, rows.dtype)
        ):
            return buffer
        return Buffer(capacity, rows.array.shape[1], rows.dtype)

    def _widen_buffer(self, rows: Rows) -> None:
        """Convert buffered rows of a narrower dtype to that of `rows`."""
        buffer, width = self.buffer, rows.array.shape[1]
        if buffer is not None and buffer.rows.dtype.itemsize < rows.dtype.itemsize:
            capacity = self._capacity(width, rows.dtype)
            if buffer.filled >= capacity:
                self.flush()
            self.buffer = buffer.converted(capacity, rows.dtype)

    def flush(self) -> None:
        """Merge the buffered rows into the sums."""
        buffer = self.buffer
        if buffer is not None and buffer.filled and self.state is not None:
            changes, variables = self._merge(buffer.contents(), self.state, self.variables)
            add([*changes, Assignment(self, {"variables": variables}), buffer.emptied()])

    def _merge(
        self, block: Block, state: State, variables: dict[VariableName, Variable]
    ) -> tuple[list[Change], dict[VariableName, Variable]]:
        """Return the changes that add the sums of a block, and the variables after them."""
        label_sums = [
            variables[name].label_sums(labels, block.weight)
            for name, labels in block.labels.items()
        ]
        codes, class_weights, values = _joined(label_sums, block.n)
        sums = self._reduce(block, codes, class_weights, values)
        mean = sums.shift + sums.total / sums.weight_sum
        reference = state.reference_with(sums.shift, mean, sums.squares, sums.weight_sum)
        if reference is not state.reference:
            variables = _about(reference, state, variables)
        changes = state.added(sums, reference, self._work.product)
        offset = sums.shift - reference
        class_sums, products = sums.class_sums, sums.products
        class_sums += class_weights[:, None] * offset
        if len(values):
            products += values.sum(axis=1)[:, None] * offset
        for name, own in zip(block.labels, label_sums, strict=True):
            k, q = len(own.weights), len(own.values)
            changes += variables[name].add(own, class_sums[:k], products[:q])
            class_sums, products = class_sums[k:], products[q:]
        if len(block.labels) > 1:
            table, added = self.label_products.with_products(block.labels, variables, block.weight)
            changes += [
                Addition(table.gram, added), Assignment(self, {"label_products": table})
            ]  # fmt: skip
        return changes, variables

    def _reduce(
        self, block: Block, codes: NDArray[np.intp], class_weights: Float, values: Float
    ) -> BlockSums:
        """Return the sums of a block; the arguments are those of `_joined`."""
        shape = block.rows.shape[1], block.rows.dtype
        self._capacity(*shape)
        memory = self._work.for_block(block.n, *shape)
        return reduce_block(block, codes, len(class_weights), values, memory)

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
        add(self.merged(other))

    def merged(self, other: Accumulator) -> list[Change]:
        """Return the changes that add the sums of another accumulator."""
        self.check_compatible(other)
        theirs, state = other.state, self.state
        if theirs is None:
            return []
        names = self.feature_names or other.feature_names
        if state is None:
            copy = other.copy()
            sums: dict[str, Any] = {"state": copy.state, "variables": copy.variables}
            sums |= {"label_products": copy.label_products, "feature_names": names}
            return [Assignment(self, sums)]
        reference = state.reference_with(
            theirs.reference.copy(), theirs.reference + theirs.mean_deviation,
            theirs.second.diagonal(), theirs.weight,
        )  # fmt: skip
        ours = self.variables
        if reference is not state.reference:
            ours = _about(reference, state, ours)
        variables = merged_variables(ours, other.variables, theirs.reference - reference, 1)
        table = self.label_products.copy()
        table.merge(other.label_products, 1, variables, other.variables)
        sums = {"variables": variables, "label_products": table, "feature_names": names}
        return [*state.merged(theirs, reference), Assignment(self, sums)]

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
            span = np.abs(variable.span()[:, constant]).max(axis=0, initial=0.0)
            constant = constant[span <= rounding[constant]]
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
            new, table = old.in_order(order), self.label_products.copy()
            table.reorder(name, old, new)
            sums = {"variables": {**self.variables, name: new}, "label_products": table}
            add([Assignment(self, sums)])

    def restore(self, buffered: Block) -> None:
        """Replace the buffer by rows whose labels are encoded with the registered classes."""
        state = self.state
        if state is None:
            raise RuntimeError("buffered rows need a state")
        dtype = buffered.rows.dtype
        capacity = self.parameters.capacity(state.width, dtype.itemsize)
        self.buffer = Buffer(capacity, state.width, dtype)
        add(self.buffer.appended(buffered, 0))
        if buffered.n == capacity:
            self.flush()
            self.buffer = None


def _about(
    reference: Float, state: State, variables: dict[VariableName, Variable]
) -> dict[VariableName, Variable]:
    """Return copies of variables with sums about another reference point than the state's."""
    if not state.weight:
        return variables
    offset = state.reference - reference
    return {
        name: variable.empty_like().merged(variable, offset, 1, name)
        for name, variable in variables.items()
    }


def _joined(label_sums: list[LabelSums], n: int) -> tuple[NDArray[np.intp], Float, Float]:
    """Return codes, (v, n), class weights, (c,), and values, (q, n), of all variables."""
    # The class sums are numbered over all variables; codes are -1 for missing labels.
    codes = [sums.codes for sums in label_sums if sums.codes is not None]
    stacked = np.empty((len(codes), n), np.intp)
    row = n_sums = 0
    for sums in label_sums:
        if sums.codes is not None:
            np.add(sums.codes, n_sums, out=stacked[row])
            if n_sums and sums.codes.min() < 0:
                stacked[row][sums.codes < 0] = -1
            row, n_sums = row + 1, n_sums + len(sums.weights)
    if len(label_sums) == 1:
        weights, values = label_sums[0].weights, label_sums[0].values
    else:
        weights = np.concatenate([np.empty(0), *(sums.weights for sums in label_sums)])
        values = np.concatenate([np.empty((0, n)), *(sums.values for sums in label_sums)])
    if len(values) < MATRIX_PRODUCT_FROM:  # the kernel, unlike GEMM, needs C order
        values = np.ascontiguousarray(values)
    return stacked, weights, values
