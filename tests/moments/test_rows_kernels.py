"""Row kernels and BLAS verbs against their twins in plain NumPy, number by number."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from naive_model import U32, U64, scatter_of

from splince_fast import Moments
from splince_fast._kernels import accumulate, blas, gram, jit, reference
from splince_fast._kernels import apply as kernels
from splince_fast.moments import block as reducing
from splince_fast.moments import passes

Array = np.ndarray[Any, Any]
ALL = np.empty(0, np.intp)  # every row of a block, in its order
NO_PANELS = passes._NO_PANELS


# Any number of either precision that can be squared.
constants = st.one_of(
    st.floats(-(2.0**120), 2.0**120, width=32).map(np.float32),
    st.floats(-1e140, 1e140).map(np.float64),
)


def sorted_by_cell(codes: Array, n_codes: int, part_rows: int) -> tuple[Array, Array]:
    n = codes.shape[1]
    order, cell = np.full(n, -7, np.intp), np.full(n, -7, np.intp)
    accumulate.sort_by_cell(codes, n_codes, part_rows, order, cell)
    return order, cell


class Block:
    """A random block, with everything the reducing kernel takes."""

    def __init__(
        self, n: int, d: int, dtype: Any = np.float64, *, weighted: bool = False,
        variables: int = 0, classes: int = 3, columns: int = 0, offset: float = 0.0,
        turns: Array = passes._ROTATIONS, part_rows: int = 16, seed: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.rows = (rng.normal(size=(n, d)) + offset).astype(dtype)
        self.weight = rng.uniform(0.1, 3, n) if weighted else np.empty(0)
        self.reference = self.rows[: min(n, 5)].astype(np.float64).mean(axis=0)
        self.shift = self.rows[-min(n, 3) :].astype(np.float64).mean(axis=0)
        self.codes = rng.integers(-1, classes, (variables, n)).astype(np.intp)
        self.codes += np.arange(variables)[:, None] * classes * (self.codes >= 0)
        self.n_codes = variables * classes
        self.values = rng.normal(size=(columns, n)) * (rng.random((columns, n)) < 0.8)
        self.turns, self.part_rows = turns, part_rows

    def reduced(self, bounds: list[int] | None = None) -> dict[str, Array]:
        """Call the kernel on stripes of columns; outputs begin as NaN."""
        n, d = self.rows.shape
        order, cell = sorted_by_cell(self.codes, self.n_codes, self.part_rows)
        out = {
            "out": np.full((passes.buffer_rows(n), d), np.nan, self.rows.dtype),
            "peak": np.full(d, np.nan),
            "total": np.full(d, np.nan),
            "class_sums": np.full((self.n_codes, d), np.nan),
            "products": np.full((len(self.values), d), np.nan),
        }
        for first, last in pairwise(bounds or [0, d]):
            accumulate.centre_block(
                self.rows, ALL, self.weight, self.shift, self.shift - self.reference, self.codes,
                order, cell, self.values, self.turns, self.part_rows, 0, n, first, last,
                out["out"], NO_PANELS[self.rows.dtype], *list(out.values())[1:], np.empty(d),
            )  # fmt: skip
        return out

    def turned(self) -> Array:
        """What `out` is in exact arithmetic: rows padded with zeros, turned in pairs."""
        n, d = self.rows.shape
        deviations = np.zeros((passes.buffer_rows(n), d))
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
        """Against the twins, to N u sum |terms|."""
        found = self.reduced()
        n = len(self.rows)
        w = self.weight if self.weight.size else np.ones(n)
        deviations = self.rows.astype(np.float64) - self.shift
        np.testing.assert_array_equal(found["peak"], np.abs(deviations).max(axis=0))
        # Two products and a sum, once more where they are stored in float32.
        largest = np.sqrt(w.max()) * found["peak"]
        u = U32 if self.rows.dtype == np.float32 else 0.0
        assert (np.abs(found["out"] - self.turned()) <= (2 * u + 8 * U64) * largest).all()
        _, total, _, _ = reference.centre_block(
            self.rows, self.weight, self.shift, self.codes, self.values, self.n_codes
        )
        slack = 8 * (n + 8) * U64 * found["peak"]
        assert (np.abs(found["total"] - total) <= slack * w.sum()).all()
        _, _, class_sums, products = reference.centre_block(
            self.rows, self.weight, self.reference, self.codes, self.values, self.n_codes
        )
        slack += 8 * (n + 8) * U64 * (np.abs(self.shift) + np.abs(self.reference))
        assert (np.abs(found["class_sums"] - class_sums) <= slack * w.sum()).all()
        shares = np.abs(self.values).sum(axis=1, keepdims=True)
        assert (np.abs(found["products"] - products) <= slack * shares).all()


# --- the order of rows ---------------------------------------------------------------------------


@given(
    n=st.integers(1, 60),
    variables=st.integers(0, 3),
    n_codes=st.integers(0, 12),
    part_rows=st.sampled_from([1, 4, 7, 20, 64]),
    seed=st.integers(0, 999),
)
def test_rows_of_a_part_are_sorted_by_their_combination_of_codes(
    n: int, variables: int, n_codes: int, part_rows: int, seed: int
) -> None:
    codes = np.random.default_rng(seed).integers(-1, n_codes, (variables, n)).astype(np.intp)
    order, cell = sorted_by_cell(codes, n_codes, part_rows)
    assert sorted(order) == list(range(n))  # no row is lost
    parts = np.arange(n) // part_rows
    np.testing.assert_array_equal(order // part_rows, parts)  # nor leaves its part
    keys = [(part, *codes[:, i]) for part, i in zip(parts, order, strict=True)]
    assert keys == sorted(keys, key=lambda key: (key[0], *key[:0:-1]))  # by the last code first
    # Cells are numbered without gaps, and are equal where and only where part and codes are.
    assert list(np.unique(cell)) == list(range(len(set(keys))))
    assert len(set(zip(keys, cell, strict=True))) == len(set(keys))
    assert (np.diff(cell) >= 0).all()
    # Stable: rows of one cell keep their order.
    assert (np.diff(order)[np.diff(cell) == 0] > 0).all()


def test_no_variables_leave_rows_in_their_order() -> None:
    order, cell = sorted_by_cell(np.empty((0, 9), np.intp), 0, 16)
    np.testing.assert_array_equal(order, np.arange(9))
    assert not cell.any()


# --- the shift -----------------------------------------------------------------------------------


@given(
    n=st.integers(1, 90),
    d=st.integers(1, 40),
    stride=st.integers(1, 100),
    dtype=st.sampled_from([np.float32, np.float64]),
    weighted=st.booleans(),
    offset=st.sampled_from([0.0, 1e4]),
    seed=st.integers(0, 999),
)
def test_a_sample_has_the_mean_and_the_squares_of_its_rows(
    n: int, d: int, stride: int, dtype: Any, weighted: bool, offset: float, seed: int
) -> None:
    block = Block(n, d, dtype, weighted=weighted, offset=offset, seed=seed)
    shift, spread = np.full(d, np.nan), np.full(d, np.nan)
    accumulate.sample_columns(block.rows, ALL, block.weight, stride, shift, spread)
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


@given(
    value=constants,
    n=st.integers(1, 50),
    stride=st.integers(1, 9),
    weighted=st.booleans(),
)
def test_a_sample_of_a_constant_column_is_exactly_that(
    value: Any, n: int, stride: int, weighted: bool
) -> None:
    rows = np.full((n, 3), value)
    weight = np.linspace(0.1, 3, n) if weighted else np.empty(0)
    shift, spread = np.full(3, np.nan), np.full(3, np.nan)
    accumulate.sample_columns(rows, ALL, weight, stride, shift, spread)
    assert (shift == value).all()
    assert (spread == 0.0).all()


# --- reducing rows -------------------------------------------------------------------------------


@given(
    n=st.integers(1, 70),
    d=st.integers(1, 40),
    dtype=st.sampled_from([np.float32, np.float64]),
    weighted=st.booleans(),
    variables=st.integers(0, 3),
    classes=st.integers(1, 5),
    columns=st.integers(0, 3),
    offset=st.sampled_from([0.0, 1.0, 1e4]),
    angles=st.lists(st.floats(-7, 7), min_size=1, max_size=5),
    part_rows=st.sampled_from([4, 8, 64]),
    seed=st.integers(0, 999),
)
def test_reducing_equals_its_twin(
    n: int, d: int, dtype: Any, weighted: bool, variables: int, classes: int, columns: int,
    offset: float, angles: list[float], part_rows: int, seed: int,
) -> None:  # fmt: skip
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    Block(
        n, d, dtype, weighted=weighted, variables=variables, classes=classes, columns=columns,
        offset=offset, turns=turns, part_rows=part_rows, seed=seed,
    ).check()  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "d"), [(4096, 33), (1025, 130), (514, 1), (3, 700)])
def test_reducing_at_the_sizes_it_is_used(n: int, d: int, dtype: Any, weighted: bool) -> None:
    part_rows = passes.part_rows(d, np.dtype(dtype).itemsize)
    Block(
        n, d, dtype, weighted=weighted, variables=2, classes=40, columns=2, offset=10.0,
        part_rows=part_rows,
    ).check()  # fmt: skip


@given(st.integers(1, 10**6), st.sampled_from([np.float32, np.float64]))
def test_parts_are_whole_groups_of_four_rows(width: int, dtype: Any) -> None:
    part_rows = passes.part_rows(width, np.dtype(dtype).itemsize)
    assert 64 <= part_rows <= 512
    assert part_rows % 4 == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_labels_have_no_influence_on_the_state_of_x(dtype: Any) -> None:
    """Not by a rounding: the covariance is the same whatever is accumulated beside it."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1003, 37)).astype(dtype)
    plain = Moments(block_rows=300).update(X)
    for labels in (
        {"z": rng.integers(0, 3, 1003)},
        {"z": rng.integers(0, 200, 1003), "y": rng.normal(size=(1003, 2))},
    ):
        labelled = Moments(block_rows=300).update(X, labels)
        assert labelled.covariance().tobytes() == plain.covariance().tobytes()
        assert labelled.mean.tobytes() == plain.mean.tobytes()


