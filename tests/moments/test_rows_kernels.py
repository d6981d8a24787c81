"""Row kernels and BLAS verbs against their twins in plain NumPy, number by number."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_model import U32, U64, laid_out, scatter_of

from splince_fast._kernels import row_kernels
from splince_fast.moments import block as reducing

Array = np.ndarray[Any, Any]


class Block:
    """A random block, with everything the reducing kernel takes."""

    def __init__(
        self, n: int, d: int, dtype: Any = np.float64, *, weighted: bool = False,
        variables: int = 0, classes: int = 3, columns: int = 0, offset: float = 0.0,
        turns: Array = reducing._ROTATIONS, part_rows: int = 16, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.rows = (rng.normal(size=(n, d)) + offset).astype(dtype)
        self.weight = rng.uniform(0.1, 3, n) if weighted else np.empty(0)
        self.shift = self.rows[-min(n, 3) :].astype(np.float64).mean(axis=0)
        self.codes = rng.integers(-1, classes, (variables, n)).astype(np.intp)
        self.codes += np.arange(variables)[:, None] * classes * (self.codes >= 0)
        self.n_codes = variables * classes
        self.values = rng.normal(size=(columns, n)) * (rng.random((columns, n)) < 0.8)
        self.turns, self.part_rows = turns, part_rows

    def reduced(
        self, bounds: list[int] | None = None, out: Array | None = None
    ) -> dict[str, Array]:
        """Call the kernel on stripes of columns; outputs begin as NaN, but for a given `out`."""
        n, d = self.rows.shape
        room = np.full((reducing.buffer_rows(n), d), np.nan, self.rows.dtype)
        out = room if out is None else out
        block = self.taken()
        block.sums[:] = np.nan
        for first, last in pairwise(bounds or [0, d]):
            row_kernels.centre_columns(block, self.turns, out, first, last)
        total, peak, *_ = block.sums
        return {
            "out": out, "peak": peak, "total": total, "class_sums": block.class_sums,
            "products": block.products,
        }  # fmt: skip

    def taken(self) -> row_kernels.Block:
        """As the kernels take it."""
        return row_kernels.Block(
            self.rows, None, self.weight if self.weight.size else None, self.shift,
            self.codes, self.n_codes, self.values, self.part_rows,
        )  # fmt: skip

    def turned(self) -> Array:
        """What `out` is in exact arithmetic: rows padded with zeros, turned in pairs."""
        n, d = self.rows.shape
        deviations = np.zeros((reducing.buffer_rows(n), d))
        deviations[:n] = self.rows - self.shift
        if self.weight.size:
            deviations[:n] *= np.sqrt(self.weight)[:, None]
        first, second = deviations[::2], deviations[1::2]
        cosine, sine = self.turns[np.arange(len(first)) % len(self.turns)].T[:, :, None]
        turned = np.empty_like(deviations)
        turned[::2], turned[1::2] = (
            cosine * first + sine * second,
            cosine * second - sine * first,
        )
        return turned

    def check(self) -> None:
        found = self.reduced()
        peak = np.abs(self.rows.astype(np.float64) - self.shift).max(axis=0)
        np.testing.assert_array_equal(found["peak"], peak)
        # Two products and a sum, once more where they are stored in float32.
        largest = np.sqrt(self.weight.max(initial=1.0)) * peak
        u = U32 if self.rows.dtype == np.float32 else 0.0
        assert (np.abs(found["out"] - self.turned()) <= (2 * u + 8 * U64) * largest).all()
        self.check_sums(self.shift, found["total"], found["class_sums"], found["products"])

    def check_sums(self, shift: Array, total: Array, class_sums: Array, products: Array) -> None:
        """Against the twins, to N u sum |terms|."""
        n = len(self.rows)
        w = self.weight if self.weight.size else np.ones(n)
        deviations = self.rows.astype(np.float64) - shift
        expected = np.zeros((self.n_codes, self.rows.shape[1]))
        for codes in self.codes:
            np.add.at(expected, codes[codes >= 0], (w[:, None] * deviations)[codes >= 0])
        slack = 8 * (n + 8) * U64 * np.abs(deviations).max(axis=0)
        assert (np.abs(total - w @ deviations) <= slack * w.sum()).all()
        assert (np.abs(class_sums - expected) <= slack * w.sum()).all()
        shares = np.abs(self.values).sum(axis=1, keepdims=True)
        assert (np.abs(products - self.values @ deviations) <= slack * shares).all()


DTYPES = [np.float32, np.float64]
SOME, FEW = st.integers(1, 90), st.integers(1, 40)
seeds = st.integers(0, 999)


@st.composite
def blocks(draw: st.DrawFn, rows: Any = SOME, width: Any = FEW, **more: Any) -> Block:
    """Blocks of any numbers of rows, features, variables and label columns."""
    return Block(
        draw(rows), draw(width), draw(st.sampled_from(DTYPES)), weighted=draw(st.booleans()),
        variables=draw(st.integers(0, 3)), classes=draw(st.sampled_from([1, 2, 5, 300])),
        offset=draw(st.sampled_from([0.0, 3.0, 1e4])), seed=draw(seeds),
        **{name: draw(v) for name, v in {"columns": st.integers(0, 3), **more}.items()},
    )  # fmt: skip


# --- the shift -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("level")
@given(blocks(), st.integers(1, 100))
def test_a_sample_has_the_mean_and_the_squares_of_its_rows(block: Block, stride: int) -> None:
    weighted = bool(block.weight.size)
    given = block.weight if weighted else None
    shift, spread = row_kernels.sample_columns(block.rows, None, given, stride)
    x = block.rows[::stride].astype(np.longdouble)
    w = block.weight[::stride] if weighted else np.ones(len(x))
    y = x - x[0]
    mean = np.average(y, axis=0, weights=w)
    squares = w @ (y - mean) ** 2
    # Sums about the first row, which lies within `size` of all others.
    size, m = np.abs(y).max(axis=0), len(y) + 8
    slack = 4 * m * U64 * size
    assert (np.abs(shift - (x[0] + mean)) <= slack + 2 * U64 * np.abs(shift)).all()
    assert (np.abs(spread - squares) <= slack * w.sum() * size).all()
    assert (spread >= 0).all()


# --- reducing rows -------------------------------------------------------------------------------


turns = st.lists(st.floats(-7, 7), min_size=1, max_size=5).map(
    lambda angles: np.stack([np.cos(angles), np.sin(angles)], axis=1)
)


@pytest.mark.usefixtures("level")
@given(
    blocks(
        st.one_of(SOME, st.integers(500, 2100)),
        st.one_of(FEW, st.integers(100, 140)),
        turns=turns,
        part_rows=st.sampled_from([4, 8, 64, 512]),
    )
)
def test_reducing_equals_its_twin(block: Block) -> None:
    block.check()


@pytest.mark.usefixtures("level")
@given(blocks(width=st.just(97)), st.lists(st.integers(0, 97), max_size=6), st.integers(0, 16))
def test_stripes_of_columns_give_the_same_bytes(block: Block, cuts: list[int], offset: int) -> None:
    """However columns are dealt to threads, and wherever in a cache line the centred block lies.

    Each number comes from the same operations; nothing beside the block is written.
    """
    whole = block.reduced()
    stop = offset + whole["out"].size
    memory = np.full(stop + 20, 7, block.rows.dtype)
    bounds, out = sorted({0, 97, *cuts}), memory[offset:stop].reshape(-1, 97)
    for name, array in block.reduced(bounds, out).items():
        assert array.tobytes() == whole[name].tobytes(), name
    assert (memory[:offset] == 7).all()
    assert (memory[stop:] == 7).all()
    block.codes, block.values = block.codes[:0], block.values[:0]
    assert block.reduced()["out"].tobytes() == whole["out"].tobytes(), "labels have no influence"


def _add(array: Array, place: Any, value: float) -> None:
    array[place] += value


SPOIL: dict[str, Callable[[Block], None]] = {
    "a lost row": lambda block: _add(block.rows, 17, 1.0),
    "a lost class": lambda block: _add(block.codes, (0, 3), 1 if block.codes[0, 3] < 0 else -1),
    "a label": lambda block: _add(block.values, (0, 3), 1.0),
    "a weight": lambda block: _add(block.weight, 3, 0.5),
    "an angle": lambda block: setattr(block, "turns", block.turns[:7]),
}


@pytest.mark.parametrize("spoil", SPOIL)
def test_the_twin_is_not_the_kernel(spoil: str) -> None:
    """A control: the comparison sees each of them."""
    block = Block(50, 4, weighted=True, variables=1, columns=1)
    found = block.reduced()
    SPOIL[spoil](block)
    block.reduced = lambda bounds=None, out=None: found  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        block.check()


# --- reducing a block: the shift, the precision --------------------------------------------------


def reduce_into(
    block: Block, memory: Any, rows: Array | None = None, index: Array | None = None
) -> reducing.BlockSums:
    """Reduce rows, those of the block unless others are given, with its weights and labels."""
    rows = block.rows if rows is None else rows
    weight, n = block.weight if block.weight.size else None, len(rows if index is None else index)
    given = reducing.Block(n, rows, weight, {}, index)
    return reducing.reduce_block(given, block.codes, block.n_codes, block.values, memory)


def centred(rows: Array) -> reducing.Centred:
    """Memory for the centred rows that begins as NaN."""
    n, d = rows.shape
    return reducing.Centred(np.full((reducing.buffer_rows(n), d), np.nan, rows.dtype))


def gram(rows: Array) -> reducing.Gram:
    """Memory for their product that begins as NaN."""
    memory = reducing.Gram(*rows.shape, rows.dtype)
    memory.set_memory(np.full(memory.size, np.nan))
    return memory


def reduce(rows: Array, weight: Array) -> reducing.BlockSums:
    """Reduce rows without labels."""
    block = Block(*rows.shape)
    block.weight = weight
    return reduce_into(block, centred(rows), rows)


SMALL = {"_PART_BYTES": 1, "_CHUNK_ROWS": 16, "_GRAIN_PRODUCTS": 1, "_PAGE": 1,
         "_THREADS_PER_STRIPE": 1}  # fmt: skip


@contextmanager
def small_tasks(threads: int) -> Iterator[None]:
    """Chunks of 16 rows, stripes of a register, and so many threads, whatever the block."""
    reducing.part_rows.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(reducing, name, value)
        patch.setenv("SPLINCE_FAST_NUM_THREADS", str(threads))
        yield
    reducing.part_rows.cache_clear()


def product_of(shifted: Array) -> tuple[Array, Array]:
    """Lower triangle of the product of the rows, a sum of n terms in any order, and its rounding.

    Rows that two compilations of a pass store may differ by a rounding.
    """
    wide = shifted.astype(np.longdouble)
    u = U32 if shifted.dtype == np.float32 else U64
    return np.tril(wide.T @ wide), (len(wide) + 8) * u * np.tril(np.abs(wide).T @ np.abs(wide))


def multiplied(block: Block, threads: int) -> reducing.BlockSums:
    """Reduce a block with its product."""
    d = block.rows.shape[1]
    with small_tasks(threads):
        found = reduce_into(block, gram(block.rows))
    assert found.product is not None
    found.product = np.tril(found.product[:d, :d])
    return found


@pytest.mark.usefixtures("level")
@given(
    blocks(
        st.one_of(st.integers(1, 70), st.integers(1, 400)),
        st.one_of(st.integers(1, 20), st.integers(1, 140)),
    )
)
def test_a_pass_that_multiplies_equals_two_passes(block: Block) -> None:
    """No number depends on the threads."""
    in_two, found = reduce_into(block, centred(block.rows)), multiplied(block, 1)
    assert in_two.product is None
    assert found.shift.tobytes() == in_two.shift.tobytes()
    for sums in (in_two, found):
        block.check_sums(sums.shift, sums.total, sums.class_sums, sums.products)
    exact, bound = product_of(in_two.shifted)
    assert (np.abs(found.product - exact) <= bound).all()
    n, d = block.rows.shape
    if n > 8 and d > 1:  # the control: a row that is missing shows
        less, _ = product_of(in_two.shifted[: n // 2])
        assert (np.abs(found.product - less) > bound).any()
    for threads in (2, 3, 5):
        other = multiplied(block, threads)
        for name in ("shift", "total", "squares", "class_sums", "products", "product"):
            np.testing.assert_array_equal(getattr(other, name), getattr(found, name), strict=True)
    block.codes, block.values = block.codes[:0], block.values[:0]
    np.testing.assert_array_equal(multiplied(block, 1).product, found.product)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("d", "dtype"), [(270, np.float64), (530, np.float32)])
def test_a_product_of_several_blocks_of_panels(d: int, dtype: Any) -> None:
    """Rows of two chunks, and panels beyond those that a cache keeps at once, of any processor."""
    block = Block(300, d, dtype)
    found = reduce_into(block, gram(block.rows))
    exact, bound = product_of(reduce_into(block, centred(block.rows)).shifted)
    assert (np.abs(np.tril(found.product[:d, :d]) - exact) <= bound).all()


@pytest.mark.usefixtures("level")
def test_no_product_is_taken_before_every_stripe_is_centred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread waits for a task that another one has begun, and goes on when that is finished."""
    original = row_kernels.reduce_chunks
    seen: list[tuple[bool, int]] = []

    def beside_another(*arguments: Any) -> None:
        counters = arguments[-1]
        counters[0, 0] = 1
        thread = threading.Thread(target=original, args=arguments)
        thread.start()
        thread.join(0.2)
        seen.append((thread.is_alive(), int(counters[1, 0])))
        counters[0, 8] += 1
        thread.join()

    monkeypatch.setattr(row_kernels, "reduce_chunks", beside_another)
    n, d = 16, 9
    memory = reducing.Gram(n, d, np.dtype(np.float64))
    memory.set_memory(np.zeros(memory.size)).reduce(Block(n, d).taken())
    assert seen == [(True, 0)]


