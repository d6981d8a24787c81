"""Accumulator of the moments of x and of the sums of every label variable over all rows.

An update has two steps. `prepare` encodes the labels, reduces the rows block by block to sums, and
returns the changes of the state; it may fail, and changes nothing. `add` applies the changes in one
compiled call. Rows that do not fill a block are buffered. :class:`splince_fast.Moments` validates
the input beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from splince_fast._kernels.row_kernels import Assignment, Change, add
from splince_fast._runtime import threads
from splince_fast._runtime.rows import Rows, SparseRows
from splince_fast.exceptions import InputError, NotEnoughDataError
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
from splince_fast.moments.parameters import Parameters
from splince_fast.moments.scatters import Diagonal, Sampled, sum_variances
from splince_fast.moments.state import Scatter, State, not_added
from splince_fast.moments.variables import (
    ClassSums,
    LabelTable,
    Variable,
    encode_column,
    look_up,
)

Float = NDArray[np.float64]

# Sparse rows per block. Blocks are larger than for dense rows, since the merge of a block takes
# O(d k) operations even if the block has few stored entries.
_SPARSE_ROWS = 1 << 14


def merged_variables(
    ours: Mapping[VariableName, Variable],
    theirs: Mapping[VariableName, Variable],
    offset: NDArray[np.float64],
    sign: int,
) -> dict[VariableName, Variable]:
    """Return the sum (sign 1) or difference (sign -1) of the variables of two accumulators."""
    # `offset` is the reference point of `theirs` minus that of `ours`.
    result = dict(ours)
    for name, variable in theirs.items():
        if name not in result:
            if sign < 0:
                raise not_added(
                    f"cannot remove rows labelled with {name!r}: no labels of this variable were "
                    "added"
                )
            result[name] = variable.empty_like()
        result[name] = result[name].merged(variable, offset, sign, name)
    return result


class Accumulator:
    """Accumulator of the moments of x and of the sums of every label variable."""

    # Accumulators of the classes of `by`, if this is their total.
    parts: Mapping[Any, Accumulator] = MappingProxyType({})

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
        self._is_full = parameters.subsample == 1 and not parameters.is_diagonal

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
    def nbytes(self) -> int:
        tensors = (t for variable in self.variables.values() for t in variable.tensors().values())
        owners = [self._work, self.state, self.buffer, self.label_products, *tensors]
        return sum(owner.nbytes for owner in owners if owner is not None)

    def leaves(self) -> list[Accumulator]:
        return [self]

    def nonempty_state(self) -> State:
        if self.state is None or self.state.weight == 0:
            raise NotEnoughDataError("these moments are empty; call update(X, labels) first")
        return self.state

    def variable(self, name: VariableName) -> Variable:
        return look_up(self.variables, name)

    def descriptions(self) -> dict[VariableName, str]:
        return {name: variable.description for name, variable in self.variables.items()}

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
        # Full blocks are reduced directly, and the other rows are buffered; the buffered rows come
        # first if `in_order`. `checked` rows are not validated again; `index` are the positions of
        # the rows to add, (n,), with one entry of `weight` and of `encoded` each. The changes of a
        # block refer to sums in the work memory, which no other block may use before they are
        # added. With `copy`, or if there are several blocks, the rows are therefore added to a copy
        # of the state, which then replaces the state.
        n = rows.array.shape[0] if index is None else len(index)
        if not n:
            return []
        # A sample must not depend on the sizes of blocks.
        in_order = in_order or self.parameters.subsample < 1
        capacity, n_merges = self._plan(rows, n)
        changes: list[Change] = []
        try:
            if not checked:  # the reduction checks full blocks
                filled = self.buffer is not None and self.buffer.filled
                direct = rows.direct and not (in_order and filled)
                first = n - n % capacity if direct else 0
                if first < n:
                    (Rows.from_array(rows.array[first:]) if first else rows).check()
            if n_merges == 0 or (n_merges == 1 and not copy):
                self._add_rows(rows, n, weight, encoded, in_order, index, changes.extend, capacity)
                return changes
            draft = self.copy()
            draft._work = self._work
            buffer = draft.buffer
            if buffer is not None and buffer.rows.dtype.itemsize < rows.dtype.itemsize:
                draft.flush()
            draft._add_rows(rows, n, weight, encoded, in_order, index, add, capacity)
        except InputError:
            if not checked:
                rows.check()  # its message has the row numbers of the whole update
            raise
        return [Assignment(self, vars(draft))]

    def _plan(self, rows: Rows, n: int) -> tuple[int, int]:
        """Return the rows per block, and the largest number of blocks that n rows can fill."""
        width, dtype = rows.array.shape[1], rows.dtype
        if isinstance(rows, SparseRows):
            capacity = self.parameters.block_rows or _SPARSE_ROWS
            return capacity, -(-n // capacity)
        capacity = self._work.capacities.get((width, dtype)) or self._reserve(width, dtype)
        buffer = self.buffer
        if buffer is None or not buffer.filled:
            return capacity, n // capacity
        if buffer.rows.dtype.itemsize < dtype.itemsize:
            return capacity, 2  # the buffered rows are merged first, on a copy
        return capacity, (buffer.filled + n) // min(capacity, len(buffer.rows))

    def _add_rows(
        self,
        rows: Rows,
        n: int,
        weight: Float | None,
        encoded: Mapping[VariableName, Encoded],
        in_order: bool,
        index: NDArray[np.intp] | None,
        sink: Callable[[list[Change]], None],
        capacity: int,
    ) -> None:
        """Pass the changes that add rows to `sink`, step by step."""
        # A step reduces one block at most. If there are several, `sink` adds the changes of a step.
        # Sparse rows are merged at once, without a buffer.
        width, sparse = rows.array.shape[1], isinstance(rows, SparseRows)
        if sparse and index is not None:
            rows, index = rows.select(index), None
        labels: dict[VariableName, Labels] = {}
        variables = self.variables
        for name, column in encoded.items():
            existing = variables.get(name)
            codes, named = encode_column(existing, width, column, name)
            if codes is not None:
                labels[name] = codes
                if named is not existing:
                    variables = {**variables, name: named}
        weight = None if weight is None else np.ascontiguousarray(weight)
        block = Block(n, rows.array, weight, labels, index)
        state = self.state or self._empty_state(width)
        sums = {"state": state, "variables": variables, "label_products": self.label_products}
        buffer, start = None, 0
        filled = 0 if self.buffer is None else self.buffer.filled
        while start < n:
            if sparse or (rows.direct and n - start >= capacity and not (in_order and filled)):
                stop = min(n, start + capacity)
                part = block if stop - start == n else block.slice(start, stop)
                changes = self._merge(part, sums)
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
                    changes, filled = [*self._merge(whole, sums), emptied], 0
            sink(changes)
            start = stop
        row_eps = max(state.row_eps, rows.eps)
        sums["buffer"] = buffer or self.buffer
        sink([Assignment(state, {"row_eps": row_eps}), Assignment(self, sums)])

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
        # Read the buffer only now: user code in the access to the labels may have changed it.
        parameters, buffer = self.parameters, self.buffer
        if buffer is None or parameters.joint or not parameters.kinds.keys() <= codes.keys():
            return False
        return buffer.append_row(X, codes)

    def _empty_state(self, width: int) -> State:
        parameters = self.parameters
        if self._is_full:
            second = Scatter.empty(width)
        elif parameters.is_diagonal:
            second = Diagonal.empty(width)
        else:
            second = Sampled(
                np.zeros(width), sample=Accumulator(Parameters(parameters.block_rows, {}, ())),
                subsample=parameters.subsample, random_state=parameters.random_state,
            )  # fmt: skip
        return State(np.zeros(width), 0, 0.0, np.zeros(width), second)

    def _reserve(self, width: int, dtype: np.dtype[np.generic]) -> int:
        """Allocate work memory for blocks of this width and dtype; return the rows per block."""
        capacity = self.parameters.capacity(width, dtype.itemsize)
        threads.thread_count()  # raises InputError if SPLINCE_FAST_NUM_THREADS is invalid
        if self._is_full:
            self._work.reserve(capacity, width, dtype)
        self._work.capacities[width, dtype] = capacity
        return capacity

    def _buffer_for(self, capacity: int, rows: Rows) -> Buffer:
        """Return a buffer that accepts rows of this dtype; buffered rows have none narrower."""
        buffer = self.buffer
        if buffer is not None and (buffer.filled or buffer.rows.dtype == rows.dtype):
            return buffer
        return Buffer(capacity, rows.array.shape[1], rows.dtype)

    def flush(self) -> None:
        buffer = self.buffer
        if buffer is not None and buffer.filled and self.state is not None:
            names = "state", "variables", "label_products"
            sums = {name: getattr(self, name) for name in names}
            changes = self._merge(buffer.contents(), sums)
            add([*changes, Assignment(self, sums), buffer.emptied()])

    def merge_pending(self) -> None:
        """Merge all buffered rows into the sums, those of a sample included."""
        self.flush()
        if self.state is not None and self.parameters.subsample < 1:
            cast(Sampled, self.state.second).sample.flush()

    def _merge(self, block: Block, sums: dict[str, Any]) -> list[Change]:
        """Return the changes that add a block, and set the new attributes in `sums`."""
        state, variables = sums["state"], sums["variables"]
        label_sums = [
            variables[name].label_sums(labels, block.weight)
            for name, labels in block.labels.items()
        ]
        codes, class_weights, values = _joined(label_sums, block.n)
        of_x = self._reduce(block, codes, class_weights, values)
        mean = of_x.shift + of_x.total / of_x.weight_sum
        reference = state.reference_with(of_x.shift, mean, of_x.squares, of_x.weight_sum)
        if reference is not state.reference and state.weight:
            shift = state.reference - reference
            variables = sums["variables"] = merged_variables({}, variables, shift, 1)
        changes: list[Change] = state.added(of_x, reference, block)
        offset = of_x.shift - reference
        class_sums, products = of_x.class_sums, of_x.products
        class_sums += class_weights[:, None] * offset
        if len(values):
            products += values.sum(axis=1)[:, None] * offset
        for name, own in zip(block.labels, label_sums, strict=True):
            k, q = len(own.weights), len(own.values)
            changes += variables[name].add(own, class_sums[:k], products[:q])
            class_sums, products = class_sums[k:], products[q:]
        if len(block.labels) > 1:
            table = sums["label_products"]
            sums["label_products"] = table.with_block(block.labels, variables, block.weight)
        return changes

    def _reduce(
        self, block: Block, codes: NDArray[np.intp], class_weights: Float, values: Float
    ) -> BlockSums:
        """Return the sums of a block; the arguments are those of `_joined`."""
        if not self._is_full:
            return sum_variances(block, codes, len(class_weights), values)
        shape = block.rows.shape[1], block.rows.dtype
        if shape not in self._work.capacities:
            self._reserve(*shape)
        memory = self._work.grams.get(shape) or self._work.centred(block.n, *shape)
        return reduce_block(block, codes, len(class_weights), values, memory)

    def merged(self, other: Accumulator) -> list[Change]:
        theirs = other.state
        if theirs is None:
            return []
        state = self.state or self._empty_state(theirs.width)
        reference = state.reference_with(
            theirs.reference, theirs.reference + theirs.mean_deviation,
            theirs.second.diagonal(), theirs.weight,
        )  # fmt: skip
        ours = self.variables
        if reference is not state.reference and state.weight:
            ours = merged_variables({}, ours, state.reference - reference, 1)
        variables = merged_variables(ours, other.variables, theirs.reference - reference, 1)
        sums = {
            "state": state, "variables": variables,
            "label_products": self.label_products.merged(
                other.label_products, 1, variables, other.variables
            ),
            "feature_names": self.feature_names or other.feature_names,
        }  # fmt: skip
        return [*state.merged(theirs, reference), Assignment(self, sums)]

    def without(self, part: Accumulator) -> Accumulator:
        """Return a copy from which the rows of `part` are removed. Both buffers must be empty."""
        result = self.copy()
        theirs = part.state
        if theirs is None or not theirs.n_rows:
            return result
        state = result.state or self._empty_state(theirs.width)
        offset = theirs.reference - state.reference
        variables = merged_variables(result.variables, part.variables, offset, -1)
        if theirs.n_rows == state.n_rows:
            state.check_same_rows(theirs)
            state = result.state = self._empty_state(theirs.width)
            constant, rounding = np.empty(0, np.intp), np.empty(0)
        else:
            constant, rounding = state.remove(theirs)
        for name, variable in variables.items():
            if variable.n_rows > state.n_rows:
                raise not_added(
                    f"cannot remove these moments: {state.n_rows} rows would remain, and "
                    f"{variable.n_rows} rows labelled with {name!r}"
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
        result.label_products = self.label_products.merged(
            part.label_products, -1, variables, part.variables
        )
        return result

    def copy(self) -> Accumulator:
        other = type(self)(self.parameters)
        other.state = None if self.state is None else self.state.copy()
        other.variables = {name: v.copy() for name, v in self.variables.items()}
        other.label_products, other.feature_names = self.label_products, self.feature_names
        if self.buffer is not None and self.buffer.filled:
            other.buffer = self.buffer.copy()
        return other

    def scale(self, factor: float) -> None:
        if self.state is not None:
            self.state.scale(factor)
        self.label_products = self.label_products.scaled(factor)
        self.variables = {name: v.scaled(factor) for name, v in self.variables.items()}

    def sort_classes(self, name: VariableName, order: list[ClassName]) -> None:
        """Reorder the classes of a variable as in `order`, which may include new classes."""
        if self.state is not None:
            width = self.state.width
            old = self.variables.get(name, ClassSums.empty(width))
            ordered = ClassSums.empty(width, order).merged(old, np.zeros(width), 1, name)
            variables = {**self.variables, name: ordered}
            table = LabelTable().merged(self.label_products, 1, variables, self.variables)
            add([Assignment(self, {"variables": variables, "label_products": table})])


def _joined(label_sums: list[LabelSums], n: int) -> tuple[NDArray[np.intp], Float, Float]:
    """Return codes, (v, n), class weights, (c,), and values, (q, n), of all variables."""
    # The class sums are numbered over all variables; codes are -1 for missing labels.
    codes, start = list[NDArray[np.intp]](), 0
    for sums in label_sums:
        if sums.codes is not None:
            codes.append(np.where(sums.codes < 0, -1, sums.codes + start) if start else sums.codes)
        start += len(sums.weights)
    weights = np.concatenate([np.empty(0), *(sums.weights for sums in label_sums)])
    columns = np.concatenate([np.empty((n, 0)), *(sums.values.T for sums in label_sums)], axis=1)
    values = columns.T
    if len(values) < MATRIX_PRODUCT_FROM:  # the kernel, unlike GEMM, needs C order
        values = np.ascontiguousarray(values)
    return np.array(codes, np.intp).reshape(len(codes), n), weights, values