@given(
    n=st.integers(1, 90),
    cuts=st.lists(st.integers(0, 97), max_size=6),
    dtype=st.sampled_from([np.float32, np.float64]),
    weighted=st.booleans(),
)
def test_stripes_of_columns_give_the_same_bytes(
    n: int, cuts: list[int], dtype: Any, weighted: bool
) -> None:
    """However columns are dealt to threads: each number comes from the same operations."""
    block = Block(n, 97, dtype, weighted=weighted, variables=2, columns=2, offset=3.0)
    whole = block.reduced()
    striped = block.reduced(sorted({0, 97, *cuts}))
    for name, array in whole.items():
        assert array.tobytes() == striped[name].tobytes(), name


def test_rows_that_may_not_be_written() -> None:
    block = Block(40, 9, np.float32, variables=1, columns=1)
    for array in (block.rows, block.shift, block.codes, block.values):
        array.flags.writeable = False
    block.check()


@pytest.mark.parametrize("spoil", ["rows", "codes", "values", "weight", "turns"])
def test_the_twin_is_not_the_kernel(spoil: str) -> None:
    """A control: the comparison sees a lost row, a lost class, a wrong weight or angle."""
    block = Block(50, 4, weighted=True, variables=1, columns=1)
    found = block.reduced()
    if spoil == "rows":
        block.rows = block.rows.copy()
        block.rows[17] = 0
    elif spoil == "codes":
        block.codes[:, 3] = -1 if block.codes[0, 3] >= 0 else 0
    elif spoil == "values":
        block.values[:, 3] += 1
    elif spoil == "turns":
        block.turns = block.turns[:7]
    else:
        block.weight[3] *= 1.5
    block.reduced = lambda bounds=None: found  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        block.check()


