"""The accumulator behind Moments: the state of x, of every variable, and the rows that wait.

It takes valid input only; :class:`splince_fast.Moments` is its public door.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splince_fast._runtime import interrupts, threads
from splince_fast._runtime.arrays import check_values, is_direct, working_dtype
from splince_fast.exceptions import (
    IncompatibleMomentsError,
    NotEnoughDataError,
    UnknownVariableError,
)
from splince_fast.labels import ClassCodes, Encoded, VariableName
from splince_fast.moments.buffer import LabelledRows, Stage
from splince_fast.moments.state import State, reduce_block
from splince_fast.moments.variable import ClassSums, ColumnSums, Variable, merged_variables
from splince_fast.moments.workspace import Workspace

Float = NDArray[np.float64]

_BLOCK_BYTES = 1 << 27
# Numbers below which new memory costs nothing.
_SMALL = 1 << 16


class Accumulator:
    """What was seen so far.

    Attributes
    ----------
    width : int or None
        Features d; None before the first rows, as is `state`.
    state : State or None
    variables : dict of VariableName to ClassSums or ColumnSums
    stage : Stage or None
        Rows that wait for a block to fill up.
    """

    def __init__(self, block_rows: int | None, *, ledoit_wolf: bool = False) -> None:
        self.block_rows = block_rows
        self.ledoit_wolf = ledoit_wolf
        self.width: int | None = None
        self.state: State | None = None
        self.variables: dict[VariableName, Variable] = {}
        self.stage: Stage | None = None
        self._work: Workspace | None = None

    @property
    def n_rows(self) -> int:
        """Rows seen, waiting ones included."""
        return self.n_merged + (0 if self.stage is None else self.stage.filled)

    @property
    def n_merged(self) -> int:
        """Rows in the state."""
        return 0 if self.state is None else self.state.n_rows

    @property
    def waiting(self) -> bool:
        """Whether rows wait to be merged."""
        return self.stage is not None and self.stage.filled > 0

    @property
    def nbytes(self) -> int:
        """Bytes held: the state and the work buffers."""
        total = 0
        if self.state is not None:
            total += self.state.scatter.nbytes + 2 * self.state.reference.nbytes
        for variable in self.variables.values():
            total += sum(tensor.nbytes for tensor in variable.tensors().values())
        for buffer in (self.stage, self._work):
            total += 0 if buffer is None else buffer.nbytes
        return total

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
        """The sums of one variable, with room for every class that was named.

        Raises
        ------
        UnknownVariableError
            No such variable was seen.
        """
        # A list is searched: a tuple may hold what has no hash.
        if not isinstance(name, str | tuple) or name not in list(self.variables):
            known = ", ".join(map(repr, self.variables)) or "none"
            hint = f"; Moments(joint=[{name!r}]) does it" if isinstance(name, tuple) else ""
            raise UnknownVariableError(
                f"no variable {name!r} was accumulated; the variables are: {known}{hint}"
            )
        found = self.variables[name]
        if isinstance(found, ClassSums):
            found.allocate()
        return found

    def workspace(self, size: int) -> AbstractContextManager[Float]:
        """Memory for `size` float64 numbers, for a solve."""
        if self._work is None or size < _SMALL:
            return nullcontext(np.empty(size))
        return self._work.lent(size)

    def feed(
        self, rows: NDArray[Any], weight: Float | None, encoded: Mapping[VariableName, Encoded]
    ) -> None:
        """Add rows with valid labels: whole blocks where their layout allows, others by the stage.

        Raises
        ------
        NonFiniteError, InputError
            As `check_values`, before anything changes.
        """
        only_waits = self._only_waits(rows)
        # A single block that is merged at once is checked by its reduction, without another pass.
        if only_waits or self.state is None or not self._is_block(rows):
            check_values(rows)
        before = self.width, self.state, self.stage, self._work
        merged, waiting = self.n_merged, 0 if self.stage is None else self.stage.filled
        known = dict(self.variables)
        classes = [(v, len(v.names)) for v in known.values() if isinstance(v, ClassSums)]
        columns = [(v, v.names) for v in known.values() if isinstance(v, ColumnSums)]
        try:
            if only_waits and self.stage is not None:
                # Waiting rows count from a single assignment on, so nothing has to be held back.
                self.stage.append(self._labelled(rows, weight, encoded))
            else:
                with interrupts.deferred():
                    self._feed(rows, weight, encoded)
        except BaseException:
            # Memory ran out, or a kernel failed: unless rows were merged, nothing has happened.
            if self.n_merged == merged:
                self.width, self.state, self.stage, self._work = before
                if self.stage is not None:
                    self.stage.rewind(waiting, known)
                self.variables = known
                for sums, n_names in classes:
                    sums.forget(n_names)
                for column_sums, names in columns:
                    column_sums.names = names
            raise

    def _feed(
        self, rows: NDArray[Any], weight: Float | None, encoded: Mapping[VariableName, Encoded]
    ) -> None:
        dtype, width = working_dtype(rows.dtype), rows.shape[1]
        capacity = self.capacity(width)
        stage = self.stage
        if stage is None or stage.dtype != dtype or stage.width != width:
            self.flush()
            stage = self._reserve(width, dtype)
        if self.state is None:
            head = rows[: min(len(rows), 256)].astype(np.float64, order="C")
            # About its first row, so that a constant column has exactly its value.
            reference = head[0] + (head - head[0]).mean(axis=0)
            self.state = State.empty(reference, fourth=self.ledoit_wolf)
        self.width = width
        block = self._labelled(rows, weight, encoded)
        start, n = 0, len(rows)
        while start < n:
            room = stage.room
            if room == capacity <= n - start and is_direct(rows):
                stop = start + capacity
                self._merge_rows(block.slice(start, stop))
            else:
                stop = min(n, start + room)
                stage.append(block.slice(start, stop))
                if stop - start == room:
                    self.flush()
            start = stop

    def _only_waits(self, rows: NDArray[Any]) -> bool:
        """Whether these rows join those that wait, and nothing is merged."""
        stage = self.stage
        return (
            stage is not None
            and self.state is not None
            and len(rows) < stage.room
            and stage.dtype == working_dtype(rows.dtype)
        )

    def _is_block(self, rows: NDArray[Any]) -> bool:
        """Whether these rows are merged as they are, and as one block."""
        return (
            is_direct(rows)
            and len(rows) == self.capacity(rows.shape[1])
            and (self.stage is None or not self.stage.filled)
        )

    def _reserve(self, width: int, dtype: np.dtype[Any]) -> Stage:
        """Work buffers for blocks of this width and dtype."""
        from splince_fast._kernels import provider

        threads.thread_count()  # so that a wrong setting is told at once
        provider.ensure_for(width)
        self._work = Workspace(self.capacity(width), width, dtype)
        self.stage = Stage(self.capacity(width), width, dtype)
        return self.stage

    def capacity(self, width: int) -> int:
        """Rows of a block."""
        if self.block_rows is not None:
            return self.block_rows
        return max(1, min(4096, _BLOCK_BYTES // (8 * width)))

    def _labelled(
        self, rows: NDArray[Any], weight: Float | None, encoded: Mapping[VariableName, Encoded]
    ) -> LabelledRows:
        """Rows with labels in terms of the state: new variables and classes get their place."""
        block = LabelledRows(rows, weight)
        width = rows.shape[1]
        for name, column in encoded.items():
            known = self.variables.get(name)
            if isinstance(column, ClassCodes):
                if not column.classes:
                    continue
                if known is None:
                    known = self.variables[name] = ClassSums.empty(width)
                if isinstance(known, ClassSums):
                    # -1, a missing label, picks the last entry.
                    lookup = [*known.places(column.classes), -1]
                    block.codes[name] = np.array(lookup, np.intp)[column.codes]
            else:
                present = column.present
                if present is not None and not present.any():
                    continue
                if known is None:
                    shown = column.values if present is None else column.values[present]
                    reference = shown.mean(axis=0)
                    self.variables[name] = ColumnSums.empty(width, column.columns, reference)
                named = self.variables[name]
                if isinstance(named, ColumnSums) and named.unnamed:
                    named.names = list(column.columns)
                values = column.values
                block.values[name] = (
                    values if present is None else np.where(present[:, None], values, np.nan)
                )
        return block

    def flush(self) -> None:
        """Merge the staged rows."""
        if self.stage is not None and self.stage.filled:
            with interrupts.deferred():
                self._merge_rows(self.stage.contents())
                self.stage.clear()

    def _merge_rows(self, block: LabelledRows) -> None:
        """Reduce a block of rows and add it to the state and to the variables."""
        if self.state is None or self._work is None:
            raise RuntimeError("rows were merged before the state was made")
        n = len(block)
        weight = np.empty(0) if block.weight is None else np.ascontiguousarray(block.weight)
        # Sums are kept only for the classes that occur: `where` lists them, per variable.
        codes = np.full((len(block.codes), n), -1, np.intp)
        where: list[tuple[NDArray[np.intp], NDArray[np.int64]]] = []
        n_codes = 0
        for row, (name, column) in zip(codes, block.codes.items(), strict=True):
            known = self.variables[name]
            # Code -1, a missing label, picks the last place.
            rows_of_class = np.bincount(column + 1, minlength=known.n_columns + 1)[1:]
            present = np.flatnonzero(rows_of_class)
            place = np.full(known.n_columns + 1, -1, np.intp)
            place[present] = n_codes + np.arange(len(present))
            place.take(column, out=row, mode="wrap")
            where.append((present, rows_of_class[present]))
            n_codes += len(present)
        values, pieces = self._weighted_values(block, weight)
        reduced = reduce_block(
            block.rows, weight, self.state.reference, codes, n_codes, values, self._work.shifted
        )
        fourth = None if self.state.fourth is None else self.state.fourth.copy()
        if fourth is not None:
            fourth.add_rows(block.rows, weight, self.state.reference)
        # What can fail for want of memory comes before the first change.
        additions = []
        start = 0
        for row, name, (present, counts) in zip(codes, block.codes, where, strict=True):
            variable = self.variables[name]
            if isinstance(variable, ClassSums):
                variable.allocate()
                stop = start + len(present)
                weights = counts.astype(np.float64)
                if weight.size:
                    shown = row >= 0
                    slots = row[shown] - start
                    weights = np.asarray(np.bincount(slots, weight[shown], len(present)), float)
                additions.append(
                    (variable, present, counts, weights, reduced.class_sums[start:stop])
                )
                start = stop
        self.state.merge_block(reduced, self._work.product)
        self.state.fourth = fourth
        for known, present, counts, weights, sums in additions:
            known.add(present, counts, weights, sums)
        start = 0
        for name, (n_present, total, z_sum, squares) in pieces.items():
            columns = self.variables[name]
            if isinstance(columns, ColumnSums):
                stop = start + columns.n_columns
                columns.add(n_present, total, reduced.products[stop], z_sum,
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
            known = self.variables[name]
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

    def merged(self, other: Accumulator, sign: int) -> Accumulator:
        """self + other, or self - other, where no rows wait; neither is changed."""
        if self.width is not None and other.width is not None and self.width != other.width:
            raise IncompatibleMomentsError(
                f"moments of {self.width} features and of {other.width} features cannot be "
                "combined; both must come from rows of the same embedding"
            )
        if other.state is None:
            return self.copy()
        if self.ledoit_wolf != other.ledoit_wolf:
            raise IncompatibleMomentsError(
                "one side was accumulated with ledoit_wolf=True and the other without; accumulate "
                "both alike"
            )
        if self.state is None:
            if sign < 0 and other.state.n_rows:
                raise IncompatibleMomentsError(
                    "cannot remove a part from empty moments: it is not a part of them"
                )
            result = other.copy()
            result.block_rows = self.block_rows
            return result
        shift = other.state.reference - self.state.reference
        result = Accumulator(self.block_rows, ledoit_wolf=self.ledoit_wolf)
        result.width = self.width
        result.variables = merged_variables(self.variables, other.variables, shift, sign)
        result.state = self.state.merged(other.state, sign)
        for name, variable in result.variables.items():
            if variable.n_rows > result.state.n_rows:
                raise IncompatibleMomentsError(
                    f"cannot remove this part: more rows would carry the variable {name!r} than "
                    "are left, so it is not a part of the whole"
                )
        return result

    def copy(self) -> Accumulator:
        """An independent copy, waiting rows included."""
        other = Accumulator(self.block_rows, ledoit_wolf=self.ledoit_wolf)
        other.width = self.width
        other.state = None if self.state is None else self.state.copy()
        other.variables = {name: v.copy() for name, v in self.variables.items()}
        if self.stage is not None and self.stage.filled:
            other.restage(self.stage.contents())
        return other

    def restage(self, block: LabelledRows) -> None:
        """Let rows wait whose labels are already in terms of this state."""
        self._reserve(block.rows.shape[1], block.rows.dtype).append(block)
