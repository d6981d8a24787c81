"""Moments against a list of rows: anything that can be done to one, in any order.

``SPLINCE_FAST_FUZZ=20 pytest tests/moments/test_moments_state_machine.py`` runs twenty times as
long.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from naive_model import FUZZ, REFUSED, Rows, Table, check, no_rows, squares_of, state_bytes, tables

from splince_fast import Moments

WIDTH = 3


@dataclass
class Pair:
    """A state and what it should hold; `past` is every row that ever went through it."""

    moments: Moments
    rows: Rows
    past: Rows

    def check(self) -> None:
        check(self.moments, self.rows, self.past)


def _as_given(column: list[Any]) -> Any:
    """A column of the model as `Moments.update` takes it."""
    example = next((value for value in column if value is not None), None)
    if not isinstance(example, tuple):
        return column
    missing = (np.nan,) * len(example)
    return np.array([missing if value is None else value for value in column])


def assume_precise(moments: Moments) -> Moments:
    """A feature counts as constant where the stated rounding of removals exceeds its variance."""
    lost = moments.__getstate__()["tensors"].get("lost")
    if lost is not None:
        squares = squares_of(moments)
        assume(((lost <= squares) | (squares == 0)).all())
    return moments


class Machine(RuleBasedStateMachine):
    pairs = Bundle("pairs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "state.moments")
        self.touched: list[Pair] = []

    def made(self, moments: Moments, rows: Rows, past: Rows | None = None) -> Pair:
        pair = Pair(moments, rows, rows if past is None else past)
        self.touched.append(pair)
        return pair

    @initialize(target=pairs, table=tables(width=WIDTH))
    def first(self, table: Table) -> Pair:
        return self.made(table.feed(Moments(block_rows=4)), table.rows)

    def small(self) -> bool:
        """Merging with itself again and again would make the list of rows endless."""
        return max(len(pair.past) for pair in self.touched) < 1000

    @rule(target=pairs, block_rows=st.sampled_from([None, 1, 2, 5, 16]))
    def empty(self, block_rows: int | None) -> Pair:
        return self.made(Moments(block_rows=block_rows), no_rows(WIDTH))

    @rule(pair=pairs, table=tables(width=WIDTH))
    def update(self, pair: Pair, table: Table) -> None:
        assert table.feed(pair.moments) is pair.moments
        pair.rows, pair.past = pair.rows + table.rows, pair.past + table.rows

    @rule(pair=pairs, seed=st.integers(0, 99), size=st.integers(1, 400))
    def grow_classes(self, pair: Pair, seed: int, size: int) -> None:
        """Ever more classes, in blocks that see few of them."""
        rng = np.random.default_rng(seed)
        block = rng.normal(size=(8, WIDTH)).astype(np.float32)
        labels = {"many": rng.integers(0, size, 8)}
        pair.moments.update(block, labels)
        added = Rows.of(block, labels)
        pair.rows, pair.past = pair.rows + added, pair.past + added

    @rule(pair=pairs, bad=st.sampled_from(sorted(REFUSED)))
    def failed_update(self, pair: Pair, bad: str) -> None:
        before = state_bytes(pair.moments)
        rows, arguments, error, _ = REFUSED[bad]
        with pytest.raises(error):
            pair.moments.update(rows, **arguments)
        assert state_bytes(pair.moments) == before

    @precondition(small)
    @rule(target=pairs, a=pairs, b=pairs)
    def merge(self, a: Pair, b: Pair) -> Pair:
        return self.made(a.moments + b.moments, a.rows + b.rows, a.past + b.past)

    @precondition(small)
    @rule(a=pairs, b=pairs)
    def merge_in_place(self, a: Pair, b: Pair) -> None:
        before = a.moments
        a.moments += b.moments
        assert a.moments is before
        a.rows, a.past = a.rows + b.rows, a.past + b.past

    @precondition(small)
    @rule(target=pairs, a=pairs, b=pairs)
    def merge_and_remove(self, a: Pair, b: Pair) -> Pair:
        whole = a.moments + b.moments
        return self.made(assume_precise(whole - b.moments), a.rows, a.past + b.past)

    @rule(pair=pairs, cut=st.floats(0, 1), seed=st.integers(0, 99))
    def remove_some_rows(self, pair: Pair, cut: float, seed: int) -> None:
        """Rows in any choice, not only those of one update."""
        chosen = np.random.default_rng(seed).random(len(pair.rows)) < cut
        part = pair.rows.take(chosen)
        removed = Moments(block_rows=3)
        if len(part):
            labels = {name: _as_given(column) for name, column in part.labels.items()}
            removed.update(part.x, labels, sample_weight=part.w)
        self.made(assume_precise(pair.moments - removed), pair.rows.take(~chosen), pair.past)

    @rule(target=pairs, pair=pairs, way=st.sampled_from(["file", "pickle", "deepcopy", "copy"]))
    def duplicate(self, pair: Pair, way: str) -> Pair:
        if way == "file":
            pair.moments.save(self.path)
            twin = Moments.load(self.path)
        elif way == "pickle":
            twin = pickle.loads(pickle.dumps(pair.moments))
        else:
            twin = copy.deepcopy(pair.moments) if way == "deepcopy" else pair.moments.copy()
        assert state_bytes(twin) == state_bytes(pair.moments)
        return self.made(twin, pair.rows, pair.past)

    @rule(pair=pairs)
    def read(self, pair: Pair) -> None:
        pair.check()
        settled = state_bytes(pair.moments)
        pair.check()
        assert state_bytes(pair.moments) == settled

    @invariant()
    def rows_are_counted(self) -> None:
        for pair in self.touched:
            assert pair.moments.n_rows == len(pair.rows)

    def teardown(self) -> None:
        try:
            for pair in self.touched:
                pair.check()
        finally:
            self.folder.cleanup()


Machine.TestCase.settings = settings(
    max_examples=50 * max(FUZZ, 1), stateful_step_count=25, deadline=None
)
TestMoments = Machine.TestCase