# --- turning -------------------------------------------------------------------------------------

UNTURNED = np.array([[1.0, 0.0]])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [3, 62, 800])
def test_turning_changes_no_product(n: int, weighted: bool) -> None:
    block = Block(n, 20, weighted=weighted, variables=1)
    turned = block.reduced()["out"]
    block.turns = UNTURNED
    plain = block.reduced()["out"]
    assert np.abs(turned - plain).max() > 0.1
    size = np.sqrt(np.einsum("ij,ij->j", plain, plain))
    slack = 8 * (n + 8) * U64 * np.outer(size, size)
    assert (np.abs(turned.T @ turned - plain.T @ plain) <= slack).all()


@pytest.mark.parametrize("pattern", ["alternating", "random", "unlike", "one in ten"])
def test_turning_breaks_the_bias_of_equal_products(
    monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """The control: without it the roundings of equal float32 products add up."""
    rng, n = np.random.default_rng(0), 4096
    levels = {
        "alternating": np.arange(n)[:, None] % 2,
        "random": rng.integers(0, 2, (n, 1)),
        "unlike": rng.integers(0, 2, (n, 40)),
        "one in ten": np.arange(n)[:, None] % 10 == 0,
    }[pattern]
    X = (levels * np.linspace(0.5, 1.0, 41)[:-1]).astype(np.float32)
    truth = scatter_of(X)
    root = np.sqrt(np.diag(truth))

    def error() -> float:
        found = Moments().update(X).covariance(ddof=0) * n
        return float(np.max(np.abs(found - truth) / np.outer(root, root)))

    assert error() <= 1e-6
    monkeypatch.setattr(passes, "_ROTATIONS", UNTURNED)
    assert error() > 1e-6


def test_no_two_turns_are_alike() -> None:
    """Angles t and t + pi / 2 give the same products up to their order and signs."""
    angles = np.sort(np.arctan2(passes._ROTATIONS[:, 1], passes._ROTATIONS[:, 0]) % (np.pi / 2))
    gaps = np.diff(np.append(angles, angles[0] + np.pi / 2))
    assert gaps.min() > 0.1 * np.pi / 2 / len(angles)
    np.testing.assert_allclose(np.linalg.norm(passes._ROTATIONS, axis=1), 1.0, atol=2 * U64)


# --- reducing a block: the shift, the precision --------------------------------------------------


def reduce(rows: Array, weight: Array, block: Block | None = None) -> reducing.Reduced:
    """Reduce rows about zero, with the labels of `block`."""
    n, d = rows.shape
    block = block or Block(n, d)
    buffer = np.full((passes.buffer_rows(n), d), np.nan, rows.dtype)
    given = weight if weight.size else None
    return reducing.reduce_block(
        rows,
        given,
        reducing.sample_block(rows, given),
        block.reference,
        block.codes,
        block.n_codes,
        block.values,
        passes.Centred(buffer),
    )


SMALL = {"_PART_BYTES": 1, "_CHUNK_ROWS": 16, "_GRAIN_PRODUCTS": 1, "_PAGE": 1,
         "_THREADS_PER_STRIPE": 1}  # fmt: skip


@contextmanager
def small_tasks(threads: int) -> Iterator[None]:
    """Chunks of 16 rows, stripes of a register, and so many threads, whatever the block."""
    passes.part_rows.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(passes, name, value)
        patch.setenv("SPLINCE_FAST_NUM_THREADS", str(threads))
        yield
    passes.part_rows.cache_clear()


def multiplied(block: Block, threads: int) -> reducing.Reduced:
    """Reduce a block with its product, in memory that begins as NaN."""
    n, d = block.rows.shape
    dtype = block.rows.dtype
    given = block.weight if block.weight.size else None
    with small_tasks(threads):
        memory = np.full(passes.Gram.size(n, d, dtype), np.nan)
        found = reducing.reduce_block(
            block.rows, given, reducing.sample_block(block.rows, given), block.reference,
            block.codes, block.n_codes, block.values, passes.Gram(n, d, dtype, memory),
        )  # fmt: skip
    assert found.product is not None
    found.product = np.tril(found.product[:d, :d])
    return found


@given(
    n=st.one_of(st.integers(1, 70), st.integers(1, 400)),
    d=st.one_of(st.integers(1, 20), st.integers(1, 140)),
    dtype=st.sampled_from([np.float32, np.float64]),
    weighted=st.booleans(),
    variables=st.integers(0, 2),
    columns=st.integers(0, 2),
    seed=st.integers(0, 999),
)
def test_a_pass_that_multiplies_equals_a_sweep_and_a_product(
    n: int, d: int, dtype: Any, weighted: bool, variables: int, columns: int, seed: int
) -> None:
    """A product is a sum of n + 3 terms at most, in any order; no number depends on the threads."""
    block = Block(
        n, d, dtype, weighted=weighted, variables=variables, columns=columns, offset=3.0, seed=seed
    )
    swept, found = reduce(block.rows, block.weight, block), multiplied(block, 1)
    assert swept.product is None
    size = np.abs(block.rows).max() + np.abs(block.reference).max()
    slack = 8 * (n + 8) * U64 * size
    weights = np.abs(block.weight if weighted else np.ones(n)).sum()
    assert np.abs(found.residual - swept.residual).max() <= slack
    assert np.abs(found.deviation - swept.deviation).max() <= slack * weights
    assert np.abs(found.class_sums - swept.class_sums).max(initial=0) <= slack * weights
    shares = np.abs(block.values).sum(axis=1, keepdims=True)
    assert (np.abs(found.products - swept.products) <= slack * shares).all()
    wide = swept.shifted.astype(np.longdouble)
    exact, magnitude = np.tril(wide.T @ wide), np.tril(np.abs(wide).T @ np.abs(wide))
    u = U32 if dtype is np.float32 else U64
    # Rows that two compilations of a sweep store may differ by a rounding.
    bound = (n + 3 + 8) * u * magnitude
    assert (np.abs(found.product - exact) <= bound).all()
    if n > 8 and d > 1:  # the control: a row that is missing shows
        less = wide[: n // 2]
        assert (np.abs(found.product - np.tril(less.T @ less)) > bound).any()
    for threads in (2, 5):
        other = multiplied(block, threads)
        for name in ("residual", "deviation", "class_sums", "products", "product"):
            np.testing.assert_array_equal(getattr(other, name), getattr(found, name), strict=True)


@pytest.mark.parametrize(("d", "dtype"), [(270, np.float64), (530, np.float32)])
def test_a_product_of_several_blocks_of_panels(d: int, dtype: Any) -> None:
    """Rows of two chunks, and panels beyond those that a cache keeps at once, of any processor."""
    n = 300
    block = Block(n, d, dtype)
    memory = np.full(passes.Gram.size(n, d, block.rows.dtype), np.nan)
    sample = reducing.sample_block(block.rows, None)
    found = reducing.reduce_block(
        block.rows, None, sample, block.reference, block.codes, 0, block.values,
        passes.Gram(n, d, block.rows.dtype, memory),
    ).product  # fmt: skip
    assert found is not None
    shifted = reduce(block.rows, block.weight, block).shifted
    assert shifted is not None
    wide = shifted.astype(np.float64)
    exact, magnitude = wide.T @ wide, np.abs(wide).T @ np.abs(wide)
    # NumPy's product of float64 rounds as much, and rows may differ by a rounding.
    bound = 2 * (n + 3 + 8) * (U32 if dtype is np.float32 else U64) * magnitude
    assert (np.abs(np.tril(found[:d, :d] - exact)) <= bound).all()


def test_no_product_is_taken_before_every_stripe_is_centred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread waits for a task that another one has begun, and goes on when that is finished."""
    original = gram.reduce_chunks
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

    monkeypatch.setattr(gram, "reduce_chunks", beside_another)
    n, d = 16, 9
    memory = np.zeros(passes.Gram.size(n, d, np.dtype(np.float64)))
    order, none = np.arange(n), np.empty((0, n))
    passes.Gram(n, d, np.dtype(np.float64), memory).reduce(
        np.ones((n, d)), ALL, np.empty(0), np.zeros(d), np.zeros(d), none.astype(np.intp), order,
        np.zeros(n, np.intp), none, np.empty(d), np.empty(d), np.empty((0, d)), np.empty((0, d)),
    )  # fmt: skip
    assert seen == [(True, 0)]


def test_wide_blocks_of_float64_are_added_where_the_state_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product of their own would take more memory than a block; float32 needs one anyway."""
    monkeypatch.setattr(gram, "WIDE", True)
    kinds = np.dtype(np.float32), np.dtype(np.float64)
    assert [passes.Gram.serves(99, 99, dtype) for dtype in kinds] == [True, True]
    assert [passes.Gram.serves(99, 100, dtype) for dtype in kinds] == [True, False]
    monkeypatch.setattr(gram, "WIDE", False)
    assert [passes.Gram.serves(99, 99, dtype) for dtype in kinds] == [False, False]


def uncentred(found: reducing.Reduced) -> Array:
    """Sums of squares about the shift, in extended precision."""
    wide = found.shifted.astype(np.longdouble)
    return np.asarray((wide * wide).sum(axis=0))


def stride_of(n: int) -> int:
    """Rows from one of the sample to the next."""
    return int(np.ceil(n**0.5 / 4))


def adversarial(order: str, n: int, rng: np.random.Generator, size: float) -> Array:
    """A column whose sample says little of it."""
    x, place = rng.normal(size=n), np.arange(n)
    seen = place % stride_of(n) == 0
    return {
        "random": x,
        "sorted": np.sort(x) * size,
        "small where sampled": np.where(seen, x, size * (5 + x)),
        "large where sampled": np.where(seen, size * (5 + x), x),
        "constant where sampled": np.where(seen, 7.0, 7 + size),
        "one outlier": np.where(place == n // 2 + 1, size, x),
        "one outlier, which is sampled": np.where(place == 0, size, x),
        "period of the stride": np.where(seen, size, 0.0) + 1e-3 * x,
        "a trend": x + size * place,
    }[order]


ORDERS = [
    "random", "sorted", "small where sampled", "large where sampled", "constant where sampled",
    "one outlier", "one outlier, which is sampled", "period of the stride", "a trend",
]  # fmt: skip


@given(
    n=st.integers(1, 1500),
    columns=st.lists(
        st.tuples(st.sampled_from(ORDERS), st.sampled_from([0.0, 1.0, 30.0, 1e3, 1e8])),
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
    roundings = found.weight * (8 * (n + 8) * U64 * size) ** 2
    u = U32 if found.shifted.dtype == np.float32 else U64
    assert (squares <= 5 * (1 + 8 * u + 8 * n * U64) * centred + roundings).all()
    back = squares - found.weight * found.residual.astype(np.longdouble) ** 2
    assert (np.abs(back - centred) <= 8 * (2 * u + n * U64) * squares + roundings).all()


@pytest.mark.parametrize(
    "order", ["small where sampled", "large where sampled", "constant where sampled",
              "period of the stride"],
)  # fmt: skip
def test_a_second_sweep_is_what_bounds_the_cost_of_a_shift(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """The control: orders that mislead the sample, with and without a second sweep."""
    X = adversarial(order, 2000, np.random.default_rng(0), 1e3)[:, None]
    centred = np.diag(scatter_of(X))
    assert uncentred(reduce(X, np.empty(0))) <= (1 + 1e-12) * centred
    monkeypatch.setattr(reducing, "_EXCESS", np.inf)
    assert uncentred(reduce(X, np.empty(0))) > 5 * centred


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [1, 16, 17, 500, 4096])
def test_rows_in_random_order_are_swept_once(
    monkeypatch: pytest.MonkeyPatch, n: int, weighted: bool
) -> None:
    original, shifts = accumulate.centre_block, []

    def counted(*arguments: Any) -> None:
        shifts.append(arguments[3].copy())
        original(*arguments)

    monkeypatch.setattr(accumulate, "centre_block", counted)
    monkeypatch.setenv("SPLINCE_FAST_NUM_THREADS", "1")
    for seed in range(10):
        shifts.clear()
        block = Block(n, 8, weighted=weighted, offset=1e4, variables=1, seed=seed)
        reduce(block.rows, block.weight, block)
        assert len(shifts) == 1
    block.rows[:: stride_of(n)] += 1e3  # the control
    if n > 16:
        reduce(block.rows, block.weight, block)
        assert len(shifts) == 3


@given(
    n=st.integers(1, 200),
    d=st.integers(1, 20),
    dtype=st.sampled_from([np.float32, np.float64]),
    weighted=st.booleans(),
    columns=st.sampled_from([0, 2, reducing.MATRIX_PRODUCT_FROM]),
    scale=st.sampled_from([1.0, 1e25]),
    misled=st.booleans(),
    seed=st.integers(0, 999),
)
def test_rows_by_number_have_the_bits_of_their_copy(
    n: int, d: int, dtype: Any, weighted: bool, columns: int, scale: float, misled: bool, seed: int
) -> None:
    """With a second sweep and in float64 where float32 overflows, too."""
    block = Block(n, d, weighted=weighted, variables=2, columns=columns, seed=seed)
    rng = np.random.default_rng(seed)
    lying = (rng.normal(size=(2 * n, d)) * scale).astype(dtype)
    index = rng.permutation(2 * n)[:n]
    if misled:
        lying[index[:: stride_of(n)]] *= 1e3
    given = block.weight if weighted else None

    def reduced(rows: Array, index: Array | None) -> reducing.Reduced:
        return reducing.reduce_block(
            rows, given, reducing.sample_block(rows, given, index), block.reference, block.codes,
            block.n_codes, block.values,
            passes.Centred(np.empty((passes.buffer_rows(n), d), dtype)), index,
        )  # fmt: skip

    ours, copied = reduced(lying, index), reduced(lying[index], None)
    for name in ("deviation", "residual", "shifted", "class_sums", "products"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(copied, name), strict=True)
    assert (ours.n_rows, ours.weight) == (copied.n_rows, copied.weight)
    others = reduced(lying, np.roll(np.arange(2 * n), 1)[:n])  # the control
    assert not np.array_equal(others.shifted, copied.shifted) or n < 3


@given(
    value=constants,
    n=st.integers(1, 300),
    weighted=st.booleans(),
    misled=st.booleans(),
)
def test_a_constant_column_leaves_nothing(value: Any, n: int, weighted: bool, misled: bool) -> None:
    """Also where another column asks for a second sweep."""
    rows = np.full((n, 3), value)
    rows[:, 1] = 0.0
    if misled:
        rows[1 :: stride_of(n), 1] = 1.0
    found = reduce(rows, np.linspace(0.1, 3, n) if weighted else np.empty(0))
    assert (found.shifted[:, [0, 2]] == 0.0).all()
    assert (found.residual[[0, 2]] == 0.0).all()


@pytest.mark.parametrize("d", [1, 31, 300])
@pytest.mark.parametrize("unit", [1e-45, 1.0, 1e45])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e20])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_block_reduces_in_the_precision_that_holds_it(
    d: int, scale: float, unit: float, weighted: bool
) -> None:
    """Weights count, too: their roots multiply what float32 has to hold."""
    n = 701
    block = Block(n, d, weighted=weighted, variables=1, columns=1)
    rows = (block.rows * scale).astype(np.float32)
    block.reference = rows[:5].astype(np.float64).mean(axis=0)
    weight = block.weight * unit
    values = block.values
    block.values = values * unit
    found = reduce(rows, weight, block)
    assert found.shifted.dtype in (np.float32, np.float64)
    if scale == 1.0 and (unit == 1.0 or not weighted):
        assert found.shifted.dtype == np.float32
    if scale != 1.0 and (unit == 1.0 or not weighted):
        assert found.shifted.dtype == np.float64
    size = unit if weighted else 1.0
    # Products as they are taken, in the dtype of the rows.
    product = (found.shifted.T @ found.shifted)[:40, :40].astype(np.float64) / scale**2 / size
    residual = found.residual[:40] / scale
    scatter = product - found.weight / size * np.outer(residual, residual)
    twin = reference.centre_block(
        (rows[:, :40] / np.float64(scale)), block.weight, block.reference[:40] / scale,
        block.codes, values, block.n_codes,
    )  # fmt: skip
    root = np.sqrt(np.diag(twin[0]))
    assert np.max(np.abs(scatter - twin[0]) / np.outer(root, root)) <= 1e-6
    deviation = found.deviation[:40] / scale / size
    np.testing.assert_allclose(deviation, twin[1], atol=1e-9)
    np.testing.assert_allclose(found.class_sums[:, :40] / scale / size, twin[2], atol=1e-9)
    np.testing.assert_allclose(found.products[:, :40] / scale / unit, twin[3], atol=1e-9)


@given(st.integers(0, 9000))
def test_a_buffer_has_room_for_whole_groups_of_four(n: int) -> None:
    assert n <= passes.buffer_rows(n) < n + 4
    assert passes.buffer_rows(n) % 4 == 0


def test_a_buffer_without_room_is_refused() -> None:
    block = Block(9, 2)
    with pytest.raises(RuntimeError, match="room"):
        reducing.reduce_block(
            block.rows, None, reducing.sample_block(block.rows, None), block.reference,
            block.codes, 0, block.values, passes.Centred(np.empty((8, 2))),
        )  # fmt: skip


# --- finding what cannot be used -----------------------------------------------------------------


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=20),
        elements=st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1e-45, 1.0])),
    )
)
def test_finite_squares_are_recognised(X: Array) -> None:
    with np.errstate(all="ignore"):
        sums = (X.astype(np.float64) ** 2).sum(axis=1)
    for i in range(len(X)):
        assert kernels.squares_finite(X, i, i + 1) == np.isfinite(sums[i])
    assert kernels.squares_finite(X, 0, len(X)) == np.isfinite(sums).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 1.5e149, -1e300])