def uncentred(found: reducing.BlockSums) -> Array:
    """Sums of squares about the shift, in extended precision."""
    wide = found.shifted.astype(np.longdouble)
    return np.asarray((wide * wide).sum(axis=0))


def stride_of(n: int) -> int:
    """Rows from one of the sample to the next."""
    return int(np.ceil(n**0.5 / 4))


# Columns whose sample says little of them: of random numbers x, places of rows, whether a row is
# sampled, and a size.
ADVERSARIAL: dict[str, Callable[[Array, Array, Array, float], Array]] = {
    "random": lambda x, place, seen, size: x,
    "sorted": lambda x, place, seen, size: np.sort(x) * size,
    "small where sampled": lambda x, place, seen, size: np.where(seen, x, size * (5 + x)),
    "large where sampled": lambda x, place, seen, size: np.where(seen, size * (5 + x), x),
    "constant where sampled": lambda x, place, seen, size: np.where(seen, 7.0, 7 + size),
    "one outlier": lambda x, place, seen, size: np.where(place == len(x) // 2 + 1, size, x),
    "an outlier that is sampled": lambda x, place, seen, size: np.where(place == 0, size, x),
    "period of the stride": lambda x, place, seen, size: np.where(seen, size, 0.0) + 1e-3 * x,
    "a trend": lambda x, place, seen, size: x + size * place,
}


def adversarial(order: str, n: int, rng: np.random.Generator, size: float) -> Array:
    place = np.arange(n)
    return ADVERSARIAL[order](rng.normal(size=n), place, place % stride_of(n) == 0, size)


@given(
    n=st.integers(1, 1500),
    columns=st.lists(
        st.tuples(st.sampled_from(sorted(ADVERSARIAL)), st.sampled_from([0, 1, 30, 1e3, 1e8])),
        min_size=1, max_size=4,
    ),
    offset=st.sampled_from([0.0, 1e4]),
    weighted=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_a_shift_costs_at_most_a_factor_of_five(
    n: int, columns: list[tuple[str, float]], offset: float, weighted: bool, dtype: Any, seed: int
) -> None:
    """Whatever the order of rows: that bounds the digits that subtracting W r r^T can cost."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([adversarial(order, n, rng, size) for order, size in columns]) + offset
    X = X.astype(dtype)
    weight = 10.0 ** rng.uniform(-3, 3, n) if weighted else np.empty(0)
    found = reduce(X, weight)
    centred = np.diag(scatter_of(X, weight if weighted else None))
    squares = uncentred(found)
    # A mean is known to its roundings; `out` to those of its precision.
    size = np.abs(X.astype(np.float64)).max(axis=0)
    roundings = found.weight_sum * (8 * (n + 8) * U64 * size) ** 2
    u = U32 if found.shifted.dtype == np.float32 else U64
    assert (squares <= 5 * (1 + 8 * u + 8 * n * U64) * centred + roundings).all()
    back = squares - found.total.astype(np.longdouble) ** 2 / found.weight_sum
    assert (np.abs(back - centred) <= 8 * (2 * u + n * U64) * squares + roundings).all()


@pytest.mark.parametrize(
    "order", ["small where sampled", "large where sampled", "constant where sampled",
              "period of the stride"],
)  # fmt: skip
def test_a_second_pass_is_what_bounds_the_cost_of_a_shift(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """The control: orders that mislead the sample, with and without a second pass."""
    X = adversarial(order, 2000, np.random.default_rng(0), 1e3)[:, None]
    centred = np.diag(scatter_of(X))
    assert uncentred(reduce(X, np.empty(0))) <= (1 + 1e-12) * centred
    monkeypatch.setattr(reducing, "_EXCESS", np.inf)
    assert uncentred(reduce(X, np.empty(0))) > 5 * centred


@pytest.mark.usefixtures("level")
@given(
    blocks(st.integers(1, 200), columns=st.sampled_from([0, 2, reducing.MATRIX_PRODUCT_FROM])),
    st.sampled_from([1.0, 1e25]),
    st.booleans(),
    seeds,
)
def test_rows_by_number_have_the_bits_of_their_copy(
    block: Block, scale: float, misled: bool, seed: int
) -> None:
    """With a second pass and in float64 where float32 overflows, too."""
    (n, d), rng = block.rows.shape, np.random.default_rng(seed)
    lying = (rng.normal(size=(2 * n, d)) * scale).astype(block.rows.dtype)
    index = rng.permutation(2 * n)[:n]
    if misled:
        lying[index[:: stride_of(n)]] *= 1e3

    def reduced(rows: Array, index: Array | None) -> reducing.BlockSums:
        return reduce_into(block, centred(rows[:n]), rows, index)

    ours, copied = reduced(lying, index), reduced(lying[index], None)
    for name in ("shift", "total", "squares", "shifted", "class_sums", "products"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(copied, name), strict=True)
    assert (ours.n_rows, ours.weight_sum) == (copied.n_rows, copied.weight_sum)
    others = reduced(lying, np.roll(np.arange(2 * n), 1)[:n])  # the control
    assert not np.array_equal(others.shifted, copied.shifted) or n < 3


# In the pass, or multiplied as a matrix.
@pytest.mark.parametrize("columns", [2, reducing.MATRIX_PRODUCT_FROM + 1])
@pytest.mark.parametrize(("dtype", "weighted"), [(np.float32, True), (np.float64, False)])
# One segment, and several; columns that fill no register, no cache line, no stripe.
@pytest.mark.parametrize(
    ("n", "d", "segments"), [(3, 5, 1), (203, 209, 1), (203, 1100, 1), (2803, 400, 2)]
)
def test_block_sums_are_its_naive_twin(
    dtype: Any, weighted: bool, columns: int, n: int, d: int, segments: int, level: str
) -> None:
    """Also of rows that lie among others."""
    block = Block(n, d, dtype, weighted=weighted, variables=2, columns=columns, offset=3.0)
    rows, index, weight = block.rows, None, None
    if weighted:
        index, weight = np.random.default_rng(1).permutation(2 * n)[:n], block.weight
        rows = np.full((2 * n, d), np.nan, dtype)
        rows[index] = block.rows
    given = reducing.Block(n, rows, weight, {}, index)
    found = reducing.sum_block(given, block.shift, block.codes, block.n_codes, block.values)
    block.check_sums(block.shift, found.total, found.class_sums, found.products)
    deviations = block.rows.astype(np.float64) - block.shift
    squares = (np.ones(n) if weight is None else weight) @ deviations**2
    np.testing.assert_allclose(found.squares, squares, rtol=1e-12)
    n_sums = 2 + block.n_codes + (columns if columns < reducing.MATRIX_PRODUCT_FROM else 0)
    assert -(-n // reducing._segment_rows(n, d, n_sums)) == segments


# --- arguments that do not fit -------------------------------------------------------------------

N, D, CLASSES = 11, 9, 3


def codes_of(*shape: int) -> Array:
    return np.zeros(shape, np.intp)


def arguments(dtype: Any) -> dict[str, Any]:
    """Arguments with which each entry works."""
    lanes = row_kernels.register_width(max(np.dtype(dtype).itemsize, 4))
    whole = -(-D // lanes)
    block = {
        "rows": np.ones((N, D), np.promote_types(dtype, np.float32)), "index": np.arange(N),
        "weight": np.ones(N), "shift": np.zeros(D), "codes": codes_of(2, N), "n_codes": CLASSES,
        "values": np.ones((2, N)), "part_rows": 8,
    }  # fmt: skip
    taken = row_kernels.Block(**block)
    return {
        "sample_columns": {
            "rows": block["rows"], "index": np.arange(N), "weight": np.ones(N), "stride": 2,
        },
        "Block": block,
        "centre_columns": {
            "block": taken, "rotations": np.ones((5, 2)), "out": np.ones((12, D), dtype),
            "first": 0, "last": D,
        },
        "reduce_chunks": {
            "block": taken, "rotations": np.ones((5, 2)), "chunk": 8, "stripe": 2 * lanes,
            "panels": np.ones((2 * whole, 8 * lanes), dtype),
            "product": np.ones((whole * lanes, whole * lanes), dtype),
            "counters": np.zeros((3, 16), np.int64),
        },
        "Addition": {
            "sums": np.ones((CLASSES, D)), "addend": np.ones((2, D)), "rows": np.array([2, 0]),
        },
        "ScatterAddition": {
            "scatter": np.ones((D, D), order="F"), "product": np.ones((D, D), dtype, order="F"),
            "sign": 1.0, "vectors": np.ones((2, D)), "coefficients": np.ones(2),
        },
        "check_sums": {
            "sample_squares": np.ones(D), "weight_sum": 1.0, "min_weight": 1.0, "max_weight": 1.0,
            "excess": 4.0,
        },
        "reference_is_far": {
            "reference": np.zeros(D), "deviation": np.zeros(D), "weight": 1.0,
            "squares": np.ones(D), "added_mean": np.zeros(D), "added_squares": np.ones(D),
            "added_weight": 1.0, "max_distance": 16.0, "roundings": 1e-13,
        },
        "sum_block": {
            "block": taken, "task_columns": 16, "sums": np.zeros((2, 4 + CLASSES, D)),
            "work": np.zeros((2, 3, D)), "counter": np.zeros(1, np.int64),
        },
        "PackedFactors": {
            "left": np.ones((2, D)), "right": np.ones((2, D)), "mean": np.zeros(D),
            "shift": np.zeros(2),
        },
        "count_classes": {"labels": codes_of(N), "weight": np.ones(N), "n_classes": 1},
        "apply_rows": {
            "factors": row_kernels.PackedFactors(
                np.ones((2, D)), np.ones((2, D)), np.zeros(D), np.zeros(2)
            ),
            "rows": np.ones((N, D), dtype), "out": np.ones((N, D), dtype), "start": 0, "stop": N,
        },
        "squares_finite": {"rows": np.ones((N, D), dtype), "start": 0, "stop": N},
    }  # fmt: skip


def part_of_six() -> row_kernels.Block:
    """A block that cannot be centred."""
    return row_kernels.Block(**arguments(np.float64)["Block"] | {"part_rows": 6})


def call_of(entry: str, dtype: Any) -> Callable[..., Any]:
    """A function of the module, or the method of a block."""
    if entry != "check_sums":
        return cast(Callable[..., Any], getattr(row_kernels, entry))
    block = row_kernels.Block(**arguments(dtype)["Block"])
    block.sums[:] = 1.0
    return block.check_sums


ENTRIES = [(entry, dtype) for dtype in DTYPES for entry in arguments(dtype)]
ENTRIES.append(("apply_rows", np.float16))
WRITTEN = {
    "centre_columns": {"out"},
    "reduce_chunks": {"panels", "product", "counters"},
    "Addition": {"sums"},
    "ScatterAddition": {"scatter"},
    "sum_block": {"sums", "work", "counter"},
    "apply_rows": {"out"},
}
# Sizes that are an argument's own.
FREE = {
    ("Block", "codes", 0),
    ("Block", "values", 0), ("centre_columns", "rotations", 0), ("reduce_chunks", "rotations", 0),
    ("count_classes", "labels", 0), ("Addition", "sums", 0),
    ("sample_columns", "rows", 1), ("sample_columns", "rows", 0), ("Block", "rows", 0),
    ("squares_finite", "rows", 1),
}  # fmt: skip
# Sizes with room to spare.
ROOMY = {
    ("reduce_chunks", "panels", 1), ("sum_block", "work", 2), ("squares_finite", "rows", 0),
}  # fmt: skip
# Entries that take arrays of any strides.
STRIDED = ("reference_is_far", "apply_rows")
# Rows that the index does not name, and sizes that are taken from another argument.
OPTIONAL = {"index", "weight", "product"}


def misfits(entry: str, name: str, array: Array) -> Iterator[Array]:
    """The same argument too short, too long, of other numbers, or laid out in another way."""
    order: Any = "F" if name in ("scatter", "product") else "C"
    for axis in range(array.ndim):
        if (entry, name, axis) in FREE:
            continue
        if array.shape[axis]:
            yield np.array(np.delete(array, -1, axis), order=order)
        if (entry, name, axis) not in ROOMY:
            more = [(0, int(k == axis)) for k in range(array.ndim)]
            yield np.array(np.pad(array, more), order=order)
    for kind in (np.float16, np.int8, np.uint16, np.int32, np.complex128, np.longdouble, object,
                 array.dtype.newbyteorder()):  # fmt: skip
        if kind != array.dtype:
            yield np.array(array.astype(kind), order=order)
    if entry in ("apply_rows", "squares_finite"):
        yield laid_out(array, "unaligned")
        yield array.tolist()
    yield array[None]
    if entry not in STRIDED and array.size > 1:
        yield np.stack([array, array], axis=-1)[..., 0]
    if name in WRITTEN.get(entry, ()):
        locked = array.copy(order="K")
        locked.flags.writeable = False
        yield locked


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("entry", "dtype"), ENTRIES)
def test_an_argument_that_does_not_fit_is_refused(entry: str, dtype: Any) -> None:
    """Before anything is read or written, and nothing is held: an array may then be resized."""
    call = call_of(entry, dtype)
    call(*arguments(dtype)[entry].values())  # the control
    given = arguments(dtype)[entry]
    before = {k: v.copy() for k, v in given.items() if isinstance(v, np.ndarray)}

    def held() -> dict[str, int]:
        return {name: sys.getrefcount(given[name]) for name in before}

    at_first, refused = held(), 0
    for name in before:
        for misfit in misfits(entry, name, given[name]):
            with pytest.raises((ValueError, TypeError)):
                call(*(given | {name: misfit}).values())
            refused += 1
            del misfit
        if name not in OPTIONAL:
            with pytest.raises((ValueError, TypeError)):
                call(*(given | {name: None}).values())
        for other in before:
            assert given[other].tobytes() == before[other].tobytes(), (name, other)
        assert held() == at_first
    assert refused >= 7 * len(before)


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        ("sample_columns", {"stride": 0}), ("sample_columns", {"index": np.arange(N) + 1}),
        ("Block", {"index": np.arange(N) - 1}), ("Block", {"part_rows": 0}),
        ("Block", {"codes": codes_of(2, N) + CLASSES}), ("Block", {"codes": codes_of(2, N) - 2}),
        ("Block", {"n_codes": 0}),
        ("Block", {"rows": np.ones((N, 0))}), ("centre_columns", {"first": -1}),
        ("centre_columns", {"last": D + 1}), ("centre_columns", {"first": 3, "last": 2}),
        ("centre_columns", {"rotations": np.ones((0, 2))}),
        ("reduce_chunks", {"chunk": 0}), ("reduce_chunks", {"chunk": 6}),
        ("reduce_chunks", {"chunk": 12}), ("reduce_chunks", {"stripe": 0}),
        ("centre_columns", {"block": part_of_six()}), ("reduce_chunks", {"block": part_of_six()}),
        ("Addition", {"rows": np.array([0, CLASSES])}), ("Addition", {"rows": np.array([-1, 0])}),
        ("count_classes", {"labels": np.full(N, -2)}),
        ("sum_block", {"task_columns": 0}), ("sum_block", {"task_columns": 17}),
        *((entry, {"start": start, "stop": stop})
          for entry in ("apply_rows", "squares_finite")
          for start, stop in ((-1, 2), (0, N + 1), (3, 2), (N + 1, N + 1))),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused(entry: str, change: dict[str, Any]) -> None:
    given = arguments(np.float64)[entry]
    before = {k: v.copy() for k, v in given.items() if isinstance(v, np.ndarray)}
    with pytest.raises(ValueError, match=r"ha(s|ve) to|needs|rows"):
        getattr(row_kernels, entry)(*(given | change).values())
    assert all(given[name].tobytes() == array.tobytes() for name, array in before.items())


def test_a_block_keeps_its_arrays() -> None:
    """Memory that a kernel reads is not given back while the block lives."""
    given = arguments(np.float32)["Block"]
    watched = [weakref.ref(array) for array in given.values() if isinstance(array, np.ndarray)]
    block = row_kernels.Block(**given)
    del given
    assert all(array() is not None for array in watched)
    del block
    assert all(array() is None for array in watched)


# --- changes of a state --------------------------------------------------------------------------

WIDTHS = [1, 2, 3, 17, 64, 65, 130, 200]


def symmetric(d: int, seed: int = 0) -> Array:
    square = np.random.default_rng(seed).normal(size=(d, d))
    return np.asfortranarray(square + square.T)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("product_of", [np.float32, np.float64, None])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("d", WIDTHS)
def test_a_product_and_two_vectors_are_added(d: int, sign: float, product_of: Any) -> None:
    scatter, product, added = symmetric(d), None, np.zeros((d, d))
    if product_of is not None:
        product = np.asfortranarray(symmetric(d + 2, 1), dtype=product_of)
        added = product[:d, :d].astype(np.float64)
    rng = np.random.default_rng(2)
    vectors, coefficients = rng.normal(size=(2, d)), np.array([0.37, -2.5])
    squares = [c * np.outer(v, v) for c, v in zip(coefficients, vectors, strict=True)]
    expected = scatter + sign * added + squares[0] + squares[1]
    slack = 8 * U64 * (np.abs(scatter) + np.abs(added) + sum(map(np.abs, squares)))
    found = scatter.copy(order="F")
    change = row_kernels.ScatterAddition(found, product, sign, vectors, coefficients)
    assert found.tobytes() == scatter.tobytes()  # only `add` changes it
    row_kernels.add([change])
    assert (np.abs(np.tril(found - expected)) <= slack).all()
    np.testing.assert_array_equal(np.triu(found, 1), np.triu(scatter, 1))


def test_changes_are_applied_in_order() -> None:
    sums, owner, values = np.zeros((4, 3)), type("Owner", (), {})(), np.ones((2, 3))
    changes = [
        row_kernels.Addition(sums, values, np.array([3, 1])),
        row_kernels.Call(sums.__setitem__, 1, 5.0),
        row_kernels.Addition(sums, np.full((4, 3), 0.5)),
        row_kernels.Assignment(owner, {"first": sums, "second": 2}),
    ]
    assert not sums.any()
    row_kernels.add(changes)
    np.testing.assert_array_equal(sums, np.array([[0.5], [5.5], [0.5], [1.5]]) + np.zeros(3))
    assert (owner.first is sums, owner.second) == (True, 2)
    with pytest.raises(TypeError, match="has to contain changes"):
        row_kernels.add([*changes, None])
    assert sums[0, 0] == 0.5


def test_a_change_that_fails_marks_the_owners() -> None:
    """Owners of any change of the list, applied or not, if they can be marked."""
    owners = [type("Owner", (), {"broken": False})() for _ in range(2)]
    plain = type("Plain", (), {})()
    changes = [row_kernels.Assignment(owner, {"x": 1}) for owner in (*owners, plain)]
    changes.insert(1, row_kernels.Call(np.zeros(2).__getitem__, 2))
    with pytest.raises(IndexError):
        row_kernels.add(changes)
    assert [owner.broken for owner in owners] == [True, True]
    assert not hasattr(plain, "broken")