@pytest.mark.parametrize("d", [1, 2, 15, 16, 17, 64, 1000])
def test_one_bad_number_is_found_wherever_it_is(d: int, value: float) -> None:
    X = np.ones((3, d))
    for j in {0, d // 2, d - 1}:
        X[1, j] = value
        assert not kernels.squares_finite(X, 0, 3)
        assert kernels.squares_finite(X, 0, 1)
        assert kernels.squares_finite(X, 2, 3)
        X[1, j] = 1
    assert kernels.squares_finite(X, 0, 3)
    assert kernels.squares_finite(np.full((2, 3), 3e38, np.float32), 0, 2)
    assert kernels.squares_finite(np.full((2, 3), 5e148), 0, 2)


# --- adding what was multiplied ------------------------------------------------------------------

WIDTHS = [1, 2, 3, 17, 64, 65, 130, 200]


def symmetric(d: int, seed: int = 0) -> Array:
    square = np.random.default_rng(seed).normal(size=(d, d))
    return np.asfortranarray(square + square.T)


@pytest.mark.parametrize("product_of", [np.float32, np.float64, None])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("d", WIDTHS)
def test_a_product_and_two_vectors_are_added(d: int, sign: float, product_of: Any) -> None:
    scatter = symmetric(d)
    product = np.empty((0, 0), order="F")
    if product_of is not None:
        product = np.asfortranarray(symmetric(d, 1), dtype=product_of)
    rng = np.random.default_rng(2)
    vectors, coefficients = rng.normal(size=(2, d)), np.array([0.37, -2.5])
    added = product.astype(np.float64) if product.size else np.zeros((d, d))
    squares = [c * np.outer(v, v) for c, v in zip(coefficients, vectors, strict=True)]
    expected = scatter + sign * added + squares[0] + squares[1]
    slack = 8 * U64 * (np.abs(scatter) + np.abs(added) + sum(map(np.abs, squares)))
    whole, pieces = scatter.copy(order="F"), scatter.copy(order="F")
    half = (d + 1) // 2
    accumulate.add_lower(whole, product, sign, vectors, coefficients, 0, half)
    assert (np.abs(np.tril(whole - expected)) <= slack).all()
    np.testing.assert_array_equal(np.triu(whole, 1), np.triu(scatter, 1))
    for first, last in pairwise([0, half // 3, half // 2, half]):
        accumulate.add_lower(pieces, product, sign, vectors, coefficients, first, last)
    assert pieces.tobytes() == whole.tobytes()


# --- applying ------------------------------------------------------------------------------------


@given(
    n=st.integers(0, 70),
    d=st.one_of(st.integers(1, 40), st.integers(120, 300)),
    rank=st.integers(0, 20),
    dtype=st.sampled_from([np.float32, np.float64]),
    in_place=st.booleans(),
    streamed=st.booleans(),
    cut=st.floats(0, 1),
    seed=st.integers(0, 999),
)
def test_applying_equals_its_twin(
    n: int, d: int, rank: int, dtype: Any, in_place: bool, streamed: bool, cut: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(n, d)) + 5).astype(dtype)
    left, right = rng.normal(size=(rank, d)), rng.normal(size=(rank, d))
    mean, shift = rng.normal(size=d), rng.normal(size=rank)
    twin = reference.apply_rows(rows, left, right, mean, shift)
    size = np.abs(rows.astype(np.float64) - mean) @ np.abs(right.T) + np.abs(shift)
    slack = 8 * (d + rank + 4) * U64 * (np.abs(rows) + size @ np.abs(left))
    if dtype == np.float32:
        slack += 2 * U32 * np.abs(twin)
    out = rows if in_place else np.full_like(rows, np.nan)
    stop, panels = round(cut * n), kernels.panels(left, right)
    for first, last in ((0, stop), (stop, n)):
        kernels.apply_rows(rows, *panels, mean, shift, streamed, first, last, out)
    assert (np.abs(out - twin) <= slack).all()


@pytest.mark.parametrize("rank", [1, 3, 17])
@pytest.mark.parametrize("d", [1, 37, 128])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_row_has_the_same_bits_whatever_its_neighbours_and_however_it_is_written(
    dtype: Any, d: int, rank: int
) -> None:
    """Also where the result begins anywhere in a cache line; nothing beside it is written."""
    rng = np.random.default_rng(0)
    n = 75
    rows = rng.normal(size=(n, d)).astype(dtype)
    left, right = rng.normal(size=(2, rank, d))
    parts = (*kernels.panels(left, right), rng.normal(size=d), rng.normal(size=rank))
    alone = np.empty_like(rows)
    for i in range(n):
        kernels.apply_rows(rows, *parts, False, i, i + 1, alone)
    spoilt = np.where(np.arange(n)[:, None] % 7 == 3, np.nan, rows).astype(dtype)
    for offset in range(17):
        memory = np.full(offset + rows.size + 20, 7, dtype)
        out = memory[offset : offset + rows.size].reshape(n, d)
        kernels.apply_rows(spoilt, *parts, True, 0, n, out)
        kept = np.arange(n) % 7 != 3
        assert out[kept].tobytes() == alone[kept].tobytes()
        assert (memory[:offset] == 7).all()
        assert (memory[offset + rows.size :] == 7).all()
        assert np.isnan(out[~kept]).all()


def in_table(rows: Array, layout: str) -> tuple[Array, Array]:
    """The same rows in memory of another layout, and that memory, 7 wherever no row lies."""
    n, d = rows.shape
    if layout == "columns":
        table = np.full((n, d), 7, rows.dtype, order="F")
    elif layout == "part of columns":
        table = np.full((n + 5, d + 2), 7, rows.dtype, order="F")
    elif layout == "part of rows":
        table = np.full((n + 5, d + 2), 7, rows.dtype)
    else:
        table = np.full((2 * n + 3, 3 * d), 7, rows.dtype)[::-1, ::-1]
    step = (2, 3) if layout == "every other, backwards" else (1, 1)
    start = 0 if layout == "columns" else 1
    places = table[start : start + n * step[0] : step[0], -d * step[1] :: step[1]]
    places[...] = rows
    return places, table


@pytest.mark.parametrize("rank", [1, 3, 17])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "layout", ["columns", "part of columns", "part of rows", "every other, backwards"]
)
def test_a_row_has_the_same_bits_in_every_layout(layout: str, dtype: Any, rank: int) -> None:
    """Read, or read and written; nothing beside it is written."""
    rng = np.random.default_rng(rank)
    known = np.uint16 if dtype == np.float16 else dtype
    for n, d in ((75, 1), (1, 37), (33, 37), (75, 130)):  # tiles and groups, and their rests
        rows = rng.normal(size=(n, d)).astype(dtype)
        left, right = rng.normal(size=(2, rank, d)) / d
        parts = (*kernels.panels(left, right), rng.normal(size=d), rng.normal(size=rank), False)
        plain, found = np.empty_like(rows), np.empty_like(rows)
        assert kernels.apply_rows(rows.view(known), *parts, 0, n, plain.view(known)) == -1
        places, table = in_table(rows, layout)
        _, expected = in_table(plain, layout)
        for streamed in (False, True):
            found[:] = np.nan
            kernels.apply_rows(places.view(known), *parts[:-1], streamed, 0, n, found.view(known))
            assert found.tobytes() == plain.tobytes()
        kernels.apply_rows(places.view(known), *parts, 0, n, places.view(known))
        assert table.tobytes() == expected.tobytes()
    if dtype == np.float64:  # the control: sums over the features in another order have other bits
        turned = kernels.panels(left[:, ::-1].copy(), right[:, ::-1].copy())
        parts = (*turned, parts[2][::-1].copy(), *parts[3:])
        kernels.apply_rows(rows[:, ::-1].copy(), *parts, 0, n, found)
        assert found[:, ::-1].tobytes() != plain.tobytes()


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_first_row_that_halves_cannot_hold(order: Any) -> None:
    """Of all groups; rows whose infinity was given are no such rows."""
    rows = np.ones((75, 20), np.float16, order=order)
    rows[3, 4], rows[[40, 60, 70]] = np.inf, 60000
    double = (-np.ones((1, 20)) / 20, np.ones((1, 20)))
    parts = (*kernels.panels(*double), np.zeros(20), np.zeros(1), False)
    bits = rows.view(np.uint16)
    assert kernels.apply_rows(bits, *parts, 0, 75, np.empty_like(bits)) == 40
    assert kernels.apply_rows(bits, *parts, 41, 75, np.empty_like(bits)) == 60
    assert kernels.apply_rows(bits, *parts, 0, 40, np.empty_like(bits)) == -1


def test_halves_are_widened_and_rounded_as_numpy_does() -> None:
    """All halves, all midpoints between two of them and their neighbours, and random bits."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    wide = np.empty(1 << 16, np.float32)
    kernels.widen_halves(halves, wide)
    np.testing.assert_array_equal(wide, halves.view(np.float16).astype(np.float32))
    finite = np.sort(wide[np.isfinite(wide)])
    middle = finite[:-1] + (finite[1:] - finite[:-1]) / 2
    near = np.concatenate([finite, middle, np.float32([65519.996, 65520, 65536, 3e38])])
    bits = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    infinite = np.float32(np.inf)
    values = np.concatenate(
        [near, -near, np.nextafter(near, infinite), np.nextafter(near, -infinite), bits]
    )
    found = np.empty(values.size, np.uint16)
    assert kernels.narrow_halves(values, found)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    lost = np.isfinite(values) & np.isinf(expected)
    assert not kernels.narrow_halves(values[~lost], np.empty_like(found[~lost]))
    for value in (values[lost].min(), values[lost].max(), np.abs(values[lost]).min()):
        assert kernels.narrow_halves(np.full(1, value), np.empty(1, np.uint16))
    np.testing.assert_array_equal(found.view(np.float16), expected)
    np.testing.assert_array_equal(np.signbit(found.view(np.float16)), np.signbit(expected))


# --- BLAS verbs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("n", [0, 1, 7, 300])
def test_products_of_rows(n: int, d: int) -> None:
    rows = np.random.default_rng(d).normal(size=(n, d))
    scatter = symmetric(d)
    upper = np.triu(scatter, 1)
    expected = np.tril(scatter + rows.T @ rows)
    slack = 4 * (n + 2) * U64 * (np.abs(scatter) + np.abs(rows).T @ np.abs(rows))
    blas.syrk_f64_into(rows, scatter)
    assert (np.abs(np.tril(scatter) - expected) <= slack).all()
    np.testing.assert_array_equal(np.triu(scatter, 1), upper)  # never touched
    narrow = rows.astype(np.float32)
    product = np.full((d, d), 7, np.float32, order="F")
    blas.syrk_f32_out(narrow, product)
    if n:
        size = np.abs(narrow).T @ np.abs(narrow)
        twin = narrow.astype(np.float64).T @ narrow.astype(np.float64)
        assert (np.abs(np.tril(product - twin)) <= 4 * (n + 2) * U32 * size).all()
        assert (product[np.triu_indices(d, 1)] == 7).all()


@pytest.mark.parametrize("d", WIDTHS)
def test_mirror(d: int) -> None:
    scatter = symmetric(d)
    scatter[np.triu_indices(d, 1)] = np.nan
    lower = np.tril(scatter).copy()
    blas.mirror_lower(scatter)
    np.testing.assert_array_equal(scatter, scatter.T)
    np.testing.assert_array_equal(np.tril(scatter), lower)


@pytest.mark.parametrize(
    ("rows", "square"),
    [
        (np.ones((3, 2), np.float32), np.zeros((2, 2), order="F")),
        (np.ones((3, 2)), np.zeros((2, 2), np.float32, order="F")),
        (np.asfortranarray(np.ones((3, 2))), np.zeros((2, 2), order="F")),
        (np.ones((3, 2)), np.zeros((2, 2))),
    ],
    ids=["rows too narrow", "scatter too narrow", "rows in F order", "scatter in C order"],
)
def test_verbs_refuse_another_dtype_or_order(rows: Array, square: Array) -> None:
    with pytest.raises((ValueError, TypeError)):
        blas.syrk_f64_into(rows, square)


def test_a_provider_must_bring_every_routine() -> None:
    """No call may ever mix two libraries: an incomplete table changes nothing."""
    rows = np.random.default_rng(0).normal(size=(20, 6))
    before, after = np.zeros((6, 6), order="F"), np.zeros((6, 6), order="F")
    blas.syrk_f64_into(rows, before)
    with pytest.raises(KeyError):
        blas.use_routines({"dsyrk": 1, "ssyrk": 1, "dgemm": 1})
    blas.syrk_f64_into(rows, after)
    assert before.tobytes() == after.tobytes()


# --- one decorator owns the options --------------------------------------------------------------


def test_every_kernel_is_compiled_and_releases_the_interpreter() -> None:
    held = [v for module in (accumulate, kernels) for v in vars(module).values()]
    found = [
        v for v in [*held, *(c for v in held for c in _closed_over(v))] if hasattr(v, "py_func")
    ]
    assert len(found) >= 7
    for kernel in found:
        assert kernel.targetoptions["nogil"]
        assert "nnan" not in kernel.targetoptions["fastmath"]
        assert "ninf" not in kernel.targetoptions["fastmath"]


def _closed_over(value: Any) -> list[Any]:
    """What the guards of conftest.py wrap."""
    return (
        list(inspect.getclosurevars(value).nonlocals.values()) if inspect.isfunction(value) else []
    )


def test_the_cache_may_be_unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only installation without a home directory compiles once in each process."""
    import numba

    original = numba.njit

    def no_cache(*arguments: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return original(*arguments, **options)

    monkeypatch.setattr(numba, "njit", no_cache)

    def double(x: float) -> float:
        return 2 * x

    assert jit.kernel(double)(4.0) == 8.0
